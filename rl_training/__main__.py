"""Run a command of the package: rl-training COMMAND …, or python -m rl_training COMMAND ….

In a checkout, `train.py`, `offline.py` (analyze) and `evaluate.py` do the same. To start several processes:
`accelerate launch -m rl_training train …`.
"""

from __future__ import annotations

import importlib
import os
import sys

from rl_training.version import VERSION

RUNS_SCRIPT = "attach"  # the command whose errors and working folder are those of a script
# Command name → module and function that do the work, imported when the command runs, and a description.
COMMANDS = {
    "train": ("rl_training.job.commands", "train", "train with GRPO and probes"),
    "analyze": ("rl_training.job.commands", "analyze", "analyze checkpoints: what their next step does to entropy"),
    "evaluate": ("rl_training.job.commands", "evaluate", "evaluate the checkpoints of a run"),
    RUNS_SCRIPT: ("rl_training.hosts.trl.launcher", "main", "run your own script with probes on its trl.GRPOTrainer"),
    "report": ("rl_training.records.report_command", "main", "make the report of a run, or compare several runs"),
    "kernel": ("rl_training.offline.kernel.command", "main", "print and redraw the kernels of an analysis"),
    "dashboard": ("rl_training.records.dashboard", "main", "save a W&B workspace for the runs"),
    "config": ("rl_training.job.configuration.shipped", "show_conf", "print where the configuration is, or copy it"),
    "launch-file": ("rl_training.job.configuration.shipped", "copy_launch_file", "copy a launch file or script"),
}


# typed word → command, for words that are not similar to the command's name
MEANT = {"compare": "report", "offline": "analyze"}


def command(name: str) -> None:
    """Run a command with the arguments in sys.argv, and exit as described in job/errors.py, or as its script does."""
    module, function, _ = COMMANDS[name]
    if name == RUNS_SCRIPT:
        getattr(importlib.import_module(module), function)()
        return
    _leave_out_working_folder()
    from rl_training.job.errors import run_command  # only then, since this imports

    run_command(lambda: getattr(importlib.import_module(module), function)())


def _leave_out_working_folder() -> None:
    """Remove the working folder from Python's path, here and in child processes.

    The reason is in job/configuration/custom_code.py.
    """
    here, home = os.getcwd(), os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    if here == home:  # a checkout: child processes must find the package
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
    """Return an error line that suggests the command that may have been meant."""
    _leave_out_working_folder()
    import difflib  # only then, too

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
