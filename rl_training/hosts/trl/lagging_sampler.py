"""A sampler with older weights than the policy's, for experiments: asynchronous training on one process."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import torch
from torch import Tensor
from trl import GRPOTrainer

from rl_training.engine.batch import as_rollout
from rl_training.engine.policy import Policy


class LaggingSampler:
    """Generates with the weights of `lag` rollouts before, and says with which log-probabilities.

    The copies, `lag` of the trained weights, are not in checkpoints: a resumed training begins to lag anew.
    """

    def __init__(self, trainer: GRPOTrainer, policy: Policy, lag: int) -> None:
        if type(lag) is not int or lag < 0:
            raise ValueError(f"sampler_lag={lag} must be a whole number of rollouts, at least 0")
        if trainer.use_vllm or trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled or trainer._is_vlm:
            raise ValueError(
                "sampler_lag keeps whole copies of the weights and generates text with them: use it without vLLM, "
                "DeepSpeed, FSDP and images"
            )
        self.trainer, self.policy = trainer, policy
        self._past: deque[tuple[int, dict[str, Tensor]]] = deque(maxlen=lag + 1)  # by step, the oldest first

    def weights(self) -> dict[str, Tensor]:
        """Returns the weights to sample with, by name. Called for each generation."""
        step = self.trainer.state.global_step
        if not self._past or self._past[-1][0] != step:
            model = self.trainer.model
            now = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
            self._past.append((step, now))
        return self._past[0][1]

    def generate(self, original: Callable[[list], tuple], prompts: list) -> tuple:
        """Returns what TRL's `_generate` does, by the sampler and with its log-probabilities."""
        with self.policy.pointing_to(self.weights()):
            generated = list(original(prompts))
            device = self.trainer.accelerator.device
            prompt_ids, completion_ids = ([torch.tensor(row, device=device) for row in rows] for rows in generated[:2])
            rollout = as_rollout(prompt_ids, completion_ids, range(len(prompts)), self.trainer._tokenizer.pad_token_id)
            logps = self.policy.score_rollout(rollout).logps
            lengths = rollout.completion_mask.sum(dim=1).tolist()
            generated[4] = [row[:length].tolist() for row, length in zip(logps, lengths, strict=True)]
        return tuple(generated)
