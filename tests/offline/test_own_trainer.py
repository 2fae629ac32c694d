"""A checkpoint of a user's own trainer is analyzed in Python with the objects of the user's script."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from configs import composed, prepared_evaluation
from trainers import graded
from trl import GRPOConfig, GRPOTrainer

from rl_training import Estimate, Probe, Reading, analyze, attach
from rl_training.job.configuration.prepare import prepare_analysis
from rl_training.job.evaluation.request import read_request
from rl_training.job.run.analysis import result_files
from rl_training.offline.buffers import UpdateBuffer
from rl_training.offline.restored import restore
from rl_training.offline.settings import (
    EvaluationSettings,
    KernelSettings,
    MemorySettings,
    Settings,
    TruthSettings,
    UpdateSettings,
)
from rl_training.offline.update import make_update
from rl_training.records.analyses import analysis_results

SMALL = Settings(EvaluationSettings(prompts=24), UpdateSettings(prompts=8), memory=MemorySettings(microbatch_size=8))
PLAIN: dict[str, Any] = {
    "trainer_class": GRPOTrainer, "config_class": GRPOConfig, "use_cpu": True, "bf16": False, "reward": graded,
    "per_device_train_batch_size": 4, "gradient_accumulation_steps": 8, "max_completion_length": 8,
    "save_strategy": "steps", "save_steps": 1, "adam_epsilon": 1e-5,
}  # fmt: skip


class Keeps(Probe):
    """Keeps the second step's rollout and its gradient."""

    name = "keeps"

    def measure(self, ctx: Any, state: Any) -> Reading:
        step = ctx.step
        self.rollout = step.batch.rollout
        self.gradient = torch.cat([part.flatten() for part in step.gradients.mean.values()]).clone()
        return Reading(measured={"keeps/step": Estimate(1.0)})


@pytest.mark.parametrize("loss", ["dapo", "grpo", "dr_grpo"])
def test_the_analyzed_step_is_the_one_that_training_took(
    make_trainer: Callable[..., Any], tmp_path: Path, loss: str
) -> None:
    """The second step is recomputed from its responses and the first step's checkpoint."""
    keeps, trainer = Keeps(), make_trainer(**PLAIN, loss_type=loss)
    with attach(trainer, tmp_path / "run", keeps):
        trainer.train()
    checkpoint = Path(trainer.args.output_dir) / "checkpoint-1"
    restored = restore(make_trainer(**PLAIN, loss_type=loss), checkpoint)
    _, number = keeps.rollout.prompt_index.unique(return_inverse=True)
    buffer = UpdateBuffer(dataclasses.replace(keeps.rollout, prompt_index=number), 8, 4)
    update = make_update(restored, buffer, SMALL.memory)
    off = (torch.cat(update.gradient) - keeps.gradient).norm() / keeps.gradient.norm()
    assert float(off) < 1e-3


def test_analyze_writes_results_and_pages_for_a_checkpoint_of_an_attached_run(
    make_trainer: Callable[..., Any], tmp_path: Path
) -> None:
    trainer = make_trainer(**PLAIN)
    with attach(trainer, tmp_path / "run"):
        trainer.train()
    page = tmp_path / "run" / "report" / "report.html"
    before = page.read_text()
    analysis = analyze(
        make_trainer(**PLAIN), Path(trainer.args.output_dir) / "checkpoint-1", tmp_path / "run", settings=SMALL
    )
    assert analysis["deltaH1_se"] > 0.0
    assert analysis["deltaH_true_se"] > 0.0
    table = analysis_results(tmp_path / "run")
    assert table.query("kind == 'whole'")["deltaH1"].tolist() == [analysis["deltaH1"]]
    assert list((tmp_path / "run" / "offline").rglob("*.html"))
    assert page.read_text() != before  # it now has a section on them

    # A kernel is refused before anything is sampled where the loss has none, and one that fails leaves the rest.
    checkpoint = Path(trainer.args.output_dir) / "checkpoint-1"

    def with_kernel(name: str, options: dict[str, Any], **changes: Any) -> None:
        kernel = KernelSettings(enabled=True, **options)
        settings = dataclasses.replace(SMALL, kernel=kernel, truth=TruthSettings(enabled=False))
        analyze(make_trainer(**PLAIN, **changes), checkpoint, tmp_path / "run", settings=settings, name=name)

    for changes, fix in (
        ({}, "loss_type='dr_grpo'"),
        ({"loss_type": "dr_grpo", "top_entropy_quantile": 0.5}, r"top_entropy_quantile=1\.0"),
    ):
        with pytest.raises(ValueError, match=rf"the kernel is of Dr-GRPO's loss.*make the trainer with {fix}, or"):
            with_kernel("refused", {}, **changes)
    assert not (tmp_path / "run" / "offline" / "refused").exists()
    with pytest.raises(ValueError, match="memory_gb"):
        with_kernel("failed", {"memory_gb": 1e-9}, loss_type="dr_grpo")
    (written,) = (tmp_path / "run" / "offline" / "failed").rglob("result.json")
    assert json.loads(written.read_text())["results"]["deltaH1_se"] > 0.0


def test_a_loss_whose_step_cannot_be_analyzed_is_refused_with_what_to_set(
    make_trainer: Callable[..., Any], tmp_path: Path
) -> None:
    trainer = make_trainer(**PLAIN, loss_type="bnpo")
    for name in ("", "a/b", ".."):
        with pytest.raises(ValueError, match=f"name={re.escape(name)} .*RUN/offline"):
            analyze(trainer, tmp_path, tmp_path / "run", name=name)
    with pytest.raises(ValueError, match=r"learning_rate=-0\.1 must be a number above 0, or None for the checkpoint's"):
        analyze(trainer, tmp_path, tmp_path / "run", learning_rate=-0.1)
    with attach(trainer, probes=()):
        trainer.train()
    with pytest.raises(ValueError, match="loss_type='dr_grpo'"):
        analyze(
            make_trainer(**PLAIN, loss_type="bnpo"), Path(trainer.args.output_dir) / "checkpoint-1", tmp_path / "run"
        )


def test_commands_refuse_an_attached_run_with_the_function_to_call(
    make_trainer: Callable[..., Any], tmp_path: Path
) -> None:
    trainer = make_trainer(**PLAIN, max_steps=1)
    with attach(trainer, tmp_path / "run", "ess"):
        trainer.train()
    for named in (tmp_path / "run", Path(trainer.args.output_dir) / "checkpoint-1"):
        with pytest.raises(ValueError, match=r"analyze\(trainer, CHECKPOINT, FOLDER\)"):
            result_files(prepare_analysis(composed("offline", f"checkpoint={named}")))
    with pytest.raises(ValueError, match=r"evaluate\(trainer, CHECKPOINTS, "):
        read_request(prepared_evaluation(f"run={tmp_path / 'run'}"))
