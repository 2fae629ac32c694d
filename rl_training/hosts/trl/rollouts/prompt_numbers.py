"""Numbers the prompts of a batch, so that the responses to one prompt are known to belong together."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from trl import GRPOTrainer

from rl_training.hosts.trl.rollouts.generated import rows_as_bytes
from rl_training.hosts.trl.settings.rollout_shape import sequences_per_rollout

PROMPT = "rollout_prompt"  # key of a batch: number of each row's prompt within the rollout


def number_prompts(
    trainer: GRPOTrainer, prompts: Sequence[bytes], keys: Sequence[bytes], is_in_order: bool, has_images: bool
) -> tuple[list[int], int]:
    """Return the prompt number of each row of a fresh rollout, and the number of responses per prompt.

    Prompts are numbered in TRL's order, `num_generations` consecutive rows each. If the rows contradict that order,
    they are numbered by their tokens.

    Args:
        trainer: The trainer.
        prompts: Each row's prompt tokens, as bytes.
        keys: Hashes of each row's prompt and completion.
        is_in_order: Whether rows are in the order of generation. TRL's order then holds even if prompts of a group
            differ, because an environment may have told each response something else.
        has_images: Whether rows have images. Equal tokens may then be different prompts.

    Returns:
        The numbers, and the number of responses per prompt, 0 if prompts differ in it.
    """
    group_size = trainer.num_generations
    size = sequences_per_rollout(trainer.args)
    # Responses to this rank's first prompt that the previous rank has.
    num_on_previous_rank = trainer.accelerator.process_index * size % group_size
    numbers = [(num_on_previous_rank + row) // group_size for row in range(len(prompts))]
    first_prompt = dict(zip(reversed(numbers), reversed(prompts), strict=True))
    is_consistent = all(first_prompt[number] == prompt for number, prompt in zip(numbers, prompts, strict=True))
    if len(prompts) == size and (is_in_order or is_consistent):
        return numbers, group_size
    if has_images:
        return [*range(len(prompts))], 0
    numbers = number_by_tokens(prompts, keys, group_size)
    counts = {*Counter(numbers).values()}
    return numbers, counts.pop() if len(counts) == 1 else 0


def number_by_tokens(prompts: Sequence[bytes], keys: Sequence[bytes], group_size: int) -> list[int]:
    """Return a number for each row, from 0. Responses to the same prompt have the same number.

    A batch may hold a group several times, as when a subclass fills it up with copies. Each copy is then numbered as a
    prompt of its own, as TRL does where it draws a prompt twice.

    Args:
        prompts: Each row's prompt tokens.
        keys: Hashes of each row's prompt and completion.
        group_size: Number of responses that are generated to a prompt at a time.

    >>> number_by_tokens([b"p", b"q", b"p", b"q", b"p", b"p"], [b"1", b"3", b"1", b"4", b"2", b"2"], group_size=2)
    [0, 1, 2, 1, 0, 2]
    """
    num_groups = _groups_by_prompt(prompts, keys, group_size)
    first_row = {key: row for row, key in reversed([*enumerate(keys)])}
    num_earlier = Counter[bytes]()
    groups = [0] * len(prompts)
    # Copies of a response follow each other, so that each goes to another group of its prompt.
    for row in sorted(range(len(prompts)), key=lambda row: first_row[keys[row]]):
        prompt = prompts[row]
        groups[row] = num_earlier[prompt] % num_groups[prompt]
        num_earlier[prompt] += 1
    numbers: dict[tuple[bytes, int], int] = {}
    return [numbers.setdefault(group, len(numbers)) for group in zip(prompts, groups, strict=True)]


def _groups_by_prompt(prompts: Sequence[bytes], keys: Sequence[bytes], group_size: int) -> dict[bytes, int]:
    """Return the number of groups that the rows of each prompt are: 1, unless the batch holds copies of groups.

    The batch holds copies if all its rows are whole groups, and if a prompt has several groups of the same responses.
    """
    num_groups = {prompt: num_rows // group_size for prompt, num_rows in Counter(prompts).items()}
    is_copied = {prompt: count > 1 for prompt, count in num_groups.items()}
    num_copies = Counter(keys)
    for key, prompt in zip(keys, prompts, strict=True):
        is_copied[prompt] = is_copied[prompt] and num_copies[key] % num_groups[prompt] == 0
    are_whole_groups = len(prompts) == group_size * sum(num_groups.values())
    if are_whole_groups and any(is_copied.values()):
        return num_groups
    return dict.fromkeys(num_groups, 1)


def numbers_in_batch(inputs: Mapping[str, Any]) -> Tensor:
    """Return a number for each row, (B,), equal for responses to the same prompt.

    If a subclass built the batch and it lacks these numbers, they are hashes of the prompts' tokens.
    """
    numbers = inputs.get(PROMPT)
    if isinstance(numbers, Tensor) and len(numbers) == len(inputs["completion_ids"]):
        return numbers
    prompts = rows_as_bytes(inputs["prompt_ids"], inputs["prompt_mask"])
    digests = [hashlib.blake2b(prompt, digest_size=6).digest() for prompt in prompts]
    return inputs["prompt_ids"].new_tensor([int.from_bytes(digest, "big") for digest in digests])
