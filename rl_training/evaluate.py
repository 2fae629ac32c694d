"""python -m rl_training.evaluate run=RUN: the command evaluate; the work is in job/commands.py."""

from rl_training.__main__ import command

if __name__ == "__main__":
    command("evaluate")
