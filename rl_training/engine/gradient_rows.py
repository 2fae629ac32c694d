"""The gradient of each microbatch, caught as autograd hands it to the parameters: as rows by fold, or as square norms.

A hook on the leaf sees this rank's gradient of this microbatch alone — before DDP averages it and before it is added to
`.grad` — which differences of `.grad` do not give on the last microbatch under DDP.

A loop's loss is a mean over the B sequences of the step, so for a microbatch of b a hook sees b/B of its mean gradient;
that is undone here, once. The optimizer's gradient is then the mean of the rows, weighted by their sequences
(over ranks too).
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from rl_training.engine.loss_weights import LossWeights
from rl_training.mathematics.scores import Scores
from rl_training.mathematics.square_norms import AdamMetric, SqNormMeter
from rl_training.mathematics.vectors import Layout, Vector, add, num_bytes


class GradientRows:
    """Catches the gradients of one step at a time, each on its own scale: the mean over the microbatch.

    keep_rows      keep the gradients themselves, each row the mean of some microbatches: `rows`
    keep_sq_norms  keep their square norms, measured as they stream by: `sq_norms`
    offload        keep the rows in host memory: a row is collected where the parameters are, and copied once

    The hooks exist only between `arm` and `disarm`, around the loop's own backward: a probe's backward would fire them
    too. Nothing of parameter size is held between `release` and the next `start_step`.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        layout: Layout,
        keep_rows: bool = True,
        keep_sq_norms: bool = False,
        offload: bool = False,
    ) -> None:
        self._parameters, self.layout = parameters, layout
        self._keep_rows, self._keep_sq_norms = keep_rows, keep_sq_norms
        self._offload = offload
        self._copies = torch.cuda.Stream() if offload and layout.device.type == "cuda" else None
        self._scales: list[float] = []  # by microbatch: from what a hook sees to the mean over the microbatch
        self._shares: list[float] = []  # and to its part of the mean over its row
        self._row_of: Sequence[int] = ()  # by microbatch
        self.rows: Vector | None = None  # (K, n) of each bucket
        self._collected: tuple[int, Vector] | None = None  # with offload: the row that is being filled
        self._metric = AdamMetric(None)
        self._meters: list[SqNormMeter] = []  # by microbatch; on the scale of the hooks
        self._handles: list[RemovableHandle] = []

    def start_step(
        self,
        row_of_microbatch: Sequence[int],
        num_rows: int,
        states: Mapping[str, object] | None = None,
        sizes: Sequence[int] | None = None,
    ) -> None:
        """Makes room for the step that begins.

        row_of_microbatch  the row that each microbatch's gradient is added to; the other rows stay zero
        states             AdamW's, for square norms in its metric; those that are not warm yet are nan
        sizes              sequences of each microbatch; None: all have the same number
        """
        self.release()
        if self._keep_rows:
            device = "cpu" if self._offload else None
            self.rows = self.layout.zeros(num_rows, device=device, pinned=self._copies is not None)
        self._metric = AdamMetric(states)
        self._meters = [SqNormMeter(self._metric) for _ in row_of_microbatch]
        sizes = [1] * len(row_of_microbatch) if sizes is None else sizes
        row_sizes = Counter[int]()
        for row, size in zip(row_of_microbatch, sizes, strict=True):
            row_sizes[row] += size
        self._scales = [sum(sizes) / size for size in sizes]
        self._shares = [sum(sizes) / row_sizes[row] for row in row_of_microbatch]
        self._row_of = row_of_microbatch

    @property
    def sq_norms(self) -> Tensor | None:
        """|g_k|² and Σ P g_k² by microbatch and parameter, (K, parameters, 2), on the mean scale; None if not kept."""
        if not self._keep_sq_norms:
            return None
        norms = torch.stack([meter.result(self._parameters) for meter in self._meters])
        return norms * norms.new_tensor(self._scales).square().view(-1, 1, 1)

    @property
    def num_bytes(self) -> int:
        """Bytes of what is kept at present."""
        collected = num_bytes(self._collected[1]) if self._collected is not None else 0
        return num_bytes(self.rows) + collected + self._metric.num_bytes

    def arm(self, microbatch: int) -> None:
        """Sets the hooks: gradients that reach the parameters from now on belong to this microbatch."""
        row, share = self._row_of[microbatch], self._shares[microbatch]
        target = self.layout.by_name(self._target(row)) if self._keep_rows else {}
        for name, param in self._parameters.items():
            if self._keep_rows:
                self._handles.append(param.register_hook(self._adder(target[name], share)))
            if self._keep_sq_norms:
                self._handles.append(param.register_hook(functools.partial(self._meters[microbatch].add, name)))

    def disarm(self) -> None:
        """Removes the hooks."""
        while self._handles:
            self._handles.pop().remove()
        for meter in self._meters:
            meter.flush()

    def collect(self) -> None:
        """Copies the last row to where the rows are stored; to be called once all gradients are in."""
        self._copy_collected()
        if self._copies is not None:
            torch.cuda.current_stream().wait_stream(self._copies)

    def release(self) -> None:
        """Frees the rows and the optimizer's states, which under ZeRO and FSDP2 were gathered."""
        self.disarm()
        self.rows = self._collected = None
        self._meters, self._metric = [], AdamMetric(None)

    def _target(self, row: int) -> Vector:
        """Returns the vector that gradients of this row are added to."""
        assert self.rows is not None
        if not self._offload:
            return [part[row] for part in self.rows]
        if self._collected is None or self._collected[0] != row:
            self._copy_collected()
            self._collected = row, self.layout.zeros()
        return self._collected[1]

    def _copy_collected(self) -> None:
        if self._collected is None or self.rows is None:
            return
        (row, vector), self._collected = self._collected, None
        if self._copies is not None:
            self._copies.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._copies):  # None: the present one
            for part, source in zip(self.rows, vector, strict=True):
                part[row].copy_(source, non_blocking=True)
                if self._copies is not None:
                    source.record_stream(self._copies)

    def _adder(self, row: Tensor, share: float) -> Callable[[Tensor], None]:
        def add_gradient(gradient: Tensor) -> None:  # the parameter itself may be empty by now
            row.view(gradient.shape).add_(gradient.to(row.device), alpha=share)

        return add_gradient

    def fill_slices(
        self,
        folds: Sequence[range],
        microbatch_rows: Sequence[range],
        loss_weights: LossWeights,
        score: Callable[[Tensor], Scores],
    ) -> None:
        """Splits each microbatch's gradient, in the row of its first fold, among the folds that cut it in slices.

        Each slice's gradient takes a forward pass and a backward, except the last one's, which is the difference: s
        slices cost (s − 1)/s of training's own passes. Without slices, nothing is done.
        """
        assert self.rows is not None
        for microbatch in microbatch_rows:
            inside = [k for k, rows in enumerate(folds) if rows.start in microbatch and rows.stop <= microbatch.stop]
            if len(inside) < 2:
                continue
            rest = [len(microbatch) * part[inside[0]] for part in self.rows]
            for k in inside[:-1]:
                rows = torch.arange(folds[k].start, folds[k].stop, device=loss_weights.logps.device)
                total = self.layout.vector(loss_weights.gradient(score(rows), rows, list(self._parameters.values())))
                self._set_row(k, total, len(rows))
                add(rest, total, -1.0)
            self._set_row(inside[-1], rest, len(folds[inside[-1]]))

    def _set_row(self, row: int, total: Vector, count: int) -> None:
        assert self.rows is not None
        for part, values in zip(self.rows, total, strict=True):
            part[row] = (values / count).to(part.device)
