"""LoRA: the probes measure the weights that are trained, so vectors are as small as the adapter.

python examples/lora.py
"""

from datasets import Dataset
from peft import LoraConfig
from trl import GRPOConfig, GRPOTrainer

from rl_training import attach
from rl_training.models.load import TINY_PATH

ROWS = [{"prompt": f"{a}+{b}=?<think>"} for a in range(1, 9) for b in range(1, 10 - a)]


def different_characters(completions, **kwargs):
    """Pay for each different character."""
    return [float(len(set(text))) for text in completions]


if __name__ == "__main__":
    args = GRPOConfig(
        "runs/lora/state", learning_rate=2e-3, max_steps=2, per_device_train_batch_size=8,
        gradient_accumulation_steps=8, max_completion_length=24, use_cpu=True, bf16=False, report_to=[],
    )  # fmt: skip
    trainer = GRPOTrainer(
        str(TINY_PATH), different_characters, args, train_dataset=Dataset.from_list(ROWS),
        peft_config=LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM"),
    )  # fmt: skip
    with attach(trainer, "runs/lora"):
        trainer.train()
