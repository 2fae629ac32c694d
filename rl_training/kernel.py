"""python -m rl_training.kernel FOLDER …: the command, under its public name; the work is in offline/kernel_command."""

from rl_training.job.command_line import run_command
from rl_training.offline.kernel_command import main

if __name__ == "__main__":
    run_command(main)
