"""Do predictions hold when another policy samples? Compares them with large samples from the policy itself.

    OMP_NUM_THREADS=1 python benchmarks/sampler.py forward        prediction of the actual step, with and without ratios
    OMP_NUM_THREADS=1 python benchmarks/sampler.py corrections    what each correction would change
    OMP_NUM_THREADS=1 python benchmarks/sampler.py divergences    how far off samplers are; is ESS = exp(−2 KL T)?

A run is frozen at one step: each batch is sampled by μ (--samplers), probes measure the step that the optimizer takes
with it, then weights and moments are restored. Truth: X and the reward gradient, from `--truth` fresh responses.

    forward      the coverage of X · step by the 95 % intervals of `forward`, and X along three fixed directions: the
                 step of the moments alone, X itself, and what the reward gradient adds to the first
    corrections  ΔH and Δreward of each correction relative to the actual step: interval coverage and asserted signs
    divergences  the probe `sampler` on batches of 32 prompts × 8
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import statistics
import tempfile
from collections.abc import Sequence
from typing import Any

import rl_training.job.silence  # noqa: F401

import torch
from other_samplers import Named, StateKeeper, trainer_of
from torch import Tensor

from rl_training import DrGRPOTrainer, Reading
from rl_training.engine.context import StepContext
from rl_training.engine.verifier import UpdateVerifier
from rl_training.entropy.prediction import predict_entropy
from rl_training.entropy.previous_update import PreviousUpdate
from rl_training.entropy.weights import surrogate_weights
from rl_training.hosts.trl.policy import TrainerPolicy
from rl_training.interventions.loss import loss_inputs
from rl_training.parallel.vectors import dot
from rl_training.probes import InterventionsProbe, SamplerProbe, SimpleEntropyProbe
from rl_training.probes.sampler import TRUNCATED_SAMPLER
from rl_training.statistics.calibration import interval_covers
from rl_training.statistics.estimate import Estimate
from rl_training.step.data import EntropyPrediction
from rl_training.step.needs import Need

UpdateVerifier.detect_external_edits = lambda self: None  # type: ignore[method-assign]  # steps begin at given weights, on purpose
SAMPLERS = {
    "forward": ["int5", "noise-.6", "stale-2", "stale-8"],
    "corrections": ["int5", "noise-.6", "stale-2", "stale-4", "stale-8"],
    "divergences": ["itself", "bf16", "int8", "int5", "stale-8", "noise-.6", "int4", "top-p-.95"],
}
CORRECTIONS = ["tis:2", "mis:0.5,2", "seq_mask:3", "ppo_clip:0.2", "exact"]
DIRECTIONS = ("the momentum's step", "X itself", "the reward's step")
PART = 512  # responses per part of the truth
MIN_ESS = 0.7  # batches with a smaller ESS are left out of the scatter of X with and without ratios


@dataclasses.dataclass
class Truth:
    """∂H_tok and the reward gradient, one of each per part of the fresh responses."""

    entropy: list[Named]
    reward: list[Named]


class Divergence(SamplerProbe):
    """Keeps the probe's estimates for each batch."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[dict[str, Estimate]] = []
        self.tokens: list[float] = []

    def measure(self, ctx: StepContext, state: Any) -> Reading:
        step = ctx.step
        reading = super().measure(ctx, state)
        self.said.append(reading.estimates)
        self.tokens.append(float(step.batch.scores.mask.sum()) / step.batch.num_sequences)
        return reading

    def mean(self, name: str) -> str:
        values = [said[f"sampler/{name}"].value for said in self.said]
        return f"{statistics.fmean(values):.3g} ± {statistics.stdev(values) / math.sqrt(len(values)):.1g}"

    def report(self) -> None:
        """Print the divergence, and exp(−2 KL T) from all batches for comparison with ESS."""
        kl, tokens = statistics.fmean(said["sampler/kl"].value for said in self.said), statistics.fmean(self.tokens)
        cuts = sum(said["sampler/mean_ratio"].reason == TRUNCATED_SAMPLER for said in self.said)
        names = ("kl", "ratio_outside", "ess", "mean_ratio", "reward_gap")
        said = ", ".join(f"{name} {self.mean(name)}" for name in names)
        law = math.exp(-2.0 * kl * tokens)
        print(f"  {len(self.said)} batches, {tokens:.1f} tokens: {said}; exp(−2 KL T) {law:.3f}, flagged as cut {cuts}",
              flush=True)  # fmt: skip


