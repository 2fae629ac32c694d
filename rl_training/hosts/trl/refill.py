"""A filtered rollout: generated, rejected, generated again, and joined into one as TRL would return it.

Every process knows all rewards, so all make the same decisions without communicating. Each attempt has the same size on
all processes: as many groups as the process with most empty slots needs.

Like batches.py this file knows the layout of TRL's batch dictionaries and metrics.
"""

from __future__ import annotations

import contextlib
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from trl import GRPOTrainer

from rl_training.engine.batch import in_one_width
from rl_training.hosts.trl import batches
from rl_training.hosts.trl.buffer import FilteredBuffer, are_mixed

Generate = Callable[[list[dict[str, Any]]], tuple[dict[str, Any], Tensor]]  # rows → TRL's output, rewards of all ranks
Metrics = Mapping[str, Sequence[float]]


class RolloutSlots:
    """The slots of a rollout, one prompt each, on every process: which of the groups generated there fills each.

    Groups are numbered across attempts. In the first attempt every group has its own slot; a mixed group of a later one
    takes the first empty slot. A slot is empty while its group is not mixed.
    """

    def __init__(self, num_processes: int, num_places: int) -> None:
        self.groups = [list(range(num_places)) for _ in range(num_processes)]
        self.empty = [list(range(num_places)) for _ in range(num_processes)]
        self._generated = 0  # groups on a process

    @property
    def missing(self) -> int:
        """The number of empty slots on the process that has most."""
        return max(map(len, self.empty))

    @property
    def filled(self) -> float:
        """The share of slots that are not empty."""
        return 1 - sum(map(len, self.empty)) / sum(map(len, self.groups))

    def put(self, mixed: Tensor) -> None:
        """Takes in an attempt: (processes, groups), whether each is mixed. Surplus groups are dropped."""
        for process, row in enumerate(mixed):
            good = row.nonzero().flatten().tolist()
            taken = self.empty[process][: len(good)] if self._generated else good
            for place, group in zip(taken, good, strict=False):
                self.groups[process][place] = self._generated + group
            self.empty[process] = [place for place in self.empty[process] if place not in taken]
        self._generated += mixed.shape[1]


def fill_rollout(trainer: GRPOTrainer, buffer: FilteredBuffer, generate: Generate, num_rows: int) -> dict[str, Any]:
    """Returns a rollout of `num_rows` sequences of this process, rewards too, as full of mixed prompts as can be.

    Slots that stay empty keep the prompt of the first attempt, whose advantages are 0.
    """
    size, world, rank = trainer.num_generations, trainer.accelerator.num_processes, trainer.accelerator.process_index
    slots = RolloutSlots(world, num_rows // size)
    outputs: list[dict[str, Any]] = []
    metrics: list[Metrics] = []
    tried: list[int] = []
    num_mixed = 0
    buffer.forget()
    while (each := slots.missing) and len(outputs) < buffer.max_attempts:
        if each * world > buffer.num_prompts - len(tried):
            break  # no prompts are left to try
        prompts = buffer.draw(each * world, tried)
        own = prompts[rank * each : (rank + 1) * each]
        with _metrics_of_its_own(trainer) as logged:
            output, rewards = generate([dict(trainer.train_dataset[i]) for i in own for _ in range(size)])
        rewards = rewards.view(world, each, size)
        output[batches.REWARD] = rewards[rank].flatten().to(output["completion_ids"].device)
        mixed = are_mixed(rewards)
        slots.put(mixed)
        buffer.learn(prompts, rewards.flatten(0, 1))
        num_mixed += int(mixed.sum())
        tried += prompts
        outputs.append(output)
        metrics.append(logged)
    sequences = [len(output["completion_ids"]) * world for output in outputs]
    lengths = [logged["completions/mean_length"][-1] for logged in metrics]
    merged = merge_metrics(metrics, sequences) | {
        "buffer/attempts": float(len(outputs)),
        "buffer/acceptance": num_mixed / len(tried),
        "buffer/filled": slots.filled,
        "buffer/generated_tokens": float(sum(round(t * n) for t, n in zip(lengths, sequences, strict=True))),
    }
    for name, value in merged.items():
        trainer._metrics["train"][name].append(value)
    trainer._metrics["train"]["num_tokens"] = list(metrics[-1]["num_tokens"])  # a running count, not an average
    return _joined(trainer, outputs, torch.tensor(slots.groups[rank]))


def merge_metrics(attempts: Sequence[Metrics], num_sequences: Sequence[int]) -> dict[str, float]:
    """Returns what TRL logged in each attempt as one number per name: the mean over all their sequences.

    Of a minimum it is the least one, of a maximum the largest; of a standard deviation the mean of the attempts' own.
    What is logged of the sequences that ended by themselves, `…_terminated_length`, is merged over those.
    """
    merged = {}
    ended = [
        n * (1 - attempt["completions/clipped_ratio"][-1]) for attempt, n in zip(attempts, num_sequences, strict=True)
    ]
    for name in {name: None for attempt in attempts for name in attempt}:
        weights = ended if name.endswith("_terminated_length") else num_sequences
        values = [
            (attempt[name][-1], weight)
            for attempt, weight in zip(attempts, weights, strict=True)
            if weight > 0 and name in attempt and not math.isnan(attempt[name][-1])
        ]
        kind = name.rpartition("/")[2].partition("_")[0]
        if not values:
            merged[name] = math.nan
        elif kind in ("min", "max"):
            merged[name] = {"min": min, "max": max}[kind](value for value, _ in values)
        else:
            merged[name] = sum(value * weight for value, weight in values) / sum(weight for _, weight in values)
    return merged


@contextlib.contextmanager
def _metrics_of_its_own(trainer: GRPOTrainer) -> Iterator[dict[str, list[float]]]:
    """A context in which what TRL logs goes into the dictionary that it yields, and not into the trainer's."""
    kept = trainer._metrics["train"]
    own: dict[str, list[float]] = defaultdict(list)
    trainer._metrics["train"] = own
    try:
        yield own
    finally:
        trainer._metrics["train"] = kept


def _joined(trainer: GRPOTrainer, outputs: Sequence[dict[str, Any]], groups: Tensor) -> dict[str, Any]:
    """Returns these groups, counted through TRL's outputs, as one output: no wider than its longest sequence needs."""
    size = trainer.num_generations
    rows = (groups.unsqueeze(1) * size + torch.arange(size)).flatten().to(outputs[0]["completion_ids"].device)
    joined = {}
    for key, first in outputs[0].items():
        if first.ndim == 0:  # num_items_in_batch, counted anew below
            continue
        parts = [output[key] for output in outputs]
        if first.ndim == 2:
            value = trainer._tokenizer.pad_token_id if key.endswith("_ids") else 0
            joined[key] = in_one_width(parts, on_the_left=key.startswith("prompt"), value=value)[rows]
        else:
            joined[key] = torch.cat(parts)[rows]
    multiple = trainer.pad_to_multiple_of or 1
    for side in ("prompt", "completion"):
        longest = max(1, int(joined[f"{side}_mask"].sum(dim=1).max()))
        width, padded = -(-longest // multiple) * multiple, joined[f"{side}_mask"].shape[1]
        if side == "completion" and trainer.mask_truncated_completions:
            continue  # the mask hides the longest responses
        for key, tensor in joined.items():
            if tensor.ndim == 2 and tensor.shape[1] == padded and key.startswith("prompt") == (side == "prompt"):
                joined[key] = tensor[:, -width:] if side == "prompt" else tensor[:, :width]
    joined["num_items_in_batch"] = trainer.accelerator.gather(joined["completion_mask"].sum()).sum()
    return joined
