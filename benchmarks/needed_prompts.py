"""Does `delta_h/needed_prompts` hold? Runs of the default task against banks of 512 fresh prompts at each step.

    OMP_NUM_THREADS=1 python benchmarks/needed_prompts.py [--rates 3e-4 1e-3] [--seeds 0 1] [--only-report]

Before each step 512 prompts x 8 responses are drawn. Their products, prompt by prompt, with this step and with the one
before, both as they were made, give the mean change and the variance of one prompt's product: the truth of each step,
averaged over steps with the probe's own weights. Products are central differences of scores along the step.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import rl_training.job.silence  # noqa: F401

import torch
from default_task import default_trainer
from measured_steps import PROMPTS, RESPONSES, Bank
from torch import Tensor

from rl_training import Estimate
from rl_training.engine.probe import Need
from rl_training.engine.step import Step
from rl_training.mathematics.entropy import surrogate_weights
from rl_training.mathematics.needed_prompts import DECAY, NeededPrompts
from rl_training.probes import SimpleEntropyProbe

SHARE = 0.5  # of the step, to either side


class Products(Bank):
    """Keeps what each step's batch says of it, and what the bank says."""

    name, needs = "products", Need.ENTROPY_CHANGE
    before: Mapping[str, Tensor] | None = None

    def prepare(self, step: Step) -> None:
        self._answers = {"products/true": Estimate.missing("it is in the file of the benchmark")}
        change, layout = step.entropy_change, step.gradients.layout
        assert change.update is not None
        assert change.variances_given_step is not None
        update = {name: part.clone() for name, part in layout.by_name(change.update).items()}
        self.rollout = self.draw(step.number)
        self.scores = step.policy.score_rollout(self.rollout)
        row: dict[str, Any] = {
            "step": step.number,
            "prompts": step.num_sequences / step.batch.responses_per_prompt,
            "folds": step.num_folds,
            "given": change.variances_given_step.tolist(),
        }
        for name, moved in (("forward", update), ("backward", self.before)):
            found = change.quantities[name]
            assert found.stderr_of_batch is not None
            row.setdefault("values", []).append(float(found.value[0]))
            row.setdefault("printed", []).append(float(found.stderr_of_batch[0]) ** 2)
            row[f"{name} bank"] = None if moved is None else self.mean_and_variance(step, moved)
        self.before = update
        self.rows.append(row)

    def after_step(self, step: Step) -> None:
        """Nothing is left to be done."""

    def mean_and_variance(self, step: Step, moved: Mapping[str, Tensor]) -> list[float]:
        """Returns the change per token along the step, and the variance of one prompt's product, from 1 of 8."""
        policy, scores, rows = step.policy, self.scores, torch.arange(0, PROMPTS * RESPONSES, RESPONSES)
        assert policy.shard is not None
        held = policy.shard.held()
        ends = []
        for sign in (SHARE, -SHARE):
            there = {name: part + sign * moved[name].view_as(part) for name, part in held.items()}
            with policy.with_weights(there), policy.measuring(), torch.no_grad():
                ends.append(policy.scorer.score(self.rollout, rows, graph=False))
        width = ends[0].logps.shape[1]
        lengths = scores.mask.double().sum(dim=1)
        level = float((scores.entropies.double() * scores.mask).nan_to_num().sum() / lengths.sum())
        (weights, entropy_weights), (length_weights, _) = (
            surrogate_weights(scores.entropies, scores.mask, self.rollout.prompt_index, target)
            for target in ("sequence", "length")
        )
        logps, entropies = (
            (getattr(ends[0], name) - getattr(ends[1], name)).double() / (2 * SHARE) for name in ("logps", "entropies")
        )
        terms = (weights - level * length_weights)[rows, :width] * logps + entropy_weights[rows, :width] * entropies
        products = (terms * scores.mask[rows, :width]).nan_to_num().sum(dim=1)
        tokens = lengths.view(PROMPTS, RESPONSES).mean(dim=1)
        change = float(products.sum() / tokens.sum())
        return [change, float(((products - change * tokens) / tokens.mean()).var())]


def train(rate: float, seed: int, steps: int) -> list[dict[str, Any]]:
    """Returns a row for each step."""
    bank = Products(lambda: trainer, seed, range(1, steps + 1))
    with tempfile.TemporaryDirectory() as folder:
        trainer = default_trainer(folder, [SimpleEntropyProbe(), bank], steps, rate, seed)
        trainer.attachment._policy._batch_size = 256  # of forward passes: large ones are faster here
        trainer.train()
    return [{"rate": rate, "seed": seed} | row for row in bank.rows]


def report(rows: Sequence[dict[str, Any]], at: Sequence[int]) -> None:
    """Prints the probe's interval and the bank's value at some steps of each run, from the batches' own numbers."""
    print("| learning rate, seed, step | `needed_prompts` | bank | held |\n|---|---|---|---|")
    hits, errors = [], []
    for rate, seed in dict.fromkeys((row["rate"], row["seed"]) for row in rows):
        run = [row for row in rows if (row["rate"], row["seed"]) == (rate, seed)]
        needed, squares, variances = NeededPrompts(), 0.0, 0.0
        for before, row in zip([None, *run], run, strict=False):
            total, weight = needed.state[3:5].tolist()  # of the noise that this step's weight is the inverse of
            found = needed.add(row["values"], row["given"], row["prompts"], row["folds"] - 1)
            if weight:
                missed = (row["values"][0] - row["forward bank"][0]) ** 2 - row["forward bank"][1] / PROMPTS
                known = row["forward bank"][1] / row["prompts"], row["given"][0], row["printed"][0]
                errors.append([weight / total * square for square in (missed, *known)])
            if before and weight:
                ends = before["forward bank"], row["backward bank"]
                change, variance = (sum(parts) / 2 for parts in zip(*ends, strict=True))
                squares = DECAY * squares + (change**2 - variance / (2 * PROMPTS)) * weight / total
                variances = DECAY * variances + 4 * variance * weight / total
            if row["step"] in at:
                low, high = found.ends()
                hits.append(low <= variances / squares <= high)
                print(f"| {rate:g}, {seed}, {row['step']} | {found.value:.0f} ({low:.0f} … {high:.0f}) "
                      f"| {variances / squares:.0f} | {'yes' if hits[-1] else 'no'} |")  # fmt: skip
    print(f"{sum(hits)} of {len(hits)} intervals hold the bank's value")
    missed, *known = map(sum, zip(*errors, strict=True))
    print("rms of `forward` less the bank's over the bank's error of a batch, its own given the step, the printed one: "
          + ", ".join(f"{math.sqrt(missed / square):.2f}" for square in known))  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", type=float, nargs="+", default=[3e-4, 1e-3])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--at", type=int, nargs="+", default=[10, 15, 20, 25, 30], help="steps of the table")
    parser.add_argument("--output", type=Path, default=Path("runs/needed_prompts.jsonl"))
    parser.add_argument("--only-report", action="store_true")
    options = parser.parse_args()
    options.output.parent.mkdir(parents=True, exist_ok=True)
    for seed, rate in [(s, r) for s in options.seeds for r in options.rates if not options.only_report]:
        rows = train(rate, seed, options.steps)
        with options.output.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
    report([json.loads(line) for line in options.output.read_text("utf-8").splitlines()], options.at)


if __name__ == "__main__":
    main()
