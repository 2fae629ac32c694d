"""offline.py after realistic runs: LoRA and QLoRA on GSM8K rows in bf16 with checkpointing, ZeRO's shards."""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path

import pytest
import torch
from analyzed_runs import restored_at
from configs import composing
from hydra import compose
from qwen_stand_in import experiment

from rl_training.job.configuration.prepare import prepare_analysis
from rl_training.job.run.analysis import analyze_checkpoints
from rl_training.records.analyses import read_analysis

SAVED = ("++trainer.save_strategy=steps", "trainer.save_steps=1", "probe=none", "trainer.max_steps=1")
SMALL = ["evaluation.prompts=16", "update.prompts=8", "memory.microbatch_size=8", "report=false"]
NO_DEEPSPEED = "" if importlib.util.find_spec("deepspeed") else "needs deepspeed: pip install -e '.[deepspeed]'"


@pytest.mark.parametrize("adapter", ["lora", "qlora"])
def test_an_adapter_on_gsm8k_is_analyzed_in_bf16(stand_in: Path, tmp_path: Path, adapter: str) -> None:
    run = tmp_path / "run"
    trained = experiment(stand_in, run, f"adapter={adapter}", *SAVED, "trainer.learning_rate=1e-3")
    trained.train()
    weights = {n: p.detach().clone() for n, p in trained.trainer.model.named_parameters() if p.requires_grad}
    restored = restored_at(run, 1)
    smaller = ["evaluation.prompts=4", "update.prompts=2"] if adapter == "qlora" else []
    with composing():
        (path,) = analyze_checkpoints(prepare_analysis(compose("offline", [f"checkpoint={run}", *SMALL, *smaller])))
    assert restored.parameters.keys() == weights.keys()
    assert all(torch.equal(weights[name], param) for name, param in restored.parameters.items())
    results = read_analysis(path)["results"]
    assert results["learning_rate"] == 1e-3
    assert math.isfinite(results["deltaH1"])
    if adapter == "lora":
        assert abs(results["paired_error_odd"]) < 0.1 * abs(results["deltaH_odd"]) + 4 * results["paired_error_odd_se"]
        with pytest.raises(ValueError, match=r"use adapter=lora \(or qlora\)"):
            restored_at(run, 1, "adapter=none")
        with pytest.raises(ValueError, match=r"lora_A.* adapter\.r"):
            restored_at(run, 1, "adapter.r=4")
