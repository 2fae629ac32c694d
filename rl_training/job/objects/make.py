"""Makes the object that a node of the configuration describes. Nothing else in job/ calls Hydra's instantiate."""

from __future__ import annotations

import os
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import hydra
from hydra.errors import InstantiationException
from hydra.utils import instantiate
from omegaconf.errors import OmegaConfBaseException

from rl_training.errors import UserError, require_extra
from rl_training.job.configuration.overrides import PATH_KEYS
from rl_training.job.configuration.stored import refuse_marked
from rl_training.job.errors import format_error, is_refusal
from rl_training.tasks.task import Task


def make(key: str, node: Mapping[str, Any], **values: Any) -> Any:
    """Make the object that a node of the configuration describes.

    Args:
        key: Key of the node in the configuration, for messages.
        node: `_target_` and its arguments.
        values: Further arguments.

    Raises:
        UserError: Names the key, if the node describes no object or a library refuses it. Any other error is raised
            unchanged, with a note that names the key.
    """
    refuse_marked({key: node}, key)
    try:
        with require_extra():
            return _instantiate(_with_literal_paths(key, node), values)
    except UserError:
        raise
    except (InstantiationException, OmegaConfBaseException, ImportError) as error:
        raise UserError(f"{key}: {' '.join(str(error).split())}") from error
    except Exception as error:
        if is_refusal(error) or _is_misfit(error):
            raise UserError(f"{key}: {format_error(error)} (--debug shows where)") from error
        error.add_note(f"while {key} was made")
        raise


def make_task(node: Mapping[str, Any]) -> Task:
    """Make the task that the node `data` describes.

    Raises:
        UserError: As for `make`, or if its function returns no Task.
    """
    returned = make("data", node)
    if not isinstance(returned, Task):
        raise UserError(
            f"data: the task's function returned {returned!r:.60}, which is not a Task: return "
            "Task(train_dataset, eval_dataset, reward) of rl_training.tasks.task"
        )
    return returned


def _with_literal_paths(key: str, node: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a node in which a path that still begins with `~` names a folder `~`, here: a stored one, not typed.

    Some loaders would expand it.
    """
    tildes = {name: value for name, value in node.items() if isinstance(value, str) and value.startswith("~")}
    literal = {name: os.path.abspath(value) for name, value in tildes.items() if f"{key}.{name}" in PATH_KEYS}
    return {**node, **literal} if literal else node


def _instantiate(node: Mapping[str, Any], values: Mapping[str, Any]) -> Any:
    """Call Hydra's instantiate, but raise errors of the called function itself, without Hydra's wrapper."""
    try:
        return instantiate(node, _convert_="all", **values)
    except InstantiationException as error:
        raised = error.__cause__ or error
    raise raised


def _is_misfit(error: Exception) -> bool:
    """Return whether Hydra's call of the target itself failed, for example because of an unknown argument."""
    frames = traceback.extract_tb(error.__traceback__)
    return isinstance(error, TypeError) and Path(frames[-1].filename).is_relative_to(Path(hydra.__file__).parent)
