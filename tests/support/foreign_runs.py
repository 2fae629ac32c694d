"""A run from an untrusted source, and the commands with which somebody would read it."""

from __future__ import annotations

import functools
import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import yaml
from configs import composed, composing
from omegaconf import DictConfig, OmegaConf
from safetensors.torch import save_file

from rl_training import OfflineEntropyProbe
from rl_training.job.configuration.overrides import force_add
from rl_training.job.configuration.prepare import prepare_evaluation
from rl_training.job.configuration.run_settings import resolve_branch, run_settings
from rl_training.job.evaluation.evaluation import Evaluation
from rl_training.job.evaluation.request import read_request
from rl_training.job.objects.trainer import build_restored

SECRET = "hf_of_the_reader"
TOUCH = "import pathlib; pathlib.Path(r'{canary}').touch()"  # the code that an attack would run


class Canary:
    """Runs code when it is unpickled."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
        return exec, (TOUCH.format(canary=self.canary),)


def foreign_run(parent: Path) -> Path:
    """Return a run with a checkpoint that looks complete, and files that create PARENT/canary if they are executed."""
    folder = parent / "run"
    checkpoint = folder / "training_state" / "checkpoint-1"
    checkpoint.mkdir(parents=True)
    save_file({"w": torch.zeros(1)}, checkpoint / "model.safetensors")
    (checkpoint / "trainer_state.json").write_text('{"global_step": 1}')
    for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth"):
        torch.save({}, checkpoint / name)
    (folder / "canary.pkl").write_bytes(pickle.dumps(Canary(parent / "canary")))
    (folder / "own.py").write_text(TOUCH.format(canary=parent / "canary") + "\ndef f(loss, strength): ...\n")
    write_config(folder, {})
    return folder


@functools.cache
def own_settings() -> str:
    cfg = composed("train", "run_dir=run", "trainer.max_steps=2")
    return yaml.dump(OmegaConf.to_container(cfg, resolve=True))


@functools.cache
def typed(name: str, *words: str) -> DictConfig:
    return composed(name, *words)


def write_config(run: Path, changes: Mapping[str, Any] | str) -> None:
    if isinstance(changes, str):
        text = changes
    else:
        settings = yaml.safe_load(own_settings())
        for key, value in changes.items():
            *above, name = key.split(".")
            node = settings
            for part in above:
                node = node[part]
            node[name] = value
        text = yaml.dump(settings)
    canary = run.parent / "canary"
    (run / "config.yaml").write_text(text.replace("{run}", str(run)).replace("{canary}", str(canary)))


def analyze(run: Path, *words: str) -> object:
    checkpoint = run / "training_state" / "checkpoint-1"
    with composing():
        return build_restored(run_settings(checkpoint, words), checkpoint)


def evaluate(run: Path, *words: str) -> Evaluation:
    cfg = OmegaConf.merge(typed("evaluate", *map(force_add, words)), {"run": str(run)})
    return read_request(prepare_evaluation(cfg)).evaluation


def branch(run: Path, *words: str) -> DictConfig:
    settings = {"branch": str(run), "run_dir": str(run.parent / "branch")}
    return resolve_branch(OmegaConf.merge(typed("train", *map(force_add, words)), settings), words)


def probe(run: Path, *words: str) -> object:
    return OfflineEntropyProbe({"overrides": list(words)}).run_mixed_probe(run)


def said(command: Callable[[Path], object], run: Path) -> str:
    """Return the line in which a command refuses a run, or "". Assert that none of its code ran and no secret shows."""
    try:
        command(run)
        line = ""
    except ValueError as error:
        line = str(error)
    assert not (run.parent / "canary").exists()
    assert SECRET not in line
    return line
