"""What cannot be measured by verl's settings, refused in the command before workers start, each with the fix."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from omegaconf import DictConfig, OmegaConf

from rl_training.engine.driver import StepDriver
from rl_training.errors import UserError
from rl_training.hosts.verl.probes import make_probes
from rl_training.hosts.verl.whole_prompts import ACTOR, ROLLOUT, num_processes, whole_prompts_fix

MODEL, FSDP = "actor_rollout_ref.model", f"{ACTOR}.fsdp_config"
WITHOUT_PROBES = "run python -m verl.trainer.main_ppo"
PRECISIONS = ("bf16", "bfloat16", "fp32", "float32")
# Advantage estimators without a critic.
ESTIMATORS = ("grpo", "grpo_vectorized", "grpo_passk", "rloo", "rloo_vectorized", "opo", "gpg")
# Each setting, the values with which probes can measure, and the reason why not with others. The first is the fix.
SUPPORTED: tuple[tuple[str, Sequence[Any], str], ...] = (
    (f"{ACTOR}.strategy", ("fsdp2",), "only FSDP2 hands out the gradient of each microbatch and parameter"),
    ("trainer.use_v1", (True,), "probes attach to the new trainer only"),
    ("trainer.v1.trainer_mode", ("sync", "sync_with_probes"), "the asynchronous trainers have not been tried"),
    (f"{FSDP}.mixed_precision.param_dtype", PRECISIONS, "its loss scaler also scales the gradients that probes read"),
    (f"{FSDP}.offload_policy", (False,), "probes cannot read offloaded parameters"),
    (f"{ACTOR}.ulysses_sequence_parallel_size", (1,), "a process would hold a part of each sequence"),
    (f"{FSDP}.ulysses_sequence_parallel_size", (1,), "a process would hold a part of each sequence"),
    (f"{FSDP}.qat.enable", (False,), "its forward pass is not the model's"),
    (f"{ACTOR}.use_prefix_grouper", (False,), "its forward pass shares prompts, so a row is not a sequence"),
    (f"{MODEL}.use_fused_kernels", (False,), "there would be no logits to take entropies from"),
    (f"{MODEL}.enable_activation_offload", (False,), "it has not been tried with a second backward"),
    (f"{MODEL}.tiled_mlp.enabled", (False,), "its backward accumulates gradients by itself"),
    ("distillation.enabled", (False,), "its loss is not a function of the sampled tokens' log-probabilities"),
    ("algorithm.adv_estimator", ESTIMATORS, "a critic has not been tried"),
    (f"{ROLLOUT}.n", range(2, 2**20), "each response is compared with the others to its prompt"),
)


def refuse_what_cannot_be_measured(config: DictConfig) -> None:
    """Raise UserError, with the fix, for the first setting or probe with which nothing can be measured."""
    for name, supported, why in SUPPORTED:
        value = OmegaConf.select(config, name)
        if value is not None and value not in supported:
            raise UserError(f"{name}={value}: {why}; set {name}={supported[0]}, or {WITHOUT_PROBES}")
    if not OmegaConf.select(config, "probes"):
        raise UserError(f"no probe is selected: give probe=all, or {WITHOUT_PROBES}")
    _refuse_impossible_probes(config)


def _refuse_impossible_probes(config: DictConfig) -> None:
    """Raise UserError for probes that a worker could not make or run together.

    Workers make them again. Ray would tell their error from afar, after the model is loaded.
    """
    probes: Any = OmegaConf.to_container(config.probes, resolve=True)
    driver = StepDriver(make_probes(probes))
    if not whole_prompts_fix(config):  # otherwise folds are not of whole prompts, whatever their number
        group, processes = config.actor_rollout_ref.rollout.n, num_processes(config)
        local_prompts = config.actor_rollout_ref.actor.ppo_mini_batch_size // processes
        driver.refuse_impossible_folds(local_prompts * group, group, processes)
