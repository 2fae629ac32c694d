"""Train with Dr-GRPO and probes.

accelerate launch train.py probe=simple
python train.py --help
"""

from rl_training.__main__ import command

if __name__ == "__main__":
    command("train")
