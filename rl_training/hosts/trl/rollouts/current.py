"""Keeps what is known of a trainer's current rollout, from its generation to the steps that learn from it.

TRL's settings predict what a batch should contain: how many rows, in which order, sampled by which policy, with which
rewards. A subclass may have built something else, so each row is matched by its tokens with the generated responses
(complete.py), and whatever the rows contradict is not used.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.utils import logging
from trl import GRPOTrainer

from rl_training.hosts.trl.policy import TrainerPolicy
from rl_training.hosts.trl.rollouts import batches
from rl_training.hosts.trl.rollouts.complete import complete_batch, match_rows
from rl_training.hosts.trl.rollouts.generated import GeneratedResponses, Response
from rl_training.hosts.trl.rollouts.kind import gather_facts, record_of_batch
from rl_training.hosts.trl.rollouts.old_logps import are_own_up_to_dropout
from rl_training.hosts.trl.rollouts.record import RolloutRecord
from rl_training.hosts.trl.settings.rollout_shape import sequences_per_rollout, steps_per_rollout
from rl_training.hosts.trl.settings.sampling import sampling_reason
from rl_training.hosts.trl.versions import of_trainer, tokenizer_of
from rl_training.policy.dropout import has_dropout
from rl_training.policy.rollout import Origin, Rollout
from rl_training.policy.scores import Scores
from rl_training.statistics.unavailable import Unavailable

logger = logging.get_logger(__name__)

PLACEHOLDERS = Unavailable(
    "placeholder_logps",
    "the sampler's log-probabilities (sampling_per_token_logps) are all 0, as if every token had been certain",
    fix="from a rollout_func, return logprobs=None if the policy itself samples, and otherwise the sampler's own",
)


class Rollouts:
    """Completes the batches that TRL makes of the current rollout, and reads them.

    Args:
        trainer: The trainer.
        policy: Scores as the trainer does.
    """

    def __init__(self, trainer: GRPOTrainer, policy: TrainerPolicy) -> None:
        self._trainer = trainer
        self._policy = policy
        self._generated = GeneratedResponses()
        self.current = RolloutRecord(  # the rollout that training learns from
            number=0,
            sampled_at=-1,
            responses_per_prompt=trainer.num_generations,
            is_fresh=True,
            is_rewarded=False,
            is_untested=False,
            origin=Origin(knows_sampler=True),
        )

    def mark_leftover_rollout(self) -> None:
        """Warn if TRL begins with responses left over from the trainer's previous training, and mark learned ones."""
        args = self._trainer.args
        num_used = self._trainer._step % (args.steps_per_generation * args.num_iterations)  # microbatches
        if self._trainer._buffered_inputs and num_used:
            _warn_of_leftover_responses(self._trainer)
            origin = dataclasses.replace(self.current.origin, learned=num_used >= args.steps_per_generation)
            self.current = dataclasses.replace(self.current, origin=origin)

    def sampling_reason(self) -> Unavailable | None:
        """Return the reason why responses that are generated now are no samples of the scored policy, or None."""
        return sampling_reason(self._trainer, self._policy.scorer.temperature)

    def add_generated(self, generated: tuple, reason_before: Unavailable | None) -> None:
        """Take what TRL has generated, with the tool masks, before TRL masks truncated responses.

        Args:
            generated: The tuple that TRL's `_generate` returned.
            reason_before: Why responses are no samples, by the settings before generation, or None.
        """
        prompts, completions, tool_masks = generated[:3]
        if not self._trainer.mask_truncated_completions:  # TRL's batch then has them, of all responses
            tool_masks = None
        self._generated.add(prompts, completions, tool_masks, reason_before or self.sampling_reason())

    def add_rewards(self, by_function: Tensor) -> None:
        """Take the generated responses' rewards, (sequences of all ranks, functions), which TRL does not pass on."""
        rewards = batches.total_rewards(self._trainer, by_function)
        num_local = len(rewards) // self._trainer.accelerator.num_processes
        first = self._trainer.accelerator.process_index * num_local
        local = slice(first, first + num_local)
        self._generated.reward(rewards[local].tolist(), by_function[local].tolist())

    def begin_rollout(self, output: dict, is_measured: bool) -> None:
        """Begin a fresh rollout: add to this rank's batch what TRL does not pass on. Collective if it is measured.

        Args:
            output: TRL's batch dictionary, changed in place.
            is_measured: Whether probes, a bound on the step or interventions need it.
        """
        rows = match_rows(self._trainer, self._generated, output)
        local_facts = complete_batch(self._trainer, self._generated, output, rows)
        facts = gather_facts(local_facts, output["completion_ids"].device) if is_measured else [local_facts]
        has_logps = bool({batches.OLD_LOGPS, batches.SAMPLING_LOGPS} & output.keys())
        record = record_of_batch(
            facts,
            number=self.current.number + 1,
            sampled_at=self._trainer.state.global_step,
            num_generations=self._trainer.num_generations,
            has_logps=has_logps,
            sampler_reason=self._sampling_mismatch(rows.responses) or (PLACEHOLDERS if rows.has_placeholders else None),
        )
        if not record.is_rewarded:
            output.pop(batches.REWARD, None)
            output.pop(batches.REWARDS_BY_FUNCTION, None)
        self._generated.begin_next(rows.keys)
        if is_measured and batches.OLD_LOGPS in output:
            record = self._with_old_logps(record, output)
        self.current = record

    def _sampling_mismatch(self, responses: Sequence[Response | None]) -> Unavailable | None:
        """Return the first reason why some of these responses are no samples of the policy, or None."""
        known = [response for response in responses if response is not None]
        if not known:
            return self.sampling_reason()  # by the present settings
        return next((response.mismatch for response in known if response.mismatch), None)

    def _with_old_logps(self, record: RolloutRecord, output: dict) -> RolloutRecord:
        """Find out whose old log-probabilities a fresh batch has, and complete them. Collective.

        Returns:
            The record with what was found out. The batch gets those of responses that the loss masks.
        """
        hidden = batches.are_hidden(output)
        if has_dropout(self._policy.model):
            has_own = are_own_up_to_dropout(self._read(output, record), hidden, self._policy)
            record = dataclasses.replace(record, has_own_old_logps=has_own)
        are_needed = steps_per_rollout(self._trainer.args) > 1 or not record.is_fresh
        if self._trainer.mask_truncated_completions and are_needed:
            rollout = self._read(output, record)
            logps = output[batches.OLD_LOGPS]
            scores = Scores(logps, torch.zeros_like(logps), rollout.completion_mask)
            output[batches.ALL_OLD_LOGPS] = self._policy.with_hidden(scores, rollout, hidden).logps
        return record

    def sizes_of_step(self, inputs: Mapping[str, Any]) -> list[int]:
        """Return the number of sequences of each microbatch of the step on this rank, in order.

        Microbatches that are not sampled yet are assumed to be as large as the first.

        Args:
            inputs: TRL's dictionary of the step's first microbatch.
        """
        trainer = self._trainer
        size = len(inputs["completion_ids"])
        count = trainer.current_gradient_accumulation_steps
        first = trainer._step % trainer.args.steps_per_generation
        sampled = [len(batch["completion_ids"]) for batch in (trainer._buffered_inputs or [])[first : first + count]]
        return [size, *(sampled + [size] * count)[1:count]]

    def read(self, inputs: Mapping[str, Any], num_earlier: int = 0) -> Rollout:
        """Return the sequences of the current rollout in one of TRL's dictionaries: a microbatch, or this rank's rows.

        They keep the log-probabilities in the batch, whichever policy these are from; old_logps.py tells that.

        Args:
            inputs: TRL's dictionary.
            num_earlier: The number of microbatches that the step has had before this one.
        """
        return self._read(inputs, self.current, self._num_copies(num_earlier))

    def _num_copies(self, num_earlier: int) -> int:
        """Return how often the step has had the same microbatch before. `num_iterations` may fall within one step."""
        args = self._trainer.args
        age = self._trainer._step % (args.steps_per_generation * args.num_iterations)  # microbatches of this rollout
        return min(num_earlier, age) // args.steps_per_generation

    def _read(self, inputs: Mapping[str, Any], record: RolloutRecord, num_copies: int = 0) -> Rollout:
        """Return the sequences of a batch dictionary of this rollout, as they are at the trainer's present step.

        Copies are numbered as further prompts, as TRL numbers a prompt that it draws twice.
        """
        trainer = self._trainer
        number = record.number * trainer.args.num_iterations + num_copies
        rollout = batches.read_rollout(
            inputs,
            first_prompt=number * sequences_per_rollout(trainer.args),
            on_policy=record.is_on_policy(trainer.state.global_step),
            pad_token_id=tokenizer_of(trainer).pad_token_id if trainer.mask_truncated_completions else None,
            end_tokens=[*of_trainer(trainer, "eos_token_ids"), tokenizer_of(trainer).pad_token_id],
        )
        rewards_by_name = batches.rewards_by_name(trainer, inputs)
        return dataclasses.replace(
            rollout,
            origin=record.origin,
            rewards_by_name=rewards_by_name,
            untested=rollout.untested or record.is_untested,
        )


def _warn_of_leftover_responses(trainer: GRPOTrainer) -> None:
    """Warn that TRL starts with responses left over from the trainer's previous training."""
    if not trainer.accelerator.is_main_process:
        return
    if trainer._step % trainer.args.gradient_accumulation_steps:
        logger.warning(
            "this trainer's last training ended within a step, and TRL goes on in the middle of its responses: each "
            "step learns from stale ones. Make a new trainer"
        )
    else:
        logger.warning(
            "this trainer's last training ended before it had used up its responses, and TRL goes on with what is left "
            "of them. Make a new trainer, or train for a number of steps that uses them up"
        )
