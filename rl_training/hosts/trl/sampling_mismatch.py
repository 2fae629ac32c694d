"""Whether responses are samples of the very policy whose log-probabilities are taken: why not, in words.

Expectations over the policy need samples of it. Where top-p and the like cut the distribution, or log-probabilities
depend on padding, no entropy gradient can be estimated from the samples; norms of gradients and sizes of weights can.
"""

from __future__ import annotations

from typing import Any

from trl import GRPOTrainer

# What generate may do beside the temperature, and with which value it does nothing; None always does nothing.
NEUTRAL_SAMPLING: dict[str, Any] = {
    "do_sample": True,
    "num_beams": 1,
    "num_beam_groups": 1,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "typical_p": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "repetition_penalty": 1.0,
    "encoder_repetition_penalty": 1.0,
    "no_repeat_ngram_size": 0,
    "encoder_no_repeat_ngram_size": 0,
    "min_length": 0,
    "min_new_tokens": 0,
    "penalty_alpha": 0.0,
    "diversity_penalty": 0.0,
    "guidance_scale": 1.0,
    "top_h": None,
    "bad_words_ids": None,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "sequence_bias": None,
    "exponential_decay_length_penalty": None,
    "watermarking_config": None,
}


def why_sampling_mismatch(trainer: GRPOTrainer) -> str:
    """Returns why responses are not sampled from the policy that is scored, with the fix; "" if they are."""
    args = trainer.args
    asked = {key: getattr(args, key) for key in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")}
    asked |= {"do_sample": True, **(args.generation_kwargs or {})}
    of_model = {} if args.use_vllm else trainer.model.generation_config.to_dict()  # fills what is not asked for
    effective = {**of_model, **{key: value for key, value in asked.items() if value is not None}}
    for key, neutral in {**NEUTRAL_SAMPLING, "temperature": args.temperature}.items():
        value = effective.get(key)
        if value is not None and value != neutral:
            where = "" if asked.get(key) == value else " in the model's generation_config.json"
            return (
                f"{key}={value}{where} makes the sampled policy differ from the scored one, so its entropy gradient "
                f"cannot be estimated from these samples: set {key}={neutral}"
            )
    return ""


def why_no_fresh_responses(trainer: GRPOTrainer) -> str:
    """Returns why no responses can be sampled beside the training's, "" if they can."""
    if trainer.tools or trainer.environment_factories is not None or trainer.rollout_func is not None:
        return (
            "fresh responses would call the tools, environments or rollout_func once more, which may remember it: "
            "training would not be what it is without probes"
        )
    if trainer._is_vlm:
        return "fresh responses are sampled to prompts of text: validate on another run without images"
    return ""
