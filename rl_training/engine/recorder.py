"""The step being measured: created before its first microbatch, filled by each microbatch, discarded at its end."""

from __future__ import annotations

import dataclasses
import functools
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from rl_training.engine.context import StepContext
from rl_training.engine.gradient_witness import GradientWitness
from rl_training.engine.loop import Loop
from rl_training.engine.probe import Probe, Reading
from rl_training.parallel.ranks import Ranks
from rl_training.parallel.rows import rows_in_vectors
from rl_training.parallel.sharding import Shard
from rl_training.policy.rollout import Rollout, join_origins, join_rollouts, pad_and_concat
from rl_training.policy.scores import Scores
from rl_training.statistics.estimate import Estimate
from rl_training.statistics.unavailable import Unavailable
from rl_training.step.batch import LossSettings
from rl_training.step.data import StepData
from rl_training.step.folds import FoldGroup, ranges_of
from rl_training.step.loss_weights import LossWeights
from rl_training.step.reasons import (
    HOOKED,
    MIXED_PROMPTS,
    ONE_RESPONSE,
    OTHER_SIZES,
    OTHER_TERMS,
    OWN_FORWARD_PASS,
    REASONS_ELSEWHERE,
    REUSED,
    SPLIT_PROMPTS,
    Reasons,
)


@dataclass
class SeenPrompts:
    """The prompts of the latest rollout from which optimizer steps on this rank have learned."""

    rollout_number: int = 0  # of the latest rollout
    numbers: set[int] = field(default_factory=set)

    def start_rollout(self, rollout_number: int) -> None:
        """Start over if this is a new rollout."""
        if rollout_number != self.rollout_number:
            self.rollout_number, self.numbers = rollout_number, set()

    def add(self, rollouts: Sequence[Rollout]) -> None:
        """Add the prompts from which a step has learned."""
        if rollouts:
            self.numbers.update(torch.cat([rollout.prompt_index for rollout in rollouts]).tolist())


