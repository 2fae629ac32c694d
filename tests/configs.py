"""Settings as a command composes them, those that are refused, and a run that is quick."""

from __future__ import annotations

from pathlib import Path

import yaml
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig

from rl_training.job.build import TrainingRun, build_run
from rl_training.job.shipped import CONF

QUICK = [
    "trainer.num_generations=4", "batch.sequences_per_step=32", "batch.microbatch_size=4",
    "trainer.max_completion_length=12", "logger=none", "++trainer.disable_tqdm=true",
]  # fmt: skip
REFUSED = yaml.safe_load(Path(__file__).with_name("refused.yaml").read_text(encoding="utf-8"))


def composing() -> initialize_config_dir:
    """Returns a context in which hydra finds the files of conf/."""
    return initialize_config_dir(str(CONF), version_base="1.3")


def composed(name: str, *overrides: str) -> DictConfig:
    with composing():
        return compose(name, list(overrides))


def quick_run(folder: Path, *overrides: str) -> TrainingRun:
    return build_run(composed("train", f"run_dir={folder}", *QUICK, *overrides))