class Forward(Divergence):
    """Compares the step's prediction, and X along given directions, with the truth."""

    needs = Need.ENTROPY_CHANGE | Need.ENTROPY_ROWS

    def __init__(self, parts: list[Named], directions: list[Named]) -> None:
        super().__init__()
        self.truth, self.directions = mean_of(parts), directions
        self.held_out = parts[len(parts) // 2 :]  # the direction "X itself" is the mean of the other parts
        self.rows: list[tuple[float, float, float]] = []  # forward, half-width of its interval, truth
        self.along: list[list[tuple[float, float]]] = []  # by batch and direction: with and without ratios
        self.ess: list[float] = []

    def measure(self, ctx: StepContext, state: Any) -> Reading:
        step = ctx.step
        reading = super().measure(ctx, state)
        change, layout = ctx.prediction, step.gradients.layout
        if change.limit:
            return reading
        rollout = dataclasses.replace(step.batch.rollout, sampling_logps=None)
        bare = dataclasses.replace(step, batch=dataclasses.replace(step.batch, rollout=rollout))
        assert ctx.policy.shard is not None
        assert change.update is not None
        previous = PreviousUpdate(ctx.policy.shard, change.settings)
        without = predict_entropy(bare, ctx.passes, previous, Need.ENTROPY_ROWS)
        forward = change.quantities["forward"].estimates(step.batch.num_folds)[0]
        truth = float(dot(layout.vector(self.truth[name] for name in layout.names), change.update))
        self.rows.append((forward.value, forward.half_width(), truth))
        self.ess.append(self.said[-1]["sampler/ess"].value)
        vectors = [layout.vector(direction[name] for name in layout.names) for direction in self.directions]
        self.along.append(
            [(x_dot(change, step.batch.fold_sizes, v), x_dot(without, step.batch.fold_sizes, v)) for v in vectors]
        )
        return reading

    def report(self) -> None:
        """Print the coverage, and the means along the directions with those of the truth."""
        super().report()
        error, number = [value - truth for value, _, truth in self.rows], len(self.rows)
        held = statistics.fmean(abs(value - truth) <= width for value, width, truth in self.rows)
        print(f"  forward of {number}: covered {held:.3f}, mean error {milli(error)} mnats, mean truth "
              f"{milli([truth for *_, truth in self.rows])}", flush=True)  # fmt: skip
        large = [i for i, ess in enumerate(self.ess) if ess >= MIN_ESS]
        for i, (name, direction) in enumerate(zip(DIRECTIONS, self.directions, strict=True)):
            columns = list(zip(*(row[i] for row in self.along), strict=True))
            deviations = [statistics.stdev([column[j] for j in large]) for column in columns]
            print(f"  X along {name}: truth {milli([dot_named(part, direction) for part in self.held_out])}, "
                  f"with ratios {milli(columns[0])}, without {milli(columns[1])}; sd with / without, ESS ≥ {MIN_ESS} "
                  f"({len(large)}): {deviations[0] / deviations[1]:.2f}", flush=True)  # fmt: skip


class Corrections(InterventionsProbe):
    """Compares each intervention's predicted change with the difference of AdamW's steps times the truth."""

    def __init__(self, run: StateKeeper, truth: Truth, names: Sequence[str] = CORRECTIONS, state: int = -1) -> None:
        super().__init__(["none", *names], every=1, num_folds=8)
        self.run, self.truth, self.state = run, truth, state
        self.cases: list[tuple[str, str, Estimate, float, float]] = []  # name, quantity, estimate, truth, truth's error
        self.batches = 0

    def measure(self, ctx: StepContext, state: Any) -> Reading:
        step = ctx.step
        reading = super().measure(ctx, state)
        self.batches += 1
        if ctx.prediction.limit:
            return reading
        loss = loss_inputs(step.batch, ctx.ranks.reduce)  # by microbatch: some interventions select tokens within each
        weights = [torch.cat([correction.weights(part).stacked() for part in loss], dim=1) for correction in self.which]
        pairs = [[logps, entropies if entropies.any() else None] for logps, entropies in weights]
        gradients = gradients_of(ctx.policy, step.batch.rollout, pairs)
        made, *changed = (self.run.step(gradient, self.state) for gradient in gradients)
        for correction, other in zip(self.which[1:], changed, strict=True):
            difference = {name: other[name] - made[name] for name in made}
            for quantity, parts in (("delta_h", self.truth.entropy), ("delta_reward", self.truth.reward)):
                along = [dot_named(part, difference) for part in parts]
                said = reading.predicted[f"intervention/{correction.name}/{quantity}"]
                error = statistics.stdev(along) / math.sqrt(len(along))
                self.cases.append((correction.name, quantity, said, statistics.fmean(along), error))
        return reading

    def report(self) -> None:
        print(f"  {len(self.cases) // 2 // (len(self.which) - 1)} of {self.batches} batches")
        for correction in self.which[1:]:
            print_cases(correction.name, [case for case in self.cases if case[0] == correction.name])


def print_cases(name: str, cases: Sequence[tuple[str, str, Estimate, float, float]]) -> None:
    """Print the coverage of ΔH and Δreward, and how many asserted signs are right."""
    for quantity in ("delta_h", "delta_reward"):
        listed = [(said, truth, error) for _, of, said, truth, error in cases if of == quantity]
        held = [
            interval_covers(said.value - truth, said.stderr, said.num_samples, error) for said, truth, error in listed
        ]
        asserted = [said.value * truth > 0 for said, truth, _ in listed if abs(said.value) > said.half_width()]
        print(f"    {name} {quantity}: covered {statistics.fmean(held):.3f} of {len(held)}, signs {sum(asserted)} of "
              f"{len(asserted)}, mean estimate {milli([said.value for said, *_ in listed])}, truth "
              f"{milli([truth for _, truth, _ in listed])}, error of the truth / of the estimate "
              f"{statistics.median(error / said.stderr for said, _, error in listed):.2f}", flush=True)  # fmt: skip


def milli(values: Sequence[float]) -> str:
    """Format the mean and its standard error in thousandths."""
    error = statistics.stdev(values) / math.sqrt(len(values))
    return f"{1e3 * statistics.fmean(values):.4g} ± {1e3 * error:.2g}"


def dot_named(first: Named, other: Named) -> float:
    return sum(float((first[name].double() * other[name]).sum()) for name in other)


def x_dot(change: EntropyPrediction, sizes: Tensor, direction: Any) -> float:
    """Return ∂H_tok · direction, from the X rows of all folds."""
    assert change.rows is not None
    assert change.levels is not None
    by_fold = [float(dot([part[k] for part in change.rows], direction)) for k in range(len(sizes))]
    return sum(n * x for n, x in zip(sizes.tolist(), by_fold, strict=True)) / float(change.levels[:, 2].sum())


def gradients_of(policy: Any, rollout: Any, weights: Sequence[Sequence[Tensor | None]]) -> list[Named]:
    """Return Σ (c ∂log π + d ∂h) for each pair of weights (c, d), both (B, T). If d is None, its term is left out."""
    parameters = dict(policy.model.named_parameters())
    by_weighting = [{name: torch.zeros_like(p) for name, p in parameters.items()} for _ in weights]
    for rows in torch.arange(rollout.num_sequences).split(64):
        fresh = policy.score(rollout, rows)
        width = fresh.logps.shape[1]
        for sums, (logps, entropies) in zip(by_weighting, weights, strict=True):
            pairs = [(fresh.logps, logps), (fresh.entropies, entropies)]
            outputs = [output for output, w in pairs if w is not None]
            given = [w[rows, :width] for _, w in pairs if w is not None]
            gradients = torch.autograd.grad(outputs, list(parameters.values()), given, retain_graph=True)
            for name, gradient in zip(parameters, gradients, strict=True):
                sums[name] += gradient
    return by_weighting


def large_sample(trainer: DrGRPOTrainer, count: int, seed: int, part_size: int = PART) -> Truth:
    """Estimate the truth from `count` fresh responses, one per prompt. The reward baseline is each part's mean."""
    policy, truth = TrainerPolicy(trainer), Truth([], [])
    by_prompt = {row["prompt"]: row for row in trainer.train_dataset}
    for part in range(count // part_size):
        rollout = policy.sample(part_size, seed + part)
        scores = policy.score_rollout(rollout)
        prompts = [policy.decode(ids[mask.bool()]) for ids, mask in zip(rollout.prompt_ids, rollout.prompt_mask)]  # noqa: B905
        said = [ids[mask.bool()].tolist() for ids, mask in zip(rollout.completion_ids, rollout.completion_mask)]  # noqa: B905
        rewards = trainer.rewards_of([by_prompt[prompt] for prompt in prompts], said)
        advantages = (rewards - rewards.mean()) * part_size / (part_size - 1)
        of_reward = advantages.unsqueeze(1) * scores.mask / part_size
        of_entropy = surrogate_weights(scores.entropies, scores.mask, rollout.prompt_index, "token", "buffer")
        entropy, reward = gradients_of(policy, rollout, [[w / part_size for w in of_entropy], [of_reward, None]])
        truth.entropy.append(entropy)
        truth.reward.append(reward)
    return truth


def mean_of(parts: list[Named], factor: float = 1.0) -> Named:
    return {name: factor * torch.stack([part[name] for part in parts]).mean(dim=0) for name in parts[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=list(SAMPLERS))
    parser.add_argument("--batches", type=int, default=300)
    parser.add_argument("--truth", type=int, default=8192)
    parser.add_argument("--state", type=int, default=20, help="the step at which the run is frozen")
    parser.add_argument("--samplers", nargs="+", help="stale-N, int8, int5, int4, bf16, noise-.6, top-p-.95, itself")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        run = StateKeeper()
        first = trainer_of(folder, [], options.state + 1, "itself")
        first.add_callback(run)
        first.train()
        weights = run.weights[options.state]
        first.model.load_state_dict(weights, strict=False)
        if options.what != "divergences":
            truth = large_sample(first, options.truth, seed=77)
            half = len(truth.entropy) // 2
            nothing = {name: torch.zeros_like(w) for name, w in weights.items()}
            momentum, rewarded = run.step(nothing), run.step(mean_of(truth.reward, -7 / 8 / 36))
            of_reward = {name: rewarded[name] - momentum[name] for name in momentum}
            directions = [momentum, mean_of(truth.entropy[:half]), of_reward]
        cases = []
        for sampler in options.samplers or SAMPLERS[options.what]:
            print(f"{sampler}:", flush=True)
            lag = int(sampler.partition("-")[2]) if sampler.startswith("stale") else 0
            probes, more = [SimpleEntropyProbe(num_folds=8)], {}
            if options.what == "forward":
                probe: Any = Forward(truth.entropy, directions)
            elif options.what == "corrections":
                probe = Corrections(run, truth)
            else:
                probe, probes, more = Divergence(), [], {"gradient_accumulation_steps": 16}
            again = trainer_of(folder, [*probes, probe], options.batches, sampler, run.weights[options.state - lag],
                               seed=1, **more)  # fmt: skip
            again.add_callback(StateKeeper((weights, run.optimizers[-1])))
            again.train()
            probe.report()
            cases += probe.cases if options.what == "corrections" else []
        if cases:
            print_cases("all", cases)


if __name__ == "__main__":
    main()
