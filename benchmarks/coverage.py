"""Are the error bars of δH honest, and is its mean right? Hundreds of independent batches at one and the same state.

    OMP_NUM_THREADS=1 python benchmarks/coverage.py [--batches 200] [--warm-steps 10] [--num-folds 8 16 32]

The default task is trained for a few steps. From then on every optimizer step is taken back, parameters and Adam's
state, so that every batch is measured at the same state and the true first-order change is one number. --warm-steps 0
is the first step of all, at which the whole step is the sign of this very batch's gradient.

The first --truth-batches batches are a sample of their own, from which X is estimated with all responses; the truth is
that X · the mean step of the other batches. Then, over these batches,

    mean      of an estimate, and its distance from the truth in standard errors. `backward` here dots a batch's X with
              the step of the batch before: batches are independent, so that its mean is the truth too
    coverage  share of the nominal 95 % intervals that hold what the estimate is of. For `forward` that is its own
              expectation, the mean over all batches; for `backward` it is X · the step that it was dotted with
    sd / se   the scatter of the estimates over the mean of their standard errors

All numbers of folds are measured on the same batches: fine folds are joined to coarse ones.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import math
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

import rl_training.job.silence  # noqa: F401

import torch
from default_task import Progress, default_trainer
from torch import Tensor
from tqdm import tqdm
from transformers import TrainerCallback

from rl_training import Estimate, Probe
from rl_training.engine.entropy_change import LEVELS, StepMemory
from rl_training.engine.entropy_gradients import EntropySettings, fold_gradients, importance_ratios
from rl_training.engine.probe import Need
from rl_training.engine.step import Step
from rl_training.mathematics.jackknife import jackknife_stderr
from rl_training.mathematics.vectors import Layout
from rl_training.probes import SimpleEntropyProbe

UNITS = {"": "token", "_sequence": "sequence"}


class StayHere(TrainerCallback):
    """Takes back every optimizer step after the first `warm_steps`: parameters and the optimizer's state."""

    def __init__(self, warm_steps: int) -> None:
        self.warm_steps = warm_steps
        self._parameters: list[Tensor] = []

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.warm_steps:
            self._parameters = [p.detach().clone() for p in kwargs["model"].parameters()]
            self._optimizer_state = copy.deepcopy(kwargs["optimizer"].state_dict())

    @torch.no_grad()
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        for param, value in zip(kwargs["model"].parameters(), self._parameters, strict=bool(self._parameters)):
            param.copy_(value)
        if self._parameters:
            kwargs["optimizer"].load_state_dict(self._optimizer_state)


