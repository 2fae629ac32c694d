"""Find groups of responses that occur more than once in a step: copies, which a batch may have been filled up with.

A copy is no further sample. Folds and units of error bars are made of distinct groups, each with all its copies, so
that no copy lies in another fold than its original.

Two groups are copies if their prompts and their responses have the same tokens, wherever their rows lie, unless that is
likely by chance. If a group's responses have the probability p, another group of the same prompt has the same responses
with probability n p, where n is the number of their different orders. O repeated groups where E are expected have at
most the probability (e E / O)^O exp(−E) (Chernoff's bound for a Poisson variable), which is small unless a certain
policy answers few prompts.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from rl_training.parallel.ranks import Ranks
from rl_training.policy.rollout import Rollout, response_index
from rl_training.policy.scores import Scores
from rl_training.statistics.unavailable import Unavailable
from rl_training.step.batch import NO_COPIES, Copies

MAX_CHANCE = 1e-4  # probability of as many repeated groups by chance, below which they are copies
BASE = 6364136223846793005  # odd factors of hashes mod 2^64
ROW_BASE = 3202034522624059733
COPIED_GROUPS = Unavailable(
    "copied_groups",
    "only {distinct} of the {total} groups of responses that this step learns from are distinct, the others are copies "
    "of them (a batch that is filled up by duplicating prompts, or a rollout that the step goes through again): a copy "
    "is no further sample",
    fix="generate as many groups as a step learns from",
)


def find_copies(rollout: Rollout, scores: Scores, ranks: Ranks) -> Copies:
    """Return the copies among this rank's groups. Collective.

    Args:
        rollout: This rank's sequences of the step, with all responses to each prompt.
        scores: Their scores.
    """
    prompts, prompt_of_row = rollout.prompt_index.unique(return_inverse=True)
    prompt_hashes, row_hashes = _hashes_of_rows(rollout)
    # The key of each group is a sum over its rows: of the hashes of their prompts, and of those of all their tokens.
    hashes = torch.stack([prompt_hashes, row_hashes])
    keys = row_hashes.new_zeros(2, len(prompts)).index_add_(1, prompt_of_row, hashes)
    if rollout.images is not None:  # the same tokens may belong to different images
        keys[1] += 1 + ranks.number + ranks.count * torch.arange(len(prompts), device=keys.device)
    logps = scores.logps.double().masked_fill(scores.mask == 0, 0.0).sum(dim=1)
    padding = (0, ranks.most(len(prompts), logps.device) - len(prompts))  # a group whose key is 0 is none
    gathered_keys = ranks.gather(nn.functional.pad(keys, padding)).transpose(1, 2).flatten(0, 1)
    all_keys = [tuple(key) for key in gathered_keys.tolist()]
    distinct = {key for key in all_keys if any(key)}
    total = sum(map(any, all_keys))
    if len(distinct) == total:
        return NO_COPIES
    orders = logps.new_tensor(_log_orders(prompt_of_row.tolist(), row_hashes.tolist()))
    group_logps = nn.functional.pad(orders.index_add(0, prompt_of_row, logps), padding)
    all_logps = ranks.gather(group_logps).flatten().tolist()
    if _is_chance([(key, logp) for key, logp in zip(all_keys, all_logps, strict=True) if any(key)]):
        return NO_COPIES
    local_keys = [tuple(key) for key in keys.t().tolist()]
    numbers = {key: number for number, key in enumerate(dict.fromkeys(local_keys))}
    unit_of_prompt = torch.tensor([numbers[key] for key in local_keys], device=prompt_of_row.device)
    unit = unit_of_prompt[prompt_of_row]
    return Copies(
        unit=unit,
        response=_numbers_of_responses(unit, prompt_of_row, row_hashes),
        on_several_ranks=len(distinct) < ranks.total(len(numbers), logps.device),
        reason=COPIED_GROUPS.formatted(distinct=len(distinct), total=total),
    )


def _is_chance(groups: Sequence[tuple[tuple[int, ...], float]]) -> bool:
    """Return whether so many repeated groups may be chance.

    Args:
        groups: Of each group its key, which begins with that of its prompt, and the log-probability of its responses in
            any order.
    """
    expected = 0.0
    probabilities = dict[int, float]()
    for (prompt, _), logp in groups:
        earlier = probabilities.get(prompt, 0.0)
        expected += min(earlier, 1.0)
        probabilities[prompt] = earlier + (1.0 if math.isnan(logp) else math.exp(min(logp, 0.0)))
    observed = len(groups) - len({key for key, _ in groups})
    if expected >= observed:
        return True
    return observed * (1.0 + math.log(max(expected, 1e-300) / observed)) - expected > math.log(MAX_CHANCE)


def _hashes_of_rows(rollout: Rollout) -> tuple[Tensor, Tensor]:
    """Return hashes of each row's prompt and of all its tokens, (B,) int64 each, which padding does not change.

    Sums of them over the rows of a group do not depend on the rows' order.
    """
    prompts = _hash(rollout.prompt_ids.flip(1), rollout.prompt_mask.flip(1))
    rows = prompts * ROW_BASE + _hash(rollout.completion_ids, rollout.token_mask)
    return _mixed(prompts), _mixed(rows)


def _log_orders(prompt_of_row: Sequence[int], row_hashes: Sequence[int]) -> list[float]:
    """Return, for each group, the logarithm of the number of different orders of its responses, (prompts,).

    Args:
        prompt_of_row: The group of each row, from 0.
        row_hashes: The hash of each row's tokens.
    """
    sizes = Counter(prompt_of_row)
    equal = Counter(zip(prompt_of_row, row_hashes, strict=True))
    orders = [math.lgamma(sizes[group] + 1) for group in range(len(sizes))]
    for (group, _), count in equal.items():
        orders[group] -= math.lgamma(count + 1)
    return orders


def _numbers_of_responses(unit: Tensor, prompt_of_row: Tensor, row_hashes: Tensor) -> Tensor:
    """Return a number for each row, (B,), equal for a response and its copies in other groups of its unit."""
    order = row_hashes.argsort(stable=True)
    order = order[prompt_of_row[order].argsort(stable=True)]  # by group, and in a group by hash
    places = torch.empty_like(order)
    places[order] = response_index(prompt_of_row[order])
    return unit * (int(places.max()) + 1) + places


def _mixed(hashes: Tensor) -> Tensor:
    """Return hashes whose sums are hashes too, unlike those of the linear `_hash`."""
    hashes = (hashes ^ (hashes >> 29)) * BASE
    return (hashes ^ (hashes >> 32)) * ROW_BASE


def _hash(ids: Tensor, mask: Tensor) -> Tensor:
    """Return Σ_j (id_j + 1) BASE^(j+1) of each row's tokens, mod 2^64."""
    powers = ids.new_full((ids.shape[1],), BASE, dtype=torch.int64).cumprod(0)
    return ((ids.long() + 1) * mask.long() * powers).sum(dim=1)
