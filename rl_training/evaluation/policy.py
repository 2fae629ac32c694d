"""A checkpoint's policy, and the run's first model as its reference: sampling responses and scoring given tokens.

Sampling, greedy decoding and scoring all use the same policy: weights in their own precision, no dropout, one
temperature, no top-p and no penalties. Every response has its own random numbers, so it depends neither on the other
sequences in its batch nor on the number of processes.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from rl_training.evaluation.next_token import kl_divergences
from rl_training.policy.rollout import Rollout, as_rollout
from rl_training.policy.scorer import Scorer

MAX_LOGITS_ON_CPU = 2**26  # most logits (tokens × vocabulary) at once on a CPU; more would not be faster
BYTES_PER_LOGIT = 16  # peak memory per logit: the model's logits, their fp32 copy, and the reference's
MEMORY_SHARE = 1 / 8  # of a GPU's memory that logits may take


@dataclass(frozen=True)
class TokenScores:
    """Scores of one response, one entry per token: (tokens,), fp64, in nats."""

    logps: Tensor
    entropies: Tensor
    kl: Tensor | None  # KL divergence from the policy to the reference; None without a reference


@dataclass(frozen=True)
class CheckpointPolicy:
    """A model that responds to prompts at a temperature.

    Args:
        reference: The run's first model. If it is `model` itself, its adapter is switched off to score the reference.
            None: there is no reference.
        template: Extra arguments of the tokenizer's chat template.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    reference: PreTrainedModel | None
    temperature: float
    max_completion_length: int
    template: Mapping[str, Any] = field(default_factory=dict, kw_only=True)

    @property
    def eos_token_ids(self) -> list[int]:
        """The tokens that end a response: the tokenizer's EOS, then those of the model's generation_config."""
        ids = self.model.generation_config.eos_token_id
        ids = [] if ids is None else [ids] if isinstance(ids, int) else list(ids)
        return list(dict.fromkeys([self.tokenizer.eos_token_id, *ids]))

    @torch.inference_mode()
    def generate(self, prompt_ids: Sequence[Tensor], uniforms: Tensor | None) -> list[Tensor]:
        """Return one response per prompt, ending with the first EOS token if there is one.

        Args:
            uniforms: Random numbers in [0, 1) that choose the tokens, (B, max_completion_length). None decodes
                greedily.
        """
        pad = self.tokenizer.pad_token_id
        device = self.model.device
        ids = pad_sequence(list(prompt_ids), True, pad, padding_side="left").to(device)
        mask = pad_sequence([torch.ones_like(row) for row in prompt_ids], True, padding_side="left").to(device)
        processors = LogitsProcessorList()
        if uniforms is not None:
            processors.append(_InverseCdfSampler(uniforms.to(device), ids.shape[1], self.temperature))
        config = GenerationConfig(
            max_new_tokens=self.max_completion_length,
            do_sample=False,  # to sample, _InverseCdfSampler leaves a single token
            num_beams=1,
            pad_token_id=pad,
            eos_token_id=self.eos_token_ids,
            repetition_penalty=1.0,
            disable_compile=True,
        )
        sequences = self.model.generate(
            input_ids=ids, attention_mask=mask, generation_config=config, logits_processor=processors
        )
        completions = sequences[:, ids.shape[1] :].cpu()
        is_end = torch.isin(completions, torch.tensor(self.eos_token_ids))
        lengths = (is_end.cumsum(dim=1) - is_end.long() == 0).sum(dim=1)  # number of tokens with no EOS before them
        return [row[:length] for row, length in zip(completions, lengths.tolist(), strict=True)]

    @torch.inference_mode()
    def score(self, prompt_ids: Sequence[Tensor], completion_ids: Sequence[Tensor]) -> list[TokenScores]:
        """Return each response's log-probabilities and entropies, and the KL divergence to the reference if any."""
        prompts, completions = ([ids.to(self.model.device) for ids in part] for part in (prompt_ids, completion_ids))
        rollout = as_rollout(prompts, completions, range(len(prompts)), self.tokenizer.pad_token_id)
        rows = torch.arange(len(prompts), device=self.model.device)
        lengths = [len(ids) for ids in completions]
        scores = self.scorer.score(rollout, rows, graph=False)
        is_token = scores.mask.bool()
        logps, entropies = (v[is_token].double().cpu().split(lengths) for v in (scores.logps, scores.entropies))
        kl: Sequence[Tensor | None] = [None] * len(lengths)
        if self._reference_scorer is not None:
            chunk_size = max(1, max_logits(self.model.device) // (max(lengths) * len(self.tokenizer)))
            parts = [self._kl_divergences(self._reference_scorer, rollout, chunk) for chunk in rows.split(chunk_size)]
            kl = torch.cat(parts).cpu().split(lengths)
        return [TokenScores(*values) for values in zip(logps, entropies, kl, strict=True)]

    def _kl_divergences(self, reference: Scorer, rollout: Rollout, rows: Tensor) -> Tensor:
        """Return the KL divergence from the policy to its reference at every token of these rows, (tokens,)."""
        logits = self.scorer.token_logits(rollout, rows)
        is_adapter = self.reference is self.model
        with self.model.disable_adapter() if is_adapter else contextlib.nullcontext():
            return kl_divergences(logits, reference.token_logits(rollout, rows))

    @functools.cached_property
    def scorer(self) -> Scorer:
        """Scorer of the policy, in the precision of its weights, without dropout."""
        return Scorer(self.model, self.temperature)

    @functools.cached_property
    def _reference_scorer(self) -> Scorer | None:
        return None if self.reference is None else Scorer(self.reference, self.temperature)


def max_logits(device: torch.device) -> int:
    """Return how many logits may be held at once. A single sequence may exceed it.

    The number follows from the device's total memory, not its free memory: the same command then always makes the same
    batches, and so the same numbers.
    """
    if device.type != "cuda":
        return MAX_LOGITS_ON_CPU
    return int(torch.cuda.get_device_properties(device).total_memory * MEMORY_SHARE) // BYTES_PER_LOGIT


class _InverseCdfSampler(LogitsProcessor):
    """Inverse-CDF sampling: leaves only the token where the cumulative probability first exceeds the next uniform."""

    def __init__(self, uniforms: Tensor, prompt_width: int, temperature: float) -> None:
        self.uniforms = uniforms
        self.prompt_width = prompt_width
        self.temperature = temperature

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        cumulative = (scores.double() / self.temperature).softmax(dim=-1).cumsum(dim=-1)
        number = self.uniforms[:, input_ids.shape[1] - self.prompt_width, None] * cumulative[:, -1:]
        token = torch.searchsorted(cumulative, number, right=True)  # never a token of probability 0
        return torch.full_like(scores, -torch.inf).scatter(1, token, 0.0)


def uniforms_of(seed: int, row: int, response: int, length: int) -> Tensor:
    """Return the random numbers of one response, (length,): the same for all checkpoints, batches and processes."""
    return torch.from_numpy(np.random.default_rng([seed, row, response]).random(length))
