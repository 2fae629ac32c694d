"""The sequences of a step: prompts, sampled completions, their rewards and advantages.

Shape legend, used in every comment of this package:
    B  sequences (of a microbatch, of the whole step on this rank, or of an evaluation buffer)
    P  prompt tokens, left-padded
    T  completion tokens, right-padded; the end-of-sequence token counts, padding never. Over several turns, a
       completion also holds an environment's tokens between the policy's: they are context, not actions
    G  responses per prompt
    K  folds of an optimizer step, over all ranks
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from rl_training.errors import UserError
from rl_training.statistics.unavailable import Unavailable


@dataclass(frozen=True)
class Origin:
    """Why sequences are not the scored policy's own sample with the same number of responses per prompt."""

    # They were not sampled from a policy whose log-probabilities are known.
    sample_reason: Unavailable | None = None
    # Responses cannot be matched to prompts, or prompts have different numbers of responses.
    groups_reason: Unavailable | None = None
    learned: bool = False  # whether a step has already trained on some of them, in an earlier rollout
    # Why their sampler is not the scored policy (top-p, say): fresh responses would be no samples either.
    sampler_reason: Unavailable | None = None
    knows_sampler: bool = False  # whether `sampler_reason` says it; otherwise what is known of the loop counts


@dataclass(frozen=True)
class Rollout:
    """Sequences sampled from the policy, or from a sampler whose log-probabilities are known. Tensors are detached."""

    prompt_ids: Tensor  # (B, P)
    prompt_mask: Tensor  # (B, P), 1 on tokens
    completion_ids: Tensor  # (B, T)
    completion_mask: Tensor  # (B, T), 1 on sampled tokens
    # (B,), as the loss uses them: 0 for a truncated response that it leaves out; the mean if they differ by token.
    advantages: Tensor
    rewards: Tensor | None  # (B,), weighted sum over the reward functions; None if sequences were not rewarded
    prompt_index: Tensor  # (B,), equal for responses to the same prompt, different for different prompts
    sampling_logps: Tensor | None = None  # (B, T), the sampler's; None: `has_unknown_sampler` says why
    on_policy: bool = True  # no step has trained on them yet: the ratios in the loss are 1
    environment_mask: Tensor | None = None  # (B, T), 1 on an environment's tokens; None: there are none
    images: Mapping[str, Any] | None = None  # further model inputs by name: a tensor or a list, B rows each
    truncated: Tensor | None = None  # (B,), bool: cut off at the maximum length; None: unknown
    # (B, T), the denominators of the loss's ratios; None: the policy's own if on_policy, else the sampler's.
    old_logps: Tensor | None = None
    origin: Origin = Origin()  # what the loop knows about where they come from
    token_advantages: Tensor | None = None  # (B, T), if advantages differ within a response
    # (B,) each: values of several reward functions by name, whether or not they are part of `rewards`; nan: no value
    rewards_by_name: Mapping[str, Tensor] = field(default_factory=dict)
    # Skip the test whether the policy drew the tokens: the responses were selected by their content, or were given.
    untested: bool = False

    @property
    def advantages_of_tokens(self) -> Tensor:
        """(B, T), or (B, 1) if all tokens of a response have the same advantage."""
        return self.advantages.unsqueeze(1) if self.token_advantages is None else self.token_advantages

    @property
    def token_mask(self) -> Tensor:
        """(B, T), 1 on all tokens of the completion, sampled or written by an environment."""
        return self.completion_mask if self.environment_mask is None else self.completion_mask + self.environment_mask

    @property
    def has_unknown_sampler(self) -> bool:
        """Whether there are no `sampling_logps` because they are unknown. If not, the policy itself sampled.

        Once a step has learned from the responses, another policy than the present one has sampled them.
        """
        return self.sampling_logps is None and not self.on_policy

    @property
    def num_sequences(self) -> int:
        return self.completion_ids.shape[0]


def as_rollout(
    prompt_ids: Sequence[Tensor], completion_ids: Sequence[Tensor], prompt_index: Sequence[int], pad: int
) -> Rollout:
    """Pad one or more responses into a rollout without rewards.

    Args:
        prompt_ids: The prompt of each response, (length,) each.
        completion_ids: The responses, (length,) each.
        prompt_index: Equal for responses to the same prompt.
        pad: The token id of padding.
    """
    device = prompt_ids[0].device
    return Rollout(
        prompt_ids=pad_sequence(list(prompt_ids), True, pad, padding_side="left"),
        prompt_mask=pad_sequence([torch.ones_like(ids) for ids in prompt_ids], True, padding_side="left"),
        completion_ids=pad_sequence(list(completion_ids), True, pad),
        completion_mask=pad_sequence([torch.ones_like(ids) for ids in completion_ids], True),
        advantages=torch.full((len(prompt_ids),), torch.nan, device=device),
        rewards=None,
        prompt_index=torch.tensor(prompt_index, device=device),
    )


