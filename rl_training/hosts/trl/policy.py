"""The policy of a trainer, for probes: it scores, samples and decodes exactly as training would.

The trainer may be running, or restored at a checkpoint without taking steps.

Fresh responses, for measurements that need sequences of their own, come from the policy that is scored: the unwrapped
model in the precision of its weights (autocast off), without dropout, at the trainer's temperature. Where TRL generates
with vLLM it is the same policy up to vLLM's numerics. Restored bit for bit afterwards: the random streams of Python,
NumPy and torch, the train / eval mode of every module, gradient checkpointing, autocast.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import GenerationConfig
from trl import GRPOTrainer
from trl.models import unwrap_model_for_generation

from rl_training.errors import UserError
from rl_training.hosts.trl.sharding import has_sharded_weights
from rl_training.parallel.fsdp import reshard
from rl_training.policy.policy import Policy
from rl_training.policy.precision import measuring
from rl_training.policy.rng import preserve_rng, seed_torch
from rl_training.policy.rollout import Rollout, as_rollout, take_rows
from rl_training.policy.scorer import Scorer
from rl_training.policy.scores import Scores
from rl_training.statistics.limit import Limit
from rl_training.step.limits import SAMPLING_MISMATCH

REGEX = "vllm_structured_outputs_regex"
SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")  # what TRL has settings of its own for
# Options of generate beside the temperature, by the value that switches them off; None always does.
NEUTRAL_SAMPLING: dict[str, Any] = {
    "do_sample": True,
    **dict.fromkeys(("num_beams", "num_beam_groups"), 1),
    **dict.fromkeys(("top_p", "typical_p", "repetition_penalty", "encoder_repetition_penalty", "guidance_scale"), 1.0),
    **dict.fromkeys(("min_p", "epsilon_cutoff", "eta_cutoff", "penalty_alpha", "diversity_penalty"), 0.0),
    **dict.fromkeys(("top_k", "min_length", "min_new_tokens", "min_tokens"), 0),
    **dict.fromkeys(("no_repeat_ngram_size", "encoder_no_repeat_ngram_size"), 0),
    **dict.fromkeys(("bad_words_ids", "suppress_tokens", "begin_suppress_tokens", "forced_bos_token_id")),
    **dict.fromkeys(("forced_eos_token_id", "sequence_bias", "exponential_decay_length_penalty")),
    **dict.fromkeys(("watermarking_config", "top_h")),
    **dict.fromkeys(("presence_penalty", "frequency_penalty"), 0.0),  # from here on vLLM's
    **dict.fromkeys(("logit_bias", "allowed_token_ids", "bad_words", "structured_outputs", REGEX)),
}


STREAM = Limit(
    "streamed",
    "prompts can be drawn at random only from a training set with a length",
    fix="load it without streaming, or measure without fresh samples",
)
KEEPS_STATE = Limit(
    "generation_keeps_state",
    "fresh responses would call the tools, environments or rollout_func once more; if these keep state, training would "
    "differ from training without probes",
)
IMAGES = Limit("images", "fresh responses can only be sampled for text prompts", fix="validate in a run without images")
OTHER_SAMPLING = Limit(
    SAMPLING_MISMATCH.code,
    "{setting} makes the sampled policy differ from the scored one, so its entropy gradient cannot be estimated from "
    "these samples",
    fix="set {name}={neutral}",
)
SHARE = 1 / 8  # of a GPU's memory: for keys and values of responses that a probe generates


class TrainerPolicy(Policy):
    """The policy of this trainer.

    call_head  the head's module is called when scoring, for hooks on it
    """

    def __init__(self, trainer: GRPOTrainer, call_head: bool = False) -> None:
        self._trainer, self._call_head = trainer, call_head
        self._reference: tuple[nn.Module, Scorer] | None = None  # a model, and its scorer
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
        """The scorer of TRL's reference model, which it keeps if beta > 0; None where it is sharded."""
        trainer = self._trainer
        sharded = trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled
        if trainer.ref_model is None or sharded:
            return None
        if self._reference is None or self._reference[0] is not trainer.ref_model:
            self._reference = trainer.ref_model, self._scorer_of(trainer.ref_model)
        return self._reference[1]

    @property
    def has_reference(self) -> bool:
        # "ref" is TRL's copy of an adapter that is trained further: without it the model is no reference.
        return "ref" not in getattr(self.model, "peft_config", {}) and super().has_reference

    def completed(self, loss_scores: tuple[Tensor, Tensor | None] | None, rollout: Rollout, is_kept: bool) -> Scores:
        """Return training's own scores, with what training has not asked for scored here, without graph.

        found    training's log-probabilities, perhaps with entropies; None where its loss takes none
        is_kept  somebody reads the scores: otherwise what is not there is nan
        """
        logps, entropies = loss_scores or (None, None)
        if logps is None or entropies is None:
            nothing = torch.full_like(rollout.completion_mask, torch.nan, dtype=torch.float32)
            own_scores = Scores(nothing, nothing, rollout.completion_mask)
            if is_kept:
                own_scores = self.score_rollout(rollout, as_training=True, dropout=True)
            logps, entropies = own_scores.logps if logps is None else logps, own_scores.entropies
        return Scores(logps, entropies, rollout.completion_mask)

    def with_hidden(self, scores: Scores, rollout: Rollout, hidden: Tensor) -> Scores:
        """Return these scores with those of hidden rows, (B,), recomputed: training's forward pass masks them.

        Without graph, and otherwise as training would score them.
        """
        logps, entropies = scores.logps.detach().clone(), scores.entropies.detach().clone()
        rows = hidden.nonzero().squeeze(1)
        if len(rows):
            fresh = self.score_rollout(take_rows(rollout, rows), as_training=True, dropout=True)
            logps[rows], entropies[rows] = fresh.logps.to(logps), fresh.entropies.to(entropies)
        return Scores(logps, entropies, scores.mask)

    def sample(self, num_sequences: int, seed: int) -> Rollout:
        """Return this rank's share of so many fresh responses: see Policy. There are no advantages: nan.

        Prompts are drawn with replacement, so that sequences are independent; `prompt_index` numbers the draws over all
        ranks, of which rank r has r, r + ranks, ...
        """
        trainer, accelerator = self._trainer, self._trainer.accelerator
        if not hasattr(trainer.train_dataset, "__len__"):
            raise UserError(STREAM)
        rows = np.random.default_rng([seed, 0]).integers(len(trainer.train_dataset), size=num_sequences)
        mine = range(accelerator.process_index, num_sequences, accelerator.num_processes)
        if not mine:
            raise UserError(
                f"{num_sequences} sequences cannot be shared among {accelerator.num_processes} processes: "
                f"sample at least one for each"
            )
        prompts = [trainer.train_dataset[int(rows[i])]["prompt"] for i in mine]
        size = trainer.args.per_device_train_batch_size * trainer.args.steps_per_generation
        if accelerator.device.type == "cuda":  # of all its memory: the same run draws the same batches again
            memory = torch.cuda.get_device_properties(accelerator.device).total_memory
            size = min(size, caches_that_fit(trainer.model.config, trainer.max_completion_length, memory))
        prompt_ids, completion_ids = [], []
        for number, part in enumerate(self.in_batches(torch.arange(len(mine), device=accelerator.device), size)):
            # A seed per batch: how many numbers a batch uses depends on its longest response, hence on the parameters.
            some = [prompts[row] for row in part.tolist()]
            batch = respond(trainer, some, seed, 1 + accelerator.process_index, number)
            prompt_ids += batch[0]
            completion_ids += batch[1]
        local_rows = slice(len(mine))
        return as_rollout(prompt_ids[local_rows], completion_ids[local_rows], mine, trainer._tokenizer.pad_token_id)

    def decode(self, ids: Tensor) -> str:
        return self._trainer._tokenizer.decode(ids, skip_special_tokens=True)


