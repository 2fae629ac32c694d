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
from torch.nn.utils.rnn import pad_sequence
from transformers import GenerationConfig
from trl import GRPOTrainer

from rl_training.errors import UserError
from rl_training.hosts.trl import versions
from rl_training.hosts.trl.settings.rollout_shape import sequences_per_rollout
from rl_training.hosts.trl.settings.sampling import STREAM
from rl_training.hosts.trl.sharding import has_sharded_weights
from rl_training.parallel.fsdp import reshard
from rl_training.parallel.ranks import all_ranks
from rl_training.policy.policy import Policy, draws_of_rank
from rl_training.policy.precision import measuring
from rl_training.policy.rng import preserve_rng, seed_torch
from rl_training.policy.rollout import Rollout, as_rollout
from rl_training.policy.scorer import Scorer
from rl_training.policy.scores import Scores

KV_CACHE_MEMORY_SHARE = 1 / 8  # share of a GPU's memory for the KV cache of responses that a probe generates


class TrainerPolicy(Policy):
    """The policy of a trainer.

    Args:
        trainer: The trainer.
        call_head: Whether scoring calls the head's module, so that hooks on it run.
    """

    def __init__(self, trainer: GRPOTrainer, call_head: bool = False) -> None:
        self._trainer, self._call_head = trainer, call_head
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
            missing = torch.full_like(rollout.completion_mask, torch.nan, dtype=torch.float32)
            own_scores = Scores(missing, missing, rollout.completion_mask)
            if is_needed:
                own_scores = self.score_rollout(rollout, as_training=True, dropout=True)
            logps, entropies = own_scores.logps if logps is None else logps, own_scores.entropies
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
        logps, entropies = scores.logps.detach().clone(), scores.entropies.detach().clone()
        rows = hidden.nonzero().squeeze(1)
        batches = self.batches_of(rows)  # none on a rank whose rows are all scored
        fresh = self.score_rollout(rollout, as_training=True, dropout=True, batches=batches)
        logps[rows], entropies[rows] = fresh.logps.to(logps), fresh.entropies.to(entropies)
        return Scores(logps, entropies, scores.mask)

    def sample(self, num_sequences: int, seed: int) -> Rollout:
        """Sample this rank's share of `num_sequences` fresh responses, see `Policy.sample`. Advantages are nan.

        Prompts are drawn with replacement, so the sequences are independent. `prompt_index` numbers the draws over all
        ranks: rank r has the draws r, r + ranks, ...
        """
        trainer, accelerator = self._trainer, self._trainer.accelerator
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
            return respond(trainer, [prompts[i] for i in indices], seed, 1 + accelerator.process_index, number)

        parts = self.run_passes(torch.arange(len(local_draws)).split(size), respond_to)
        prompt_ids, completion_ids = (list(itertools.chain(*ids)) for ids in zip(*parts, strict=True))
        return as_rollout(prompt_ids, completion_ids, local_draws, versions.tokenizer_of(trainer).pad_token_id)

    def decode(self, ids: Tensor) -> str:
        return versions.tokenizer_of(self._trainer).decode(ids, skip_special_tokens=True)


def max_responses(trainer: GRPOTrainer, prompts: Sequence[Any], memory: float) -> int:
    """Return how many responses to these prompts may be generated at once in `memory` bytes. At least 1."""
    longest_prompt = max(map(len, trainer._tokenize_prompts(list(prompts))[0]))
    return max_kv_caches(trainer.model.config, longest_prompt + trainer.max_completion_length, memory)


def max_kv_caches(config: Any, tokens: int, memory: float) -> int:
    """Return how many fp32 KV caches of `tokens` tokens fit into their share of `memory` bytes. At least 1."""
    text = config.get_text_config()
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return max(1, int(KV_CACHE_MEMORY_SHARE * memory) // (2 * 4 * text.num_hidden_layers * heads * width * tokens))


def respond(trainer: GRPOTrainer, prompts: Sequence[Any], *seed: int) -> tuple[list[Tensor], list[Tensor]]:
    """Return the token ids of these prompts, and of one response to each, generated in one batch.

    A response depends on the seed, and on the other prompts of the batch.
    """
    device = trainer.accelerator.device
    autocast_forward = vars(trainer.model).pop("forward", None)  # accelerate's wrapper with autocast
    try:
        # Not inference mode: tensors that a model caches in it (rotary tables) would break training's next forward.
        with torch.no_grad(), preserve_rng(device), measuring(trainer.model):
            prompt_ids = [torch.tensor(ids, device=device) for ids in trainer._tokenize_prompts(list(prompts))[0]]
            seed_torch(*seed, device=device)
            return prompt_ids, _generate(trainer, prompt_ids)
    finally:
        if autocast_forward is not None:
            trainer.model.forward = autocast_forward


def _generate(trainer: GRPOTrainer, prompt_ids: list[Tensor]) -> list[Tensor]:
    """Generate a response to each prompt as TRL does, cut after the first end-of-sequence token."""
    pad, ends = versions.tokenizer_of(trainer).pad_token_id, versions.of_trainer(trainer, "eos_token_ids")
    config = None if trainer.use_vllm else trainer.generation_config
    if config is None:  # vLLM's settings are neutral too: otherwise sampling_reason rules out fresh samples
        config = GenerationConfig(
            max_new_tokens=trainer.max_completion_length,
            do_sample=True,
            temperature=trainer.temperature,
            top_p=1.0,
            top_k=0,
            repetition_penalty=1.0,
            pad_token_id=pad,
            eos_token_id=ends,
            disable_compile=True,
        )
    ids = pad_sequence(prompt_ids, True, pad, padding_side="left")
    mask = pad_sequence([torch.ones_like(row) for row in prompt_ids], True, padding_side="left")
    checkpointing = trainer.args.gradient_checkpointing_kwargs
    with versions.unwrap_for_generation(trainer.model_wrapped, trainer.accelerator, checkpointing) as model:
        # Sharded weights are gathered layer by layer, so all ranks must generate until the longest response ends.
        sequences = model.generate(
            input_ids=ids, attention_mask=mask, generation_config=config, synced_gpus=has_sharded_weights(trainer)
        )
    reshard(trainer.model)
    completions = sequences[:, ids.shape[1] :]
    is_end = torch.isin(completions, torch.tensor(ends, device=completions.device))
    lengths = (is_end.cumsum(dim=1) - is_end.long() == 0).sum(dim=1)  # tokens with no end before them
    return [row[:length] for row, length in zip(completions, lengths.tolist(), strict=True)]
