"""Settings as a command composes them, settings that are refused, and the settings of a quick run."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import yaml
from accelerate.commands.launch import _validate_launch_command, launch_command_parser, prepare_simple_launcher_cmd_env
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig

from rl_training.job.configuration.prepare import PreparedEvaluation, prepare_evaluation, prepare_run
from rl_training.job.configuration.shipped import CONF
from rl_training.job.run.training import TrainingRun, build_run

QUICK = [
    "trainer.num_generations=4", "batch.sequences_per_step=32", "batch.microbatch_size=4",
    "trainer.max_completion_length=12", "logger=none", "++trainer.disable_tqdm=true",
]  # fmt: skip
REFUSED = yaml.safe_load(Path(__file__).parents[1].joinpath("refused.yaml").read_text(encoding="utf-8"))


def refusal(parts: str | list[str]) -> str:
    """Return the regular expression for an error of refused.yaml: its text, or its parts in their order."""
    return ".*".join(map(re.escape, [parts] if isinstance(parts, str) else parts))


def composing() -> initialize_config_dir:
    """Return a context in which hydra finds the files of conf/."""
    return initialize_config_dir(str(CONF), version_base="1.3")


def composed(name: str, *overrides: str) -> DictConfig:
    with composing():
        return compose(name, list(overrides))


def prepared_evaluation(*overrides: str) -> PreparedEvaluation:
    return prepare_evaluation(composed("evaluate", *overrides))


def launched_program(*words: str) -> tuple[list[str], dict[str, str]]:
    """Return the command and the environment with which `accelerate launch WORDS` starts a program."""
    arguments, *_ = _validate_launch_command(launch_command_parser().parse_args(words))
    (python, *program), env = prepare_simple_launcher_cmd_env(arguments)
    assert python == sys.executable
    return program, env


def assert_silent(said: str) -> None:
    """Assert that the output has none of the messages that libraries print on import, loading and saving."""
    for noise in ("Failed to load CPU", "Setting accelerator", "Loading weights", "Writing model", "FutureWarning"):
        assert noise not in said


def quick_run(folder: Path, *overrides: str) -> TrainingRun:
    return build_run(prepare_run(composed("train", f"run_dir={folder}", *QUICK, *overrides)))
