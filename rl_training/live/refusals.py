"""Settings under which probes would corrupt training or measure something else: refused, with what to do instead."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from trl import GRPOTrainer

from rl_training.live import zero
from rl_training.live.policy import TrainerPolicy
from rl_training.probes.base import Probe
from rl_training.step.rollout import Rollout

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


def _refuse_other_sampling(trainer: GRPOTrainer) -> None:
    """Raises ValueError when responses are not sampled from the very policy whose log-probabilities are taken."""
    args = trainer.args
    asked = {key: getattr(args, key) for key in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")}
    asked |= {"do_sample": True, **(args.generation_kwargs or {})}
    of_model = {} if args.use_vllm else trainer.model.generation_config.to_dict()  # fills what is not asked for
    effective = {**of_model, **{key: value for key, value in asked.items() if value is not None}}
    for key, neutral in {**NEUTRAL_SAMPLING, "temperature": args.temperature}.items():
        value = effective.get(key)
        if value is not None and value != neutral:
            where = "" if asked.get(key) == value else " in the model's generation_config.json"
            raise ValueError(
                f"{key}={value}{where} makes the sampled policy differ from the scored one, so its entropy gradient "
                f"cannot be estimated from these samples: set {key}={neutral}, or train without probes (probe=none)"
            )


def refuse_the_same_name(probes: Sequence[Probe]) -> None:
    """Raises ValueError when two probes would write under one name."""
    twice = [name for name, count in Counter(probe.name for probe in probes).items() if count > 1]
    if twice:
        raise ValueError(f"two probes have the same name: {twice}")


def refuse_what_cannot_be_measured(trainer: GRPOTrainer) -> None:
    """Raises ValueError, saying what to do, where probes would corrupt training or measure something else."""
    _refuse_other_sampling(trainer)
    _refuse_rollouts_that_are_not_read(trainer)
    _refuse_backwards_that_are_corrupted(trainer)
    _refuse_sharded_states(trainer)


def _refuse_rollouts_that_are_not_read(trainer: GRPOTrainer) -> None:
    if trainer.num_generations < 2:
        raise ValueError("probes need num_generations >= 2: one response has no leave-one-out baseline")
    if trainer.mask_truncated_completions:
        raise ValueError(
            "mask_truncated_completions hides the truncated responses, whose entropy is part of the policy's: "
            "set mask_truncated_completions=False"
        )
    if trainer._is_vlm or trainer.tools or trainer.environments is not None:
        raise ValueError("probes read text rollouts of one turn: no images, tools or environments")
    args = trainer.args
    local_batch = args.per_device_train_batch_size * args.steps_per_generation
    if local_batch % trainer.num_generations:
        raise ValueError(
            f"a process generates {local_batch} sequences (per_device_train_batch_size x steps_per_generation), which "
            f"is not a multiple of num_generations={trainer.num_generations}: a prompt's responses would lie on two "
            f"processes; use {_next_multiple(local_batch, trainer.num_generations)}"
        )


def _refuse_backwards_that_are_corrupted(trainer: GRPOTrainer) -> None:
    args = trainer.args
    if args.gradient_checkpointing and (args.gradient_checkpointing_kwargs or {}).get("use_reentrant"):
        raise ValueError(
            "reentrant gradient checkpointing gives a second backward no gradients: "
            'set gradient_checkpointing_kwargs={"use_reentrant": False}'
        )
    ddp = trainer.accelerator.ddp_handler
    if args.ddp_static_graph or (ddp is not None and ddp.static_graph):
        raise ValueError("DDP's static_graph is silently corrupted by a second backward: set ddp_static_graph=False")
    if args.fp16:
        raise ValueError("fp16 scales the loss, and with it the gradients that probes read: use bf16 or fp32")


def _refuse_sharded_states(trainer: GRPOTrainer) -> None:
    if trainer.is_fsdp_enabled:
        raise ValueError(
            "probes do not run under FSDP, whose parameters and gradients are sharded: use DDP (launch/ddp.yaml) or "
            "ZeRO-2 (launch/zero2.yaml), or train without probes (probe=none)"
        )
    if trainer.is_deepspeed_enabled:
        zero.refuse_what_cannot_be_read(trainer.accelerator.state.deepspeed_plugin.deepspeed_config)


def refuse_split_prompts(trainer: GRPOTrainer) -> None:
    """Raises ValueError when microbatches cannot hold whole prompts."""
    if trainer._is_vlm:
        raise ValueError("the whole-prompt order of microbatches is for text only: use trl.GRPOTrainer for images")
    size, group = trainer.args.per_device_train_batch_size, trainer.num_generations
    if size % group:
        raise ValueError(
            f"per_device_train_batch_size={size} is not a multiple of num_generations={group}, so a microbatch cannot "
            f"hold all responses of its prompts: use {_next_multiple(size, group)}"
        )


def _next_multiple(size: int, of: int) -> int:
    return -(-size // of) * of


def refuse_dependence_on_padding(trainer: GRPOTrainer, policy: TrainerPolicy, rollout: Rollout) -> None:
    """Raises ValueError when the log-probabilities of a response change with the padding on the left of its prompt."""
    row = rollout.prompt_mask.sum(dim=1).argmin().view(1)  # the one with the most padding
    ids = torch.cat([rollout.prompt_ids[row], rollout.completion_ids[row]], dim=1)
    mask = torch.cat([rollout.prompt_mask[row], rollout.completion_mask[row]], dim=1)
    modes = [(module, module.training) for module in trainer.model.modules()]
    trainer.model.eval()  # dropout would be a difference too
    with torch.no_grad():
        alone = policy.score(rollout, row)
        width = rollout.completion_ids.shape[1]
        padded, _, _ = policy.logps_and_entropies(trainer.model, ids, mask, logits_to_keep=width)
    for module, mode in modes:
        module.training = mode
    difference = (alone.logps - padded[:, : alone.logps.shape[1]])[alone.mask.bool()].abs().max()
    rounded = trainer.args.bf16 or any(p.dtype.itemsize < 4 for p in trainer.model.parameters())
    if float(difference) > (0.5 if rounded else 0.01):
        raise ValueError(
            f"a response's log-probabilities change by up to {float(difference):.2g} nats with the padding on the left "
            "of its prompt (absolute position embeddings?), so what is sampled, trained on and measured are three "
            "policies: use a model with rotary positions, or train without probes (probe=none)"
        )
