"""FilteredBuffer chooses a rollout's prompts by the rewards of their responses so far.

A prompt whose responses all get the same reward has zero advantage and contributes no gradient. Two remedies:

    rejection   replaces such a prompt with another one, until the rollout is full or `max_attempts` generations were
                made. Every rank knows all rewards, so all decide the same without communicating
    weights     draws a prompt in proportion to   floor + (1 - floor) 4 E[p (1 - p)],   at most 1

p is the probability that the current policy answers the prompt correctly, and p (1 - p) the variance of a 0/1 reward.
The posterior of p is Beta(a, b), so E[p (1 - p)] = a b / ((a + b) (a + b + 1)), with

    a = 2 m + successes,  b = 2 (1 - m) + failures

Successes and failures are the prompt's own; m is the success rate of all responses. A prompt without responses thus
gets the average weight. Because the policy changes, a response counts half after `half_life` rollouts.

Rewards need not be 0 and 1: each is scaled linearly from the lowest (0) to the highest (1) reward seen so far. While
all rewards are equal, all prompts are drawn with equal weight.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence, Sized
from typing import Any

import numpy as np
import torch
from torch import Tensor
from trl import GRPOTrainer

from rl_training.errors import UserError
from rl_training.hosts.trl import batches
from rl_training.hosts.trl.versions import generation_calls_code, tokenizer_of
from rl_training.policy.rollout import pad_and_concat

Generate = Callable[[list[dict[str, Any]]], tuple[dict[str, Any], Tensor]]  # rows → TRL's output, rewards of all ranks
Metrics = Mapping[str, Sequence[float]]

PRIOR_RESPONSES = 2.0  # weight of the prior, in responses; at m = 1/2 the prior of p is uniform


def prompt_weights(successes: Tensor, responses: Tensor, floor: float) -> Tensor:
    """Return the weights, (N,), with which N prompts are drawn, from their successes and responses so far, (N,) each.

    Before any response, with floor 0.1, every weight is 0.1 + 0.9 * 4 * 1/6 = 0.7.
    """
    mean = successes.sum() / responses.sum() if responses.any() else 0.5
    a = PRIOR_RESPONSES * mean + successes
    b = PRIOR_RESPONSES * (1 - mean) + responses - successes
    return floor + (1 - floor) * 4 * a * b / ((a + b) * (a + b + 1))


def are_mixed(rewards: Tensor) -> Tensor:
    """Return which groups of rewards, (…, responses), contain different rewards, up to rounding."""
    return ~torch.isclose(rewards.amin(dim=-1), rewards.amax(dim=-1))


class FilteredBuffer:
    """The prompts of a training set, with the rewards of their responses. It draws the same prompts on every rank.

    Args:
        max_attempts: Maximum number of generations per rollout, the first included. 1 replaces no prompt.
        floor: Smallest weight of a prompt, above 0 and at most 1. 1 draws all prompts with equal weight.
        half_life: Number of rollouts after which a reward counts half.
        seed: Seed of the draws.
    """

    def __init__(self, max_attempts: int = 2, floor: float = 0.1, half_life: float = 50.0, seed: int = 0) -> None:
        if type(max_attempts) is not int or max_attempts < 1:
            raise UserError(f"buffer.max_attempts={max_attempts} must be a whole number, at least 1")
        if type(floor) not in (int, float) or not 0 < floor <= 1:
            raise UserError(f"buffer.floor={floor} must be a number above 0 (or prompts die out) and at most 1")
        if type(half_life) not in (int, float) or not half_life > 0:
            raise UserError(f"buffer.half_life={half_life} must be a number above 0; .inf forgets nothing")
        self.max_attempts = max_attempts
        self.floor = floor
        self.half_life = half_life
        self.seed = seed
        self.start(num_prompts=0)

    def start(self, num_prompts: int) -> None:
        """Forget everything, and start with a training set of this many prompts."""
        self._generator = torch.Generator().manual_seed(self.seed)
        self._responses = torch.zeros(num_prompts, dtype=torch.float64)
        self._reward_sums = torch.zeros(num_prompts, dtype=torch.float64)
        self._range = torch.tensor([torch.inf, -torch.inf], dtype=torch.float64)  # lowest and highest reward seen

    @property
    def num_prompts(self) -> int:
        return len(self._responses)

    def weights(self) -> Tensor:
        """Return the weights of all prompts, (N,)."""
        low, high = self._range.tolist()
        if high <= low or torch.isclose(*self._range):
            return torch.ones_like(self._responses)
        successes = (self._reward_sums - self._responses * low) / (high - low)
        successes = successes.clamp(min=0.0).minimum(self._responses)  # rounding
        return prompt_weights(successes, self._responses, self.floor)

    def draw(self, num: int, tried: Sequence[int]) -> list[int]:
        """Draw `num` different prompts that are not in `tried`."""
        weights = self.weights()
        weights[list(tried)] = 0.0
        return torch.multinomial(weights, num, generator=self._generator).tolist()

    def forget(self) -> None:
        """Discount past rewards. Call it once per rollout."""
        decay = 0.5 ** (1 / self.half_life)
        self._responses *= decay
        self._reward_sums *= decay

    def learn(self, prompts: Sequence[int], rewards: Tensor) -> None:
        """Add the rewards, (prompts, responses), of the generated responses of all ranks."""
        rewards = rewards.double().cpu()
        self._responses[list(prompts)] += rewards.shape[1]
        self._reward_sums[list(prompts)] += rewards.sum(dim=1)
        self._range[0] = min(self._range[0], rewards.min())
        self._range[1] = max(self._range[1], rewards.max())

    def state_dict(self) -> dict[str, Tensor]:
        return {
            "generator": self._generator.get_state(),
            "responses": self._responses.clone(),
            "reward_sums": self._reward_sums.clone(),
            "range": self._range.clone(),
        }

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Continue from a state. Raise UserError if it belongs to a training set of another length."""
        if len(state["responses"]) != self.num_prompts:
            raise UserError(
                f"the checkpoint's buffer knows {len(state['responses'])} prompts and the training set has "
                f"{self.num_prompts}: resume with the training set that it was written with, or start a new run from "
                "its weights (model=hub model.name=CHECKPOINT)"
            )
        self._generator.set_state(state["generator"])
        self._responses = state["responses"].clone()
        self._reward_sums = state["reward_sums"].clone()
        self._range = state["range"].clone()


