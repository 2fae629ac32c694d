"""rl-training COMMAND …, or python -m rl_training COMMAND …: every command of the package.

In a checkout `train.py`, `offline.py` (analyze) and `evaluate.py` are the same. To start several processes:
`accelerate launch -m rl_training train …`.
"""

from __future__ import annotations

import importlib
import os
import sys

from rl_training.version import VERSION

# By name: the module and the function that do the work, imported when the command runs, and what it does.
COMMANDS = {
    "train": ("rl_training.job.commands", "train", "train with GRPO and probes"),
    "analyze": ("rl_training.job.commands", "analyze", "analyze checkpoints: what their next step does to entropy"),
    "evaluate": ("rl_training.job.commands", "evaluate", "evaluate the checkpoints of a run"),
    "report": ("rl_training.records.compare.command", "main", "make the report of a run, or compare several runs"),
    "kernel": ("rl_training.offline.kernel.command", "main", "print and redraw the kernels of an analysis"),
    "dashboard": ("rl_training.records.workspace", "main", "save a W&B workspace for the runs"),
    "config": ("rl_training.job.configuration.shipped", "show_conf", "say where the configuration lies, or copy it"),
    "launch-file": ("rl_training.job.configuration.shipped", "copy_launch_file", "copy a launch file or script"),
}


MEANT = {"compare": "report", "offline": "analyze"}  # by what is typed, where it is not close to the command's name


def command(name: str) -> None:
    """Run a command, whose arguments are sys.argv, and ends the process as job/errors.py says."""
    _leave_out_working_folder()
    from rl_training.job.errors import run_command  # after that, since it imports

    module, function, _ = COMMANDS[name]
    run_command(lambda: getattr(importlib.import_module(module), function)())


def _leave_out_working_folder() -> None:
    """Take the working folder off Python's path, here and in processes that are started.

    See job/configuration/custom_code.py.
    """
    here, home = os.getcwd(), os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    if here == home:  # a checkout: what it starts needs to find the package
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH")]))
    else:
        first = sys.path[0] in ("", here)  # python -m put it there
        sys.path[:] = [folder for folder in sys.path[first:] if folder]
    os.environ["PYTHONSAFEPATH"] = "1"


def main() -> None:
    """Run the command that the first argument names."""
    name = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if name in COMMANDS:
        sys.argv = sys.argv[1:]  # the command reads its own arguments
        command(name)
    elif name in ("-h", "--help"):
        print(_help())
    elif name == "--version":
        print(VERSION)
    else:
        print(f"error: {_unknown(name)}", file=sys.stderr)
        sys.exit(2)


def _unknown(name: str) -> str:
    """Return a line that names the command that may have been meant."""
    _leave_out_working_folder()
    import difflib  # after that, too

    close = [MEANT[name]] if name in MEANT else difflib.get_close_matches(name, COMMANDS, n=1, cutoff=0.5)
    hint = f"; did you mean {close[0]}: {COMMANDS[close[0]][2]}?" if close else ""
    return f"there is no command {name}, see rl-training --help{hint}"


def _help() -> str:
    commands = "\n".join(f"  {name:13}{what}" for name, (_, _, what) in COMMANDS.items())
    return (
        f"rl-training {VERSION}: probes inside the GRPO training loop\n\n"
        f"usage: rl-training COMMAND [ARGUMENTS]\n\n{commands}\n\n"
        "  rl-training COMMAND --help says more about each.\n"
        "  What train, analyze and evaluate need: pip install 'rl-training[train]'\n"
        "  Several processes: accelerate launch -m rl_training train [ARGUMENTS]"
    )


if __name__ == "__main__":
    main()