def caches_that_fit(config: Any, tokens: int, memory: float) -> int:
    """Return how many responses' keys and values, in fp32, take at most SHARE of a GPU's memory; at least 1."""
    text = config.get_text_config()
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return max(1, int(SHARE * memory) // (2 * 4 * text.num_hidden_layers * heads * width * tokens))


def respond(trainer: GRPOTrainer, prompts: Sequence[Any], *seed: int) -> tuple[list[Tensor], list[Tensor]]:
    """Return the token ids of these prompts and of a response to each, generated in one batch.

    The response to a prompt depends on the seed, and on the prompts that are in the batch with it.
    """
    device = trainer.accelerator.device
    autocast_forward = vars(trainer.model).pop("forward", None)  # accelerate's
    try:
        # Not inference mode: what a model caches under it (rotary tables) would break training's next forward pass.
        with torch.no_grad(), preserve_rng(device), measuring(trainer.model):
            prompt_ids = [torch.tensor(ids, device=device) for ids in trainer._tokenize_prompts(list(prompts))[0]]
            seed_torch(*seed, device=device)
            return prompt_ids, _generate(trainer, prompt_ids)
    finally:
        if autocast_forward is not None:
            trainer.model.forward = autocast_forward


def _generate(trainer: GRPOTrainer, prompt_ids: list[Tensor]) -> list[Tensor]:
    """Return a response to each prompt as TRL's own generation makes it, cut after the first end-of-sequence token."""
    pad = trainer._tokenizer.pad_token_id
    config = None if trainer.use_vllm else trainer.generation_config
    if config is None:  # neutral, as vLLM's settings are, or nobody asks for samples: sampling_limit
        config = GenerationConfig(
            max_new_tokens=trainer.max_completion_length,
            do_sample=True,
            temperature=trainer.temperature,
            top_p=1.0,
            top_k=0,
            repetition_penalty=1.0,
            pad_token_id=pad,
            eos_token_id=trainer.eos_token_ids,
            disable_compile=True,
        )
    ids = pad_sequence(prompt_ids, True, pad, padding_side="left")
    mask = pad_sequence([torch.ones_like(row) for row in prompt_ids], True, padding_side="left")
    with unwrap_model_for_generation(
        trainer.model_wrapped,
        trainer.accelerator,
        gather_deepspeed3_params=False,
        gradient_checkpointing_kwargs=trainer.args.gradient_checkpointing_kwargs,
    ) as model:
        # Sharded weights are gathered layer by layer, so processes generate as many tokens as the longest of all takes.
        sequences = model.generate(
            input_ids=ids, attention_mask=mask, generation_config=config, synced_gpus=has_sharded_weights(trainer)
        )
    reshard(trainer.model)
    completions = sequences[:, ids.shape[1] :]
    is_end = torch.isin(completions, torch.tensor(trainer.eos_token_ids, device=completions.device))
    lengths = (is_end.cumsum(dim=1) - is_end.long() == 0).sum(dim=1)  # tokens with no end before them
    return [row[:length] for row, length in zip(completions, lengths.tolist(), strict=True)]


def sampling_limit(trainer: GRPOTrainer) -> Limit | None:
    """Return the limit of responses that, sampled now, are none of the policy that is scored, or None.

    By what generation reads, which a callback may have changed since the trainer was made.
    """
    args = trainer.args
    requested = {key: getattr(args, key) for key in SAMPLING}
    requested |= {"do_sample": True, REGEX: getattr(args, REGEX) if args.use_vllm else None}
    requested |= args.generation_kwargs or {}
    effective, where = _effective_sampling(trainer)
    if effective.get("suppress_tokens") == [getattr(trainer.model.config, "image_token_id", None)]:
        del effective["suppress_tokens"]  # TRL's own: no response is meant to have a token of an image
    for key, neutral in {**NEUTRAL_SAMPLING, "temperature": trainer.temperature}.items():
        value = effective.get(key)
        if value is not None and value != neutral:
            place = "" if requested.get(key) == value else f" in {where[key]}"
            return OTHER_SAMPLING.filled(setting=f"{key}={value}{place}", name=key, neutral=neutral)
    return None


def _effective_sampling(trainer: GRPOTrainer) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the options of the next generation, and where each comes from."""
    if trainer.use_vllm:
        engine = trainer.vllm_generation
        engine_settings = {**{key: getattr(engine, key) for key in SAMPLING}, REGEX: engine.structured_outputs_regex}
        layers = {"trainer.vllm_generation": engine_settings | engine.generation_kwargs}
    else:  # each fills what those after it leave open
        layers = {
            "the model's generation_config.json": trainer.model.generation_config.to_dict(),
            "trainer.generation_kwargs": trainer.generation_kwargs,
            "trainer.generation_config": trainer.generation_config.to_dict(),
        }
    effective: dict[str, Any] = {}
    where: dict[str, str] = {}
    for place, options in layers.items():
        given = {key: value for key, value in options.items() if value is not None}
        effective |= given
        where |= dict.fromkeys(given, place)
    return effective, where


def fresh_responses_limit(trainer: GRPOTrainer) -> Limit | None:
    """Return the limit of a trainer that cannot sample extra responses during training, or None."""
    if trainer.tools or trainer.environment_factories is not None or trainer.rollout_func is not None:
        return KEEPS_STATE
    if not hasattr(trainer.train_dataset, "__len__"):
        return STREAM
    return IMAGES if trainer._is_vlm else None
