"""What tests of analyses share: a run of three steps with a checkpoint at each, and a trainer restored from one."""

from __future__ import annotations

import dataclasses
import functools
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from configs import QUICK, composed, composing
from torch import Tensor

from rl_training import Estimate, Probe, Reading
from rl_training.engine.context import StepContext
from rl_training.job.configuration.prepare import prepare_run
from rl_training.job.configuration.run_settings import run_settings
from rl_training.job.objects.trainer import build_restored
from rl_training.job.run.training import build_run
from rl_training.offline.buffers import UpdateBuffer
from rl_training.offline.restored import RestoredTrainer
from rl_training.offline.settings import EvaluationSettings, MemorySettings, Settings, UpdateSettings

RUN = [
    *QUICK, "batch.microbatch_size=8", "probe=none",
    "trainer.max_steps=3", "trainer.save_steps=1", "++trainer.save_total_limit=null",
    "++trainer.weight_decay=0.1", "++trainer.max_grad_norm=0.1", "trainer.lr_scheduler_type=linear",
    "trainer.max_completion_length=24", "+probes.recorder._target_=analyzed_runs.Recorder",
]  # fmt: skip
SMALL = Settings(EvaluationSettings(prompts=24), UpdateSettings(prompts=8), memory=MemorySettings(microbatch_size=8))
SEEN: dict[int, dict[str, Any]] = {}


class Recorder(Probe):
    """Keeps each step's rollout, its gradient and its change of the weights."""

    name = "recorder"

    def measure(self, ctx: StepContext, state: Any) -> Reading:
        step = ctx.step
        self._before = {name: p.detach().clone() for name, p in step.weights.items()}
        gradient = torch.cat([g.flatten() for g in step.gradients.mean.values()]).clone()
        SEEN[step.number] = {"rollout": step.batch.rollout, "gradient": gradient}
        return Reading(measured={"recorder/steps": Estimate(float(len(SEEN)))})

    def after_step(self, ctx: StepContext, reading: Reading) -> Reading:
        step = ctx.step
        change = [(p.detach() - self._before[name]).flatten() for name, p in step.weights.items()]
        SEEN[step.number]["delta"] = torch.cat(change)
        return reading


@functools.cache
def trained(temporary: Path) -> Path:
    folder = temporary / "trained" / "run_1"
    build_run(prepare_run(composed("train", f"run_dir={folder}", *RUN))).train()
    return folder


def checkpoint(run: Path, step: int) -> Path:
    return run / "training_state" / f"checkpoint-{step}"


def restored_at(run: Path, step: int, *changes: str, learning_rate: float | None = None) -> RestoredTrainer:
    with composing():
        return build_restored(run_settings(checkpoint(run, step), changes), checkpoint(run, step), learning_rate)


def as_update_buffer(rollout: Any) -> UpdateBuffer:
    _, number = rollout.prompt_index.unique(return_inverse=True)
    prompts = int(number.max()) + 1
    return UpdateBuffer(dataclasses.replace(rollout, prompt_index=number), prompts, 4)


def close(a: Tensor, b: Tensor) -> float:
    """Return ‖a − b‖ / ‖b‖."""
    return float((a - b).double().norm() / b.double().norm())


def altered(run: Path, tmp_path: Path, alter: Callable[[Path], None]) -> Path:
    """Return a copy of the run whose first checkpoint has been tampered with."""
    copy = tmp_path / "run_2"
    shutil.copytree(checkpoint(run, 1), checkpoint(copy, 1))
    shutil.copy(run / "config.yaml", copy)
    alter(checkpoint(copy, 1))
    return copy


def results_of(predicted: float, measured: float, stderr: float, of_predicted: float = 0.1) -> dict[str, float]:
    """Return results in nats from values in thousandths. The paired error is predicted − measured."""
    numbers = {"deltaH1": (predicted, of_predicted), "deltaH_true": (measured, of_predicted)}
    numbers["paired_error"] = (predicted - measured, stderr)
    return {f"{key}{se}": 1e-3 * pair[bool(se)] for key, pair in numbers.items() for se in ("", "_se")}
