"""python -m rl_training.kernel FOLDER …: the command kernel; the work is in offline/kernel_command.py."""

from rl_training.__main__ import command

if __name__ == "__main__":
    command("kernel")
