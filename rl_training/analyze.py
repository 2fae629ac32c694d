"""python -m rl_training.analyze checkpoint=RUN: the command analyze; the work is in job/commands.py."""

from rl_training.__main__ import command

if __name__ == "__main__":
    command("analyze")
