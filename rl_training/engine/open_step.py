"""The current step: opened before its first microbatch, filled by each microbatch, discarded at its end."""

from __future__ import annotations

import dataclasses
import enum
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from rl_training.engine.context import StepContext
from rl_training.engine.gradient_witness import GradientWitness
from rl_training.engine.probe import Probe, Reading, needs_of
from rl_training.parallel.fold_vectors import equivalent_vectors
from rl_training.parallel.ranks import Ranks
from rl_training.parallel.sharding import Shard
from rl_training.policy.rollout import Rollout, join_rollouts, pad_and_concat
from rl_training.policy.scores import Scores
from rl_training.statistics.estimate import Estimate
from rl_training.statistics.unavailable import Unavailable
from rl_training.step.batch import LossSettings
from rl_training.step.data import StepData
from rl_training.step.folds import FoldGroup, ranges_of
from rl_training.step.loss_weights import LossWeights
from rl_training.step.needs import Need
from rl_training.vocabulary import ENGINE, KL_BOUND

MAX_ROLLOUTS = 256  # how many rollouts are remembered, since a loop may return to one


class SeenPrompts:
    """The prompts of the latest rollouts from which optimizer steps on this rank have learned."""

    def __init__(self) -> None:
        self._by_rollout: dict[int, set[int]] = {}

    def of_rollout(self, rollout_number: int) -> set[int]:
        """Return the prompts of this rollout from which steps have learned."""
        return self._by_rollout.get(rollout_number, set())

    def add(self, rollout_number: int, rollouts: Sequence[Rollout]) -> None:
        """Add the prompts of this rollout from which a step has learned."""
        seen = self._by_rollout.pop(rollout_number, set())  # added again below as the latest
        if rollouts:
            seen.update(torch.cat([rollout.prompt_index for rollout in rollouts]).tolist())
        self._by_rollout[rollout_number] = seen
        if len(self._by_rollout) > MAX_ROLLOUTS:
            del self._by_rollout[next(iter(self._by_rollout))]


class StepPhase(enum.StrEnum):
    """How far a step has come: the driver's latest call that has moved it on, in the order of a step."""

    BEGUN = "begin(number)"
    PLANNED = "plan(…)"
    FILLED = "microbatch(…)"
    READY = "gradients_ready(…)"
    STEPPED = "stepped()"
    SKIPPED = "skip_step()"  # in place of the two before
    FINISHED = "finish()"


