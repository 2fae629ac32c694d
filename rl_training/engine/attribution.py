"""Which part of a sum over parameters comes from where: by cause of the update, by layer and by kind of module.

Each of the three splits adds up to the whole.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rl_training.step.module_kinds import layer, module_kind
from rl_training.step.updates import CAUSES


class Splits:
    """The splits of numbers that belong to these parameters, given by name.

    labels  part/momentum, part/gradient, part/decay, layer/0, …, layer/<kind outside of layers>, kind/attention, …
    """

    def __init__(self, names: Sequence[str]) -> None:
        of_parameter = [[f"layer/{layer(name)}" for name in names], [f"kind/{module_kind(name)}" for name in names]]
        groups = [label for labels in of_parameter for label in dict.fromkeys(labels)]
        self.labels = (*(f"part/{cause}" for cause in CAUSES), *groups)
        self._member = torch.tensor(  # (groups, parameters)
            [[float(group == label) for label in labels] for labels in of_parameter for group in dict.fromkeys(labels)],
            dtype=torch.float64,
        )

    def sum(self, products: Tensor) -> Tensor:
        """Returns the sums by label, (labels, q), of numbers by parameter, direction and cause, (parameters, q, 3)."""
        by_group = self._member.to(products.device) @ products.sum(dim=2)
        return torch.cat([products.sum(dim=0).T, by_group])
