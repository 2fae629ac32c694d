"""verl's FSDP2 engine with probes: it reports each optimizer step to them, and trains exactly as without them.

The engine is a subclass, registered for the platform's own vendor, a key that verl looks up before its default. The
settings of probes come with the data, from trainer.py; without them nothing is measured. verl also makes the reference
policy from this class, which never trains.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from hydra.utils import instantiate
from tensordict import TensorDict
from torch import Tensor
from verl.utils import tensordict_utils
from verl.utils.device import get_device_name, get_vendor
from verl.workers.engine import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead
from verl.workers.engine.utils import prepare_micro_batches

from rl_training.engine.driver import StepDriver
from rl_training.engine.loop import Loop
from rl_training.engine.loss_check import LossInfo
from rl_training.errors import UserError
from rl_training.hosts.estimate_writer import EstimateWriter
from rl_training.hosts.loop_policy import LoopPolicy
from rl_training.hosts.recorded_settings import settings_of_loop
from rl_training.hosts.step_warnings import StepWarnings
from rl_training.hosts.verl.batch import ResponseTokens, RolloutSettings, flat_entropies, read_rollout
from rl_training.parallel.fsdp import FullyShard
from rl_training.parallel.ranks import all_ranks
from rl_training.policy.scorer import Scorer
from rl_training.policy.scores import Scores
from rl_training.records.checkpoint_states import load_probe_states, save_probe_states
from rl_training.records.jsonl import Records
from rl_training.records.made_by import MADE_BY, VERL
from rl_training.statistics.unavailable import Unavailable
from rl_training.step.batch import LossSettings
from rl_training.step.reasons import Fixes, Reasons, reason_of_loop

SETTINGS = "rl_training"  # key of a batch, under which the trainer passes the settings of probes
ENTROPIES = "entropies of probes"  # key of a model output, used if verl computes no entropies
ACTOR = "actor_rollout_ref.actor"
STEPS_FIX = f"{ACTOR}.ppo_mini_batch_size={{prompts}}, with data.train_batch_size at least as large"
FIXES = Fixes(
    batch_setting=f"{ACTOR}.ppo_micro_batch_size_per_gpu={{size}} {STEPS_FIX}",
    steps_setting=STEPS_FIX,
    num_folds_setting="probes.{name}.num_folds={folds}",
    dr_grpo="set actor.loss_agg_mode=seq-mean-token-sum-norm, actor.loss_scale_factor=<max response length> and "
    "algorithm.norm_adv_by_std_in_grpo=False, with no KL term and no entropy_coeff",
)
NO_SAMPLE = Unavailable(
    "server_sleeps", "fresh responses are needed, and verl's rollout server sleeps while the engine trains"
)


class Measurement:
    """Probes on an engine, from its first optimizer step on.

    Args:
        loop: verl's loop.
        settings: What trainer.py reports about the rollout, and the probes.
        resumed_from: The folder of the checkpoint that training resumes from, or None.

    Raises:
        UserError: A probe has the name under which a checkpoint has the number of optimizer steps.
    """

    name = "verl"  # key of the number of optimizer steps in a checkpoint

    def __init__(self, loop: Loop, settings: RolloutSettings, resumed_from: Path | None) -> None:
        probes = [instantiate(probe, _convert_="all") for probe in settings["probes"].values()]
        if any(probe.name == self.name for probe in probes):
            raise UserError(f"the name {self.name} is reserved: give the probe another one")
        self.driver = StepDriver(probes)
        self._loop, self._settings = loop, settings
        self._steps = 0  # number of optimizer steps made
        self._rollout = 0  # number of the rollout that the last one learned from
        self._fresh = False  # whether no step has learned from the rollout, and the present weights sampled it
        self._metrics: dict[str, Any] = {}  # of the open step
        states = None
        if resumed_from is not None:
            states = load_probe_states(self.driver.initial_states() | {self.name: 0}, resumed_from)
            self._steps = states[self.name]
        records = Records(settings["folder"], settings["rollouts_every"])
        if loop.ranks.number == 0:
            records.start(after_step=self._steps, settings={**settings_of_loop(loop), MADE_BY: VERL})
        self._writer = EstimateWriter(probes, records, loop.policy.decode)
        self._warnings = StepWarnings()
        self.driver.start(loop, states)

    def begin(self, settings: RolloutSettings, sizes: Sequence[int]) -> None:
        """Begin an optimizer step whose microbatches have these numbers of sequences."""
        self._settings, self._metrics = settings, {}
        if settings["rollout"] != self._rollout:
            self._rollout, self._fresh = settings["rollout"], settings["fresh"]
        self.driver.begin(self._steps + 1)
        self.driver.plan(sizes)

    def entropies(self, logits: Tensor, data: TensorDict) -> dict[str, Tensor]:
        """Return entropies for a microbatch without verl's own. Empty if no probe measures the step."""
        if not self.driver.needs_scores:
            return {}
        lengths = data["input_ids"].offsets().diff().tolist()
        return {ENTROPIES: flat_entropies(logits, lengths, self._loop.policy.scorer.temperature)}

    def microbatch(self, model_output: dict[str, Tensor], data: TensorDict) -> dict[str, Tensor]:
        """Register a microbatch, and return the output that the loss must be computed from: same numbers, watched."""
        tokens = ResponseTokens(data)
        rollout = read_rollout(data, self._fresh, self._settings["max_response_length"], self._settings["end_tokens"])
        logps = tokens.padded(model_output["log_probs"].values())
        watched = {"log_probs": tokens.to_nested(logps, model_output["log_probs"])}
        if "entropy" in model_output:
            entropies = tokens.padded(model_output["entropy"].values())
            watched["entropy"] = tokens.to_nested(entropies, model_output["entropy"])
        else:
            flat = model_output.get(ENTROPIES)
            entropies = torch.full_like(logps, torch.nan) if flat is None else tokens.padded(flat)
        self.driver.microbatch(rollout, Scores(logps, entropies, rollout.completion_mask), LossInfo())
        return model_output | watched

    def step(self, optimizer_step: Callable[[], float]) -> float:
        """Run the probes and the optimizer's step, and return what the step returns, the gradient's norm."""
        self.driver.gradients_ready(self._rollout)
        norm = optimizer_step()
        self._metrics |= {"grad_norm": norm, "learning_rate": self._loop.shard.optimizer.param_groups[0]["lr"]}
        self.driver.stepped()
        self._steps, self._fresh = self._steps + 1, False
        return norm

    def finish(self, outputs: Mapping[str, Any]) -> dict[str, list[float]]:
        """Write the records, and return the numbers for verl's loggers. Collective."""
        result, ranks = self.driver.finish(), self._loop.ranks
        if not result.rollouts:  # verl skipped the step
            return {}
        loss = ranks.reduce(torch.tensor(outputs["loss"], device=result.scores[0].logps.device).sum())
        self._metrics |= {"loss": float(loss) / ranks.count, "training/global_step": self._rollout}
        self._warnings.warn(self._steps, result)
        self._writer.write(self._steps, result)
        self._writer.write_line(self._steps, self._metrics, result)
        return {name: [value] for name, value in result.numbers.items() if not math.isnan(value)}

    def save(self, folder: Path) -> None:
        """Write the probes' states into verl's checkpoint. Collective."""
        ranks = self._loop.ranks
        states = self.driver.states() | {self.name: self._steps}
        save_probe_states(states, folder, ranks.count, ranks.number)
        torch.distributed.barrier()


