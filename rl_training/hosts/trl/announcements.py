"""What an attachment tells the user: the line when training begins, and how training ended."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from importlib import metadata
from pathlib import Path

from tqdm import tqdm
from trl import GRPOTrainer

from rl_training.engine.probe import Probe
from rl_training.hosts.trl.versions import TESTED
from rl_training.parallel.ranks import all_ranks
from rl_training.records.folder import checkpoints_in, step_of
from rl_training.version import VERSION

NOTHING_TRAINED = (
    "nothing was trained inside of this `with attach(...)`, so nothing was measured or written: call trainer.train() "
    "inside of it"
)


def hide_progress_bar() -> AbstractContextManager[None]:
    """Clear tqdm's progress bar for the duration of a context, so that lines on stderr do not mix with it.

    It does not take tqdm's lock, which forked processes share: collectives run inside, so ranks would deadlock.
    """
    return tqdm.external_write_mode(file=sys.stderr, nolock=True)


def opening_line(probes: Sequence[Probe], folder: Path | None) -> str:
    """Return the opening line: versions, number of processes, folder, and probes with their intervals."""
    count = all_ranks().count
    processes = "one process trains" if count == 1 else f"{count} processes train"
    writes = "and writes" if count == 1 else "and the first writes"
    output = "and nothing is written" if folder is None else f"{writes} {folder}"
    names = [f"{probe.name}{probe.interval}" for probe in probes]
    return f"rl-training {VERSION} with {_versions()}: {processes} {output}; probes: {', '.join(names) or 'none'}"


def _versions() -> str:
    """Return the installed versions of the libraries, with the tested versions of those that differ."""
    installed = {name: metadata.version(name) for name in TESTED}
    others = [name for name, version in installed.items() if not f"{version}.".startswith(f"{TESTED[name]}.")]
    shown = ", ".join(f"{name} {version}" for name, version in installed.items())
    if not others:
        return f"{shown} (as tested)"
    tested = ", ".join(f"{name} {TESTED[name]}" for name in others)
    return f"{shown} (tested with {tested})"


def how_to_resume(trainer: GRPOTrainer) -> str:
    """Return the call that continues a training from its newest checkpoint, for the end of the closing line.

    Returns:
        It begins with "; ". Empty if there is no checkpoint, or if training has taken its last step.
    """
    num_steps = trainer.state.global_step
    folder = Path(trainer.args.output_dir or ".")
    saved = [path for path in checkpoints_in(folder) if 0 < step_of(path) <= num_steps]
    if not saved or 0 < trainer.state.max_steps <= num_steps:
        return ""
    return f"; to continue from step {step_of(saved[-1])}: trainer.train(resume_from_checkpoint={str(saved[-1])!r})"


def how_it_ended(trainer: GRPOTrainer, end: BaseException | str | None) -> str:
    """Return in words how training ended, and after how many steps.

    Args:
        trainer: The trainer.
        end: The exception that ended training, or a phrase such as "was interrupted". None if it ran to its last step.
    """
    steps = trainer.state.global_step
    after = f"after {steps} step{'s' * (steps != 1)}"
    if end is None:
        return f"training has finished {after}"
    if isinstance(end, str):
        return f"training {end} {after}"
    if isinstance(end, KeyboardInterrupt | SystemExit):
        return f"training was interrupted {after}"
    return f"training has failed {after} ({type(end).__name__})"
