"""Single steps and sums of real runs: how far predictions are from the truth, and whether their bars hold.

    OMP_NUM_THREADS=1 python benchmarks/along_run.py FOLDER [--conditions default lora sgd] [--seeds 0 1] [--steps 40]

Each run is kept in FOLDER as it ends; what is there is not run again, and the tables are of all that is there.

A run of the default task, changed as CONDITIONS say, with one probe `simple` or several (`--choices`), which see the
same batches. At every step a fresh sample, one response each to `--fresh` random prompts, gives the truth along the
same directions: X(θ) · δθ, X with the baseline over the whole sample. Its prompts are such that the run has not seen
yet, which is what forward and backward speak of; for own_prompts they are the step's own, answered again. The truth's
own error is added to the bars.

    noise      root mean square of (estimate − truth), less the truth's own error
    coverage   of 95 % intervals: as the probe gives them, and with the bar of the batch alone
    width      of the former over that of the latter, on average

At the end of a run the whole change of entropy is measured on `--ends` fresh responses at its first and its last
parameters, to prompts that the run has never seen, and to those that it has; the sum of trapezoids is set against it.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import rl_training.job.silence  # noqa: F401

import torch
from along_run_tables import DIRECTIONS, QUANTITIES, UNITS, print_tables
from default_task import Progress, default_trainer
from peft import LoraConfig
from torch import Tensor
from tqdm import tqdm
from trl import GRPOTrainer

from rl_training import Estimate, Probe
from rl_training.engine.batch import Rollout, in_one_width
from rl_training.engine.entropy_change import EntropyChange, StepMemory
from rl_training.engine.entropy_gradients import entropy_gradient
from rl_training.engine.probe import Need
from rl_training.engine.step import Step
from rl_training.engine.updates import CAUSES, StepsWithoutFolds
from rl_training.mathematics.entropy import surrogate_weights
from rl_training.mathematics.importance import sequence_totals
from rl_training.mathematics.vectors import Layout, Vector, dot
from rl_training.probes import SimpleEntropyProbe

CHOICES: dict[str, dict[str, Any]] = {
    "first, 1/8": {},
    "first, 2/8": {"responses_per_prompt": 2},
    "all, 8/8": {"responses_per_prompt": 8},
}
CONDITIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "lora": {"peft_config": {"r": 16, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}, "learning_rate": 2e-3},
    "rate 1e-4": {"learning_rate": 1e-4},
    "temperature 0.7": {"temperature": 0.7},
    "temperature 1.3": {"temperature": 1.3},
    "G = 4": {"num_generations": 4},
    "G = 16": {"num_generations": 16},
    "sgd": {"optim": "sgd", "learning_rate": 0.05},
    "decay 1": {"weight_decay": 1.0},
    "clipping 0.05": {"max_grad_norm": 0.05},
    "truncation 20": {"max_completion_length": 20},
}
BLOCK = 16  # sequences of the truth that one backward takes


class AlongRun(Probe):
    """Asks the probes of CHOICES at every step, and the truth of a fresh sample."""

    name = "along_run"
    needs = Need.FOLD_GRADIENTS

    def __init__(self, choices: Sequence[str], num_fresh: int, seed: int) -> None:
        super().__init__()
        self._num_fresh, self._seed = num_fresh, seed
        always = {"per_sequence": True, "own_prompts": True}
        self._probes = {name: SimpleEntropyProbe(**always, **CHOICES[name]) for name in choices}
        self._memories: dict[str, StepMemory] = {}  # by choice
        self._last: Vector | None = None  # δθ of the step before
        self.trainer: GRPOTrainer | None = None
        self._unseen: dict[tuple[int, ...], Any] = {}  # rows of the training set by the tokens of their prompt
        self._seen: dict[tuple[int, ...], Any] = {}
        # Of each step: (blocks, directions and own_prompts, units), which add up to X · δθ.
        self.truth: list[Tensor] = []
        self.said: dict[str, list[Tensor]] = {name: [] for name in choices}

    @property
    def unseen(self) -> list[Any]:
        return list(self._unseen.values())

    @property
    def seen(self) -> list[Any]:
        return list(self._seen.values())

    def prepare(self, step: Step) -> None:
        assert self.trainer is not None
        if self._last is None:
            self._begin(step)
        own: dict[tuple[int, ...], Any] = {}  # the rows of this step's prompts
        for ids, mask in zip(step.batch.rollout.prompt_ids, step.batch.rollout.prompt_mask.bool(), strict=True):
            key = tuple(ids[mask].tolist())
            if key in self._unseen:
                self._seen[key] = self._unseen.pop(key)
            own[key] = self._seen[key]
        for name, probe in self._probes.items():
            view = dataclasses.replace(step, memory=self._memories[name])
            probe.prepare(view)
            view.entropy_change.keep_update()
        update, without, parts = _steps(step, view.entropy_change)
        nan = [torch.full_like(part, torch.nan) for part in update]
        directions = [self._last or nan, update, without, *parts]
        self._last = update
        seed = (self._seed << 32) + step.number
        fresh, again = (self.sample(rows, self._num_fresh, seed) for rows in (self.unseen, list(own.values())))
        of_own = self._products(step, again, directions)[:, [DIRECTIONS.index("forward")]]
        self.truth.append(torch.cat([self._products(step, fresh, directions), of_own], dim=1))

    def results(self) -> dict[str, Estimate]:
        for name, probe in self._probes.items():
            said = probe.results()
            rows = [[_as_row(said[f"delta_h/{q}{suffix}"]) for suffix in UNITS.values()] for q in QUANTITIES]
            self.said[name].append(torch.tensor(rows, dtype=torch.float64))
        return {"along_run/steps": Estimate(float(len(self.truth)))}

    def _begin(self, step: Step) -> None:
        assert self.trainer is not None
        rows = list(self.trainer.train_dataset)
        prompts = self.trainer._tokenize_prompts([row["prompt"] for row in rows])[0]
        self._unseen = {tuple(ids): row for ids, row in zip(prompts, rows, strict=True)}
        parameters = step.gradients.parameters
        self._layout, self.policy = Layout(parameters), step.policy
        self.start = {name: p.detach().clone() for name, p in parameters.items()}
        for name, probe in self._probes.items():
            assert probe.entropy is not None
            self._memories[name] = StepMemory(self._layout, probe.entropy)

    def sample(self, rows: list[Any], number: int, seed: int) -> Rollout:
        """Returns fresh responses, one each to random prompts of these rows."""
        assert self.trainer is not None
        whole = self.trainer.train_dataset
        self.trainer.train_dataset = rows
        try:
            return self.policy.sample(number, seed)
        finally:
            self.trainer.train_dataset = whole

    def _products(self, step: Step, fresh: Rollout, directions: Sequence[Vector]) -> Tensor:
        blocks = torch.arange(self._num_fresh).split(BLOCK)
        parts = [step.policy.score(fresh, rows) for rows in blocks]
        width = fresh.completion_mask.shape[1]
        entropies = in_one_width([part.entropies.detach().double() for part in parts], at_least=width)
        known = (entropies, fresh.completion_mask, fresh.prompt_index)
        weights = [surrogate_weights(*known, target=target, baseline="buffer") for target in ("token", "sequence")]
        parameters, products = list(step.gradients.parameters.values()), []
        for rows, part in zip(blocks, parts, strict=True):
            columns = slice(part.logps.shape[1])
            pairs = [(w[rows, columns].to(part.logps), u[rows, columns].to(part.logps)) for w, u in weights]
            gradients = entropy_gradient(part, pairs, parameters, self._layout)
            products.append(torch.stack([torch.stack([dot(x, d) for x in gradients]) for d in directions]))
        return torch.stack(products) / self._num_fresh

    def ends(self, number: int) -> dict[str, Tensor]:
        """Returns the change of entropy over the run and its error, (units, 2), on unseen prompts, and on seen ones."""
        assert self.trainer is not None
        now = dict(self.trainer.model.named_parameters())
        back = {name: start - now[name].detach() for name, start in self.start.items()}
        changes = {}
        for name, rows in (("unseen", self.unseen), ("seen", self.seen)):
            totals = []
            for shift in ({}, back):
                with self.policy.shifted(shift):
                    fresh = self.sample(rows, number, (1 << 40) + self._seed)
                    totals.append(sequence_totals(self.policy.score_rollout(fresh))[:, 1:])
            changes[name] = _change(*totals)
        return changes


def settings_of(condition: str) -> dict[str, Any]:
    """Returns what this condition changes of the default task, as `default_trainer` takes it."""
    settings = dict(CONDITIONS[condition])
    if "peft_config" in settings:
        settings["peft_config"] = LoraConfig(**settings["peft_config"])
    return settings


def _steps(step: Step, change: EntropyChange) -> tuple[Vector, Vector, list[Vector]]:
    """Returns δθ, the mean of the steps without a fold, and what momentum, gradient and decay have in δθ."""
    assert step.gradients.rows is not None
    assert change.update is not None
    sizes, norm = torch.bincount(step.batch.fold).double(), step.optimizer.max_grad_norm
    steps = StepsWithoutFolds(change.pieces, change.gradient, step.gradients.rows, sizes, float(sizes.sum()), norm)
    clips = steps.clips(steps.gradients, slice(None))
    without, *parts = (change.layout.zeros() for _ in range(1 + len(CAUSES)))
    for piece, of_folds in steps.parts(slice(None), clips):
        piece.of(without).copy_(of_folds.total.mean(dim=0))
        whole = piece.state.delta(piece.param, change.clip * piece.of(change.gradient))
        for part, cause in zip(parts, CAUSES, strict=True):
            piece.of(part).copy_(getattr(whole, cause))
    return change.update, without, parts


def _as_row(estimate: Estimate) -> list[float]:
    raw = float(estimate.detail.get("stderr_of_batch", estimate.stderr))
    return [estimate.value, estimate.stderr, float(estimate.num_samples), raw]


def _change(after: Tensor, before: Tensor) -> Tensor:
    """Returns the change of H_tok and of H_seq with their errors, (2, 2), from (N, 2) pairs of H and T."""
    values, influences = [], []
    for totals in (after, before):
        entropy, length = totals.mean(dim=0)
        values.append(torch.stack([entropy / length, entropy]))
        token = (totals[:, 0] - entropy / length * totals[:, 1]) / length
        influences.append(torch.stack([token, totals[:, 0] - entropy], dim=1))
    stderr = (influences[0] - influences[1]).std(dim=0) / math.sqrt(len(after))
    return torch.stack([values[0] - values[1], stderr], dim=1)


def run(
    choices: Sequence[str], seed: int, steps: int, num_fresh: int, num_ends: int, bar: tqdm, settings: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns the truths, (steps, blocks, directions and own_prompts, units), what was said, by choice (steps,
    quantities, units, 4: value, error, num_samples, error of the batch alone), and the change between the ends,
    (units, 2) each."""
    probe = AlongRun(choices, num_fresh, seed)
    with tempfile.TemporaryDirectory() as scratch:
        probe.trainer = trainer = default_trainer(scratch, [probe], steps, seed=seed, **settings)
        trainer.add_callback(Progress(bar))
        trainer.train()
        ends = probe.ends(num_ends)
    said = {name: torch.stack(of_steps) for name, of_steps in probe.said.items()}
    return {"truth": torch.stack(probe.truth), "said": said, "ends": ends}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where runs are kept")
    parser.add_argument("--conditions", nargs="+", choices=CONDITIONS, default=list(CONDITIONS))
    parser.add_argument("--seeds", type=int, nargs="*", default=[0], help="none: only tables of what is there")
    parser.add_argument("--choices", nargs="+", choices=CHOICES, default=["first, 1/8"])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--fresh", type=int, default=96, help="sequences that the truth of a step comes from")
    parser.add_argument("--ends", type=int, default=1024, help="sequences that the change of a whole run comes from")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    todo = [
        (condition, seed, path)
        for condition in options.conditions
        for seed in options.seeds
        if not (path := options.folder / f"{condition.replace(' ', '_')}-{seed}.pt").exists()
    ]
    with tqdm(total=len(todo) * options.steps, unit="step") as bar:
        for condition, seed, path in todo:
            settings = settings_of(condition)
            record = run(options.choices, seed, options.steps, options.fresh, options.ends, bar, settings)
            torch.save({"condition": condition, "seed": seed} | record, path)
    print_tables([torch.load(path) for path in sorted(options.folder.glob("*.pt"))])


if __name__ == "__main__":
    main()
