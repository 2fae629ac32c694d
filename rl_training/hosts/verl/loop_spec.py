"""Describes verl's loop to the driver, which treats it like any other."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from tensordict import TensorDict
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

from rl_training.engine.loop_spec import LoopSpec
from rl_training.hosts.policy import HostPolicy
from rl_training.hosts.verl.training_settings import TrainingSettings
from rl_training.hosts.verl.whole_prompts import ACTOR
from rl_training.parallel.fsdp import FullyShard
from rl_training.parallel.ranks import all_ranks
from rl_training.policy.scorer import Scorer
from rl_training.statistics.unavailable import Unavailable
from rl_training.step.batch import LossSettings
from rl_training.step.reasons import Fixes, Reasons, reason_of_loop

STEPS_FIX = f"{ACTOR}.ppo_mini_batch_size={{prompts}}, with data.train_batch_size at least as large"
FIXES = Fixes(
    batch_setting=f"{ACTOR}.ppo_micro_batch_size_per_gpu={{size}} {STEPS_FIX}",
    steps_setting=STEPS_FIX,
    num_folds_setting="probes.{name}.num_folds={folds}",
    no_reuse=f"learn from each response once ({ACTOR}.ppo_epochs=1)",
    dr_grpo="set actor.loss_agg_mode=seq-mean-token-sum-norm, actor.loss_scale_factor=<max response length> and "
    "algorithm.norm_adv_by_std_in_grpo=False, with no KL term and no entropy_coeff",
)
# With use_dynamic_bsz=True, verl ignores the size of microbatches.
DYNAMIC_FIXES = dataclasses.replace(
    FIXES, batch_setting=f"{ACTOR}.ppo_max_token_len_per_gpu=<the tokens of {{size}} sequences> {STEPS_FIX}"
)
CUT_BY_TOKENS = "verl cuts microbatches by tokens: these are the first step's"
NO_SAMPLE = Unavailable(
    "server_sleeps", "fresh responses are needed, and verl's rollout server sleeps while the engine trains"
)


def loop_spec_of(
    engine: FSDPEngineWithLMHead,
    settings: TrainingSettings,
    loss_function: Callable[..., Any],
    data: TensorDict,
    sizes: Sequence[int],
) -> LoopSpec:
    """Return what the driver must know about a training that is about to make its first step.

    Args:
        engine: verl's engine, with model and optimizer.
        settings: What only the trainer knows.
        loss_function: verl's loss, which has its settings.
        data: This rank's rows of the first optimizer step.
        sizes: Sequences in each microbatch into which verl cuts them.
    """
    dtype, device = engine._autocast_dtype, next(engine.module.parameters()).device.type
    autocast = contextlib.nullcontext if dtype == torch.float32 else lambda: torch.autocast(device, dtype)
    shard = FullyShard(engine.module, engine.optimizer, engine.optimizer_config.clip_grad)
    scorer = Scorer(engine.module, float(data["temperature"]), autocast=autocast, run_inside_forward=True)
    group, is_dynamic = int(settings["responses_per_prompt"]), engine.engine_config.use_dynamic_bsz
    size = group if is_dynamic else sizes[0]  # of the probes' own passes too; must not depend on what was sampled
    loss = dr_grpo_settings(loss_function, data) if settings["has_plain_advantages"] else None
    tokenizer = engine.model_config.tokenizer
    decode = None if tokenizer is None else lambda ids: tokenizer.decode(ids, skip_special_tokens=True)
    return LoopSpec(
        responses_per_prompt=group,
        microbatch_size=size,
        microbatches=len(sizes),
        first_sizes=tuple(sizes) if is_dynamic else (),
        shard=shard,
        policy=HostPolicy(engine.module, scorer, size, None, decode),
        ranks=all_ranks(),
        has_other_loss=loss is None,
        loss_settings=loss,
        reasons=Reasons(other_policy=reason_of_loop(settings["sampling_mismatch"]), cannot_sample=NO_SAMPLE),
        fixes=dataclasses.replace(DYNAMIC_FIXES if is_dynamic else FIXES, whole_prompts=settings["whole_prompts_fix"]),
        opening=CUT_BY_TOKENS if is_dynamic else "",
    )


def end_tokens_of(engine: FSDPEngineWithLMHead, settings: TrainingSettings) -> list[int]:
    """Return the token ids that end a response: the tokenizer's, and those of the model's generation config."""
    configured = getattr(engine.model_config.generation_config, "eos_token_id", None)
    configured = configured if isinstance(configured, list) else [configured]
    return sorted({*settings["end_tokens"], *(token for token in configured if token is not None)})


def dr_grpo_settings(loss_function: Callable[..., Any], data: TensorDict) -> LossSettings | None:
    """Return the settings of verl's loss if it is Dr-GRPO's. None for another loss, or one that is not verl's."""
    config = getattr(loss_function, "keywords", {}).get("config")
    if config is None or "rollout_is_weights" in data or config.use_kl_loss or config.entropy_coeff != 0:
        return None
    is_plain = config.policy_loss.get("loss_mode", "vanilla") == "vanilla"
    if not is_plain or config.loss_scale_factor is None or config.loss_agg_mode != "seq-mean-token-sum-norm":
        return None
    bounds = config.clip_ratio_low, config.clip_ratio_high
    low, high = (config.clip_ratio if bound is None else bound for bound in bounds)
    return LossSettings(int(config.loss_scale_factor), low, high, hides_truncated=False)
