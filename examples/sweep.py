"""A sweep over the learning rate, and one page that compares its runs.

python examples/sweep.py
rl-training report runs/sweep --out sweep.html     # runs that differ only in the seed would be pooled
"""

from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

from rl_training import attach
from rl_training.models.load import TINY_PATH
from rl_training.records import find_runs, metrics

ROWS = [{"prompt": f"{a}+{b}=?<think>"} for a in range(1, 9) for b in range(1, 10 - a)]


def few_characters(completions, **kwargs):
    """0 for an empty completion, -1 for one of forty characters."""
    return [-len(text) / 40 for text in completions]


if __name__ == "__main__":
    for rate in (1e-4, 1e-3):
        folder = f"runs/sweep/{rate}"
        args = GRPOConfig(
            f"{folder}/state", learning_rate=rate, max_steps=2, per_device_train_batch_size=8,
            gradient_accumulation_steps=8, max_completion_length=24, use_cpu=True, bf16=False, report_to=[],
        )  # fmt: skip
        trainer = GRPOTrainer(str(TINY_PATH), few_characters, args, train_dataset=Dataset.from_list(ROWS))
        with attach(trainer, folder, "simple"):
            trainer.train()
    for run in find_runs("runs/sweep"):
        print(run.name, metrics(run)[["reward", "entropy/token"]].iloc[-1].round(3).to_dict())
