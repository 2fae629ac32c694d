"""Makes the user's own code importable from the working folder, but only if the command names it.

The working folder may come from somebody else, and a peft.py in it would be imported instead of the library. So it is
appended to Python's path only if the command line, or a file of --config-dir, names code in it.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from rl_training.errors import UserError
from rl_training.job.configuration.nested import leaves
from rl_training.job.configuration.stored import must_be_typed, names_code
from rl_training.records.folder import LOGS_FOLDER, TRAINING_STATE, has_settings
from rl_training.records.jsonl import has_records


def add_custom_code_to_path(cfg: DictConfig) -> None:
    """Append the working folder to Python's path if the composed settings name code in it.

    Raises:
        UserError: If that folder is a run folder, or if another module has the same name.
    """
    here = Path.cwd()
    for named, module in _named_modules(cfg):
        name = module.partition(".")[0]
        if str(here) in sys.path or not ((here / name).is_dir() or (here / f"{name}.py").is_file()):
            continue
        if _is_run(here):
            raise UserError(f"{named}: nothing is imported from a run, as {here} is: start in the folder of your code")
        if other := importlib.util.find_spec(name):
            raise UserError(f"{named}: {name} is also the name of {other.origin}: rename yours in {here}")
        sys.path.append(str(here))
        importlib.invalidate_caches()


def _is_run(folder: Path) -> bool:
    """Return whether a folder is a run's, and not one with code and a config.yaml of its own."""
    has_parts = (folder / LOGS_FOLDER).is_dir() or (folder / TRAINING_STATE).is_dir()
    return has_records(folder) or (has_settings(folder) and has_parts)


def _named_modules(cfg: DictConfig) -> Iterator[tuple[str, str]]:
    """Yield (value, module) for each setting whose value names code that conf/ does not ship."""
    for keys, value in leaves(OmegaConf.to_container(cfg)):
        is_intervention = keys[0] == "intervention" or "which" in keys[2:3]
        if isinstance(value, str) and keys[-1] == "_target_" and must_be_typed(keys, value):
            yield value, value
        elif isinstance(value, str) and is_intervention and names_code(value):
            place = value.partition(":")[0]
            yield value, Path(place).stem if place.endswith(".py") else place
