"""Splits of a sum over parameters: by cause of the update, by layer, by kind of module, by cause and group of layers.

The parts of each split add up to the whole. Layers and kinds are read from the parameter names of Hugging Face models.
A LoRA parameter counts towards the module that it adapts.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch
from torch import Tensor

from rl_training.optim.formula import CAUSES

KINDS = ("attention", "mlp", "embedding", "norm", "other")
NUM_GROUPS = 3  # of consecutive layers
OUTSIDE = "outside"  # the parameters outside of layers
_KEYWORDS = (
    ("norm", ("norm", "ln_", "layernorm")),  # must be first: q_norm and layernorms inside of attention are norms
    ("embedding", ("embed", "wte", "wpe", "lm_head")),
    ("attention", ("attn", "attention", "q_proj", "k_proj", "v_proj", "o_proj")),
    ("mlp", ("mlp", "feed_forward", "ffn", "fc1", "fc2", "gate_proj", "up_proj", "down_proj")),
)


class Attribution:
    """Splits of products into causes, layers and kinds, and into causes × groups of layers.

    `labels` names the parts: part/momentum, part/gradient, part/decay, layer/0, …, layer/<kind> for parameters outside
    the layers, kind/attention, …. `all_labels` has group/momentum/0-9, … as well. Both begin with the CAUSES.

    Args:
        names: Names of the parameters, in the order of the products.
    """

    def __init__(self, names: Sequence[str]) -> None:
        splits = [[f"layer/{layer(name)}" for name in names], [f"kind/{module_kind(name)}" for name in names]]
        members = {
            label: [float(member == label) for member in labels] for labels in splits for label in dict.fromkeys(labels)
        }
        self.labels = (*(f"part/{cause}" for cause in CAUSES), *members)
        by_parameter = torch.tensor(list(members.values()), dtype=torch.float64)
        self._membership = torch.block_diag(torch.eye(len(CAUSES), dtype=torch.float64), by_parameter)
        groups = layer_groups(names)
        columns = dict.fromkeys(groups)
        self._groups = torch.tensor([[float(group == column) for group in groups] for column in columns]).double()
        self.all_labels = (*self.labels, *(f"group/{cause}/{column}" for cause in CAUSES for column in columns))

    def rows_of_causes(self, table: Tensor) -> Tensor:
        """Return the view of a table, (…, all_labels, q), that has the rows of the CAUSES."""
        return table[..., : len(CAUSES), :]

    def sum(self, products: Tensor) -> Tensor:
        """Sum products by cause, then by parameter, (…, causes + parameters, q), into (…, labels, q)."""
        return self._membership.to(products.device) @ products

    def sum_all(self, products: Tensor) -> Tensor:
        """Sum products by cause and parameter, (…, causes, parameters, q), into (…, all_labels, q)."""
        margins = torch.cat([products.sum(dim=-2), products.sum(dim=-3)], dim=-2)
        by_group = self._groups.to(products.device) @ products
        return torch.cat([self.sum(margins), by_group.flatten(-3, -2)], dim=-2)


def layer_groups(names: Sequence[str]) -> list[str]:
    """Return for each parameter its group of layers: NUM_GROUPS of consecutive ones, or OUTSIDE.

    >>> layer_groups([f"model.layers.{n}.mlp.weight" for n in range(5)] + ["model.norm.weight"])
    ['0-1', '0-1', '2-3', '2-3', '4', 'outside']
    """
    layers = [int(label) if label.isdigit() else None for label in map(layer, names)]
    numbers = sorted({number for number in layers if number is not None})
    size = -(-len(numbers) // NUM_GROUPS)
    groups = [numbers[start : start + size] for start in range(0, len(numbers), size or 1)]
    labels = {
        number: f"{group[0]}-{group[-1]}" if len(group) > 1 else f"{number}" for group in groups for number in group
    }
    return [OUTSIDE if number is None else labels[number] for number in layers]


def module_kind(name: str) -> str:
    """Return the kind of module that a parameter belongs to, one of KINDS.

    >>> module_kind("model.layers.0.self_attn.q_proj.weight")
    'attention'
    """
    for kind, keywords in _KEYWORDS:
        if any(keyword in name for keyword in keywords):
            return kind
    return "other"


def layer(name: str) -> str:
    """Return the number of a parameter's layer, or the kind of its module if it lies outside the layers.

    >>> layer("model.layers.11.mlp.up_proj.lora_A.default.weight"), layer("layers.0.mlp.weight"), layer("norm.weight")
    ('11', '0', 'norm')
    """
    number = re.search(r"(?:^|\.)(?:layers|layer|h|blocks)\.(\d+)\.", name)
    return number.group(1) if number else module_kind(name)
