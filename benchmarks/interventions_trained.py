"""Does the order that interventions are predicted to have come true when runs are trained with them?

    OMP_NUM_THREADS=1 python benchmarks/interventions_trained.py FOLDER [--part plain | register | train | tables]

A test registered before it is run. `plain` trains each task without any intervention, with the probe of interventions;
`register` writes down, from those runs' steps 20 to 40 alone, how much each intervention would keep of entropy and
cost in reward: benchmarks/interventions_registered.json, to be committed before `train` is begun, which refuses
without it. What is foretold, task by task: the order of entropy at the end is that of the predicted change of entropy,
and the order of pass@8 is the same, since it is lost with entropy.

`train` trains each intervention from the first step on, with the same seeds; `tables` compares the registered order
with that of entropy and pass@8 at the end. A run that has ended is not trained again.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import rl_training.job.silence  # noqa: F401

import torch
from default_task import Progress, default_trainer
from leaderboard_runs import TASKS, model_of
from scipy.stats import spearmanr
from tqdm import tqdm

from rl_training import DrGRPOTrainer
from rl_training.interventions.named import intervention
from rl_training.mathematics.pass_at_k import pass_at_k
from rl_training.probes.interventions import InterventionsProbe
from rl_training.records.atomic_write import write_atomically
from rl_training.records.jsonl import Records
from rl_training.records.report.series import read_run
from rl_training.tasks.reasoning_gym import reasoning_gym
from rl_training.tasks.task import Task

TRAINED = ("chains", "long_chains", "sums")
WHICH = ("bonus:0.01", "psr", "nsr", "lr:0.5", "clip_cov:0.02")
PLAIN = "plain"
SEEDS = range(3)
STEPS, LAST = 60, 5  # of a run; of which the last so many make its final entropy
RATE = 3e-4
SEEN = range(20, 41)  # steps whose predictions are registered
EVERY = 2
PROMPTS, RESPONSES = 128, 8  # held out, for pass@8
RIGHT = 1.0  # the most that a response earns in each of the tasks
REGISTERED = Path(__file__).with_name("interventions_registered.json")


@dataclass(frozen=True)
class Run:
    """One run: a task, what it is trained with, a seed."""

    task: str
    which: str
    seed: int

    def path(self, folder: Path) -> Path:
        return folder / f"{self.task}-{self.which.replace(':', '_')}-{self.seed}.json"


def train(folder: Path, runs: list[Run]) -> None:
    """Trains the runs that are missing; each leaves its numbers in a file when it has ended."""
    todo = [run for run in runs if not run.path(folder).exists()]
    with tqdm(total=len(todo) * STEPS, unit="step") as bar:
        for run in todo:
            bar.set_description(run.path(folder).stem)
            write_atomically({run.path(folder): json.dumps(made(folder, run, bar)).encode()})


def made(folder: Path, run: Run, bar: tqdm) -> dict[str, Any]:
    """Returns what is kept of a run: entropy and reward by step, pass@1 and pass@8 at its end, and its predictions."""
    setting = TASKS[run.task]
    task = (
        setting.task() if setting.gym is None else reasoning_gym(setting.gym[0], 1024, PROMPTS, settings=setting.gym[1])
    )
    with tempfile.TemporaryDirectory() as scratch:
        probes = [InterventionsProbe(WHICH, every=EVERY)] if run.which == PLAIN else []
        trainer = default_trainer(
            scratch, probes, STEPS, RATE, run.seed, Records(Path(scratch) / "logs"), task=task,
            model_folder=model_of(folder, setting), max_completion_length=setting.tokens,
            per_device_train_batch_size=8, logging_steps=1, interventions=() if run.which == PLAIN else (run.which,),
        )  # fmt: skip
        trainer.add_callback(Progress(bar))
        trainer.train()
        estimates = read_run(Path(scratch)).estimates if probes else {}
    predictions = {
        name: {step: e.value for step, e in measured.items() if step in SEEN}
        for name, measured in estimates.items()
        if name.endswith(("/delta_h", "/delta_reward"))
    }
    steps = [line for line in trainer.state.log_history if "reward" in line]
    right = right_responses(trainer, task)
    return {
        "entropy": [line["entropy"] for line in steps],
        "reward": [line["reward"] for line in steps],
        "pass_at_1": float(pass_at_k(right, RESPONSES, 1).mean()),
        "pass_at_8": float(pass_at_k(right, RESPONSES, RESPONSES).mean()),
        "predictions": predictions,
    }


@torch.no_grad()
def right_responses(trainer: DrGRPOTrainer, task: Task) -> torch.Tensor:
    """Returns how many responses to each held-out prompt earn the most that a response can, (PROMPTS,)."""
    torch.manual_seed(0)
    tokenizer, model = trainer.processing_class, trainer.model.eval()
    rows = task.eval_dataset.select(range(PROMPTS))
    inputs = tokenizer(list(rows["prompt"]), return_tensors="pt", padding=True, padding_side="left")
    ids = model.generate(
        **inputs, do_sample=True, num_return_sequences=RESPONSES, max_new_tokens=trainer.args.max_completion_length,
        pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    texts = tokenizer.batch_decode(ids[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    columns = {name: [v for v in rows[name] for _ in range(RESPONSES)] for name in rows.column_names}
    columns["prompts"] = columns.pop("prompt")
    rewards = torch.tensor(task.reward(completions=texts, **columns))
    return (rewards >= RIGHT).reshape(PROMPTS, RESPONSES).sum(1)


def register(folder: Path) -> None:
    """Writes what the plain runs say of each intervention, its mean over the steps seen and over seeds."""
    said: dict[str, dict[str, dict[str, float]]] = {}
    for task in TRAINED:
        runs = [read(folder, Run(task, PLAIN, seed)) for seed in SEEDS]
        for which in WHICH:
            of = {}
            for quantity in ("delta_h", "delta_reward"):
                name = f"intervention/{intervention(which).name}/{quantity}"
                values = [value for run in runs for value in run["predictions"][name].values()]
                of[quantity] = statistics.fmean(values)
                of[f"{quantity}_se"] = statistics.stdev(values) / len(values) ** 0.5
            said.setdefault(task, {})[which] = of
    write_atomically({REGISTERED: json.dumps(said, indent=2).encode()})
    print(f"registered: {REGISTERED}. Commit it before you train.")


def tables(folder: Path) -> None:
    """Prints, for each task, what was registered and what came true, and how well their orders agree."""
    registered = json.loads(REGISTERED.read_text())
    for task in TRAINED:
        told = {PLAIN: {"delta_h": 0.0, "delta_reward": 0.0}, **registered[task]}
        ends = {which: [read(folder, Run(task, which, seed)) for seed in SEEDS] for which in told}
        found = {which: ending(runs) for which, runs in ends.items()}
        print(f"\n### {task}\n")
        print("| | predicted ΔH, mnats a step | Δreward, 1e-3 | entropy at the end | pass@1 | pass@8 |")
        print("|---|---|---|---|---|---|")
        for which in sorted(told, key=lambda name: -told[name]["delta_h"]):
            h, r = (
                f"{1e3 * told[which][q]:+.2f} ± {1e3 * told[which].get(f'{q}_se', 0.0):.2f}"
                for q in ("delta_h", "delta_reward")
            )
            cells = " | ".join(f"{mean:.3f} ± {error:.3f}" for mean, error in found[which].values())
            print(f"| {which} | {h} | {r} | {cells} |")
        predicted = [told[which]["delta_h"] for which in told]
        for quantity in ("entropy", "pass_at_8"):
            rank = spearmanr(predicted, [found[which][quantity][0] for which in told]).statistic
            print(f"\nSpearman's rank correlation of predicted ΔH with final {quantity}: {rank:.2f}")


def ending(runs: list[dict[str, Any]]) -> dict[str, tuple[float, float]]:
    """Returns mean over seeds and its standard error of entropy, pass@1 and pass@8 at the end."""
    of_seeds = {
        "entropy": [statistics.fmean(run["entropy"][-LAST:]) for run in runs],
        "pass_at_1": [run["pass_at_1"] for run in runs],
        "pass_at_8": [run["pass_at_8"] for run in runs],
    }
    return {name: (statistics.fmean(v), statistics.stdev(v) / len(v) ** 0.5) for name, v in of_seeds.items()}


def read(folder: Path, run: Run) -> dict[str, Any]:
    path = run.path(folder)
    if not path.exists():
        raise FileNotFoundError(f"{path} is missing: run --part {'plain' if run.which == PLAIN else 'train'} first")
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where the numbers of the runs are kept")
    parser.add_argument("--part", choices=("plain", "register", "train", "tables"), required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.part == "plain":
        train(options.folder, [Run(task, PLAIN, seed) for seed, task in product(SEEDS, TRAINED)])
    elif options.part == "register":
        register(options.folder)
    elif options.part == "train":
        if not REGISTERED.exists():
            parser.error("nothing is registered yet: run --part plain and --part register, and commit what they write")
        train(options.folder, [Run(task, which, seed) for seed, task, which in product(SEEDS, TRAINED, WHICH)])
    else:
        tables(options.folder)


if __name__ == "__main__":
    main()
