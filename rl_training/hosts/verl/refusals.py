"""Settings of verl under which probes cannot measure: refused on the driver, before workers start, with the fix."""

from __future__ import annotations

from typing import Any

from omegaconf import DictConfig, OmegaConf

ACTOR, MODEL, ROLLOUT = ("actor_rollout_ref." + part for part in ("actor", "model", "rollout"))
# Setting, the values that are measured, and what is wrong with the others.
MEASURED: tuple[tuple[str, tuple[Any, ...], str], ...] = (
    (f"{ACTOR}.strategy", ("fsdp2",), "only FSDP2 hands out the gradient of each microbatch and parameter"),
    ("trainer.use_v1", (True,), "probes attach to the new trainer only"),
    ("trainer.v1.trainer_mode", ("sync", "sync_with_probes"), "the asynchronous trainers have not been tried"),
    (
        f"{ACTOR}.fsdp_config.mixed_precision.param_dtype",
        ("bf16", "bfloat16", "fp32", "float32"),
        "its loss scaler also scales the gradients that probes read",
    ),
    (f"{ACTOR}.fsdp_config.offload_policy", (False,), "probes cannot read offloaded parameters"),
    (f"{ACTOR}.ulysses_sequence_parallel_size", (1,), "a process would hold a part of each sequence"),
    (f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size", (1,), "a process would hold a part of each sequence"),
    (f"{ACTOR}.fsdp_config.qat.enable", (False,), "its forward pass is not the model's"),
    (f"{ACTOR}.use_prefix_grouper", (False,), "its forward pass shares prompts, so a row is not a sequence"),
    (f"{MODEL}.use_fused_kernels", (False,), "there would be no logits to take entropies from"),
    (f"{MODEL}.enable_activation_offload", (False,), "it has not been tried with a second backward"),
    (f"{MODEL}.tiled_mlp.enabled", (False,), "its backward accumulates gradients by itself"),
    ("distillation.enabled", (False,), "its loss is not a function of the sampled tokens' log-probabilities"),
    ("algorithm.adv_estimator", ("grpo", "grpo_passk", "rloo", "opo"), "probes measure one advantage per response"),
)
# Settings that truncate the sampled distribution, and the values that switch them off.
NEUTRAL: dict[str, tuple[Any, ...]] = {"top_p": (1, 1.0), "top_k": (-1, 0), "do_sample": (True,)}


def refuse_what_cannot_be_measured(config: DictConfig) -> None:
    """Raises ValueError, saying what to set, for the first setting under which probes cannot measure."""
    for name, measured, why in MEASURED:
        value = OmegaConf.select(config, name)
        if value is not None and value not in measured:
            raise ValueError(f"{name}={value}: {why}; set {name}={measured[0]}, or run python -m verl.trainer.main_ppo")
    if not OmegaConf.select(config, "probes"):
        raise ValueError("no probe is selected: give probe=all, or run python -m verl.trainer.main_ppo")


def why_sampling_mismatch(rollout: Any) -> str:
    """Returns why responses are not sampled from the policy that is scored, with the fix; "" if they are."""
    for name, neutral in NEUTRAL.items():
        value = rollout.get(name)
        if value is not None and value not in neutral:
            return (
                f"{name}={value} makes the sampled policy differ from the scored one, so its entropy gradient cannot "
                f"be estimated from these samples: set {ROLLOUT}.{name}={neutral[0]}"
            )
    return ""