@dataclass
class OpenStep:
    """The current step, measured or not: filled by each microbatch, discarded at its end."""

    number: int
    probes: Sequence[Probe]  # that measure this step; may be empty
    phase: StepPhase = StepPhase.BEGUN

    # Planned, if probes measure it.
    fold_groups: Sequence[FoldGroup] = ()
    sizes: Sequence[int] = ()  # number of sequences per microbatch
    responses_per_prompt: int = 0

    # Of its microbatches.
    rollouts: list[Rollout] = field(default_factory=list)
    scores: list[Scores] = field(default_factory=list)
    loss_weights: list[dict[str, Tensor]] = field(default_factory=list)  # for logps and for entropies
    other_terms: Unavailable | None = None  # why the loss has terms that do not go through these scores
    loss_settings: LossSettings | None = None  # of the latest microbatch

    # Once its gradients are ready.
    rollout_number: int = 0  # the rollout of the training that it learns from
    seen_prompts: set[int] = field(default_factory=set)  # from which earlier steps on the same rollout have learned
    context: StepContext | None = None  # set if probes measure it
    witness: GradientWitness | None = None  # set with the context, if probes measure the gradient's norms
    readings: dict[str, Reading] = field(default_factory=dict)  # by probe name

    # Once the optimizer has stepped.
    verification: Mapping[str, Estimate] = field(default_factory=dict)  # was it the predicted one, who drew its tokens?
    bounding: Mapping[str, Estimate] = field(default_factory=dict)  # how its learning rate was set; empty if it was not
    peak_bytes: int | None = None  # most bytes of vectors held at once while it was measured; None if it was not

    @property
    def is_measured(self) -> bool:
        """Whether its probes have measured it, which they do as soon as its gradients are ready."""
        return self.context is not None

    @property
    def needs(self) -> Need:
        """Everything that at least one of its probes needs."""
        return needs_of(self.probes)

    @property
    def estimates(self) -> dict[str, Mapping[str, Estimate]]:
        """The estimates of each probe that has measured the step, and the engine's own where it has any."""
        of_probes: dict[str, Mapping[str, Estimate]] = {
            name: reading.estimates for name, reading in self.readings.items()
        }
        of_engine = {ENGINE: self.verification, KL_BOUND: self.bounding}
        return of_probes | {name: estimates for name, estimates in of_engine.items() if estimates}

    @property
    def lacks_backward(self) -> bool:
        """Whether the loss weights of the latest microbatch are unknown, so no backward has reached its scores."""
        return bool(self.loss_weights) and "logps" not in self.loss_weights[-1]

    @property
    def microbatch_rows(self) -> tuple[range, ...]:
        """The step's rows that each microbatch holds."""
        return ranges_of([rollout.num_sequences for rollout in self.rollouts])

    @property
    def planned_start(self) -> int:
        """The row at which the latest microbatch was planned to start; on every rank it is in the same fold."""
        starts = [rows.start for rows in ranges_of(self.sizes)]
        return starts[min(len(self.rollouts), len(starts)) - 1]

    def add(self, rollout: Rollout, scores: Scores) -> None:
        """Add a microbatch."""
        self.rollouts.append(rollout)
        self.scores.append(scores)

    def watch_loss(self, scores: Scores) -> None:
        """Capture the gradients that the loop's own backwards will give these scores.

        If a loss goes backward in several parts, they add up, as in the parameters.
        """
        weights: dict[str, Tensor] = {}
        self.loss_weights.append(weights)

        def keep(name: str, weight: Tensor | None) -> None:
            if weight is not None:  # None: the loss does not depend on this score
                weights[name] = weights[name] + weight if name in weights else weight

        if scores.logps.requires_grad:  # otherwise the loss is not made of them
            scores.logps.register_hook(functools.partial(keep, "logps"))
        if scores.entropies.requires_grad:
            scores.entropies.register_hook(functools.partial(keep, "entropies"))

    def watch_gradient(self, data: StepData, shard: Shard) -> None:
        """Keep what tells whether the optimizer gets the measured gradient, if probes measure its norms."""
        if data.gradients.sq_norms is not None and shard.keeps_gradients:
            self.witness = GradientWitness(data, shard)

    def context_after_step(self, ranks: Ranks) -> StepContext:
        """Return the context with what is known about the gradient once the optimizer has stepped. Collective."""
        assert self.context is not None
        remark = "" if self.witness is None else self.witness.remark(ranks)
        return dataclasses.replace(self.context, gradient_remark=remark)

    def bytes_of_probes(self) -> int:
        """Return the bytes of the vectors that probes held at once. They run one after another."""
        assert self.context is not None
        layout = self.context.passes.layout
        fold_vectors = equivalent_vectors(layout, self.context.step.batch.num_folds)
        return int(max(probe.num_vectors(fold_vectors) for probe in self.probes) * layout.num_bytes)

    def join_on_all_ranks(self, ranks: Ranks) -> Rollout:
        """Return all microbatches as one rollout, with the same fields known on every rank. Collective.

        If one microbatch has a sampler's log-probabilities, on-policy microbatches without them get the policy's own,
        for a ratio of 1. An off-policy microbatch without them makes those of the whole step unknown. One microbatch
        without rewards makes all rewards unknown, and so for which responses were truncated. The values of reward
        functions are kept if all microbatches of all ranks have the same ones.
        """
        anywhere = self._facts_anywhere(ranks)
        unknown: dict[str, Any] = {name: None for name in ("sampling_logps", "old_logps") if not anywhere[name]}
        filled = [
            dataclasses.replace(_with_both_logps(rollout, scores), **unknown)
            for rollout, scores in zip(self.rollouts, self.scores, strict=True)
        ]
        dropped: dict[str, Any] = {}
        if anywhere["unknown_sampler"]:
            dropped |= {"sampling_logps": None, "old_logps": None}
        if anywhere["no_rewards"]:
            dropped["rewards"] = None
        if anywhere["no_truncated"]:
            dropped["truncated"] = None
        if anywhere["other_functions"] or anywhere["other_functions_elsewhere"]:
            dropped["rewards_by_name"] = {}
        return dataclasses.replace(join_rollouts(filled), on_policy=not anywhere["off_policy"], **dropped)

    def _facts_anywhere(self, ranks: Ranks) -> Mapping[str, bool]:
        """Return what holds for a microbatch of any rank, by name. Collective."""
        rollouts = self.rollouts
        facts = {
            "sampling_logps": any(rollout.sampling_logps is not None for rollout in rollouts),
            "old_logps": any(rollout.old_logps is not None for rollout in rollouts),
            "off_policy": not all(rollout.on_policy for rollout in rollouts),
            "unknown_sampler": any(rollout.has_unknown_sampler for rollout in rollouts),
            "no_rewards": any(rollout.rewards is None for rollout in rollouts),
            "no_truncated": any(rollout.truncated is None for rollout in rollouts),
            "other_functions": len({tuple(rollout.rewards_by_name) for rollout in rollouts}) > 1,
        }
        functions = {"other_functions_elsewhere": [*rollouts[0].rewards_by_name]}
        return ranks.anywhere(facts, rollouts[0].prompt_index.device, functions)

    def join_scores(self, rollout: Rollout) -> Scores:
        """Return the scores of the whole step, (B, T) each, padded to the widest microbatch."""
        return Scores(
            logps=pad_and_concat([scores.logps for scores in self.scores]),
            entropies=pad_and_concat([scores.entropies for scores in self.scores]),
            mask=rollout.completion_mask,
        )

    def join_loss_weights(self) -> LossWeights:
        """Return the loss weights on all scores of the step, (B, T) each."""
        has_entropies = any("entropies" in weights for weights in self.loss_weights)
        return LossWeights(self._joined_weights("logps"), self._joined_weights("entropies") if has_entropies else None)

    def _joined_weights(self, name: str) -> Tensor:
        """Return the loss weights on the scores of this name, (B, T), 0 where the loss is not made of them."""
        return pad_and_concat(
            [
                weights.get(name, torch.zeros_like(scores.logps))
                for weights, scores in zip(self.loss_weights, self.scores, strict=True)
            ]
        )


