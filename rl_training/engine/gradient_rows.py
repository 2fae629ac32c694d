"""The tap: catches the gradient of each microbatch as autograd hands it to the parameters.

A hook on the leaf sees this rank's gradient of this microbatch alone — before DDP averages it and before it is added to
`.grad` — which differences of `.grad` do not give on the last microbatch under DDP.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from rl_training.mathematics.square_norms import AdamMetric, SqNormMeter
from rl_training.mathematics.vectors import FlatVectors


class GradientTap:
    """Catches each microbatch's gradient on its own scale, the mean over that microbatch: as a row, or as square norms.

    The trainer divides the loss by the number of microbatches K, so what a hook sees is 1/K of the microbatch's mean
    gradient; the tap undoes that here, once. The optimizer's gradient is then the mean of the rows (over ranks too).

    keep_rows      keep the gradients themselves: `fold_gradients`, each row the mean of some microbatches
    keep_sq_norms  keep their square norms only, measured as they stream by: `sq_norms`
    device         where the rows are kept, that of the parameters by default

    The hooks exist only between `arm` and `disarm`, which the driver puts around the trainer's own backward: a probe's
    own backward would fire them too.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        keep_rows: bool = True,
        keep_sq_norms: bool = False,
        device: torch.device | str | None = None,
    ) -> None:
        self._parameters = parameters
        self._keep_rows = keep_rows
        self._device = device
        self._keep_sq_norms = keep_sq_norms
        self._scale = 1.0  # from what a hook sees to the mean scale
        self._row_of: Sequence[int] = ()  # by microbatch
        self.fold_gradients: FlatVectors | None = None
        self._rows: dict[str, tuple[Tensor, ...]] = {}  # views of these, made once: the hooks are in the hot path
        self._metric = AdamMetric(None)
        self._meters: list[SqNormMeter] = []  # by microbatch; on the scale of the hooks
        self._handles: list[RemovableHandle] = []

    def start_step(
        self, row_of_microbatch: Sequence[int], num_rows: int, states: Mapping[str, object] | None = None
    ) -> None:
        """Empties what is kept, for the microbatches of the step that begins.

        row_of_microbatch  the row that each microbatch's gradient goes into; rows that none goes into stay zero
        states             AdamW's, for square norms in its metric; those that are not warm yet are nan
        """
        num_microbatches = len(row_of_microbatch)
        if self._keep_rows and (self.fold_gradients is None or self.fold_gradients.num_rows != num_rows):
            self.fold_gradients = FlatVectors(self._parameters, num_rows, self._device)
            self._rows = {name: self.fold_gradients.view(name).unbind(0) for name in self._parameters}
        elif self.fold_gradients is not None:
            self.fold_gradients.matrix.zero_()
        self._metric = AdamMetric(states)
        self._meters = [SqNormMeter(self._metric) for _ in range(num_microbatches)]
        self._scale = float(num_microbatches)
        self._row_of = row_of_microbatch

    @property
    def sq_norms(self) -> Tensor | None:
        """|g_k|² and Σ P g_k² by microbatch and parameter, (K, parameters, 2), on the mean scale; None if not kept."""
        if not self._keep_sq_norms:
            return None
        return self._scale**2 * torch.stack([meter.result(self._parameters) for meter in self._meters])

    def end_step(self) -> None:
        """Lets go of the optimizer's states: under ZeRO and FSDP2 they were gathered for this step."""
        self._meters, self._metric = [], AdamMetric(None)

    @property
    def num_bytes(self) -> int:
        """Bytes of what is kept during a step."""
        return (self.fold_gradients.num_bytes if self.fold_gradients is not None else 0) + self._metric.num_bytes

    def arm(self, microbatch: int) -> None:
        """Sets the hooks: gradients that reach the parameters from now on belong to this microbatch."""
        row = self._row_of[microbatch]
        share = self._scale / self._row_of.count(row)
        for name, param in self._parameters.items():
            if self._keep_rows:
                self._handles.append(param.register_hook(self._adder(self._rows[name][row], share)))
            if self._keep_sq_norms:
                self._handles.append(param.register_hook(functools.partial(self._meters[microbatch].add, name)))

    def disarm(self) -> None:
        """Takes the hooks away."""
        while self._handles:
            self._handles.pop().remove()
        for meter in self._meters:
            meter.flush()

    def _adder(self, row: Tensor, share: float) -> Callable[[Tensor], None]:
        def add(grad: Tensor) -> None:
            row.add_(grad.to(row.device), alpha=share)

        return add
