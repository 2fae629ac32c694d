"""Whether responses are samples of the very policy whose log-probabilities are taken: why not, in words.

Expectations over the policy need samples of it. Where top-p and the like cut the distribution, or log-probabilities
depend on padding, no entropy gradient can be estimated from the samples; norms of gradients and sizes of weights can.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from trl import GRPOTrainer
from trl.trainer.utils import unsplit_pixel_values_by_grid

from rl_training.live.policy import TrainerPolicy
from rl_training.step.rollout import Rollout, images_of

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


def why_sampled_otherwise(trainer: GRPOTrainer) -> str:
    """Returns why responses are not sampled from the policy that is scored, with the way out; "" if they are."""
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


def why_padding_matters(
    trainer: GRPOTrainer, policy: TrainerPolicy, rollout: Rollout, reduce: Callable[[Tensor], Tensor]
) -> str:
    """Returns why a response has no one log-probability, "" if it has: padding left of its prompt changes it.

    A collective: the ranks answer alike.
    """
    row = rollout.prompt_mask.sum(dim=1).argmin().view(1)  # the one with the most padding
    ids = torch.cat([rollout.prompt_ids[row], rollout.completion_ids[row]], dim=1)
    mask = torch.cat([rollout.prompt_mask[row], rollout.token_mask[row]], dim=1)
    modes = [(module, module.training) for module in trainer.model.modules()]
    trainer.model.eval()  # dropout would be a difference too
    with torch.no_grad():
        alone = policy.score(rollout, row)
        width = rollout.completion_ids.shape[1]
        images = unsplit_pixel_values_by_grid(images_of(rollout, row) or {})
        padded, _, _ = policy.logps_and_entropies(trainer.model, ids, mask, logits_to_keep=width, **images)
    for module, mode in modes:
        module.training = mode
    difference = (alone.logps - padded[:, : alone.logps.shape[1]])[alone.mask.bool()].abs().max()
    rounded = trainer.args.bf16 or any(p.dtype.itemsize < 4 for p in trainer.model.parameters())
    if float(reduce((difference > (0.5 if rounded else 0.01)).double())) == 0.0:
        return ""
    return (
        "a response's log-probabilities change with the padding on the left of its prompt (absolute position "
        "embeddings?), so what is sampled, trained on and measured are three policies: use a model with rotary "
        "positions"
    )
