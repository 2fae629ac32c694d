"""Whether the installed libraries have what is read here, and what they have that is unknown here.

If a version lacks a member in the tables of members.py, or its first forward pass returns something unexpected, the
error names it.
"""

from __future__ import annotations

import dataclasses

from transformers import TrainingArguments
from transformers.utils import logging
from trl import GRPOConfig, GRPOTrainer
from trl import __version__ as trl_version
from trl.trainer import grpo_trainer

from rl_training.errors import UserError
from rl_training.hosts.trl.members import METHODS, SETTINGS, SHUFFLE, TRAINER_ATTRIBUTES
from rl_training.hosts.trl.versions import (
    KNOWN_SETTINGS,
    OF_ARGUMENTS,
    OF_TRAINER,
    WRITTEN_FOR,
    installed_members,
    parameters_of,
)

logger = logging.get_logger(__name__)


def check_version(trainer: GRPOTrainer) -> None:
    """Raise UserError if the installed versions lack something that is read here, and name settings unknown here."""
    _refuse_missing_members(trainer)
    _warn_of_unknown_settings(trainer)


def require(holds: bool, what: str) -> None:
    """Raise UserError, saying what is wrong with the installed TRL, if a condition does not hold."""
    if not holds:
        raise UserError(f"{what} in trl {trl_version}: pip install '{WRITTEN_FOR}'")


def _refuse_missing_members(trainer: GRPOTrainer) -> None:
    """Raise UserError if a method, attribute or setting is missing, or a method takes other parameters."""
    for name, parameters in METHODS.items():
        method = getattr(GRPOTrainer, name, None)
        names_of_method = set() if method is None else parameters_of(method)
        require({*parameters} <= names_of_method, f"GRPOTrainer.{name}({', '.join(parameters)}) is gone")
    for name in (*TRAINER_ATTRIBUTES, *installed_members(OF_TRAINER)):
        require(hasattr(trainer, name), f"GRPOTrainer.{name} is gone")
    for name in (*SETTINGS, *installed_members(OF_ARGUMENTS)):
        require(hasattr(trainer.args, name), f"GRPOConfig.{name} is gone")
    require(hasattr(grpo_trainer, SHUFFLE), f"trl.trainer.grpo_trainer.{SHUFFLE} is gone")


def _warn_of_unknown_settings(trainer: GRPOTrainer) -> None:
    """Name the fields of GRPOConfig that are newer than this package and differ from their defaults."""
    for field in dataclasses.fields(GRPOConfig):
        if field.name in KNOWN_SETTINGS or field.name in TrainingArguments.__dataclass_fields__:
            continue
        default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        value = getattr(trainer.args, field.name)
        if value != default and trainer.accelerator.is_main_process:
            logger.warning(
                f"{field.name}={value!r} of GRPOConfig in trl {trl_version} is unknown to this version of rl-training: "
                "check loss and sampling"
            )
