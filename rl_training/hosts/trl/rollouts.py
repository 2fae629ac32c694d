"""What TRL generates, as the loss receives it: the rollout that training currently learns from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from trl import GRPOTrainer

from rl_training.engine.batch import Rollout, in_one_width
from rl_training.hosts.trl import batches
from rl_training.hosts.trl.policy import TrainerPolicy
from rl_training.mathematics.scores import Scores


@dataclass
class Generation:
    """The rollout that training learns from at present."""

    number: int = 0
    sampled_at: int = -1  # global_step


class Rollouts:
    """The rollouts of a trainer: adds to TRL's batches what TRL leaves out, and reads it back.

    whole_prompts  the responses of a prompt are put into one microbatch
    """

    def __init__(self, trainer: GRPOTrainer, policy: TrainerPolicy, whole_prompts: bool) -> None:
        self._trainer, self._policy, self._whole_prompts = trainer, policy, whole_prompts
        self._tool_mask: list[list[int]] | None = None  # of the latest rollout, this rank's
        self._rewards: Tensor | None = None  # of the latest rollout, all ranks
        self.generation = Generation()

    def on_turns(self, original: Callable[..., tuple], prompts: list) -> tuple:
        generated = original(prompts)
        self._tool_mask = generated[2]
        return generated

    def on_rewards(self, original: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        by_function = original(*args, **kwargs)
        self._rewards = (by_function * self._trainer.reward_weights.to(by_function.device)).nansum(dim=1)
        return by_function

    def begin(self, output: dict, keep_logps: bool) -> None:
        """Begins with a fresh rollout, TRL's batch of this rank, and adds to it what TRL does not hand on."""
        trainer, ids = self._trainer, output["completion_ids"]
        if self._tool_mask is not None and trainer.mask_truncated_completions:
            rows = [torch.tensor([mask], device=ids.device) for mask in self._tool_mask]
            output[batches.POLICY_MASK] = in_one_width(rows, at_least=ids.shape[1])
        output[batches.ROLLOUT_ROW] = torch.arange(len(ids), device=ids.device)
        if self._rewards is not None and batches.REWARD not in output:  # a buffer has put its own there
            first = trainer.accelerator.process_index * len(ids)  # rewards are of all ranks
            output[batches.REWARD] = self._rewards[first : first + len(ids)].to(ids.device)
        self.generation = Generation(self.generation.number + 1, trainer.state.global_step)
        if keep_logps and trainer.mask_truncated_completions and batches.steps_per_rollout(trainer.args) > 1:
            output[batches.SAMPLED_LOGPS] = self._logps_at_sampling(output)

    def _logps_at_sampling(self, output: dict) -> Tensor:
        """Returns TRL's log-probabilities at sampling, (B, T), with those of hidden responses in their place."""
        rollout, logps = self.read(output), output[batches.SAMPLING_LOGPS]
        scores = Scores(logps, torch.zeros_like(logps), rollout.completion_mask)
        return self._policy.with_hidden(scores, rollout, batches.are_hidden(output)).logps

    def on_prepare_inputs(self, original: Callable[..., dict], generation_batch: Any) -> dict:
        before = self.generation
        inputs = original(generation_batch)
        if self._whole_prompts and self.generation is not before:
            buffered = self._trainer._buffered_inputs
            position = next(i for i, batch in enumerate(buffered) if batch is inputs)
            self._trainer._buffered_inputs = batches.in_whole_prompt_order(buffered)
            inputs = self._trainer._buffered_inputs[position]
        return inputs

    def read(self, inputs: dict) -> Rollout:
        """Returns the sequences of one of TRL's batch dictionaries, a microbatch or the whole rollout of this rank."""
        trainer = self._trainer
        size = trainer.args.per_device_train_batch_size * trainer.args.steps_per_generation
        return batches.read_rollout(
            inputs,
            first_prompt=self.generation.number * size,
            responses_per_prompt=trainer.num_generations,
            on_policy=self.generation.sampled_at == trainer.state.global_step,
            begun=trainer.accelerator.process_index * size % trainer.num_generations,
            pad_token_id=trainer._tokenizer.pad_token_id if trainer.mask_truncated_completions else None,
            ends=[*trainer.eos_token_ids, trainer._tokenizer.pad_token_id],
        )
