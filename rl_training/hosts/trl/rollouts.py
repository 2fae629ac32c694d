"""The rollouts of a trainer: keeps what TRL knows about a batch but does not pass on, such as rewards.

TRL's settings predict what a batch should contain: how many rows, in which order, sampled by which policy, with which
rewards. A subclass may have built something else, so each row is matched by its tokens with the generated responses
(generated.py), and whatever the rows contradict is not used.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import Tensor
from trl import GRPOTrainer
from trl.trainer import grpo_trainer

from rl_training.hosts.trl import batches
from rl_training.hosts.trl.batch_kind import BatchFacts, BatchKind, gather_facts, kind_of_batch
from rl_training.hosts.trl.compatibility import warn_of_leftover_responses
from rl_training.hosts.trl.generated import GeneratedResponses, Response, key_of, rows_as_bytes
from rl_training.hosts.trl.loss_settings import steps_per_rollout
from rl_training.hosts.trl.members import SHUFFLE
from rl_training.hosts.trl.old_logps import OldLogps
from rl_training.hosts.trl.policy import TrainerPolicy
from rl_training.hosts.trl.prompt_numbers import PROMPT, number_prompts
from rl_training.hosts.trl.sampling_settings import sampling_reason
from rl_training.hosts.trl.versions import of_trainer, tokenizer_of
from rl_training.hosts.trl.wrapping import wrap
from rl_training.policy.dropout import has_dropout
from rl_training.policy.rollout import Origin, Rollout, pad_and_concat
from rl_training.policy.scores import Scores
from rl_training.statistics.unavailable import Unavailable

PLACEHOLDERS = Unavailable(
    "placeholder_logps",
    "the sampler's log-probabilities (sampling_per_token_logps) are all 0, as if every token had been certain",
    fix="from a rollout_func, return logprobs=None if the policy itself samples, and otherwise the sampler's own",
)


def _keep_whole_prompts(shuffle: Callable[[dict], dict], generation_batch: dict) -> dict:
    """Return a generation batch in its original order, with prompts contiguous, but draw TRL's random numbers."""
    shuffle(generation_batch)
    return generation_batch


def _are_placeholders(output: Mapping[str, Any]) -> Tensor:
    """Return whether the batch has a sampler's log-probabilities and all of them are 0: (), on the device."""
    logps, tokens = output.get(batches.SAMPLING_LOGPS), output["completion_mask"]
    if logps is None:
        return tokens.new_zeros(())
    return (tokens.any() & ~(logps * tokens).any()).to(tokens)


def _to_host(*tables: Tensor) -> list[Tensor]:
    """Return tables of integers, (B, …) each, in host memory. The host waits for the device once."""
    joined = torch.cat([table.long() for table in tables], dim=1).cpu()
    return list(joined.split([table.shape[1] for table in tables], dim=1))


class MatchedRows(NamedTuple):
    """The rows of a batch on this rank, and the generated responses that they are."""

    prompts: list[bytes]  # the tokens of each row's prompt
    keys: list[bytes]  # a hash of each row's prompt and completion
    responses: list[Response | None]  # None for a row that was never generated
    is_fresh: list[bool]  # whether the row was generated for this rollout
    has_placeholders: bool  # whether all log-probabilities of a sampler are 0