def start_buffer(trainer: GRPOTrainer, buffer: FilteredBuffer) -> None:
    """Start the buffer on the trainer's prompts. Raise UserError, with the fix, if it cannot filter them."""
    if generation_calls_code(trainer):
        raise UserError(
            "buffer=filtered is for text rollouts of one turn, without tools, environments or a rollout_func: use "
            "buffer=plain"
        )
    if trainer.multi_objective_aggregation != "sum_then_normalize":
        raise UserError(
            f"multi_objective_aggregation={trainer.multi_objective_aggregation!r} makes a prompt's advantages depend "
            "on the other prompts generated with it, rejected ones included: use 'sum_then_normalize' or buffer=plain"
        )
    if {"image", "images"} & set(trainer.train_dataset.column_names or ()):
        raise UserError("buffer=filtered joins rollouts of text, and these prompts have images: use buffer=plain")
    if not isinstance(trainer.train_dataset, Sized):
        raise UserError(
            "buffer=filtered draws prompts from the whole training set, which needs a length: load it without "
            "streaming, or use buffer=plain"
        )
    buffer.start(len(trainer.train_dataset))


def fill_slots(mixed: Tensor, num_slots: int) -> tuple[Tensor, int]:
    """Assign a rank's groups to its slots.

    Each of the first groups has its own slot. A later mixed group takes the first slot whose group is not mixed.
    Surplus groups are dropped.

    Args:
        mixed: (groups,), whether each group generated so far is mixed.
        num_slots: Groups of the rollout on this rank.

    Returns:
        The group of each slot, (num_slots,), and the number of slots without a mixed group.
    """
    groups = torch.arange(num_slots)
    empty, later = (~mixed[:num_slots]).nonzero().flatten(), mixed[num_slots:].nonzero().flatten()
    filled = min(len(empty), len(later))
    groups[empty[:filled]] = num_slots + later[:filled]
    return groups, len(empty) - filled


