"""Tells from a trainer's settings whether responses are samples of the scored policy, and whether it can draw more."""

from __future__ import annotations

from typing import Any

from trl import GRPOTrainer

from rl_training.hosts.trl import versions
from rl_training.statistics.unavailable import Unavailable
from rl_training.step.reasons import SAMPLING_MISMATCH

REGEX = "vllm_structured_outputs_regex"
SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")  # options that are fields of GRPOConfig
# Options of `generate` other than the temperature, with the values that switch each off. None always does.
NEUTRAL_SAMPLING: dict[str, tuple[Any, ...]] = {
    "do_sample": (True,),
    "num_beams": (1,),
    "num_beam_groups": (1,),
    "top_p": (1.0,),
    "typical_p": (1.0,),
    "repetition_penalty": (1.0,),
    "encoder_repetition_penalty": (1.0,),
    "guidance_scale": (1.0,),
    "min_p": (0.0,),
    "epsilon_cutoff": (0.0,),
    "eta_cutoff": (0.0,),
    "penalty_alpha": (0.0,),
    "diversity_penalty": (0.0,),
    "top_k": (0, -1),  # vLLM's own word for none is -1
    "min_length": (0,),
    "min_new_tokens": (0,),
    "min_tokens": (0,),
    "no_repeat_ngram_size": (0,),
    "encoder_no_repeat_ngram_size": (0,),
    "bad_words_ids": (None,),
    "suppress_tokens": (None,),
    "begin_suppress_tokens": (None,),
    "forced_bos_token_id": (None,),
    "forced_eos_token_id": (None,),
    "sequence_bias": (None,),
    "exponential_decay_length_penalty": (None,),
    "watermarking_config": (None,),
    "top_h": (None,),
    # vLLM's own options.
    "presence_penalty": (0.0,),
    "frequency_penalty": (0.0,),
    "logit_bias": (None,),
    "allowed_token_ids": (None,),
    "bad_words": (None,),
    "structured_outputs": (None,),
    REGEX: (None,),
}
STREAM = Unavailable(
    "streamed",
    "fresh responses need prompts drawn at random, which a training set without a length does not allow",
    fix="load it without streaming, or measure without fresh samples",
)
KEEPS_STATE = Unavailable(
    "generation_keeps_state",
    "fresh responses would call the tools, environments or rollout_func once more; if these keep state, training would "
    "differ from training without probes",
)
IMAGES = Unavailable(
    "images", "fresh responses can only be sampled for text prompts", fix="validate in a run without images"
)
OTHER_SAMPLING = Unavailable(
    SAMPLING_MISMATCH.code,
    "{setting} makes the sampled policy differ from the scored one, so its entropy gradient cannot be estimated from "
    "these samples",
    fix="set {name}={neutral}",
)


def sampling_reason(trainer: GRPOTrainer, scored_temperature: float) -> Unavailable | None:
    """Return the reason why responses sampled now are not samples of the scored policy, or None.

    It reads the current options of generation, which a callback may have changed since the trainer was made.

    Args:
        trainer: The trainer.
        scored_temperature: The temperature of the scores. Newer versions of TRL keep the one that a trainer is made
            with in the head of its model, whatever its attribute says later.
    """
    args = trainer.args
    requested = {key: getattr(args, key) for key in SAMPLING}
    requested |= {"do_sample": True, REGEX: getattr(args, REGEX) if args.use_vllm else None}
    requested |= args.generation_kwargs or {}
    effective, where = _effective_sampling(trainer)
    if effective.get("suppress_tokens") == [getattr(trainer.model.config, "image_token_id", None)]:
        del effective["suppress_tokens"]  # set by TRL, so that no response contains an image token
    for key, neutral in {**NEUTRAL_SAMPLING, "temperature": (scored_temperature,)}.items():
        value = effective.get(key)
        if value is not None and value not in neutral:
            place = "" if requested.get(key) == value else f" in {where[key]}"
            return OTHER_SAMPLING.formatted(setting=f"{key}={value}{place}", name=key, neutral=neutral[0])
    return None


def _effective_sampling(trainer: GRPOTrainer) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the options of the next generation, and the place that each comes from."""
    if trainer.use_vllm:
        engine = trainer.vllm_generation
        engine_settings = {**{key: getattr(engine, key) for key in SAMPLING}, REGEX: engine.structured_outputs_regex}
        layers = {"trainer.vllm_generation": engine_settings | engine.generation_kwargs}
    else:  # later layers override earlier ones
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


def fresh_responses_reason(trainer: GRPOTrainer) -> Unavailable | None:
    """Return the reason why this trainer cannot sample extra responses during training, or None."""
    if versions.generation_calls_code(trainer):
        return KEEPS_STATE
    if not hasattr(trainer.train_dataset, "__len__"):
        return STREAM
    return IMAGES if versions.has_images(trainer) else None
