"""The two independent buffers of sequences that a prediction needs.

    E  evaluation: B_E prompts, drawn uniformly and independently, with one or more responses each, N_E in all. Not
       filtered and not rewarded: the population whose entropy is measured.
    U  update: B_U prompts with G responses each, generated and rewarded as in training: what the next optimizer step
       would learn from. Filtered if the settings ask for it.

Responses are generated in chunks, each with its own random numbers. Process c mod (number of processes) generates
chunk c. The sequences therefore do not depend on the number of processes, unless chunks must be smaller so that every
process gets its share. The filter generates all prompts of a process as one chunk.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rl_training.errors import UserError
from rl_training.hosts.trl import attach
from rl_training.hosts.trl.buffer import FilteredBuffer
from rl_training.hosts.trl.fill_rollout import start_buffer
from rl_training.hosts.trl.rollouts import batches
from rl_training.hosts.trl.settings.spelling import COMMAND_LINE
from rl_training.hosts.trl.trainer import DrGRPOTrainer
from rl_training.hosts.trl.versions import of_trainer, tokenizer_of
from rl_training.offline.phases import Progress, silent
from rl_training.offline.restored import RestoredTrainer
from rl_training.offline.settings import EvaluationSettings, UpdateSettings
from rl_training.policy.rng import preserve_rng, seed_torch
from rl_training.policy.rollout import Rollout, as_rollout, join_rollouts, take_rows
from rl_training.policy.scores import Scores
from rl_training.probes.fresh_sample import EvaluationBuffer
from rl_training.statistics.jackknife import JackknifeUnits

# Independent random streams of one seed.
PROMPTS = 0
RESPONSES = 1


@dataclass(frozen=True)
class SampledBuffer(EvaluationBuffer):
    """E with the scores of all processes' sequences, and what is needed to sample its responses again."""

    rows: tuple[dict[str, Any], ...]  # (N,), each sequence's row of the data set; responses to one are adjacent
    seed: int  # of its prompts and responses
    chunk_size: int  # sequences generated at once


def units_of(scores: Scores, responses: int) -> tuple[JackknifeUnits, JackknifeUnits]:
    """Return E's jackknife units: its sequences, and its independent units (prompts; of a single prompt, responses).

    Args:
        responses: Number of responses to each prompt. They are adjacent rows of `scores`.
    """
    sequences = JackknifeUnits.of_rows(scores.mask)
    return sequences, sequences if sequences.count == responses else sequences.in_blocks(responses)


@dataclass(frozen=True)
class UpdateBuffer:
    """U: this process's sequences with rewards and advantages. All responses to a prompt are on one process."""

    rollout: Rollout  # prompt_index numbers the prompts of all processes
    num_prompts: int  # over all processes
    responses_per_prompt: int

    @property
    def num_sequences(self) -> int:
        return self.num_prompts * self.responses_per_prompt