@dataclass
class StepRecorder:
    """The step being measured: filled by each microbatch, discarded at its end."""

    number: int
    probes: Sequence[Probe]  # that measure this step; may be empty
    folds: Sequence[FoldGroup] = ()  # planned for its microbatches
    sizes: Sequence[int] = ()  # planned number of sequences per microbatch
    responses_per_prompt: int = 0
    rollouts: list[Rollout] = field(default_factory=list)  # per microbatch
    scores: list[Scores] = field(default_factory=list)
    loss_weights: list[dict[str, Tensor]] = field(default_factory=list)  # per microbatch: for logps and for entropies
    other_terms: Unavailable | None = None  # why the loss has terms that do not go through these scores
    loss_settings: LossSettings | None = None  # of the latest microbatch
    is_ready: bool = False  # all gradients are complete
    context: StepContext | None = None  # set once it is ready, if it is measured
    witness: GradientWitness | None = None  # set with the context, if probes measure the gradient's norms
    readings: dict[str, Reading] = field(default_factory=dict)  # by probe name
    # the engine's own, once the optimizer has stepped: whether the step was the predicted one, who drew its tokens
    verification: Mapping[str, Estimate] = field(default_factory=dict)

    @property
    def microbatch_rows(self) -> tuple[range, ...]:
        """The step's rows that each microbatch holds."""
        return ranges_of([rollout.num_sequences for rollout in self.rollouts])

    @property
    def planned_start(self) -> int:
        """The row at which the latest microbatch was planned to start; on every rank it is in the same fold."""
        starts = [rows.start for rows in ranges_of(self.sizes)]
        return starts[min(len(self.rollouts), len(starts)) - 1]

    def watch_loss(self, scores: Scores) -> None:
        """Capture the gradients that the loop's own backward will give these scores."""
        weights: dict[str, Tensor] = {}
        self.loss_weights.append(weights)

        def keep(name: str, weight: Tensor | None) -> None:
            if weight is not None:  # None: the loss does not depend on this score
                weights[name] = weight

        if scores.logps.requires_grad:  # otherwise the loss is not made of them
            scores.logps.register_hook(functools.partial(keep, "logps"))
        if scores.entropies.requires_grad:
            scores.entropies.register_hook(functools.partial(keep, "entropies"))

    def watch_gradient(self, data: StepData, shard: Shard) -> None:
        """Keep what tells whether the optimizer gets the measured gradient, if probes measure its norms."""
        if data.gradients.sq_norms is not None and shard.keeps_gradients:
            self.witness = GradientWitness(data, shard)

    def read_gradient(self) -> None:
        """Read the gradient that the optimizer gets, right before it steps."""
        if self.witness is not None:
            self.witness.about_to_step()

    def context_after_step(self, ranks: Ranks) -> StepContext:
        """Return the context with what is known about the gradient once the optimizer has stepped. Collective."""
        assert self.context is not None
        remark = "" if self.witness is None else self.witness.remark(ranks)
        return dataclasses.replace(self.context, gradient_remark=remark)

    def bytes_of_probes(self) -> int:
        """Return the bytes of the vectors that probes held at once. They run one after another."""
        assert self.context is not None
        layout, num_folds = self.context.passes.layout, self.context.step.batch.num_folds
        fold_rows = rows_in_vectors(layout, num_folds)
        return int(max(probe.num_vectors(fold_rows) for probe in self.probes) * layout.num_bytes)

    def reasons(self, loop: Loop, seen_prompts: set[int], mismatch: Unavailable | None) -> Reasons:
        """Return what cannot be measured at this step. Collective: what holds on one rank holds on all.

        Args:
            seen_prompts: Prompts of the current rollout on this rank from which earlier steps have learned.
            mismatch: Set if the sequences are not samples of the scored policy.
        """
        index = torch.cat([rollout.prompt_index for rollout in self.rollouts])
        group_size = self.responses_per_prompt
        prompts, prompt_of_row, counts = index.unique(return_inverse=True, return_counts=True)
        origin, fixes = join_origins([rollout.origin for rollout in self.rollouts]), loop.fixes
        is_mixed = self._mixes_prompts(prompt_of_row, len(prompts))
        # If no boundary between microbatches ends a prompt, only all microbatches together hold whole prompts.
        has_one_fold = len(self.folds) == 1 < len(self.rollouts) and len(self.folds[0].folds) == 1
        reasons = {
            "sampling_mismatch": mismatch,
            "sample": origin.sample_reason,
            "groups": origin.groups_reason,
            "no_fresh_responses": loop.reasons.no_fresh_responses,
        }
        facts = {
            "own_pass": self.other_terms == OWN_FORWARD_PASS,
            "other_terms": self.other_terms == OTHER_TERMS,
            "incomplete": bool((counts != group_size).any()),
            "mixed": is_mixed or (has_one_fold and len(prompts) > 1),
            "reused": origin.learned or not seen_prompts.isdisjoint(prompts.tolist()),
            "hooked": any(leaf._backward_hooks for leaf in loop.shard.leaves.values()),
            "other_sizes": [len(rows) for rows in self.microbatch_rows] != [*self.sizes],
        }
        here = {**reasons, **facts}
        flags = index.new_tensor([*map(bool, here.values())], dtype=torch.float64)
        anywhere = dict(zip(here, loop.ranks.reduce(flags).tolist(), strict=True))

        def reason_of(name: str) -> Unavailable | None:
            return reasons[name] or (REASONS_ELSEWHERE[name] if anywhere[name] else None)

        def reason_if(name: str, reason: Unavailable) -> Unavailable | None:
            return reason if anywhere[name] else None

        mismatch, no_groups = reason_of("sampling_mismatch"), reason_of("groups")
        split = no_groups or reason_if("incomplete", SPLIT_PROMPTS.with_fix(fixes.whole_prompts))
        mixed = MIXED_PROMPTS.with_fix(fixes.whole_prompts)
        no_whole_prompts = no_groups or reason_if("mixed", mixed) or reason_if("incomplete", mixed)
        own_pass = OWN_FORWARD_PASS.with_fix(fixes.own_forward_pass)
        return Reasons(
            sampling_mismatch=mismatch or reason_of("sample"),
            no_fresh_responses=mismatch or reason_of("no_fresh_responses"),
            reused=reason_if("reused", REUSED.with_fix(fixes.no_reuse)),
            split_prompts=split,
            no_baseline=ONE_RESPONSE if group_size == 1 else split,
            no_whole_folds=reason_if("other_sizes", OTHER_SIZES) or no_whole_prompts,
            other_terms=reason_if("own_pass", own_pass) or reason_if("other_terms", OTHER_TERMS),
            hooked=reason_if("hooked", HOOKED),
            dr_grpo_fix=fixes.dr_grpo,
        )

    def _mixes_prompts(self, prompt_of_row: Tensor, num_prompts: int) -> bool:
        """Return whether some prompt lies in several of the planned folds.

        Args:
            prompt_of_row: (B,), the index of each sequence's prompt.
        """
        # The passes of all groups are consecutive rows.
        groups = [
            torch.full((len(rows),), number)
            for number, fold_group in enumerate(self.folds)
            for rows in fold_group.rows_per_pass
        ]
        group = torch.cat(groups).to(prompt_of_row.device)
        return (
            len(group) == len(prompt_of_row) and len((prompt_of_row * len(self.folds) + group).unique()) > num_prompts
        )

    def join_rollouts(self, ranks: Ranks) -> Rollout:
        """Return all microbatches as one rollout, with the same fields known on every rank. Collective.

        If one microbatch has a sampler's log-probabilities, on-policy microbatches without them get the policy's own,
        for a ratio of 1. An off-policy microbatch without them makes those of the whole step unknown. One microbatch
        without rewards makes all rewards unknown, and so for which responses were truncated. The values of reward
        functions are kept if all microbatches of all ranks have the same ones.
        """
        rollouts = self.rollouts
        local_flags: list[float] = [
            any(rollout.sampling_logps is not None for rollout in rollouts),
            any(rollout.old_logps is not None for rollout in rollouts),
            not all(rollout.on_policy for rollout in rollouts),
            any(rollout.sampling_logps is None and not rollout.on_policy for rollout in rollouts),
            any(rollout.rewards is None for rollout in rollouts),
            any(rollout.truncated is None for rollout in rollouts),
        ]
        names_of_rewards = [tuple(rollout.rewards_by_name) for rollout in rollouts]
        digest = float(zlib.crc32(repr(names_of_rewards[0]).encode()) % 2**20)  # its square is exact in fp64
        local_flags += [len({*names_of_rewards}) > 1, 1.0, digest, digest**2]
        flags = torch.tensor(local_flags, dtype=torch.float64, device=rollouts[0].prompt_index.device)
        sampled, old, off_policy, unknown, unrewarded, untold, *of_names = ranks.reduce(flags).tolist()
        differ, num_ranks, digests, squares = of_names
        names = ["sampling_logps"] * bool(sampled) + ["old_logps"] * bool(old)
        filled = []
        for rollout, scores in zip(rollouts, self.scores, strict=True):
            missing: dict[str, Any] = {name: scores.logps for name in names if getattr(rollout, name) is None}
            filled.append(dataclasses.replace(rollout, **missing))
        joined = dataclasses.replace(join_rollouts(filled), on_policy=not off_policy)
        if unknown:
            joined = dataclasses.replace(joined, sampling_logps=None, old_logps=None)
        if untold:
            joined = dataclasses.replace(joined, truncated=None)
        if differ or digests**2 != num_ranks * squares:
            joined = dataclasses.replace(joined, rewards_by_name={})
        return dataclasses.replace(joined, rewards=None) if unrewarded else joined

    def join_scores(self, rollout: Rollout) -> Scores:
        """Return the scores of the whole step, (B, T) each, padded to the width of its rollout."""
        return Scores(
            logps=pad_and_concat([scores.logps for scores in self.scores]),
            entropies=pad_and_concat([scores.entropies for scores in self.scores]),
            mask=rollout.completion_mask,
        )

    def join_loss_weights(self) -> LossWeights:
        """Return the loss weights on all scores of the step, (B, T) each."""
        logp_weights, entropy_weights = (
            pad_and_concat(
                [
                    weights.get(name, torch.zeros_like(scores.logps))
                    for weights, scores in zip(self.loss_weights, self.scores, strict=True)
                ]
            )
            for name in ("logps", "entropies")
        )
        has_entropies = any("entropies" in weights for weights in self.loss_weights)
        return LossWeights(logp_weights, entropy_weights if has_entropies else None)
