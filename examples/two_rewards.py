"""Two rewards that train, and one that is only watched: its weight is 0. Copy it, and put in your model and rewards.

    python examples/two_rewards.py

The records say what each step does to each reward, paid or watched: `measured/delta_reward/NAME`, and their sums over
steps: `measured/cumulative_reward/NAME`.
"""

import re

from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

from rl_training import attach
from rl_training.models.load import TINY_PATH

SUMS = [(a, b) for a in range(1, 9) for b in range(1, 10 - a)]
ROWS = [{"prompt": f"{a}+{b}=?<think>", "answer": str(a + b)} for a, b in SUMS]


def right(completions, answer, **kwargs):
    """1 for the right answer."""
    given = [re.findall("<answer>(.*?)</answer>", text) for text in completions]
    return [float(numbers == [wanted]) for numbers, wanted in zip(given, answer, strict=True)]


def short(completions, **kwargs):
    """0 for an empty completion, -1 for one of forty characters."""
    return [-len(text) / 40 for text in completions]


def digits(completions, **kwargs):
    """Return the share of digits, to see whether training changes it."""
    return [sum(map(str.isdigit, text)) / max(len(text), 1) for text in completions]


if __name__ == "__main__":
    args = GRPOConfig(
        "runs/two_rewards/state", reward_weights=[1.0, 0.2, 0.0], learning_rate=3e-5, max_steps=2,
        per_device_train_batch_size=8, gradient_accumulation_steps=8, max_completion_length=24,
        use_cpu=True, bf16=False, report_to=[],
    )  # fmt: skip
    trainer = GRPOTrainer(str(TINY_PATH), [right, short, digits], args, train_dataset=Dataset.from_list(ROWS))
    with attach(trainer, "runs/two_rewards", ["simple", "measured"]):
        trainer.train()