def join_origins(parts: Sequence[Origin]) -> Origin:
    """Return the joint origin of several rollouts: the first reason of each kind."""
    return Origin(
        next((part.sample_reason for part in parts if part.sample_reason), None),
        next((part.groups_reason for part in parts if part.groups_reason), None),
        any(part.learned for part in parts),
        next((part.sampler_reason for part in parts if part.sampler_reason), None),
        any(part.knows_sampler for part in parts),
    )


def join_rollouts(parts: Sequence[Rollout]) -> Rollout:
    """Concatenate rollouts, padded to one width."""

    def joined(name: str, join: Callable[[list[Tensor]], Tensor] = torch.cat) -> Any:
        values = [getattr(part, name) for part in parts]
        return None if any(value is None for value in values) else join(values)

    written = None
    if any(part.environment_mask is not None for part in parts):
        written = pad_and_concat([part.token_mask - part.completion_mask for part in parts])
    on_the_left = functools.partial(pad_and_concat, on_the_left=True)
    return Rollout(
        **{name: joined(name, on_the_left) for name in ("prompt_ids", "prompt_mask")},
        **{
            name: joined(name, pad_and_concat)
            for name in ("completion_ids", "completion_mask", "sampling_logps", "old_logps")
        },
        **{name: joined(name) for name in ("advantages", "rewards", "prompt_index", "truncated")},
        token_advantages=_join_token_advantages(parts),
        rewards_by_name=_join_rewards(parts),
        on_policy=all(part.on_policy for part in parts),
        origin=join_origins([part.origin for part in parts]),
        environment_mask=written,
        images=_join_images(parts),
        untested=any(part.untested for part in parts),
    )


def _join_token_advantages(parts: Sequence[Rollout]) -> Tensor | None:
    """Concatenate advantages of tokens, (B, T); None if every response has a single advantage."""
    if all(part.token_advantages is None for part in parts):
        return None
    return pad_and_concat([part.advantages_of_tokens.expand_as(part.completion_ids) for part in parts])


def _join_rewards(parts: Sequence[Rollout]) -> dict[str, Tensor]:
    """Concatenate the values of each reward function that all parts have."""
    names = [name for name in parts[0].rewards_by_name if all(name in part.rewards_by_name for part in parts)]
    return {name: torch.cat([part.rewards_by_name[name] for part in parts]) for name in names}


def with_one_advantage_each(rollout: Rollout) -> Rollout:
    """Reduce (B, T) advantages to one per response, the mean over its tokens.

    Advantages that differ within a response are kept as `token_advantages`.

    >>> ids = torch.ones(2, 2, dtype=torch.long)
    >>> of_tokens = torch.tensor([[0.5, 0.5], [1.0, 3.0]])
    >>> rollout = with_one_advantage_each(Rollout(ids, ids, ids, ids, of_tokens, None, torch.tensor([0, 0])))
    >>> rollout.advantages.tolist(), rollout.token_advantages.tolist()
    ([0.5, 2.0], [[0.5, 0.5], [1.0, 3.0]])
    """
    if rollout.advantages.ndim == 1:
        return rollout
    mask = rollout.completion_mask.bool()
    of_tokens = rollout.advantages.expand_as(mask).masked_fill(~mask, 0.0)
    first = of_tokens.gather(1, mask.long().argmax(dim=1, keepdim=True))
    if not ((of_tokens != first) & mask).any():
        return dataclasses.replace(rollout, advantages=first.squeeze(1))
    means = of_tokens.sum(dim=1) / mask.sum(dim=1).clamp(min=1)
    return dataclasses.replace(rollout, advantages=means, token_advantages=of_tokens)


def pad_and_concat(tensors: Sequence[Tensor], on_the_left: bool = False, value: float = 0, at_least: int = 0) -> Tensor:
    """Concatenate the rows of (B, T) tensors, padded with `value` to the widest and to at least `at_least` columns."""
    width = max(at_least, *(tensor.shape[1] for tensor in tensors))
    missing = [width - tensor.shape[1] for tensor in tensors]
    padding = [(m, 0) if on_the_left else (0, m) for m in missing]
    return torch.cat([nn.functional.pad(tensor, p, value=value) for tensor, p in zip(tensors, padding, strict=True)])