def _with_both_logps(rollout: Rollout, scores: Scores) -> Rollout:
    """Return a microbatch whose missing log-probabilities are filled, the sampler's by the policy's own.

    Ratios are then 1. The old ones of an off-policy microbatch without them are its sampler's, as `Rollout` says.
    """
    sampling_logps = scores.logps if rollout.sampling_logps is None else rollout.sampling_logps
    old_logps = rollout.old_logps
    if old_logps is None:
        old_logps = scores.logps if rollout.on_policy else sampling_logps
    return dataclasses.replace(rollout, sampling_logps=sampling_logps, old_logps=old_logps)


def enter(step: OpenStep | None, phase: StepPhase, after: Sequence[StepPhase]) -> OpenStep:
    """Return the current step, now in this phase. RuntimeError, naming the missing call, if it was in none of `after`.

    >>> enter(OpenStep(1, []), StepPhase.FILLED, after=[StepPhase.PLANNED, StepPhase.FILLED])
    Traceback (most recent call last):
    RuntimeError: call plan(…) before microbatch(…)
    """
    if step is not None and step.phase in after:
        step.phase = phase
        return step
    order = list(StepPhase)
    if step is None:
        missing = f"{StepPhase.BEGUN}"
    elif order.index(step.phase) < order.index(after[0]):
        missing = f"{after[0]}"
    else:
        missing = f"{StepPhase.FINISHED} and {StepPhase.BEGUN}"
    raise RuntimeError(f"call {missing} before {phase}")
