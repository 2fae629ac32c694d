"""python -m rl_training.train …, also below accelerate launch: the command train; the work is in job/commands.py."""

from rl_training.__main__ import command

if __name__ == "__main__":
    command("train")