def _describe_loop(
    engine: ProbedEngine, settings: RolloutSettings, loss_function: Callable[..., Any], data: TensorDict
) -> Loop:
    """Return what the driver must know about verl's loop."""
    dtype, device = engine._autocast_dtype, next(engine.module.parameters()).device.type
    autocast = contextlib.nullcontext if dtype == torch.float32 else lambda: torch.autocast(device, dtype)
    shard = FullyShard(engine.module, engine.optimizer, engine.optimizer_config.clip_grad)
    scorer = Scorer(engine.module, float(data["temperature"]), autocast=autocast, run_inside_forward=True)
    config, ranks, group = engine.engine_config, all_ranks(), int(settings["responses_per_prompt"])
    size = group if config.use_dynamic_bsz else int(config.micro_batch_size_per_gpu)
    loss = dr_grpo_settings(loss_function, data) if settings["plain_advantages"] else None
    tokenizer = engine.model_config.tokenizer
    decode = None if tokenizer is None else lambda ids: tokenizer.decode(ids, skip_special_tokens=True)
    return Loop(
        responses_per_prompt=group,
        microbatch_size=size,
        microbatches=max(1, len(data) // size),
        shard=shard,
        policy=LoopPolicy(engine.module, scorer, size, None, decode),
        ranks=ranks,
        is_dr_grpo=loss is not None,
        loss_settings=loss,
        reasons=Reasons(sampling_mismatch=reason_of_loop(settings["sampling_mismatch"]), no_fresh_responses=NO_SAMPLE),
        fixes=dataclasses.replace(FIXES, whole_prompts=settings["whole_prompts_fix"]),
    )


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


class ProbedEngine(FSDPEngineWithLMHead):
    """verl's FSDP2 engine, which runs probes if its data come with their settings."""

    _measurement: Measurement | None = None
    _resumed_from: Path | None = None  # folder of the checkpoint that was loaded
    _active_measurement: Measurement | None = None  # `_measurement` during a measured `train_batch`, else None

    def train_batch(self, data: TensorDict, loss_function: Callable[..., Any]) -> Any:
        settings = tensordict_utils.get(data, SETTINGS)
        if settings is None:
            return super().train_batch(data, loss_function)
        if self._measurement is None:
            loop = _describe_loop(self, settings, loss_function, data)
            self._measurement = Measurement(loop, settings, self._resumed_from)
        microbatches = prepare_micro_batches(data=data, dp_group=self.get_data_parallel_group())[0]
        self._active_measurement = self._measurement
        try:
            self._active_measurement.begin(settings, [len(part) for part in microbatches])
            outputs = super().train_batch(data, loss_function)
            outputs["metrics"] |= self._active_measurement.finish(outputs)
        except BaseException:
            self._active_measurement.driver.fail_step()
            raise
        finally:
            self._active_measurement = None
        return outputs

    def forward_step(self, micro_batch: TensorDict, loss_function: Callable[..., Any], forward_only: bool) -> Any:
        measurement = self._active_measurement
        if measurement is None:
            return super().forward_step(micro_batch, loss_function, forward_only)

        def watched_loss(model_output: dict[str, Tensor], data: TensorDict, dp_group: Any = None) -> Any:
            watched = measurement.microbatch(model_output, data)
            return loss_function(model_output=watched, data=data, dp_group=dp_group)

        return super().forward_step(micro_batch, watched_loss, forward_only)

    def prepare_model_outputs(
        self, output: Any, output_args: Any, micro_batch: TensorDict, logits_processor_func: Any
    ) -> Any:
        result = super().prepare_model_outputs(output, output_args, micro_batch, logits_processor_func)
        if self._active_measurement is not None and "entropy" not in result:
            result |= self._active_measurement.entropies(output.logits, micro_batch)
        return result

    def optimizer_step(self) -> Any:
        if self._active_measurement is not None:
            gradients = [p.grad for p in self.module.parameters() if p.grad is not None]
            if torch.isfinite(torch.nn.utils.get_total_norm(gradients)):
                return self._active_measurement.step(super().optimizer_step)
            self._active_measurement.driver.skip_step()  # verl skips a step with a non-finite gradient: nothing changes
        return super().optimizer_step()

    def save_checkpoint(self, local_path: str, *args: Any, **kwargs: Any) -> None:
        super().save_checkpoint(local_path, *args, **kwargs)
        if self._measurement is not None:
            self._measurement.save(Path(local_path))

    def load_checkpoint(self, local_path: str, *args: Any, **kwargs: Any) -> None:
        super().load_checkpoint(local_path, *args, **kwargs)
        self._resumed_from = Path(local_path)


def register() -> None:
    """Register the engine with verl, once."""
    device = os.getenv("VERL_ENGINE_DEVICE") or get_device_name()
    vendor = os.getenv("VERL_ENGINE_VENDOR") or get_vendor()
    EngineRegistry.register("language_model", ["fsdp2"], device, vendor)(ProbedEngine)
