"""The policy of a trainer, for probes: it scores, samples and decodes exactly as training would.

The trainer may be running, or restored at a checkpoint without taking steps.

Fresh responses, which some measurements need, are sampled from the policy that is scored: the unwrapped model in the
precision of its weights (autocast off), without dropout, at the trainer's temperature. If TRL generates with vLLM, its
policy is the same up to vLLM's numerics. Sampling restores bit for bit: the random states of Python, NumPy and torch,
the train/eval mode of every module, gradient checkpointing and autocast.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from trl import GRPOTrainer

from rl_training.errors import UserError
from rl_training.hosts.trl.generation import generate, max_responses
from rl_training.hosts.trl.settings.rollout_shape import sequences_per_rollout
from rl_training.hosts.trl.settings.sampling import STREAM
from rl_training.hosts.trl.sharding import has_sharded_weights
from rl_training.hosts.trl.versions import tokenizer_of
from rl_training.parallel.ranks import Ranks, all_ranks
from rl_training.parallel.sharding import Shard
from rl_training.policy.policy import Policy, draws_of_rank
from rl_training.policy.rng import preserve_rng, seed_torch
from rl_training.policy.rollout import Rollout, as_rollout
from rl_training.policy.scorer import Scorer
from rl_training.policy.scores import Scores


class TrainerPolicy(Policy):
    """The policy of a trainer.

    Args:
        trainer: The trainer.
        call_head: Whether scoring calls the head's module, so that hooks on it run.
    """

    def __init__(self, trainer: GRPOTrainer, call_head: bool = False) -> None:
        self._trainer = trainer
        self._call_head = call_head
        self._reference: tuple[nn.Module, Scorer] | None = None  # the reference model and its scorer
        super().__init__(trainer.model, self._scorer_of(trainer.model), trainer.args.per_device_train_batch_size)

    def _scorer_of(self, model: nn.Module) -> Scorer:
        trainer = self._trainer
        return Scorer(
            model,
            trainer.temperature,
            autocast=trainer.accelerator.autocast,
            fp32_head=trainer.args.cast_lm_head_to_fp32,
            call_head=self._call_head,
            run_inside_forward=has_sharded_weights(trainer),
            whole_logits=trainer.is_deepspeed_enabled and has_sharded_weights(trainer),
        )

    def begin(self, shard: Shard, ranks: Ranks) -> None:
        """Take what is known once training has begun: the model too, which may have been replaced until now."""
        model = self._trainer.model
        if {*map(id, model.parameters())} != {*map(id, self.model.parameters())}:  # a wrapped one has the same
            self.model = model
            self.scorer = self._scorer_of(model)
        super().begin(shard, ranks)

    @property
    def reference(self) -> Scorer | None:
        """The scorer of the reference model, which TRL keeps if beta > 0. None without one, or if it is sharded."""
        trainer = self._trainer
        sharded = trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled
        if trainer.ref_model is None or sharded:
            return None
        if self._reference is None or self._reference[0] is not trainer.ref_model:
            self._reference = trainer.ref_model, self._scorer_of(trainer.ref_model)
        return self._reference[1]

    @property
    def has_reference(self) -> bool:
        # TRL's adapter "ref" is a copy of an adapter that is trained further. The base model is then not the reference.
        return "ref" not in getattr(self.model, "peft_config", {}) and super().has_reference

    def complete_scores(
        self, loss_scores: tuple[Tensor, Tensor | None] | None, rollout: Rollout, is_needed: bool
    ) -> Scores:
        """Complete the scores of training's forward pass: score here, without graph, what training did not compute.

        Args:
            loss_scores: Training's log-probabilities and entropies; entropies may be None. None if the loss uses
                neither.
            rollout: The sequences of the microbatch.
            is_needed: Whether anything reads the scores. If not, missing ones are nan.
        """
        logps, entropies = loss_scores or (None, None)
        if logps is None or entropies is None:
            own_scores = Scores.unknown(rollout.completion_mask)
            if is_needed:
                own_scores = self.score_rollout(rollout, as_training=True, dropout=True)
            logps = own_scores.logps if logps is None else logps
            entropies = own_scores.entropies
        return Scores(logps, entropies, rollout.completion_mask)

    def with_hidden(self, scores: Scores, rollout: Rollout, hidden: Tensor) -> Scores:
        """Replace the scores of hidden rows, which training's forward pass masks, by new ones.

        Args:
            scores: Training's scores of the microbatch.
            rollout: Its sequences.
            hidden: (B,), which rows the loss masks.

        Returns:
            Scores without graph. Those of hidden rows are computed as in training.
        """
        logps = scores.logps.detach().clone()
        entropies = scores.entropies.detach().clone()
        rows = hidden.nonzero().squeeze(1)
        batches = self.batches_of(rows)  # none on a rank whose rows are all scored
        fresh = self.score_rollout(rollout, as_training=True, dropout=True, batches=batches)
        logps[rows] = fresh.logps.to(logps)
        entropies[rows] = fresh.entropies.to(entropies)
        return Scores(logps, entropies, scores.mask)

    def sample(self, num_sequences: int, seed: int) -> Rollout:
        """Sample this rank's share of `num_sequences` fresh responses, see `Policy.sample`. Advantages are nan.

        Prompts are drawn with replacement, so the sequences are independent. `prompt_index` numbers the draws over all
        ranks: rank r has the draws r, r + ranks, ...
        """
        trainer = self._trainer
        accelerator = trainer.accelerator
        if not hasattr(trainer.train_dataset, "__len__"):
            raise UserError(STREAM)
        local_draws = draws_of_rank(num_sequences, all_ranks())
        rows = np.random.default_rng([seed, 0]).integers(len(trainer.train_dataset), size=num_sequences)
        prompts = [trainer.train_dataset[int(rows[i])]["prompt"] for i in local_draws]
        size = sequences_per_rollout(trainer.args)
        if accelerator.device.type == "cuda":  # by total, not free memory: a repeated run then draws the same batches
            memory = torch.cuda.get_device_properties(accelerator.device).total_memory
            size = min(size, max_responses(trainer, prompts, memory))

        def respond_to(batch: Tensor) -> tuple[list[Tensor], list[Tensor]]:
            # One seed per batch, because a batch uses as many random numbers as its longest response needs.
            indices = batch.tolist()
            number = indices[0] // size
            return self.respond([prompts[i] for i in indices], seed, 1 + accelerator.process_index, number)

        parts = self.run_passes(torch.arange(len(local_draws)).split(size), respond_to)
        prompt_ids, completion_ids = (list(itertools.chain(*ids)) for ids in zip(*parts, strict=True))
        return as_rollout(prompt_ids, completion_ids, local_draws, tokenizer_of(trainer).pad_token_id)

    def respond(self, prompts: Sequence[Any], *seed: int) -> tuple[list[Tensor], list[Tensor]]:
        """Return the token ids of these prompts, and of one response to each, generated in one batch, as a measurement.

        A response depends on the seed, and on the other prompts of the batch.
        """
        trainer = self._trainer
        device = trainer.accelerator.device
        autocast_forward = vars(trainer.model).pop("forward", None)  # accelerate's wrapper with autocast
        try:
            # Not inference mode: tensors that a model caches in it (rotary tables) would break training's next forward.
            with torch.no_grad(), preserve_rng(device), self.measuring():
                prompt_ids = [torch.tensor(ids, device=device) for ids in trainer._tokenize_prompts(list(prompts))[0]]
                seed_torch(*seed, device=device)
                return prompt_ids, generate(trainer, prompt_ids)
        finally:
            if autocast_forward is not None:
                trainer.model.forward = autocast_forward

    def decode(self, ids: Tensor) -> str:
        return tokenizer_of(self._trainer).decode(ids, skip_special_tokens=True)