class Rollouts:
    """Adds to TRL's batches what TRL leaves out, and reads them as rollouts.

    Args:
        trainer: The trainer.
        policy: Scores as the trainer does.
        whole_prompts: Whether to keep all responses to a prompt in consecutive rows.
    """

    def __init__(self, trainer: GRPOTrainer, policy: TrainerPolicy, whole_prompts: bool) -> None:
        self._trainer, self._policy, self.whole_prompts = trainer, policy, whole_prompts
        self._generated = GeneratedResponses()
        self.number = 0  # number of the current rollout, which training learns from
        self.responses_per_prompt = trainer.num_generations  # in the current rollout
        self._sampled_at = -1  # global_step at which the current rollout was sampled
        self._is_fresh = True  # whether all its responses were generated for it, if that is known
        self._origin = Origin(knows_sampler=True)
        self.old_logps = OldLogps(policy)

    def mark_leftover_rollout(self) -> None:
        """Warn if TRL begins with responses left over from the trainer's previous training, and mark learned ones."""
        args = self._trainer.args
        num_used = self._trainer._step % (args.steps_per_generation * args.num_iterations)  # microbatches
        if self._trainer._buffered_inputs and num_used:
            warn_of_leftover_responses(self._trainer)
            self._origin = dataclasses.replace(self._origin, learned=num_used >= args.steps_per_generation)

    def add_generated(self, generated: tuple, reason_before: Unavailable | None) -> None:
        """Take what TRL has generated, with the tool masks, before TRL masks truncated responses.

        Args:
            generated: The tuple that TRL's `_generate` returned.
            reason_before: Why responses are no samples, by the settings before generation, or None.
        """
        prompts, completions, tool_masks = generated[:3]
        self._generated.add(prompts, completions, tool_masks, reason_before or sampling_reason(self._trainer))

    def add_rewards(self, by_function: Tensor) -> None:
        """Take the generated responses' rewards, (sequences of all ranks, functions), which TRL does not pass on."""
        rewards = batches.total_rewards(self._trainer, by_function)
        num_local = len(rewards) // self._trainer.accelerator.num_processes
        first = self._trainer.accelerator.process_index * num_local
        local = slice(first, first + num_local)
        self._generated.reward(rewards[local].tolist(), by_function[local].tolist())

    def begin(self, output: dict, is_measured: bool) -> None:
        """Begin a fresh rollout: add to this rank's batch what TRL does not pass on. Collective if it is measured.

        Args:
            output: TRL's batch dictionary, changed in place.
            is_measured: Whether probes, a bound on the step or interventions need it.
        """
        rows = self._match(output)
        local_facts = self._complete(output, rows)
        facts = gather_facts(local_facts, output["completion_ids"].device) if is_measured else [local_facts]
        has_logps = bool({batches.OLD_LOGPS, batches.SAMPLING_LOGPS} & output.keys())
        self._take_kind(output, kind_of_batch(facts, self._trainer.num_generations, has_logps))
        self.number, self._sampled_at = self.number + 1, self._trainer.state.global_step
        mismatch = self._sampling_mismatch(rows.responses) or (PLACEHOLDERS if rows.has_placeholders else None)
        self._origin = dataclasses.replace(self._origin, sampler_reason=mismatch, knows_sampler=True)
        self._generated.begin_next(rows.keys)
        self.old_logps.begin()
        if is_measured and batches.OLD_LOGPS in output:
            self._examine_old_logps(output)

    def _match(self, output: Mapping[str, Any]) -> MatchedRows:
        """Return the rows of a batch with the generated responses that they are. The host waits for the device once."""
        ids = output["completion_ids"]
        tokens = batches.tokens_of(output, tokenizer_of(self._trainer).pad_token_id)
        placeholders = _are_placeholders(output).expand(len(ids), 1)
        *of_prompts, host_ids, host_tokens, placeholders = _to_host(
            output["prompt_ids"], output["prompt_mask"], ids, tokens, placeholders
        )
        prompts = rows_as_bytes(*of_prompts)
        keys = [key_of(*pair) for pair in zip(prompts, rows_as_bytes(host_ids, host_tokens), strict=True)]
        return MatchedRows(prompts, keys, *self._generated.find(keys), bool(placeholders.any()))

    def _complete(self, output: dict, rows: MatchedRows) -> BatchFacts:
        """Add to a batch what is known of its rows: tool masks, prompts and rewards. Return the facts of this rank."""
        if self._trainer.mask_truncated_completions:
            self._add_tool_masks(output, rows.responses)
        has_images = any(output.get(name) is not None for name in batches.IMAGE_INPUTS)
        is_in_order = self._generated.matches_latest_order(rows.keys)
        numbers, group_size = number_prompts(self._trainer, rows.prompts, rows.keys, is_in_order, has_images)
        device = output["completion_ids"].device
        output[PROMPT] = torch.tensor(numbers).to(device, non_blocking=True)
        is_selected = bool(self._generated) and not self._generated.are_all(rows.keys)
        if batches.REWARD in output or is_selected:  # FilteredBuffer selects rows too
            output[batches.UNTESTED] = torch.ones(len(rows.keys), device=device)
        is_rewarded = self._add_rewards(output, rows.responses)
        num_foreign = 0 if not self._generated else rows.is_fresh.count(False)
        past = [response for response, fresh in zip(rows.responses, rows.is_fresh, strict=True) if not fresh]
        has_learned = any(response is not None and response.learned for response in past)
        return BatchFacts(len(rows.keys), num_foreign, has_learned, not is_rewarded, group_size)

    def _sampling_mismatch(self, responses: Sequence[Response | None]) -> Unavailable | None:
        """Return why these responses are no samples of the policy: the first reason of any, or None."""
        known = [response for response in responses if response is not None]
        if not known:
            return sampling_reason(self._trainer)  # by the present settings
        return next((response.mismatch for response in known if response.mismatch), None)

    def _examine_old_logps(self, output: dict) -> None:
        """Tell whose old log-probabilities a fresh batch has, and complete them. Collective."""
        hidden = batches.are_hidden(output)
        if has_dropout(self._policy.model):
            self.old_logps.compare(self.read(output), hidden)
        are_needed = steps_per_rollout(self._trainer.args) > 1 or not self._is_fresh
        if self._trainer.mask_truncated_completions and are_needed:
            rollout, logps = self.read(output), output[batches.OLD_LOGPS]
            scores = Scores(logps, torch.zeros_like(logps), rollout.completion_mask)
            output[batches.ALL_OLD_LOGPS] = self._policy.with_hidden(scores, rollout, hidden).logps

    def _add_rewards(self, output: dict, responses: Sequence[Response | None]) -> bool:
        """Add the rewards of all rows, if they are known. Return whether the batch has them.

        FilteredBuffer has already added the totals of its own.
        """
        device = output["completion_ids"].device
        rewards = [None if response is None else response.reward for response in responses]
        if batches.REWARD not in output:
            if not rewards or None in rewards:
                return False
            output[batches.REWARD] = torch.tensor(rewards, dtype=torch.float32).to(device, non_blocking=True)
        by_function = [() if response is None else response.by_function for response in responses]
        if all(len(values) > 1 for values in by_function):
            output[batches.REWARDS_BY_FUNCTION] = torch.tensor(by_function).to(device, non_blocking=True)
        return True

    def _add_tool_masks(self, output: dict, responses: Sequence[Response | None]) -> None:
        """Add the tool masks from before TRL masked truncated responses."""
        masks = [None if response is None else response.tool_mask for response in responses]
        if any(mask is not None for mask in masks):
            ids = output["completion_ids"]
            rows = [torch.tensor([mask or [1] * ids.shape[1]], device=ids.device) for mask in masks]
            output[batches.POLICY_MASK] = pad_and_concat(rows, at_least=ids.shape[1])[:, : ids.shape[1]]

    def _take_kind(self, output: dict, kind: BatchKind) -> None:
        """Keep what the batch is, and remove its rewards unless all ranks have theirs."""
        self.responses_per_prompt, self._is_fresh, self._origin = kind.responses_per_prompt, kind.is_fresh, kind.origin
        if not kind.is_rewarded:
            output.pop(batches.REWARD, None)
            output.pop(batches.REWARDS_BY_FUNCTION, None)

    def on_prepare_inputs(self, original: Callable[..., dict], *args: Any, **kwargs: Any) -> dict:
        with ExitStack() as undo:
            if self.whole_prompts:
                wrap(grpo_trainer, SHUFFLE, _keep_whole_prompts, undo)
            return original(*args, **kwargs)

    def sizes_of_step(self, inputs: Mapping[str, Any]) -> list[int]:
        """Return the number of sequences of each microbatch of the step on this rank, in order.

        Microbatches that are not sampled yet are assumed to be as large as the first.

        Args:
            inputs: TRL's dictionary of the step's first microbatch.
        """
        trainer, size = self._trainer, len(inputs["completion_ids"])
        count, first = trainer.current_gradient_accumulation_steps, trainer._step % trainer.args.steps_per_generation
        sampled = [len(batch["completion_ids"]) for batch in (trainer._buffered_inputs or [])[first : first + count]]
        return [size, *(sampled + [size] * count)[1:count]]

    def read(self, inputs: Mapping[str, Any]) -> Rollout:
        """Return the sequences of one of TRL's batch dictionaries: a microbatch, or this rank's whole rollout.

        They keep the log-probabilities in the batch, whichever policy these are from; `old_logps` tells that.
        """
        trainer = self._trainer
        size = trainer.args.per_device_train_batch_size * trainer.args.steps_per_generation
        rollout = batches.read_rollout(
            inputs,
            first_prompt=self.number * size,
            on_policy=self._is_fresh and self._sampled_at == trainer.state.global_step,
            pad_token_id=tokenizer_of(trainer).pad_token_id if trainer.mask_truncated_completions else None,
            end_tokens=[*of_trainer(trainer, "eos_token_ids"), tokenizer_of(trainer).pad_token_id],
        )
        rewards_by_name = batches.rewards_by_name(trainer, inputs)
        return dataclasses.replace(rollout, origin=self._origin, rewards_by_name=rewards_by_name)