class Batches(Probe):
    """Keeps what `simple` says of each batch at several numbers of folds, each batch's step, and X of the first ones.

    warm_steps     steps that are not measured
    truth_batches  batches after that from which only X is taken, from all responses
    num_folds      numbers of folds, the largest one last: a multiple of all others
    """

    name = "batches"
    needs = Need.FOLD_GRADIENTS

    def __init__(self, warm_steps: int, truth_batches: int, num_folds: Sequence[int]) -> None:
        super().__init__()
        self.num_folds = num_folds[-1]
        self._warm_steps, self._truth_batches = warm_steps, truth_batches
        options = {"per_sequence": True, "error_decay": 0.0}  # independent batches: each bar is its own
        self._simple = {folds: SimpleEntropyProbe(num_folds=folds, **options) for folds in num_folds}
        self.said: dict[int, list[dict[str, Estimate]]] = {folds: [] for folds in num_folds}
        self.levels: list[Tensor] = []  # of each truth batch, (LEVELS,): sequences, ΣH, ΣT
        self.gradients: list[Tensor] = []  # of each truth batch, (2, P): ∂H_seq and ∂E[T]
        self.updates: list[Tensor] = []  # of each other batch, (P,): the real δθ
        self._memories: dict[int, StepMemory] = {}  # by number of folds

    def measures_at(self, step: int) -> bool:
        return step > self._warm_steps

    def prepare(self, step: Step) -> None:
        if not self._memories:
            layout = Layout(step.gradients.parameters)
            self._memories = {
                n: StepMemory(layout, probe.entropy) for n, probe in self._simple.items() if probe.entropy
            }
        self._old = _flat(step)
        if len(self.gradients) < self._truth_batches:
            self._take_gradient(step)
            return
        for folds, probe in self._simple.items():
            joined = with_folds(step, folds, self._memories[folds])
            probe.prepare(joined)
            joined.entropy_change.keep_update()
            self.said[folds].append(probe.results())

    def after_step(self, step: Step) -> None:
        if any(self.said.values()):
            self.updates.append(_flat(step) - self._old)

    def results(self) -> dict[str, Estimate]:
        return {"batches/measured": Estimate(float(len(self.updates)))}

    def _take_gradient(self, step: Step) -> None:
        ratios, parameters = importance_ratios(step.batch), list(step.gradients.parameters.values())
        assert ratios is not None
        whole = dataclasses.replace(step.batch, fold=torch.zeros_like(step.batch.fold))
        settings = EntropySettings(responses_per_prompt=step.batch.responses_per_prompt, per_sequence=True)
        layout = Layout(step.gradients.parameters)
        (gradient,) = fold_gradients(whole, step.policy, parameters, layout, ratios, 1.0, settings)
        mask = step.batch.scores.mask.bool()
        total = step.batch.scores.entropies.double().masked_fill(~mask, 0).sum()
        self.levels.append(torch.stack([ratios.sum(), total, mask.sum().double()]))
        less_length, entropy = map(torch.cat, gradient.entropy)  # ∂H_seq − 1 ∂E[T] and ∂H_seq
        self.gradients.append(torch.stack([entropy, entropy - less_length]))


def _flat(step: Step) -> Tensor:
    """Returns a copy of the parameters, (P,)."""
    return torch.cat([p.detach().reshape(-1) for p in step.gradients.parameters.values()])


