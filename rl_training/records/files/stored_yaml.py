"""Read YAML that somebody else may have written, such as a run's config.yaml: within limits, and only if it is plain.

A few lines with aliases can expand to terabytes, tags can name classes, and deep nesting crashes the reader. Runs write
none of these.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from rl_training.errors import UserError
from rl_training.records.files.limited import read_text

MAX_DEPTH = 50


def plain_yaml(path: Path) -> str:
    """Return the text of a file after checking that it is plain YAML.

    Raises:
        UserError: If it is not; names the file, the line and what is not plain.
    """
    depth = 0
    try:
        text = read_text(path, errors="strict")
        for event in yaml.parse(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            unusual = _find_unusual(event) or ("nested too deeply" if depth > MAX_DEPTH else "")
            if unusual:
                line = event.start_mark.line + 1 if event.start_mark else 1
                raise UserError(f"{path}, line {line}: {unusual}, which no run writes: fix or delete it")
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read ({' '.join(str(error).split())}): fix or delete it") from error
    return text


def read_mapping(path: Path) -> dict[str, Any]:
    """Return the mapping in a file of plain YAML; {} if there is no file or no mapping in it.

    Raises:
        UserError: If the file cannot be read, or is not plain; names it.
    """
    if not path.is_file():
        return {}
    text = plain_yaml(path)
    try:
        content = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # not YAML, or a date that does not exist
        where = " ".join(str(error).split())
        raise UserError(f"{path} cannot be read ({where}): fix or delete it") from error
    return content if isinstance(content, dict) else {}


def holds_settings(path: Path) -> bool:
    """Return whether a file is plain YAML with a mapping in it, unlike one that was not written completely."""
    try:
        events = list(yaml.parse(plain_yaml(path), Loader=yaml.SafeLoader))
    except (UserError, yaml.YAMLError):
        return False
    return any(isinstance(event, yaml.MappingStartEvent) for event in events)


def _find_unusual(event: yaml.Event) -> str:
    """Return what is not plain in a YAML event, or ""."""
    if getattr(event, "anchor", None) is not None:  # aliases have an anchor too
        return "an anchor or alias"
    return "a tag" if getattr(event, "tag", None) not in (None, "!") else ""
