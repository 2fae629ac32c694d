"""Makes the object that a node of the configuration describes. Nothing else calls Hydra's instantiate."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hydra.errors import InstantiationException
from hydra.utils import instantiate

from rl_training.errors import UserError
from rl_training.job.configuration.stored import refuse_marked
from rl_training.job.errors import in_one_line, is_the_programs, is_the_users


def make(key: str, node: Mapping[str, Any], **values: Any) -> Any:
    """Returns what a node of the configuration describes. UserError, naming the key, when it describes nothing.

    What the package raises in making it, and short memory, stay as they are.
    """
    refuse_marked({key: node}, key)
    try:
        return instantiate(node, _convert_="all", **values)
    except InstantiationException as error:
        cause = error.__cause__
        if cause is None:
            said = str(error)
        elif is_the_users(cause) or is_the_programs(cause) or isinstance(cause, MemoryError | RuntimeError):
            raise cause from None
        elif isinstance(cause, ImportError):
            said = str(cause)
        else:
            said = f"{in_one_line(cause)} (--debug shows where)"
        raise UserError(f"{key}: {' '.join(said.split())}") from error
