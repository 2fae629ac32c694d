"""The options of an attachment: one field for each, which `attach`, its command and DrGRPOTrainer read.

A new option is a field here and a parameter of `attach`, whose docstring says what it does. The command has an argument
for each field that is made by `_of_attach`. Nothing here imports a library: a command reads it before its script runs.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from rl_training.errors import UserError
from rl_training.hosts.trl.settings.spelling import PYTHON, Spelling

if TYPE_CHECKING:
    from rl_training.interventions.named import Intervention


def _of_attach(default: Any, **argument: Any) -> Any:
    """Return a field for an option of `attach`.

    Args:
        default: The default.
        **argument: What `argparse.ArgumentParser.add_argument` gets for it.
    """
    return dataclasses.field(default=default, metadata=argument)


def _boolean(text: str) -> bool:
    """Return what true or false says on the command line."""
    if text not in ("true", "false"):
        raise argparse.ArgumentTypeError(f"{text!r}: give true or false")
    return text == "true"


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of `attach`, which documents them, and of DrGRPOTrainer.

    Raises:
        UserError: An option cannot have the given value.
    """

    metrics: Literal["core", "all"] = _of_attach(
        "core", choices=("core", "all"), help="numbers for the trainer's log; default: %(default)s"
    )
    target_kl_share: float | str | None = _of_attach(
        None, metavar="SHARE", help="set each step's rate by its KL: auto, or a share of entropy"
    )
    whole_prompts: bool | None = _of_attach(
        None, type=_boolean, metavar="{true,false}", help="keep responses to a prompt in consecutive rows"
    )
    # None reads the environment.
    strict: bool | None = _of_attach(None, action="store_true", help="let an error in a probe end training")
    alerts: bool = _of_attach(False, action="store_true", help="send what stands out through W&B or trackio")

    # Of DrGRPOTrainer alone:
    interventions: Sequence[Intervention] = ()  # that the trainer trains with, applied in this order
    keep_attached: bool = False  # whether the probes stay attached after a training has ended
    spelling: Spelling = PYTHON  # names settings in advice

    def __post_init__(self) -> None:
        if self.metrics not in ("core", "all"):
            raise UserError(f"metrics={self.metrics!r}: give 'core', at most 15 numbers, or 'all'")
        self._share_of_entropy()

    @property
    def changes_of_loss(self) -> list[Intervention]:
        """The interventions that change the loss. Others change the optimizer's settings alone."""
        return [intervention for intervention in self.interventions if intervention.function is not None]

    @property
    def training_needs_measurements(self) -> bool:
        """Whether training depends on what is measured, so that it cannot go on without."""
        return bool(self.changes_of_loss) or self.target_kl_share is not None

    @property
    def recorded(self) -> dict[str, Any]:
        """The settings that affect training, for its records."""
        return {
            "whole_prompts": self.whole_prompts,
            "interventions": [intervention.given for intervention in self.interventions],
            "target_kl_share": self._share_of_entropy(),
        }

    @property
    def longer_responses(self) -> str:
        """Advice: what lets responses get longer."""
        return f"raise {self.spelling.name('max_completion_length')}"

    def _share_of_entropy(self) -> float | None:
        """Return `target_kl_share` as a number, None if it is None. Raise UserError for an impossible one."""
        from rl_training.engine.kl_bound import share_of_entropy  # imports torch

        return share_of_entropy(self.target_kl_share)


def options_of_attach() -> list[dataclasses.Field[Any]]:
    """Return the fields that are options of `attach`: name, default, and the argument of the command as metadata."""
    return [field for field in dataclasses.fields(Options) if field.metadata]