def take_rows(rollout: Rollout, rows: Tensor) -> Rollout:
    """Return some rows of a rollout, in the order of `rows`."""
    taken: dict[str, Any] = {name: value[rows] for name, value in vars(rollout).items() if isinstance(value, Tensor)}
    rewards_by_name = {name: values[rows] for name, values in rollout.rewards_by_name.items()}
    return dataclasses.replace(rollout, images=images_of(rollout, rows), rewards_by_name=rewards_by_name, **taken)


def first_tokens(rollout: Rollout, count: int) -> Rollout:
    """Cut completions to their first `count` tokens. A rollout with images is returned unchanged."""
    if rollout.images is not None:
        return rollout
    names = ("completion_ids", "completion_mask", "sampling_logps", "old_logps", "environment_mask", "token_advantages")
    fields: dict[str, Any] = {name: getattr(rollout, name) for name in names}
    cut = {name: value[:, :count] for name, value in fields.items() if value is not None}
    return dataclasses.replace(rollout, **cut)


def images_of(rollout: Rollout, rows: Tensor) -> dict[str, Any] | None:
    """Return the images of some rows, in the order of `rows`; None if there are none."""
    if rollout.images is None:
        return None
    return {
        name: values[rows] if isinstance(values, Tensor) else [values[row] for row in rows.tolist()]
        for name, values in rollout.images.items()
    }


def _join_images(parts: Sequence[Rollout]) -> dict[str, Any] | None:
    """Concatenate the images of several rollouts. Token types are padded like the prompts and completions they cover.

    Raises:
        UserError: If some rows have images and others have none, or if their shapes do not fit into one tensor.
    """
    named = [part.images for part in parts if part.images is not None]
    if not named:
        return None
    if len(named) < len(parts) or any(images.keys() != named[0].keys() for images in named):
        raise UserError("an optimizer step mixes rows with and without images: train them in separate runs")
    joined: dict[str, Any] = {}
    for name, first in named[0].items():
        values = [images[name] for images in named]
        if name.endswith("token_type_ids"):
            prompts = [v[:, : part.prompt_ids.shape[1]] for v, part in zip(values, parts, strict=True)]
            completions = [v[:, part.prompt_ids.shape[1] :] for v, part in zip(values, parts, strict=True)]
            joined[name] = torch.cat([pad_and_concat(prompts, on_the_left=True), pad_and_concat(completions)], dim=1)
        elif isinstance(first, Tensor):
            if any(value.shape[1:] != first.shape[1:] for value in values):
                raise UserError(f"the rollouts of one optimizer step differ in the shape of their {name}")
            joined[name] = torch.cat(values)
        else:
            joined[name] = [row for value in values for row in value]
    return joined


def response_index(prompt_index: Tensor) -> Tensor:
    """Return for each sequence how many earlier sequences answer the same prompt: 0 for a prompt's first response.

    >>> response_index(torch.tensor([7, 7, 3, 7, 3]))
    tensor([0, 1, 0, 2, 1])
    """
    order = prompt_index.argsort(stable=True)
    _, sizes = prompt_index[order].unique_consecutive(return_counts=True)
    starts = torch.repeat_interleave(sizes.cumsum(0) - sizes, sizes, output_size=len(order))
    number = torch.empty_like(order)
    number[order] = torch.arange(len(prompt_index), device=prompt_index.device) - starts
    return number


def are_mixed(rewards: Tensor) -> Tensor:
    """Return which groups of rewards, (…, responses), contain different rewards, up to rounding in float32.

    >>> are_mixed(torch.tensor([[0.9, 0.90000004], [0.0, 1.0]])).tolist()
    [False, True]
    """
    return ~torch.isclose(rewards.amin(dim=-1), rewards.amax(dim=-1))


def centre_by_prompt(rewards: Tensor, prompt_index: Tensor) -> tuple[Tensor, Tensor]:
    """Return each reward minus its prompt's mean reward, (b,), and the number of rewards in that mean, (b,).

    A reward of nan counts as missing: it enters no mean, and its own difference is nan.

    >>> rewards = torch.tensor([1.0, 0.0, torch.nan, 5.0])
    >>> above, sizes = centre_by_prompt(rewards, torch.tensor([3, 3, 3, 8]))
    >>> above.tolist(), sizes.tolist()
    ([0.5, -0.5, nan, 0.0], [2, 2, 2, 1])
    """
    prompts, group = prompt_index.unique(return_inverse=True)
    is_known = ~rewards.isnan()
    sums = rewards.new_zeros(len(prompts)).index_add_(0, group, rewards.where(is_known, 0.0))
    sizes = group.new_zeros(len(prompts)).index_add_(0, group, is_known.long())
    return rewards - (sums / sizes)[group], sizes[group]
