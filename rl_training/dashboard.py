"""python -m rl_training.dashboard: the command dashboard; the work is in records/workspace.py."""

from rl_training.__main__ import command

if __name__ == "__main__":
    command("dashboard")
