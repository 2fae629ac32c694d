"""What the batch of a rollout is, the same on all ranks: generated for it or replayed, of whole groups or selected."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from rl_training.hosts.trl.rollouts.record import RolloutRecord
from rl_training.parallel.ranks import all_ranks
from rl_training.policy.rollout import Origin
from rl_training.statistics.unavailable import Unavailable

NOT_GENERATED = Unavailable(
    "not_generated",
    "{count} of the {rows} responses in this batch were not generated for it (a replay buffer, demonstrations), and it "
    "has no log-probabilities from the policy that generated them (old_per_token_logps)",
)
NOT_ALL_KEPT = Unavailable(
    "not_all_kept",
    "the batch has {kept} of the {generated} responses that were generated per prompt: the kept ones were selected, so "
    "they are not a sample of the policy",
    fix="keep or leave out whole prompts",
)
UNEVEN = Unavailable(
    "uneven_prompts",
    "responses cannot be assigned to prompts: prompts have different numbers of responses, or rows with images are not "
    "in the order of generation",
    fix="keep or leave out whole prompts",
)


class BatchFacts(NamedTuple):
    """What is known of a rank's rows of a batch."""

    num_rows: int
    num_foreign: int  # rows that were not generated for this rollout
    has_learned: bool  # whether a step has learned from some of those
    is_unrewarded: bool  # whether rewards are missing
    is_untested: bool  # whether rows were chosen by what was drawn
    group_size: int  # responses per prompt, 0 if prompts differ in it


def gather_facts(local: BatchFacts, device: torch.device) -> list[BatchFacts]:
    """Return the facts of each rank, exchanged in a tensor of numbers. Collective."""
    ranks = all_ranks()
    if ranks.count == 1:
        return [local]
    table = ranks.gather(torch.tensor(local, dtype=torch.float64).to(device)).cpu()
    return [
        BatchFacts(
            num_rows=int(num_rows),
            num_foreign=int(num_foreign),
            has_learned=bool(has_learned),
            is_unrewarded=bool(is_unrewarded),
            is_untested=bool(is_untested),
            group_size=int(group_size),
        )
        for num_rows, num_foreign, has_learned, is_unrewarded, is_untested, group_size in table.tolist()
    ]


def record_of_batch(
    facts: Sequence[BatchFacts],
    *,
    number: int,
    sampled_at: int,
    num_generations: int,
    has_logps: bool,
    sampler_reason: Unavailable | None,
) -> RolloutRecord:
    """Return the record of a rollout, by what its batch is.

    Args:
        facts: What is known of its rows on each rank, or on this one alone if the ranks do not exchange it.
        number: The number of the rollout.
        sampled_at: The trainer's global_step.
        num_generations: Number of responses that were generated to each prompt.
        has_logps: Whether the batch has log-probabilities of the policy that generated it.
        sampler_reason: Why its responses are no samples of the policy, by how they were generated. None if they are.
    """
    num_foreign = sum(fact.num_foreign for fact in facts)
    group_sizes = {fact.group_size for fact in facts}
    is_even = len(group_sizes) == 1 and group_sizes != {0}
    responses_per_prompt = group_sizes.pop() if is_even else num_generations
    reason = None
    if num_foreign and not has_logps:
        reason = NOT_GENERATED.formatted(count=num_foreign, rows=sum(fact.num_rows for fact in facts))
    elif responses_per_prompt < num_generations:
        reason = NOT_ALL_KEPT.formatted(kept=responses_per_prompt, generated=num_generations)
    uneven = None if is_even else UNEVEN
    has_learned = any(fact.has_learned for fact in facts)
    return RolloutRecord(
        number=number,
        sampled_at=sampled_at,
        responses_per_prompt=responses_per_prompt,
        is_fresh=not num_foreign,
        is_rewarded=not any(fact.is_unrewarded for fact in facts),
        is_untested=any(fact.is_untested for fact in facts),
        origin=Origin(reason or uneven, uneven, has_learned, sampler_reason=sampler_reason, knows_sampler=True),
    )
