"""Does a bounded step make the learning rate matter less? The runs were registered before they were made.

    OMP_NUM_THREADS=1 python benchmarks/step_size.py --plan    # the registered plan: settings, rules, measures, bar
    OMP_NUM_THREADS=1 python benchmarks/step_size.py           # do the runs, one line in OUTPUT/runs.jsonl each
    python benchmarks/step_size.py --table                     # tables and the picture of existing runs

step_size_plan.txt is the registered plan. It has four parts; `--part 4` is the last one, and what runs by default. The
first two judged an earlier version of the bound. A run that has its line is not repeated, so you can stop and continue
later.
Two of the rules need pip install prodigyopt==1.1.2 schedulefree==1.4.1, and are left out without them.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import math
import tempfile
import time
from pathlib import Path
from typing import Any

import rl_training.job.silence  # noqa: F401

import numpy as np
import torch
from step_size_rules import CLIPS, PACKAGES, SKIPS, Job, Rule, rule_of, set_to_evaluate, trainer_of
from step_size_settings import (
    FIRST,
    FOURTH,
    HELD_OUT,
    RESPONSES,
    SECOND,
    SETTINGS,
    SOME,
    THIRD,
    Setting,
    model_folder,
    task_of,
)
from step_size_tables import BOUNDED, draw, paired_runs, print_tables, read_lines
from transformers import TrainerCallback

from rl_training import UserError
from rl_training.evaluation.policy import CheckpointPolicy
from rl_training.evaluation.responses import Response, generate_responses, make_batches
from rl_training.models.load import load_causal_lm
from rl_training.tasks.task import Task

ALL, MIDDLE = slice(None), slice(2, 3)  # which of a setting's start rates
LOGGED = {"reward": "reward", "entropy": "entropy", "bound/kl": "kl", "bound/learning_rate": "rate"}
BESIDE = ("clip", "schedule_free", "adaptive", "linear")


def runs(settings: str, *rules: str, rates: slice = ALL, seed: int = 0) -> list[Job]:
    return [
        Job(name, rule, rate, seed)
        for name in settings.split()
        for rule in rules
        for rate in SETTINGS[name].rates[rates]
    ]


def prodigy(settings: str) -> list[Job]:
    return [Job(name, "prodigy", factor, 0) for name in settings.split() for factor in (1.0, 0.1, 10.0)]


def first_part() -> list[Job]:
    names = " ".join(FIRST)
    return [
        *(Job(name, "untrained", 0.0, 0) for name in FIRST),
        *runs(names, "fixed", "bounded"),
        *runs("few_prompts lora gcd reuse muon sgd", "adaptive", rates=SOME),
        *runs("few_prompts lora", "linear", rates=SOME),
    ]


def second_part() -> list[Job]:
    """Return the runs of the second part, in the order in which they are done."""
    return [
        *(Job(name, "untrained", 0.0, 0) for name in SECOND),
        *runs("sgd_few_prompts reuse_4 spelling muon_32", "fixed", "bounded", "bounded_1e-2"),
        *runs("few_prompts sgd_few_prompts reuse_4", "bounded_5x", "bounded_1e-2_5x", rates=MIDDLE),
        *runs("sixty_steps long lora_16", "fixed", "bounded", "bounded_1e-2"),
        *runs("default", *(f"clip_{norm:g}" for norm in CLIPS), rates=SOME, seed=100),
        *runs("default_reuse", *(f"skip_{target:g}" for target in SKIPS), rates=SOME, seed=100),
        *prodigy("few_prompts reuse_4"),
        *runs("reuse_4", *BESIDE, "skip", rates=SOME),
        *runs("reuse", "skip", rates=SOME),
        *runs("few_prompts", "clip", "schedule_free", rates=SOME),
        *(job for name in ("few_prompts", "reuse", "sgd", "muon", "lora") for job in old_setting_again(name)),
        *runs("reuse sgd muon", "linear", rates=SOME),
        *(job for name in ("spelling", "sixty_steps", "lora_16") for job in other_rules(name)),
        *old_setting_again("gcd", SOME),
        *runs("gcd", "linear", rates=SOME),
        *old_setting_again("million"),
    ]


def third_part() -> list[Job]:
    """Return the runs of the third part, in the order in which they are done."""
    return [
        *(
            job
            for name in THIRD
            for job in (
                Job(name, "untrained", 0.0, 0),
                *runs(name, "fixed"),
                *runs(name, "bounded_1e-2", rates=SOME),
            )
        ),
        *runs(" ".join(THIRD), "bounded_3e-3", rates=SOME),
    ]


def fourth_part() -> list[Job]:
    """Return the runs of the fourth part, in the order in which they are done."""
    return [
        *(job for name in THIRD for job in both_again(name)),
        *(job for name in FOURTH for job in (Job(name, "untrained", 0.0, 0), *both_again(name, seed=0))),
        *prodigy("beta2_95 grpo_kl_4"),
        *runs("beta2_95 grpo_kl_4", "schedule_free", rates=SOME),
        *runs("grpo_kl_4", "skip_0.01", rates=SOME),
        *runs("beta2_95 grpo_kl_4 muon_8", "adaptive", "linear", "clip_0.25", rates=SOME),
        *runs("beta2_95 grpo_kl_4 muon_8", "bounded_1e-2_5x", rates=MIDDLE),
        *runs(" ".join(THIRD), "bounded_3e-3", rates=SOME, seed=1),
    ]


def both_again(name: str, seed: int = 1) -> list[Job]:
    return [*runs(name, "fixed", seed=seed), *runs(name, "bounded_1e-2", rates=SOME, seed=seed)]


def old_setting_again(name: str, bounded_rates: slice = ALL) -> list[Job]:
    """Return the runs that repeat a setting of the first part with another seed."""
    some = ALL if name == "million" else SOME
    return [
        *runs(name, "fixed", seed=1),
        *runs(name, "bounded", seed=1, rates=bounded_rates),
        *runs(name, "bounded_1e-2", seed=1, rates=some),
    ]


def other_rules(name: str) -> list[Job]:
    return [*prodigy(name), *runs(name, *BESIDE, rates=SOME)]


class Curves(TrainerCallback):
    """Keeps what a run logs at each step: reward, entropy, and how the step was bounded."""

    def __init__(self) -> None:
        self.values: dict[str, list[float]] = {}

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        for name, short in LOGGED.items():
            if name in logs:
                self.values.setdefault(short, []).append(float(f"{logs[name]:.4g}"))


def evaluate(setting: Setting, task: Task, model: Any, tokenizer: Any, first: Any) -> dict[str, Any]:
    """Return a model's measures on held-out prompts, and ten example responses."""
    policy = CheckpointPolicy(model.eval(), tokenizer, None, 1.0, setting.tokens)
    [responses] = list(generate_responses(policy, task, make_batches(range(HELD_OUT), RESPONSES, False, 10**6), 0, {}))
    rewards = torch.tensor([response.reward for response in responses]).view(HELD_OUT, RESPONSES)
    with_reference = dataclasses.replace(policy, reference=first)
    quarter = make_batches(range(0, HELD_OUT, 4), RESPONSES, False, 10**6)
    [some] = list(generate_responses(with_reference, task, quarter, 0, {}))
    return {
        "reward": float(rewards.mean()),
        "pass8": float((rewards == 1.0).any(dim=1).float().mean()),
        "length": sum(response.length for response in responses) / len(responses),
        "truncated": sum(response.truncated for response in responses) / len(responses),
        "entropy": mean_over_tokens(some, "entropies"),
        "kl_to_first": mean_over_tokens(some, "kl"),
        "examples": [task.eval_dataset[r.row]["prompt"] + r.text for r in responses[:: len(responses) // 10][:10]],
    }


def mean_over_tokens(responses: list[Response], name: str) -> float:
    return float(np.concatenate([getattr(response, name) for response in responses]).mean())


def run(job: Job, setting: Setting, rule: Rule, output: Path) -> dict[str, Any]:
    """Do one run and return its line for runs.jsonl."""
    start, task, folder = time.process_time(), task_of(setting.task), model_folder(setting.model, output)
    curves, problem = Curves(), ""
    with tempfile.TemporaryDirectory() as scratch:
        trainer = trainer_of(setting, task, job, rule, folder, scratch)
        trainer.add_callback(curves)
        try:
            if job.rule != "untrained":
                trainer.train()
                set_to_evaluate(trainer)
        except UserError as error:
            if "diverged" not in str(error):
                raise
            problem = str(error)
    model = trainer.model
    first = model if setting.lora else load_causal_lm(folder)[0].eval()
    is_finite = all(bool(weight.isfinite().all()) for weight in model.parameters())
    measures = {"reward": 0.0, "pass8": 0.0, "entropy": math.nan, "kl_to_first": math.nan, "length": math.nan}
    if not problem and is_finite:
        measures = evaluate(setting, task, model, trainer.processing_class, first)
    elif not problem:
        problem = "a weight is not finite"
    seconds = time.process_time() - start
    return dataclasses.asdict(job) | measures | {"problem": problem, "seconds": seconds, "curves": curves.values}


def run_all(todo: list[Job], output: Path) -> None:
    """Do the runs whose packages are installed, and write the line of each."""
    missing = {
        name: what for name, what in PACKAGES.items() if importlib.util.find_spec(what.partition("=")[0]) is None
    }
    for name, what in missing.items():
        print(f"the rule {name} is left out: it needs pip install {what}", flush=True)
    todo = [job for job in todo if job.rule not in missing]
    output.mkdir(parents=True, exist_ok=True)
    for number, job in enumerate(todo):
        line = run(job, SETTINGS[job.setting], rule_of(job.rule, read_lines(output)), output)
        with (output / "runs.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        print(f"{number + 1}/{len(todo)} {job}: {line['reward']:.3f} {line['pass8']:.3f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", type=int, choices=(1, 2, 3, 4), default=4, help="which part of the plan to run")
    parser.add_argument("--output", type=Path, default=Path("runs/step_size"))
    parser.add_argument("--picture", type=Path, default=Path("docs/figures/step_size.png"))
    parser.add_argument("--plan", action="store_true", help="print the plan and how much of it is left to run")
    parser.add_argument("--table", action="store_true", help="print tables of the existing runs")
    options = parser.parse_args()
    torch.set_num_threads(1)
    lines = read_lines(options.output)
    if options.table:
        judged = {name for name in SETTINGS if any(all(paired_runs(lines, name, rule)) for rule in BOUNDED)}
        groups = {
            "third part": [name for name in THIRD if name in judged],
            "third and fourth part": [name for name in THIRD | FOURTH if name in judged],
            "all settings": [name for name in THIRD | FOURTH | SECOND | FIRST if name in judged],
        }
        if not judged:
            parser.error(f"{options.output} has no setting with runs of both fixed and bounded: do the runs first")
        print_tables(lines, groups)
        draw(lines, {name: SETTINGS[name].title or name for name in groups["all settings"]}, options.picture)
        return
    done = {Job(*(line[field.name] for field in dataclasses.fields(Job))) for line in lines}
    jobs = (first_part, second_part, third_part, fourth_part)[options.part - 1]()
    todo = [job for job in jobs if job not in done]
    if options.plan:
        mean = float(np.mean([line["seconds"] for line in lines])) if lines else 12.0
        print(Path(__file__).with_name("step_size_plan.txt").read_text(encoding="utf-8"))
        print(f"{len(jobs)} runs, {len(todo)} are left: about {len(todo) * mean / 3600:.1f} hours of one processor")
        return
    run_all(todo, options.output)


if __name__ == "__main__":
    main()
