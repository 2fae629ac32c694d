"""python -m rl_training.report RUN …: the command, under its public name; the work is in records/report and compare."""

from rl_training.job.command_line import run_command
from rl_training.records.compare.command import main

if __name__ == "__main__":
    run_command(main)