def with_folds(step: Step, num_folds: int, memory: StepMemory) -> Step:
    """Returns the step with every few folds joined to one."""
    assert step.gradients.rows is not None
    joined = len(step.gradients.rows[0]) // num_folds
    rows = [part.view(num_folds, joined, -1).mean(dim=1) for part in step.gradients.rows]
    return dataclasses.replace(
        step,
        batch=dataclasses.replace(step.batch, fold=step.batch.fold // joined),
        gradients=dataclasses.replace(step.gradients, rows=rows),
        capabilities=dataclasses.replace(step.capabilities, num_folds=num_folds),
        memory=memory,
    )


def measure(
    batches: int, truth_batches: int, warm_steps: int, num_folds: Sequence[int], **settings: Any
) -> tuple[Batches, dict[str, Tensor]]:
    """Returns the probe with all it has kept, and by unit the first-order change of each batch's step, (batches, 2).

    Column 0 is X · δθ with X from the truth batches, column 1 its standard error from theirs.
    """
    probe = Batches(warm_steps, truth_batches, num_folds)
    steps = warm_steps + truth_batches + batches
    with tempfile.TemporaryDirectory() as scratch, tqdm(total=steps, unit="batch") as bar:
        trainer = default_trainer(scratch, [probe], steps, **settings)
        trainer.add_callback(StayHere(warm_steps))
        trainer.add_callback(Progress(bar))
        trainer.train()
    return probe, true_changes(probe, torch.stack(probe.updates))


def true_changes(probe: Batches, updates: Tensor) -> dict[str, Tensor]:
    """Returns, by unit, X · δθ of each update and its error, (updates, 2), with X from the truth batches."""
    levels = torch.stack(probe.levels)  # (truth batches, LEVELS)
    products = torch.stack([x.double() @ updates.double().T for x in probe.gradients])  # (truth batches, 2, updates)
    terms = torch.cat([levels, (levels[:, :1, None] * products).flatten(1)], dim=1)

    def changes(sums: Tensor) -> Tensor:
        sequences, entropy, length = (column.unsqueeze(-1) for column in sums[..., :LEVELS].unbind(-1))
        d_entropy, d_length = sums[..., LEVELS:].unflatten(-1, (2, -1)).unbind(-2)
        return torch.stack([(d_entropy - entropy / length * d_length) / length, d_entropy / sequences], dim=-2)

    sums = terms.sum(dim=0)
    values, stderrs = changes(sums), jackknife_stderr(changes, sums, sums - terms, lambda x: x)
    return {unit: torch.stack([values[i], stderrs[i]], dim=1) for i, unit in enumerate(UNITS)}


def distance(values: Tensor, truth: Tensor, truth_stderr: float) -> tuple[float, float]:
    """Returns mean(values − truth), and that over its standard error; `truth` pairs with `values`."""
    difference = values - truth
    stderr = math.hypot(float(difference.std()) / math.sqrt(len(difference)), truth_stderr)
    return float(difference.mean()), float(difference.mean()) / stderr


def coverage(said: Sequence[Estimate], targets: Sequence[float]) -> float:
    """Returns the share of the 95 % intervals that hold their target."""
    hits = [abs(e.value - target) <= e.half_width() for e, target in zip(said, targets, strict=True)]
    return sum(hits) / len(hits)


def rows(probe: Batches, truth: Mapping[str, Tensor]) -> list[str]:
    """Returns the rows of the table."""
    updates = torch.stack(probe.updates)
    lines = []
    for unit, unit_name in UNITS.items():
        of_mean = true_changes(probe, updates.mean(dim=0, keepdim=True))[unit][0]
        per_batch = truth[unit][:, 0]
        lines.append(f"| {unit_name} | **truth** | | {of_mean[0]:+.6f} ± {of_mean[1]:.6f} | | | | |")
        for folds, said in probe.said.items():
            for name in ("forward", "backward", "reuse"):
                answers = [s[f"delta_h/{name}{unit}"] for s in said]
                first = 1 if name == "backward" else 0  # it speaks of the batch before
                answers = answers[first:]
                its_truth = per_batch[: len(answers)] if name == "backward" else per_batch
                values = torch.tensor([e.value for e in answers], dtype=torch.float64)
                bias, sigmas = distance(values, its_truth, float(of_mean[1]))
                cells = [unit_name, f"`{name}`", str(folds), f"{values.mean():+.6f}", f"{bias:+.6f}", f"{sigmas:+.1f}"]
                if name == "reuse":  # the same at every number of folds
                    if folds == max(probe.said):
                        lines.append(f"| {' | '.join([*cells[:2], '', *cells[3:], '', ''])} |")
                    continue
                targets = its_truth.tolist() if name == "backward" else [float(values.mean())] * len(values)
                scatter = (values - its_truth if name == "backward" else values).std()
                stderr = sum(e.stderr for e in answers) / len(answers)
                cells += [f"{coverage(answers, targets):.3f}", f"{float(scatter) / stderr:.2f}"]
                lines.append(f"| {' | '.join(cells)} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, default=200)
    parser.add_argument("--truth-batches", type=int, default=16, help="of 256 sequences each")
    parser.add_argument("--warm-steps", type=int, default=10)
    parser.add_argument("--num-folds", type=int, nargs="+", default=[8, 16, 32])
    parser.add_argument("--learning-rate", type=float, default=3e-4)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    probe, truth = measure(
        options.batches,
        options.truth_batches,
        options.warm_steps,
        sorted(options.num_folds),
        learning_rate=options.learning_rate,
        seed=options.seed,
    )
    print("\n| per | estimate | folds | mean | mean − truth | in standard errors | coverage | sd / se |")
    print("|---|---|---|---|---|---|---|---|")
    print("\n".join(rows(probe, truth)))


if __name__ == "__main__":
    main()
