"""python -m rl_training.sync SOURCE DESTINATION: the command sync; the work is in records/sync.py."""

from rl_training.__main__ import command

if __name__ == "__main__":
    command("sync")
