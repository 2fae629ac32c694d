"""python -m rl_training.dashboard: the command, under its public name; the work is in records/workspace.py."""

from rl_training.job.command_line import run_command
from rl_training.records.workspace import main

if __name__ == "__main__":
    run_command(main)
