"""A script of TRL without a line about probes. The launcher attaches them, in one process or several.

accelerate launch -m rl_training.attach --folder runs/unchanged examples/unchanged.py
torchrun --standalone --nproc_per_node 2 -m rl_training.attach --folder runs/unchanged examples/unchanged.py
"""

from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

from rl_training.models.load import TINY_PATH  # a small model, in place of yours

ROWS = [{"prompt": f"{a}+{b}=?<think>"} for a in range(1, 9) for b in range(1, 10 - a)]


def different_characters(completions, **kwargs):
    """Pay for each different character."""
    return [float(len(set(text))) for text in completions]


if __name__ == "__main__":
    args = GRPOConfig(
        "runs/unchanged/state", learning_rate=3e-4, max_steps=2, per_device_train_batch_size=8,
        gradient_accumulation_steps=8, max_completion_length=24, use_cpu=True, bf16=False, report_to=[],
    )  # fmt: skip
    GRPOTrainer(str(TINY_PATH), different_characters, args, train_dataset=Dataset.from_list(ROWS)).train()
