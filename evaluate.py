"""Evaluate the checkpoints of a run.

python evaluate.py run=RUN
python evaluate.py --help
"""

from rl_training.__main__ import command

if __name__ == "__main__":
    command("evaluate")
