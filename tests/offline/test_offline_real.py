"""offline.py on what a real run leaves: LoRA and QLoRA on GSM8K rows in bf16 with checkpointing, ZeRO's shards."""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_dir
from qwen_stand_in import experiment

from rl_training.job.analysis import analyse_checkpoints
from rl_training.job.build import build_restored
from rl_training.job.run_settings import run_settings
from rl_training.offline.restored import RestoredTrainer
from rl_training.records.analyses import read_analysis

ROOT = Path(__file__).parents[2]
CONF = ROOT / "conf"
SAVED = ("++trainer.save_strategy=steps", "trainer.save_steps=1", "probe=none", "trainer.max_steps=1")
SMALL = ["evaluation.prompts=16", "update.prompts=8", "memory.microbatch_size=8", "report=false"]
NO_DEEPSPEED = "" if importlib.util.find_spec("deepspeed") else "needs deepspeed: pip install -e '.[deepspeed]'"


def restored_at(checkpoint: Path, *changes: str) -> RestoredTrainer:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return build_restored(run_settings(checkpoint, changes), checkpoint)


@pytest.mark.parametrize("adapter", ["lora", "qlora"])
def test_the_analysis_of_an_adapter_on_gsm8k_in_bf16(stand_in: Path, tmp_path: Path, adapter: str) -> None:
    run = tmp_path / "run"
    trained = experiment(stand_in, run, f"adapter={adapter}", *SAVED, "trainer.learning_rate=1e-3")
    trained.train()
    weights = {n: p.detach().clone() for n, p in trained.trainer.model.named_parameters() if p.requires_grad}
    checkpoint = run / "training_state" / "checkpoint-1"
    with initialize_config_dir(str(CONF), version_base="1.3"):
        restored = build_restored(run_settings(checkpoint, []), checkpoint)
        (path,) = analyse_checkpoints(compose("offline", [f"checkpoint={run}", *SMALL]))
    assert restored.parameters.keys() == weights.keys()
    assert all(torch.equal(weights[name], param) for name, param in restored.parameters.items())
    found = read_analysis(path)["results"]
    assert found["learning_rate"] == 1e-3
    assert math.isfinite(found["deltaH1"])
    if adapter == "lora":
        assert abs(found["paired_error_odd"]) < 0.1 * abs(found["deltaH_odd"]) + 4 * found["paired_error_odd_se"]
        with pytest.raises(ValueError, match=r"use adapter=lora \(or qlora\)"):
            restored_at(checkpoint, "adapter=none")
        with pytest.raises(ValueError, match=r"has the shape .* set adapter.r"):
            restored_at(checkpoint, "adapter.r=4")
