"""How far do bounded steps move the policy? Their exact KL on fresh responses to prompts that training never saw.

    OMP_NUM_THREADS=1 python benchmarks/step_size_fresh.py --output runs/step_size

It repeats runs of step_size.py's third part, target_kl_share=1e-2 from the third start rate. After each step, the
policy before it answers held-out prompts, and KL(policy before ‖ after) is summed over the vocabulary at each token of
these responses. A line of OUTPUT/fresh.jsonl has a run's steps; a setting that has its line is not repeated.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import tempfile
from pathlib import Path
from statistics import fmean, median
from typing import Any

import rl_training.job.silence  # noqa: F401

import numpy as np
import torch
from step_size_rules import RULES, Job, trainer_of
from step_size_settings import HELD_OUT, SETTINGS, THIRD, Setting, model_folder, task_of
from step_size_tables import print_header, row
from transformers import TrainerCallback

from rl_training.evaluation.policy import CheckpointPolicy
from rl_training.evaluation.responses import generate_responses, make_batches
from rl_training.tasks.task import Task

RULE, SEED = "bounded_1e-2", 0
RESPONSES = 2  # to each held-out prompt
LOGGED = {"bound/target_kl": "target", "bound/kl": "bound"}


class FreshKL(TrainerCallback):
    """Measures each step's KL on fresh responses of the policy before it, and keeps what the bound logged of it."""

    def __init__(self, setting: Setting, task: Task, model: Any, tokenizer: Any) -> None:
        self.task = task
        before, self.after = copy.deepcopy(model).eval(), copy.deepcopy(model).eval()
        self.policy = CheckpointPolicy(before, tokenizer, self.after, 1.0, setting.tokens)
        self.steps: list[dict[str, float]] = []

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.after.load_state_dict(model.state_dict())
        batches = make_batches(range(HELD_OUT), RESPONSES, False, 10**6)
        [responses] = list(generate_responses(self.policy, self.task, batches, state.global_step, {}))
        by_prompt = np.zeros((HELD_OUT, 2))
        for response in responses:
            by_prompt[response.row] += (response.kl.sum(), response.length)
        kl, tokens = by_prompt.sum(axis=0)
        left_out = (kl - by_prompt[:, 0]) / (tokens - by_prompt[:, 1])  # the mean without each prompt
        variance = (HELD_OUT - 1) / HELD_OUT * ((left_out - left_out.mean()) ** 2).sum()
        self.steps.append({"fresh": float(kl / tokens), "standard_error": math.sqrt(variance)})
        self.policy.model.load_state_dict(model.state_dict())

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if "bound/kl" in logs:
            self.steps[-1] |= {short: logs[name] for name, short in LOGGED.items()}


def steps_of(name: str, output: Path) -> list[dict[str, float]]:
    """Return the steps of a setting's run: their target, the bound's KL and the KL on fresh responses."""
    setting = SETTINGS[name]
    task, job = task_of(setting.task), Job(name, RULE, setting.rates[2], SEED)
    with tempfile.TemporaryDirectory() as scratch:
        trainer = trainer_of(setting, task, job, RULES[RULE], model_folder(setting.model, output), scratch)
        fresh = FreshKL(setting, task, trainer.model, trainer.processing_class)
        trainer.add_callback(fresh)
        trainer.train()
    return fresh.steps


def print_table(runs: list[dict[str, Any]]) -> None:
    """Print the share of steps whose fresh KL is near the target, and on which side the others are."""
    print_header("setting", "steps", "within .5 to 2 of the target", "below", "above", "KL / target, geometric mean",
                 "the bound's KL / target, within", "geometric mean", "relative standard error, median")  # fmt: skip
    steps_by_name = {run["setting"]: run["steps"] for run in runs}
    steps_by_name["all"] = [step for run in runs for step in run["steps"]]
    for name, steps in steps_by_name.items():
        ratios, bounds = ([step[kl] / step["target"] for step in steps] for kl in ("fresh", "bound"))
        within, bound_within = (fmean(0.5 <= ratio <= 2.0 for ratio in part) for part in (ratios, bounds))
        means = [math.exp(fmean(map(math.log, part))) for part in (ratios, bounds)]
        errors = median(step["standard_error"] / step["fresh"] for step in steps)
        below, above = fmean(ratio < 0.5 for ratio in ratios), fmean(ratio > 2.0 for ratio in ratios)
        print(row([name, len(ratios), within, below, above, means[0], bound_within, means[1], errors]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("runs/step_size"))
    parser.add_argument("--settings", nargs="*", default=list(THIRD), choices=SETTINGS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    options.output.mkdir(parents=True, exist_ok=True)
    path = options.output / "fresh.jsonl"
    runs = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.is_file() else []
    for name in options.settings:
        if name not in {run["setting"] for run in runs}:
            runs.append({"setting": name, "steps": steps_of(name, options.output)})
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(runs[-1]) + "\n")
    print_table(runs)


if __name__ == "__main__":
    main()
