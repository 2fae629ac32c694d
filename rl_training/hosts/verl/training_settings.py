"""The settings of verl that the workers need and cannot see, read from its configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypedDict

from omegaconf import DictConfig, OmegaConf

from rl_training.hosts.verl.whole_prompts import ROLLOUT, whole_prompts_fix

# Settings that change the sampled distribution, with the values that switch each off.
NEUTRAL_SAMPLING: dict[str, tuple[Any, ...]] = {"top_p": (1,), "top_k": (-1, 0), "do_sample": (True,)}
# What is recorded of verl's configuration. Of its sampler only these, and of the rest not what only says how it runs.
SAMPLING = ("n", "temperature", "top_p", "top_k", "do_sample", "ignore_eos", "dtype", "quantization", "response_length")
NOT_RECORDED = ("_target_", "checkpoint", "profiler", "num_workers", "dataloader_num_workers", "val_files")


class TrainingSettings(TypedDict):
    """What the workers need and cannot see of a training: a plain dictionary, which verl sends to them."""

    probes: dict[str, Any]  # configurations of probes by name, each with its `_target_`
    folder: str  # of the records
    rollouts_every: int  # see `Records`
    responses_per_prompt: int
    has_plain_advantages: bool  # advantages are rewards minus their prompt's mean
    sampling_mismatch: str  # why responses are no samples of the scored policy, with the fix; "" if they are
    max_response_length: int
    end_tokens: list[int]  # of the tokenizer; the model's generation config may have more
    recorded: dict[str, Any]  # settings that affect training, for the records
    whole_prompts_fix: str  # what keeps the responses to a prompt together


def training_settings(config: DictConfig, end_token: int | None) -> TrainingSettings:
    """Return what the workers cannot see of a training, and which probes to run.

    Args:
        config: verl's configuration.
        end_token: The end-of-sequence token id, or None.
    """
    rollout, algorithm = config.actor_rollout_ref.rollout, config.algorithm
    probes: Any = OmegaConf.to_container(config.probes, resolve=True)
    is_grpo = algorithm.adv_estimator == "grpo"  # grpo_vectorized always divides by the standard deviation
    return TrainingSettings(
        probes=probes,
        folder=str(Path(config.trainer.default_local_dir).absolute() / "logs"),
        rollouts_every=OmegaConf.select(config, "rollouts.every", default=0),
        responses_per_prompt=rollout.n,
        has_plain_advantages=is_grpo and not algorithm.norm_adv_by_std_in_grpo and not algorithm.use_kl_in_reward,
        sampling_mismatch=sampling_mismatch_reason(rollout) or selection_reason(algorithm),
        max_response_length=config.data.max_response_length,
        end_tokens=[] if end_token is None else [end_token],
        recorded=recorded_settings(config),
        whole_prompts_fix=whole_prompts_fix(config)
        or "responses of this rollout are missing, or verl has added sequences to fill the batch",
    )


def recorded_settings(config: DictConfig) -> dict[str, Any]:
    """Return the settings in verl's configuration that affect training, by name, for the records."""
    parts: dict[str, Any] = {
        "actor": config.actor_rollout_ref.actor,
        "rollout": OmegaConf.masked_copy(config.actor_rollout_ref.rollout, list(SAMPLING)),
        "algorithm": config.algorithm,
        "data": config.data,
        "reward": config.reward,
    }
    plain: dict[str, Any] = {name: OmegaConf.to_container(part, resolve=True) for name, part in parts.items()}
    return {
        "verl": {
            part: {name: value for name, value in settings.items() if name not in NOT_RECORDED}
            for part, settings in plain.items()
        }
    }


def sampling_mismatch_reason(rollout: Any) -> str:
    """Return the reason why responses are not samples of the scored policy, with the fix. Empty if they are."""
    for name, neutral in NEUTRAL_SAMPLING.items():
        value = rollout.get(name)
        if value is not None and value not in neutral:
            return f"{name}={value} samples from another policy than the scored one: set {ROLLOUT}.{name}={neutral[0]}"
    return ""


def selection_reason(algorithm: Any) -> str:
    """Return the reason why training uses only responses with certain ratios, with the fix. Empty if it uses all."""
    rejection = OmegaConf.select(algorithm, "rollout_correction.rollout_rs")
    if rejection in (None, "null"):
        return ""
    return (
        f"rollout_rs={rejection} rejects responses by their ratio to the sampler, so the rest are not a sample of any "
        "policy: set algorithm.rollout_correction.rollout_rs=null; rollout_is reweights responses and keeps them all"
    )
