"""Run a script or module in which every GRPOTrainer that trains is attached, without a line in it.

    accelerate launch -m rl_training.attach --folder runs/my_run SCRIPT.py ARGUMENTS
    accelerate launch -m rl_training.attach -m trl.scripts.grpo ARGUMENTS

The script runs as if Python had been started with it: its arguments, `__main__`, folder in Python's path, exit code,
signals and tracebacks. Nothing is imported before the script does so, since it may set variables that libraries read
when they are imported: transformers' `Trainer.train` is replaced once the script has imported TRL's trainer.
"""

from __future__ import annotations

import argparse
import functools
import os
import sys
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rl_training.errors import UserError
from rl_training.hosts.after_import import after_import
from rl_training.hosts.trl.options import Options, options_of_attach
from rl_training.hosts.trl.run_script import run_module, run_script

TRAINER_MODULE = "trl.trainer.grpo_trainer"
NOTHING_MEASURED = (
    "rl-training: no trl.GRPOTrainer was trained here, so nothing was measured. A loop of your own: measured_loop in "
    "rl_training"
)
OWN_PROBES = (
    "rl-training: the script says itself what its {} measures, by attach or by probes= and records=, so --folder, "
    "--probes and the other options of this command are not used for it"
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command with these arguments, or with those in sys.argv."""
    parser = _parser()
    options = parser.parse_args(arguments)
    name, *rest = options.module or options.script or [""]
    if not name:
        parser.error("which script? Give SCRIPT.py, or -m MODULE, with its arguments")
    trainings = Trainings(parser, options, Path(name).stem if options.script else name.rpartition(".")[2])
    after_import(TRAINER_MODULE, trainings.watch)
    run = run_module if options.module else run_script
    run(name, rest, parser.error)
    if not trainings.count:
        _say(NOTHING_MEASURED)


def _say(line: str) -> None:
    """Print a line on stderr, on the first process. No library that knows the ranks may have been imported."""
    if os.environ.get("RANK", "0") == "0":
        print(line, file=sys.stderr)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="rl-training attach",
        usage="%(prog)s [OPTIONS] SCRIPT.py ARGUMENTS\n       %(prog)s [OPTIONS] -m MODULE ARGUMENTS",
        description="Run a script in which every trl.GRPOTrainer that trains is attached, as by attach(trainer, "
        "FOLDER). In several processes: accelerate launch -m rl_training.attach ...",
        allow_abbrev=False,
    )
    parser.add_argument("--folder", help="where records and report go; default: runs/ and the script's name")
    parser.add_argument("--probes", default="simple,ess", help="names of probes, with commas; default: %(default)s")
    for option in options_of_attach():
        parser.add_argument(f"--{option.name.replace('_', '-')}", default=option.default, **option.metadata)
    parser.add_argument("-m", dest="module", nargs=argparse.REMAINDER, help="run a module as a script")
    parser.add_argument("script", nargs=argparse.REMAINDER, help="the script and its arguments")
    return parser


class Trainings:
    """Attaches probes to each training of the script.

    Args:
        parser: Reports mistakes in the options.
        options: Its options.
        name: The script's name, for the default folder.
    """

    def __init__(self, parser: argparse.ArgumentParser, options: argparse.Namespace, name: str) -> None:
        self._parser = parser
        self._folder = Path(options.folder or Path("runs") / name).expanduser().absolute()  # the script may leave it
        self._probes = [probe for probe in options.probes.split(",") if probe]
        self._options = {option.name: getattr(options, option.name) for option in options_of_attach()}
        self.count = 0

    def watch(self, _: types.ModuleType) -> None:
        """Replace `train` of transformers' trainer, now that TRL's trainer has been imported."""
        from transformers import Trainer

        self._refuse_mistakes()
        original = Trainer.train

        @functools.wraps(original)
        def train(trainer: Trainer, *args: Any, **kwargs: Any) -> Any:
            return self._train(trainer, functools.partial(original, trainer), *args, **kwargs)

        Trainer.train = train

    def _refuse_mistakes(self) -> None:
        """End the process if the options are wrong, while the script has done no more than import TRL."""
        from rl_training.hosts.probes import as_probes

        try:
            as_probes(self._probes)
            Options(**self._options)
            self._refuse_folder()
        except UserError as error:
            self._parser.error(str(error))

    def _refuse_folder(self) -> None:
        """Raise UserError if nothing can be written to the folder, which a script that catches errors would hide."""
        existing = next(path for path in (self._folder, *self._folder.parents) if path.exists())
        if not (existing.is_dir() and os.access(existing, os.W_OK)):
            raise UserError(f"--folder {self._folder}: {existing} is not a folder that can be written")

    def _train(self, trainer: Any, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        from rl_training.hosts.trl import attach
        from rl_training.hosts.trl.attachment import is_attached

        is_grpo = any(base.__name__.endswith("GRPOTrainer") for base in type(trainer).__mro__)  # attach refuses copies
        self.count += is_grpo
        if not is_grpo:
            return original(*args, **kwargs)
        if is_attached(trainer):
            _say(OWN_PROBES.format(type(trainer).__name__))
            return original(*args, **kwargs)
        attached = attach(trainer, self._folder, self._probes, **self._options)
        try:
            return attached.on_train(original, *args, **kwargs)
        finally:
            attached.remove()  # what it wraps, even if training never began
