"""Splits of a sum over parameters: by cause of the update, by layer and by kind of module.

The parts of each split add up to the whole. Layers and kinds are read from the parameter names of Hugging Face models.
A LoRA parameter counts towards the module that it adapts.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch
from torch import Tensor

from rl_training.optim.updates import CAUSES

KINDS = ("attention", "mlp", "embedding", "norm", "other")
_KEYWORDS = (
    ("norm", ("norm", "ln_", "layernorm")),  # must be first: q_norm and layernorms inside of attention are norms
    ("embedding", ("embed", "wte", "wpe", "lm_head")),
    ("attention", ("attn", "attention", "q_proj", "k_proj", "v_proj", "o_proj")),
    ("mlp", ("mlp", "feed_forward", "ffn", "fc1", "fc2", "gate_proj", "up_proj", "down_proj")),
)


class Attribution:
    """Splits of products into causes, layers and kinds.

    `labels` names the parts: part/momentum, part/gradient, part/decay, layer/0, …, layer/<kind> for parameters outside
    the layers, kind/attention, ….

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

    def sum(self, products: Tensor) -> Tensor:
        """Sum products by cause, then by parameter, (…, causes + parameters, q), into (…, labels, q)."""
        return self._membership.to(products.device) @ products


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

    >>> layer("model.layers.11.mlp.up_proj.lora_A.default.weight"), layer("model.norm.weight")
    ('11', 'norm')
    """
    number = re.search(r"\.(?:layers|layer|h|blocks)\.(\d+)\.", name)
    return number.group(1) if number else module_kind(name)
