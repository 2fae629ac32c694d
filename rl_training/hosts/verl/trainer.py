"""verl's synchronous trainer, which keeps the responses to a prompt together and tells the engine what to measure.

verl balances the lengths on ranks by moving single responses, which scatters those to one prompt. Here whole prompts
are moved. This only changes the order of summation, and makes leave-one-prompt-out estimates possible.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray
import torch
from omegaconf import DictConfig, OmegaConf, open_dict
from verl.trainer.main_ppo import TaskRunnerV1
from verl.trainer.ppo.v1.trainer_base import register_trainer
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
from verl.utils.seqlen_balancing import calculate_workload, get_seqlen_balanced_partitions

from rl_training.errors import UserError
from rl_training.hosts.verl.batch import RolloutSettings
from rl_training.hosts.verl.engine import ACTOR, SETTINGS

TRAINER, LIBRARY = "sync_with_probes", "rl_training.hosts.verl"
MODEL, ROLLOUT = "actor_rollout_ref.model", "actor_rollout_ref.rollout"
FSDP = f"{ACTOR}.fsdp_config"
PRECISIONS = ("bf16", "bfloat16", "fp32", "float32")
# Advantage estimators without a critic.
ESTIMATORS = ("grpo", "grpo_vectorized", "grpo_passk", "rloo", "rloo_vectorized", "opo", "gpg")
# Each setting, the values with which probes can measure, and the reason why not with others.
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
# Settings that change the sampled distribution, with the values that switch each off.
NEUTRAL_SAMPLING: dict[str, tuple[Any, ...]] = {"top_p": (1,), "top_k": (-1, 0), "do_sample": (True,)}


@register_trainer(TRAINER)
class ProbedTrainer(PPOTrainerSync):
    """verl's synchronous trainer, with whole prompts on each rank and with settings of probes in its batches."""

    def __init__(self, config: DictConfig) -> None:
        super().__init__(with_probes(config))  # again, because verl's own command does not call it

    def _balance_batch(self, batch: Any, metrics: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        batch = super()._balance_batch(batch, metrics, *args, **kwargs)
        lengths = [tag["seq_len"] for tag in batch.tags]
        rows = whole_prompts_order(batch.keys, lengths, self.actor_rollout_wg.world_size)
        if rows is not None:
            batch.reorder(rows)
        return batch

    def _update_actor(self, batch: Any, metrics: dict[str, Any]) -> Any:
        config, end_token = self.config, self.tokenizer.eos_token_id
        batch.extra_info[SETTINGS] = rollout_settings(config, batch.tags, self.global_steps, end_token)
        if config.actor_rollout_ref.actor.use_dynamic_bsz and not whole_prompts_fix(config):
            # verl splits batches by tokens alone, which would split prompts. A group too large for a microbatch would
            # end training, so this is set only if every group fits.
            batch.extra_info["force_group_size"] = config.actor_rollout_ref.rollout.n
        return super()._update_actor(batch, metrics)


def whole_prompts_order(keys: list[str], lengths: list[int], ranks: int) -> list[int] | None:
    """Return an order of rows that keeps each prompt on one rank and balances lengths. None if there is none.

    Args:
        keys: verl's name of each row, UID_SESSION_INDEX.
        lengths: Tokens of each row.
        ranks: Number of ranks.
    """
    rows_by_prompt: dict[str, list[int]] = {}
    for row in sorted(range(len(keys)), key=keys.__getitem__):
        rows_by_prompt.setdefault(keys[row].rsplit("_", 2)[0], []).append(row)
    prompts = list(rows_by_prompt.values())
    if len(prompts) % ranks or len({len(rows) for rows in prompts}) > 1:
        return None
    work = calculate_workload(torch.tensor(lengths))
    work_by_prompt = [float(work[rows].sum()) for rows in prompts]
    parts = get_seqlen_balanced_partitions(work_by_prompt, k_partitions=ranks, equal_size=True)
    return [row for part in parts for prompt in part for row in prompts[prompt]]


def rollout_settings(
    config: DictConfig, tags: list[dict[str, Any]], step: int, end_token: int | None
) -> RolloutSettings:
    """Return what the engine cannot know about a rollout, and which probes to run.

    Args:
        config: verl's configuration.
        tags: verl's tags of each row.
        step: The trainer's step, which is the rollout's number.
        end_token: The end-of-sequence token id, or None.
    """
    rollout, algorithm = config.actor_rollout_ref.rollout, config.algorithm
    versions = {tag.get(name) for tag in tags for name in ("min_global_steps", "max_global_steps")}
    probes: Any = OmegaConf.to_container(config.probes, resolve=True)
    is_grpo = algorithm.adv_estimator == "grpo"  # grpo_vectorized always divides by the standard deviation
    return RolloutSettings(
        probes=probes,
        folder=str(Path(config.trainer.default_local_dir).absolute() / "logs"),
        rollouts_every=OmegaConf.select(config, "rollouts.every", default=0),
        responses_per_prompt=rollout.n,
        rollout=step,
        fresh=versions == {step - 1},
        plain_advantages=is_grpo and not algorithm.norm_adv_by_std_in_grpo and not algorithm.use_kl_in_reward,
        sampling_mismatch=sampling_mismatch_reason(rollout) or selection_reason(algorithm),
        max_response_length=config.data.max_response_length,
        end_tokens=[] if end_token is None else [end_token],
        whole_prompts_fix=whole_prompts_fix(config)
        or "responses of this rollout are missing, or verl has added sequences to fill the batch",
    )


def whole_prompts_fix(config: DictConfig) -> str:
    """Return the fix for a setting that separates the responses to a prompt. Empty if they stay together."""
    actor, n = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout.n
    processes = config.trainer.n_gpus_per_node * config.trainer.nnodes
    if actor.shuffle:
        return f"set {ACTOR}.shuffle=False"
    if actor.ppo_mini_batch_size % processes:
        return f"set {ACTOR}.ppo_mini_batch_size to a multiple of {processes}, the number of processes"
    tokens = n * (config.data.max_prompt_length + config.data.max_response_length)
    if actor.use_dynamic_bsz and tokens > actor.ppo_max_token_len_per_gpu:
        return f"set {ACTOR}.ppo_max_token_len_per_gpu={tokens} or more"
    if not actor.use_dynamic_bsz and (actor.ppo_micro_batch_size_per_gpu or 1) % n:
        return f"set {ACTOR}.ppo_micro_batch_size_per_gpu to a multiple of {ROLLOUT}.n={n}"
    return ""


def refuse_what_cannot_be_measured(config: DictConfig) -> None:
    """Raise UserError, with the fix, for the first setting under which probes cannot measure."""
    for name, supported, why in SUPPORTED:
        value = OmegaConf.select(config, name)
        if value is not None and value not in supported:
            raise UserError(f"{name}={value}: {why}; set {name}={supported[0]}, or run python -m verl.trainer.main_ppo")
    if not OmegaConf.select(config, "probes"):
        raise UserError("no probe is selected: give probe=all, or run python -m verl.trainer.main_ppo")


def sampling_mismatch_reason(rollout: Any) -> str:
    """Return why responses are not samples of the scored policy, with the fix. Empty if they are."""
    for name, neutral in NEUTRAL_SAMPLING.items():
        value = rollout.get(name)
        if value is not None and value not in neutral:
            return f"{name}={value} samples from another policy than the scored one: set {ROLLOUT}.{name}={neutral[0]}"
    return ""


def selection_reason(algorithm: Any) -> str:
    """Return why training uses only responses with certain ratios, with the fix. Empty if it uses all."""
    rejection = OmegaConf.select(algorithm, "rollout_correction.rollout_rs")
    if rejection in (None, "null"):
        return ""
    return (
        f"rollout_rs={rejection} rejects responses by their ratio to the sampler, so the rest are not a sample of any "
        "policy: set algorithm.rollout_correction.rollout_rs=null; rollout_is reweights responses and keeps them all"
    )


def with_probes(config: DictConfig) -> DictConfig:
    """Return verl's configuration with this engine and this trainer. Raise UserError for what cannot be measured."""
    model = config.actor_rollout_ref.model
    refuse_what_cannot_be_measured(config)
    with open_dict(config):
        libraries = model.external_lib if model.external_lib is not None else []
        libraries = [libraries] if isinstance(libraries, str) else libraries
        model.external_lib = [*(library for library in libraries if library != LIBRARY), LIBRARY]
        config.trainer.v1.trainer_mode = TRAINER
    return config


@ray.remote
class Runner(TaskRunnerV1.__ray_actor_class__):
    """verl's task runner, in a process where this trainer is registered."""

    def run(self, config: DictConfig) -> None:
        from rl_training.hosts.verl import trainer  # noqa: F401, registers it: Ray sends the class, not its module

        super().run(config)
