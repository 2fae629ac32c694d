"""Predict and measure what a checkpoint's next step does to entropy.

accelerate launch offline.py checkpoint=RUN
python offline.py --help
"""

from rl_training.__main__ import command

if __name__ == "__main__":
    command("analyze")
