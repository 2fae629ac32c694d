"""Two processes that share the prompts of each step (DDP). `attach` is called on both; the first one writes.

torchrun --standalone --nproc_per_node 2 examples/two_processes.py

On GPUs also `accelerate launch --num_processes 2`, which starts one process on a CPU.
"""

from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

from rl_training import attach
from rl_training.models.load import TINY_PATH

ROWS = [{"prompt": f"{a}+{b}=?<think>"} for a in range(1, 9) for b in range(1, 10 - a)]


def different_characters(completions, **kwargs):
    """Pay for each different character."""
    return [float(len(set(text))) for text in completions]


if __name__ == "__main__":
    args = GRPOConfig(
        "runs/two_processes/state", learning_rate=3e-4, max_steps=2, per_device_train_batch_size=8,
        gradient_accumulation_steps=4,  # microbatches of each process: eight prompts a step in all
        max_completion_length=24, use_cpu=True, bf16=False, report_to=[],
    )  # fmt: skip
    trainer = GRPOTrainer(str(TINY_PATH), different_characters, args, train_dataset=Dataset.from_list(ROWS))
    with attach(trainer, "runs/two_processes"):
        trainer.train()
