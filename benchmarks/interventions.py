"""Do predictions of interventions come true? What the probe says of a step, against what the same step really does.

    OMP_NUM_THREADS=1 python benchmarks/interventions.py FOLDER [--tasks chains] [--states 5 6 7 8]

A plain run of each task, with all weights or with adapters, leaves a checkpoint at each state. From each of them the
next step is taken once as it is, with the probe `interventions`, and once with each intervention, all from the same
rollout. The change of entropy of every step is measured on the same fresh responses E. Everything is kept in FOLDER as
it ends; what is there is not made again, and the table is of all that is there: stop it when you like.

    predicted  `intervention/NAME/delta_h`, which the probe knows from the rollout alone
    measured   ΔH of the step with the intervention less ΔH of the step as it is, both on E

Over states and interventions whose measured |ΔH| is above 1e-4 nats:

    coverage   share of the probe's 95 % intervals, E's own noise added, that hold what was measured
    sign       share of the probe's intervals without 0 whose sign is that of what was measured
    rank       Spearman's correlation over interventions: median over states, and of the means over states
    slope      of what was measured on what was predicted, through 0, over the means
    nothing    how often interventions that are no-ops on-policy are exactly 0, predicted and measured
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import tempfile
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import rl_training.job.silence  # noqa: F401

import torch
from default_task import default_trainer
from peft import LoraConfig
from scipy.stats import spearmanr
from tqdm import tqdm

from rl_training import DrGRPOTrainer, Estimate, Probe
from rl_training.engine.step import Step
from rl_training.mathematics.calibration import interval_covers
from rl_training.mathematics.jackknife import Replicates
from rl_training.mathematics.per_decision import per_decision_change
from rl_training.probes import InterventionsProbe, SimpleEntropyProbe
from rl_training.tasks.arithmetic import arithmetic
from rl_training.tasks.reasoning_gym import answered_examples, reasoning_gym
from rl_training.tasks.tiny import build_model, build_tokenizer, warm_start

TASKS = ("chains", "long_chains", "sums")
LENGTHS = {"chains": 36, "long_chains": 48, "sums": 12}  # tokens of a response at the most
SUMS = {"min_terms": 2, "max_terms": 3, "max_digits": 1}
INTERVENTIONS = [
    "bonus:0.1", "psr", "nsr", "w_reinforce", "std_norm", "length_norm", "clip_cov:0.02", "top_entropy", "steer",
    "lr:0.5",
]  # fmt: skip
NOTHINGS = ["kl_cov", "clip_higher"]
SMALLEST = 1e-4  # nats


class Judge(Probe):
    """Measures what each step does to entropy on `sequences` fresh responses, the same at the same parameters."""

    name = "judge"

    def __init__(self, sequences: int) -> None:
        super().__init__()
        self._sequences = sequences

    def prepare(self, step: Step) -> None:
        self._evaluation = step.policy.sample(self._sequences, step.number)
        self._before = step.policy.score_rollout(self._evaluation)

    def after_step(self, step: Step) -> None:
        self.change: Replicates = per_decision_change(self._before, step.policy.score_rollout(self._evaluation))

    def results(self) -> dict[str, Estimate]:
        return {"judge/delta_h": Estimate(float(self.change.value[0]), float(self.change.stderr[0]))}


def trainer_of(
    folder: Path, scratch: Path, task: str, weights: str, probes: Sequence[Probe], **more: Any
) -> DrGRPOTrainer:
    """Returns a trainer of a task, with all weights or with adapters."""
    settings: dict[str, Any] = {"learning_rate": 3e-4, "max_completion_length": LENGTHS[task], **more}
    if weights == "lora":
        settings["learning_rate"] = 1e-3
        settings["peft_config"] = LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM")
    if task == "sums":
        settings["task"] = reasoning_gym("chain_sum", settings=SUMS, num_train=1024, num_eval=16)
        settings["model_folder"] = model_of_sums(folder)
    elif task == "long_chains":
        settings["task"] = arithmetic(min_operands=8, max_operands=9)
    return default_trainer(scratch, probes, **settings)


def model_of_sums(folder: Path) -> Path:
    """Returns the folder of a tiny model that half knows chain_sum of reasoning-gym."""
    path = folder / "model_of_sums"
    if not (path / "model.safetensors").is_file():
        tokenizer = build_tokenizer()
        model = build_model(tokenizer, 0)
        warm_start(model, tokenizer, answered_examples("chain_sum", 0, SUMS))
        tokenizer.save_pretrained(path)
        model.save_pretrained(path)
    return path


def at_state(options: argparse.Namespace, task: str, weights: str, checkpoint: Path) -> list[dict[str, Any]]:
    """Returns a row for each intervention: what the probe says of the step from here, and what it really does."""
    changes: dict[str, Replicates] = {}
    said: dict[str, Estimate] = {}
    for name in ("plain", *options.interventions, *NOTHINGS):
        judge = Judge(options.evaluation)
        probes: list[Probe] = [judge]
        if name == "plain":
            probes += [SimpleEntropyProbe(), InterventionsProbe([*options.interventions, *NOTHINGS], every=1)]
        interventions = [] if name == "plain" else [name]
        with tempfile.TemporaryDirectory() as scratch:
            steps = int(checkpoint.name.removeprefix("checkpoint-")) + 1
            settings = {"max_steps": steps, "interventions": interventions}
            trainer = trainer_of(options.folder, Path(scratch), task, weights, probes, **settings)
            trainer.train(resume_from_checkpoint=str(checkpoint))
        changes[name] = judge.change
        if name == "plain":
            said = trainer.attachment.latest
    rows = []
    for name in (*options.interventions, *NOTHINGS):
        predicted, measured = said[f"intervention/{name}/delta_h"], changes[name] - changes["plain"]
        estimates = {"predicted": predicted.value, "predicted_se": predicted.stderr, "samples": predicted.num_samples}
        truth = {"measured": float(measured.value[0]), "measured_se": float(measured.stderr[0])}
        rows.append({"name": name, "half_width": predicted.half_width()} | estimates | truth)
    return rows


def make(options: argparse.Namespace) -> None:
    """Makes what is asked for and not there yet."""
    for weights, task in product(options.weights, options.tasks):
        run = options.folder / f"{task}-{weights}"
        if not (run / f"checkpoint-{max(options.states)}").is_dir():
            saving = {"save_strategy": "steps", "save_steps": 1, "save_total_limit": None}
            trainer_of(options.folder, run, task, weights, [], max_steps=max(options.states), **saving).train()
        for state in tqdm(options.states, desc=run.name, unit="state"):
            path = run / f"state_{state}.json"
            if not path.is_file():
                path.write_text(json.dumps(at_state(options, task, weights, run / f"checkpoint-{state}")))


def rank(pairs: Sequence[tuple[float, float]]) -> float:
    return float(spearmanr(*zip(*pairs, strict=True)).statistic)


def share(hits: Sequence[bool]) -> str:
    return f"{sum(hits) / len(hits):.3f} ({len(hits)})" if hits else "–"


def cells_of(states: Sequence[list[dict[str, Any]]]) -> list[str]:
    """Returns coverage, sign, rank and slope over the states of one task with one kind of weights."""
    known = [
        [row for row in rows if math.isfinite(row["predicted"]) and row["name"] not in NOTHINGS] for rows in states
    ]
    rows = [row for state_rows in known for row in state_rows]
    held = [
        interval_covers(row["predicted"] - row["measured"], row["predicted_se"], row["samples"], row["measured_se"])
        for row in rows
        if abs(row["measured"]) > SMALLEST
    ]
    right = [row["predicted"] * row["measured"] > 0 for row in rows if abs(row["predicted"]) > row["half_width"]]
    single = [rank([(row["predicted"], row["measured"]) for row in state_rows]) for state_rows in known]
    means = [
        tuple(statistics.fmean(row[key] for row in rows if row["name"] == name) for key in ("predicted", "measured"))
        for name in {row["name"]: None for row in rows}
    ]
    slope = sum(p * m for p, m in means) / sum(p * p for p, _ in means)
    return [share(held), share(right), f"{statistics.median(single):.2f}", f"{rank(means):.2f}", f"{slope:.2f}"]


def print_table(folder: Path) -> None:
    print(
        "\n| run | states | coverage (effects) | sign (asserted) | rank, one batch | of means | slope |\n|" + "---|" * 7
    )
    everything = []
    for run in sorted(path for path in folder.glob("*-*") if path.is_dir()):
        states = [json.loads(path.read_text()) for path in sorted(run.glob("state_*.json"))]
        if states:
            everything += states
            print(f"| {run.name} | {len(states)} | {' | '.join(cells_of(states))} |")
    print(f"| all | {len(everything)} | {' | '.join(cells_of(everything)[:3])} | | |")
    exact = [row["predicted"] == row["measured"] == 0 for rows in everything for row in rows if row["name"] in NOTHINGS]
    print(f"\nExactly 0 on-policy ({', '.join(NOTHINGS)}): {sum(exact)} of {len(exact)}.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tasks", nargs="*", default=list(TASKS), choices=TASKS, help="none: the table alone")
    parser.add_argument("--weights", nargs="+", default=["full", "lora"], choices=["full", "lora"])
    parser.add_argument("--states", type=int, nargs="+", default=[5, 10, 15, 20, 25, 30, 35, 40])
    parser.add_argument("--interventions", nargs="+", default=INTERVENTIONS)
    parser.add_argument("--evaluation", type=int, default=1024, help="responses of E, to as many prompts")
    options = parser.parse_args()
    options.folder = options.folder.resolve()
    torch.set_num_threads(1)
    make(options)
    print_table(options.folder)


if __name__ == "__main__":
    main()
