"""`python -m rl_training.job.make_tiny`: makes the default model again, or the same for a task of reasoning-gym."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import rl_training.job.silence  # noqa: F401

import torch

from rl_training.job.errors import run_command
from rl_training.models.load import TINY_PATH
from rl_training.models.tiny import build_model, build_tokenizer, warm_start
from rl_training.options import ArgumentParser
from rl_training.tasks import arithmetic, reasoning_gym


def main() -> None:
    """Make the model that the command line asks for, and save it."""
    parser = ArgumentParser(
        prog="python -m rl_training.job.make_tiny",
        description="Make the tiny default model: build it, warm it up on worked arithmetic, or on the answers of a "
        "task of reasoning-gym (about 15 seconds on one core), and save it with its tokenizer.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--output", type=Path, default=TINY_PATH, metavar="DIR", help="folder to write")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of weights and examples")
    parser.add_argument("--task", metavar="NAME", help="a task of reasoning-gym instead of arithmetic")
    parser.add_argument("--settings", type=json.loads, metavar="JSON", help='settings of that task: {"max_terms": 3}')
    arguments = parser.parse_args()
    if arguments.task and arguments.output == TINY_PATH:
        parser.error("--task needs --output FOLDER: the package's own model is that of arithmetic")

    torch.set_num_threads(1)  # more threads would change the order of sums, and are slower at this size
    tokenizer = build_tokenizer()
    model = build_model(tokenizer, arguments.seed)
    examples = (
        reasoning_gym.worked_examples(arguments.task, arguments.seed, arguments.settings)
        if arguments.task
        else arithmetic.worked_examples(arguments.seed)
    )
    losses = warm_start(model, tokenizer, examples)
    model.save_pretrained(arguments.output)
    tokenizer.save_pretrained(arguments.output)
    print(f"{arguments.output}: {model.num_parameters()} parameters, last loss {losses[-1]:.3f} nats a token")


if __name__ == "__main__":
    run_command(main)