def fill_rollout(trainer: GRPOTrainer, buffer: FilteredBuffer, generate: Generate, num_rows: int) -> dict[str, Any]:
    """Return a rollout of `num_rows` sequences for this rank, with rewards, and with as many mixed prompts as possible.

    Slots that stay empty keep their prompt of the first attempt, whose advantages are 0. All ranks generate the same
    number of groups per attempt: as many as the rank with the most empty slots needs. Collective.

    Args:
        trainer: The trainer. Its metrics get one merged value per name for all attempts.
        buffer: Draws the prompts, and learns their rewards.
        generate: Returns TRL's output for some rows, and the rewards of all ranks.
        num_rows: Sequences of the rollout on this rank.
    """
    size, world, rank = trainer.num_generations, trainer.accelerator.num_processes, trainer.accelerator.process_index
    num_slots = num_rows // size
    mixed, empty = torch.zeros(world, 0, dtype=torch.bool), [num_slots] * world
    outputs: list[dict[str, Any]] = []
    metrics: list[Metrics] = []
    tried: list[int] = []
    buffer.forget()
    while (most_empty := max(empty)) and len(outputs) < buffer.max_attempts:
        if most_empty * world > buffer.num_prompts - len(tried):
            break  # too few untried prompts are left
        prompts = buffer.draw(most_empty * world, tried)
        rows = [
            dict(trainer.train_dataset[i])
            for i in prompts[rank * most_empty : (rank + 1) * most_empty]
            for _ in range(size)
        ]
        earlier, trainer._metrics["train"] = trainer._metrics["train"], defaultdict(list)
        try:
            output, rewards = generate(rows)
        finally:
            logged, trainer._metrics["train"] = trainer._metrics["train"], earlier
        rewards = rewards.view(world, most_empty, size)
        output[batches.REWARD] = rewards[rank].flatten().to(output["completion_ids"].device)
        buffer.learn(prompts, rewards.flatten(0, 1))
        mixed = torch.cat([mixed, are_mixed(rewards).cpu()], dim=1)
        empty = [fill_slots(mixed_of_rank, num_slots)[1] for mixed_of_rank in mixed]
        tried += prompts
        outputs.append(output)
        metrics.append(logged)
    sequences = [len(output["completion_ids"]) * world for output in outputs]
    lengths = [logged["completions/mean_length"][-1] for logged in metrics]
    merged = merge_metrics(metrics, sequences) | {
        "buffer/attempts": float(len(outputs)),
        "buffer/acceptance": int(mixed.sum()) / len(tried),
        "buffer/filled": 1 - sum(empty) / (num_slots * world),
        "buffer/generated_tokens": float(sum(round(t * n) for t, n in zip(lengths, sequences, strict=True))),
    }
    for name, value in merged.items():
        trainer._metrics["train"][name].append(value)
    trainer._metrics["train"]["num_tokens"] = list(metrics[-1]["num_tokens"])  # a running count, not an average
    return _joined(trainer, outputs, fill_slots(mixed[rank], num_slots)[0])


def merge_metrics(attempts: Sequence[Metrics], num_sequences: Sequence[int]) -> dict[str, float]:
    """Merge what TRL logged in each attempt into one number per name: the mean over the sequences of all attempts.

    Minima and maxima are merged by min and max. A standard deviation becomes the mean of the attempts' own values.
    `…_terminated_length` describes only sequences that ended by themselves, so it is averaged over those.
    """
    merged = {}
    num_terminated = [
        n * (1 - attempt["completions/clipped_ratio"][-1]) for attempt, n in zip(attempts, num_sequences, strict=True)
    ]
    for name in {name: None for attempt in attempts for name in attempt}:
        values = np.array([attempt.get(name, [math.nan])[-1] for attempt in attempts])
        weights = np.array(num_terminated if name.endswith("_terminated_length") else num_sequences)
        known = (weights > 0) & ~np.isnan(values)
        kind = name.rpartition("/")[2].partition("_")[0]
        if not known.any():
            merged[name] = math.nan
        elif kind in ("min", "max"):
            merged[name] = float(getattr(values[known], kind)())
        else:
            merged[name] = float(np.average(values[known], weights=weights[known]))
    return merged


def _joined(trainer: GRPOTrainer, outputs: Sequence[dict[str, Any]], groups: Tensor) -> dict[str, Any]:
    """Join the chosen groups, numbered consecutively over TRL's outputs, into one output."""
    size = trainer.num_generations
    rows = (groups.unsqueeze(1) * size + torch.arange(size)).flatten().to(outputs[0]["completion_ids"].device)
    joined = {}
    for key, first in outputs[0].items():
        if first.ndim == 0:  # num_items_in_batch, which is recomputed below
            continue
        parts = [output[key] for output in outputs]
        if first.ndim == 2:
            value = tokenizer_of(trainer).pad_token_id if key.endswith("_ids") else 0
            joined[key] = pad_and_concat(parts, on_the_left=key.startswith("prompt"), value=value)[rows]
        else:
            joined[key] = torch.cat(parts)[rows]
    joined["num_items_in_batch"] = trainer.accelerator.gather(joined["completion_mask"].sum()).sum()
    return joined
