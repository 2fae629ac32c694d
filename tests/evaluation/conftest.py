"""A run to evaluate, and evaluations in forks."""

from __future__ import annotations

import json
import multiprocessing
import pickle
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a run folder with two checkpoints, each a small change of the first model. The second one is damaged."""
    import torch  # here, because the process that only distributes the tests need not import it
    from configs import composed
    from omegaconf import OmegaConf

    from rl_training.models.load import load_tiny

    folder = tmp_path_factory.mktemp("runs") / "run"
    model, tokenizer = load_tiny()
    generator = torch.Generator().manual_seed(0)
    for step in (1, 2):
        for parameter in model.parameters():
            parameter.data += 0.01 * torch.randn(parameter.shape, generator=generator)
        checkpoint = folder / "training_state" / f"checkpoint-{step}"
        model.save_pretrained(checkpoint)
        tokenizer.save_pretrained(checkpoint)
        (checkpoint / "trainer_state.json").write_text(json.dumps({"global_step": step}), encoding="utf-8")
    weights = folder / "training_state" / "checkpoint-2" / "model.safetensors"
    weights.rename(folder / "whole")
    weights.write_bytes((folder / "whole").read_bytes()[:100_000])
    cfg = composed("train", f"run_dir={folder}", "hydra.job.num=0")
    OmegaConf.save(cfg, folder / "config.yaml", resolve=True)
    return folder


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Evaluate checkpoints in forks of this process, which has imported everything; their work is pickled."""
    from rl_training.evaluation.workers import run_in_process
    from rl_training.job.evaluation import worker

    fork = multiprocessing.get_context("fork")

    def in_fork(work: Any, *more: Any, **options: Any) -> str:
        return run_in_process(pickle.loads(pickle.dumps(work)), *more, **options)

    monkeypatch.setattr(multiprocessing, "get_context", lambda kind: fork)
    monkeypatch.setattr(worker, "run_in_process", in_fork)