def sample_update(
    restored: RestoredTrainer, settings: UpdateSettings, chunk_size: int, progress: Progress = silent
) -> UpdateBuffer:
    """Sample U: generate and reward responses as training does, and filter them if the settings say so. Collective.

    No prompt is drawn twice, as within an epoch. The filter starts with the statistics of the trainer's buffer.

    Args:
        chunk_size: Most sequences to generate at once. The filter ignores it and generates all prompts at once.
    """
    num_prompts = settings.prompts
    seed = settings.seed
    filtered = settings.filtered
    trainer = restored.trainer
    group = restored.trainer.num_generations
    total = len(trainer.train_dataset)
    if num_prompts > total:
        raise UserError(f"update.prompts={num_prompts}: the training set has {total} prompts; ask for no more")
    if num_prompts % restored.num_ranks:
        raise UserError(
            f"update.prompts={num_prompts} must be a multiple of the number of processes ({restored.num_ranks})"
        )
    share = num_prompts // restored.num_ranks
    chunk = share if filtered else math.gcd(share, max(chunk_size // group, 1))
    order = np.random.default_rng([seed, PROMPTS]).permutation(total)[:num_prompts]
    parts = []
    ends = [*of_trainer(trainer, "eos_token_ids"), tokenizer_of(trainer).pad_token_id]
    with preserve_rng(restored.device):
        for first in range(restored.rank * chunk, num_prompts, chunk * restored.num_ranks):
            seed_torch(seed, RESPONSES, first // chunk, device=restored.device)
            rows = [dict(trainer.train_dataset[int(i)]) for i in order[first : first + chunk] for _ in range(group)]
            batch = _generate_rewarded(restored, rows, seed, filtered)
            parts.append(batches.read_rollout(batch, first, on_policy=True, end_tokens=ends))
            progress(len(rows) * restored.num_ranks)
    return UpdateBuffer(join_rollouts(parts), num_prompts, group)


def _generate_rewarded(
    restored: RestoredTrainer, rows: list[dict[str, Any]], seed: int, filtered: bool
) -> dict[str, Any]:
    """Return TRL's batch for these rows or, filtered, an equally large one. The trainer's buffer is restored."""
    trainer = restored.trainer
    if not isinstance(trainer, DrGRPOTrainer):
        if filtered:
            raise UserError("update.filtered needs the filter of DrGRPOTrainer(buffer=FilteredBuffer())")
        with attach(trainer, probes=(), whole_prompts=True):  # adds rewards and prompts to the batch
            return trainer._generate_and_score_completions(rows)
    buffer = trainer.buffer
    trainer.buffer = _filter_of(restored, seed) if filtered else None
    try:
        return trainer._generate_and_score_completions(rows)
    finally:
        trainer.buffer = buffer


def _filter_of(restored: RestoredTrainer, seed: int) -> FilteredBuffer:
    """Return a filter with its own random numbers, and the statistics of the trainer's buffer if there is one."""
    trainer = restored.trainer
    training_buffer = getattr(trainer, "buffer", None)  # TRL's own trainer has none
    settings: dict[str, Any] = {}
    if training_buffer is not None:
        settings = {key: getattr(training_buffer, key) for key in ("max_attempts", "floor", "half_life")}
    buffer = FilteredBuffer(**settings, seed=seed)
    start_buffer(trainer, buffer, COMMAND_LINE)
    if training_buffer is not None:
        buffer.load_state_dict({**training_buffer.state_dict(), "generator": buffer.state_dict()["generator"]})
    return buffer


def sample_evaluation(
    restored: RestoredTrainer,
    settings: EvaluationSettings,
    update: UpdateBuffer | None,
    chunk_size: int,
    progress: Progress = silent,
) -> SampledBuffer:
    """Sample E and score it at the checkpoint. Collective.

    Args:
        update: U, whose prompts `settings.overlap` allows, forbids or requires in E. None allows any.
    """
    rows = tuple(row for row in _rows_of_evaluation(restored, settings, update) for _ in range(settings.responses))
    rollout, score_rows = respond_in_chunks(restored, rows, settings.seed, chunk_size, progress)
    scores = gather_scores(restored, restored.policy.score_rollout(rollout), score_rows, len(rows))
    units = units_of(scores, settings.responses)
    return SampledBuffer(rollout, score_rows, scores, *units, rows, settings.seed, chunk_size)


def sample_again(restored: RestoredTrainer, buffer: SampledBuffer) -> Scores:
    """Sample and score new responses to E's prompts at the current parameters, with E's random numbers. Collective."""
    rollout, score_rows = respond_in_chunks(restored, buffer.rows, buffer.seed, buffer.chunk_size)
    return gather_scores(restored, restored.policy.score_rollout(rollout), score_rows, buffer.num_sequences)


def gather_scores(restored: RestoredTrainer, scores: Scores, score_rows: Tensor, total: int) -> Scores:
    """Return the scores of all processes' sequences, (N, L), on every process. Collective.

    Args:
        score_rows: Row of the result for each of this process's sequences, (B,).
        total: N.
    """
    width = restored.trainer.max_completion_length

    def gather(values: Tensor) -> Tensor:
        real_values = values.double().masked_fill(scores.mask == 0, 0.0)
        all_values = real_values.new_zeros(total, width)
        all_values[score_rows, : real_values.shape[1]] = real_values
        return restored.reduce(all_values)  # a sum, because each row is zero on all processes but one

    return Scores(gather(scores.logps), gather(scores.entropies), gather(scores.mask).bool())


def gather_rollout(rollout: Rollout, restored: RestoredTrainer) -> Rollout:
    """Gather the sequences of all processes on every process, ordered by `prompt_index`. Collective."""
    parts = restored.gather([_to_device(rollout, torch.device("cpu"))])
    rollout = _to_device(join_rollouts(parts), restored.device)
    return take_rows(rollout, rollout.prompt_index.argsort(stable=True))


def _to_device(rollout: Rollout, device: torch.device) -> Rollout:
    values: dict[str, Any] = {key: v.to(device) for key, v in vars(rollout).items() if isinstance(v, Tensor)}
    return dataclasses.replace(rollout, **values)


def tokens_of(rollout: Rollout, row: int) -> tuple[list[int], list[int]]:
    """Return the token ids of a row's prompt and response, without padding."""
    prompt = rollout.prompt_ids[row][rollout.prompt_mask[row].bool()]
    response = rollout.completion_ids[row][rollout.completion_mask[row].bool()]
    return prompt.tolist(), response.tolist()


def text_of(restored: RestoredTrainer, rollout: Rollout, row: int) -> dict[str, str]:
    """Return the texts of a row's prompt and response."""
    prompt, response = (restored.policy.decode(torch.tensor(ids)) for ids in tokens_of(rollout, row))
    return {"prompt": prompt, "response": response}


def evaluation_rewards(restored: RestoredTrainer, rows: Sequence[dict[str, Any]], rollout: Rollout) -> Tensor:
    """Return the rewards of E's responses to these rows of the data set, (N_E,). Collective."""
    completions = [tokens_of(rollout, row)[1] for row in range(rollout.num_sequences)]
    return batches.rewards_of(restored.trainer, list(rows), completions).cpu().float()


def _rows_of_evaluation(
    restored: RestoredTrainer, settings: EvaluationSettings, update: UpdateBuffer | None
) -> list[dict[str, Any]]:
    trainer = restored.trainer
    source = settings.source
    overlap = settings.overlap
    data = trainer.eval_dataset if source == "eval" else trainer.train_dataset
    if data is None:
        raise UserError("evaluation.source=eval: this run's task has no evaluation split; use evaluation.source=train")
    if not isinstance(source, str):
        outside = [row for row in source if not 0 <= row < len(data)]
        if outside:
            raise UserError(f"evaluation.source: row {outside[0]} is not in the training set of {len(data)} prompts")
        return [data[int(row)] for row in source]
    draw = np.random.default_rng([settings.seed, PROMPTS])
    if overlap == "allowed" or update is None:
        return [data[int(row)] for row in draw.integers(len(data), size=settings.prompts)]
    in_update = _in_update(restored, update, data["prompt"][:])
    rows = [row for row, is_in_update in enumerate(in_update) if is_in_update == (overlap == "wanted")]
    if not rows:
        raise UserError(f"evaluation.overlap={overlap}: no prompt of {source} is left to draw; use overlap=allowed")
    return [data[rows[int(i)]] for i in draw.integers(len(rows), size=settings.prompts)]


def _in_update(restored: RestoredTrainer, update: UpdateBuffer, prompts: Sequence[Any]) -> list[bool]:
    """Return for each of these prompts whether U has it. Compares tokens, because a data set may repeat a text."""
    rollout = update.rollout
    update_prompts = {
        tuple(ids[mask.bool()].tolist()) for ids, mask in zip(rollout.prompt_ids, rollout.prompt_mask, strict=True)
    }
    tokens = [tuple(ids) for ids in restored.trainer._tokenize_prompts(list(prompts))[0]]
    is_found = torch.tensor([ids in update_prompts for ids in tokens], device=restored.device, dtype=torch.float64)
    return (restored.reduce(is_found) > 0).tolist()


def respond_in_chunks(
    restored: RestoredTrainer, data_rows: Sequence[Mapping[str, Any]], seed: int, chunk_size: int,
    progress: Progress = silent,
) -> tuple[Rollout, Tensor]:  # fmt: skip
    """Generate one response to each row's prompt, and return this process's share.

    Returns:
        The responses, and the index in `data_rows` of each, (B,).
    """
    total = len(data_rows)
    # Each chunk has its own random numbers. There are at least two, so that two processes have the same chunks as one.
    chunk = max(1, min(chunk_size, -(-total // 2)))
    if -(-total // chunk) < restored.num_ranks:
        chunk = max(1, -(-total // restored.num_ranks))
    prompt_ids = list[Tensor]()
    completion_ids = list[Tensor]()
    row_indices = list[int]()
    for first in range(restored.rank * chunk, total, chunk * restored.num_ranks):
        rows = range(first, min(first + chunk, total))
        chosen = [data_rows[i]["prompt"] for i in rows]
        responses = restored.policy.respond(chosen, seed, RESPONSES, first // chunk)
        prompt_ids = prompt_ids + responses[0]
        completion_ids = completion_ids + responses[1]
        row_indices = [*row_indices, *rows]
        progress(min(len(rows) * restored.num_ranks, total))
    if not row_indices:
        raise UserError(
            f"evaluation: {total} sequences leave process {restored.rank} of {restored.num_ranks} without one: ask for "
            f"at least {2 * restored.num_ranks}"
        )
    rollout = as_rollout(prompt_ids, completion_ids, row_indices, tokenizer_of(restored.trainer).pad_token_id)
    return rollout, torch.tensor(row_indices, device=restored.device)
