"""What a source holds of runs, and which of it is wanted.

Wanted of a run (a folder with logs/metrics.jsonl): config.yaml, logs/, report/, evaluations/; checkpoints on request.
Left out: dotfiles and *.tmp, which are still being written; links; files outside of runs.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import PurePosixPath
from typing import Any, Literal

from fsspec import AbstractFileSystem
from fsspec.core import url_to_fs

from rl_training.records.folder import CONFIG_FILE, LOGS_FOLDER

Checkpoints = Literal["none", "latest", "all"]
METRICS = "logs/metrics.jsonl"
REPORT = "report/report.html"
BROUGHT = (CONFIG_FILE, LOGS_FOLDER, "report", "evaluations")  # first parts of a path in a run
CHECKPOINT = re.compile(r"training_state/checkpoint-(\d+)/")
WRITTEN_LAST = "trainer_state.json"  # in a checkpoint: without it, it is still being written
TIMES = ("mtime", "LastModified", "last_modified", "updated", "created")  # names that file systems have for it


@dataclass(frozen=True)
class SourceFile:
    """A file of the source.

    path      as the file system names it
    relative  in the source, with / between its parts
    modified  seconds since 1970; None when the source does not say
    """

    path: str
    relative: str
    size: int
    modified: float | None


def open_source(source: str) -> tuple[AbstractFileSystem, str]:
    """Returns a new connection to the source, and the path in it.

    Raises ValueError for a protocol that nothing installed can speak, with what to install.
    """
    options: dict[str, Any] = {}
    if re.fullmatch(r"\w+:/*", source):
        raise ValueError(f"{source} has no path: give BUCKET/path or HOST/path after it, see --help")
    if source.startswith(("sftp://", "ssh://")):
        options["known_hosts"] = ()  # those of ~/.ssh/known_hosts; the default of sshfs is to trust whoever answers
    try:
        filesystem, path = url_to_fs(source, skip_instance_cache=True, **options)
    except ImportError as error:
        raise ValueError(
            f"{shown(source)} needs a package that is not installed: {_what_to_install(source)}"
        ) from error
    except ValueError as error:
        raise ValueError(f"{shown(source)}: {error}") from error
    return filesystem, str(path).rstrip("/")


def shown(source: str) -> str:
    """Returns the source as it may be printed: a password in it is masked."""
    return re.sub(r"(://[^/@:]*):[^@/]*@", r"\1:***@", source)


def list_files(filesystem: AbstractFileSystem, root: str) -> list[SourceFile]:
    """Returns all files below `root`, without links, sorted by path. Raises FileNotFoundError when there is no root."""
    filesystem.invalidate_cache()  # of an earlier listing
    found: Mapping[str, Mapping[str, Any]] = filesystem.find(root, detail=True)
    if not found and not filesystem.exists(root):
        raise FileNotFoundError(f"{root} does not exist")
    start = root.lstrip("/")
    files = []
    for path, info in sorted(found.items()):
        if info.get("type") == "file" and not info.get("islink"):
            relative = path.lstrip("/").removeprefix(start).removeprefix("/")
            files.append(SourceFile(path, relative, int(info["size"]), _modified(info)))
    return files


def wanted(files: Iterable[SourceFile], checkpoints: Checkpoints) -> list[SourceFile]:
    """Returns the files to download."""
    files = list(files)
    runs = {f.relative.removesuffix(METRICS) for f in files if f"/{f.relative}".endswith(f"/{METRICS}")}
    chosen = _chosen_checkpoints(files, checkpoints)
    return [f for f in files if _is_wanted(f.relative, runs, chosen) and not _is_unfinished(f.relative)]


def has_ended(files: Iterable[SourceFile]) -> bool:
    """Returns whether every run has written its report after its last step, as a run does when it ends."""
    modified = {f.relative: f.modified or 0.0 for f in files}
    runs = [path.removesuffix(METRICS) for path in modified if f"/{path}".endswith(f"/{METRICS}")]
    return bool(runs) and all(modified.get(run + REPORT, -1.0) >= modified[run + METRICS] for run in runs)


def _is_wanted(relative: str, runs: set[str], chosen: set[str]) -> bool:
    if any(relative.startswith(checkpoint) for checkpoint in chosen):
        return True
    return any(relative.startswith(run) and relative[len(run) :].split("/")[0] in BROUGHT for run in runs)


def _is_unfinished(relative: str) -> bool:
    parts = PurePosixPath(relative).parts
    return relative.endswith(".tmp") or any(part.startswith(".") and part != ".." for part in parts)


def _chosen_checkpoints(files: Iterable[SourceFile], checkpoints: Checkpoints) -> set[str]:
    """Returns the path prefixes of the checkpoints to download: only completely written ones."""
    steps: dict[str, dict[int, str]] = {}
    for file in files:
        match = CHECKPOINT.search(file.relative)
        if match and file.relative == file.relative[: match.end()] + WRITTEN_LAST:
            steps.setdefault(file.relative[: match.start()], {})[int(match[1])] = file.relative[: match.end()]
    if checkpoints == "none":
        return set()
    if checkpoints == "latest":
        return {of_run[max(of_run)] for of_run in steps.values()}
    return {path for of_run in steps.values() for path in of_run.values()}


def _modified(info: Mapping[str, Any]) -> float | None:
    for name in TIMES:
        value = info.get(name)
        if isinstance(value, datetime):
            return value.timestamp()
        if isinstance(value, str):  # Google's
            return datetime.fromisoformat(value.replace("Z", "+00:00")).timestamp()
        if isinstance(value, int | float):
            return float(value)
    return None


def _what_to_install(source: str) -> str:
    extras = {
        "sftp": "'rl-training[sync-ssh]'",
        "ssh": "'rl-training[sync-ssh]'",
        "s3": "'rl-training[sync-s3]'",
        "gs": "gcsfs",
        "hf": "huggingface_hub",
    }
    name = extras.get(source.partition("://")[0])
    return f"pip install {name}" if name else "fsspec names it in its list of known implementations"
