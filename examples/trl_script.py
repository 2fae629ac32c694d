"""A script as in TRL's quickstart, with probes: the two lines that end in # probes.

python examples/trl_script.py --model_name_or_path Qwen/Qwen2.5-0.5B --dataset_name trl-lib/tldr \
    --output_dir runs/tldr --gradient_accumulation_steps 8
"""

from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer, ModelConfig, ScriptArguments, TrlParser

from rl_training import attach  # probes


def twenty_characters(completions, **kwargs):
    """0 for a completion of 20 characters, less the further it is from that."""
    return [-abs(20 - len(completion)) / 20 for completion in completions]


if __name__ == "__main__":
    script, args, model = TrlParser((ScriptArguments, GRPOConfig, ModelConfig)).parse_args_and_config()
    dataset = load_dataset(script.dataset_name, split=script.dataset_train_split)
    trainer = GRPOTrainer(model.model_name_or_path, twenty_characters, args, train_dataset=dataset)
    with attach(trainer, args.output_dir):  # probes
        trainer.train()
