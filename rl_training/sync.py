"""python -m rl_training.sync SOURCE DESTINATION: the command, under its public name; the work is in records/sync/."""

from rl_training.job.command_line import run_command
from rl_training.records.sync.command import main

if __name__ == "__main__":
    run_command(main)
