"""python -m rl_training.offline --config FILE --checkpoint PATH: the command; the work is in job/offline_probe.py."""

from rl_training.job.command_line import run_command
from rl_training.job.offline_probe import main

if __name__ == "__main__":
    run_command(main)
