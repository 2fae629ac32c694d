"""Record every estimate of a set of short runs, and compare two such records.

    python tests/golden_record.py record FOLDER [--tree CHECKOUT] [--only NAME ...]
    python tests/golden_record.py compare BEFORE AFTER

A refactoring changes no number and no weight. `record` runs the commands of a checkout (by default this one) as a user
would, so the same script can record the code before and after a refactoring. `compare` exits with 1 if a weight differs
in any bit, or an estimate by more than 1e-6 of its value or error. It also lists names that only one of the two records
has; a person must judge whether these were meant to change.

The runs take about three minutes on two idle cores. verl is not included because it needs a separate environment (make
test-verl).
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

ROOT = Path(__file__).parents[1]
TOLERANCE = 1e-6  # of an estimate's value or its error, whichever is larger
SHORT = ["trainer.max_steps=4", "logger=none", "trainer.save_steps=4"]
MANY_PROBES = "probe=[simple,measured,interventions,token_classes,ground_truth,gns,ess,sampler,covariance]"
EVERY_STEP = [f"probes.{name}.every=1" for name in ("interventions", "token_classes", "ground_truth")]
# Settings of `train.py` by name of the run. Usually training settings come first, then the probes.
TRAININGS = {
    "default": [MANY_PROBES, *EVERY_STEP, "probes.simple.per_sequence=true"],
    "lora": ["adapter=lora", MANY_PROBES, *EVERY_STEP],
    "sgd": ["+trainer.optim=sgd", "trainer.learning_rate=0.1", "probe=[simple,measured,interventions,gns]"],
    "clipped": ["trainer.max_grad_norm=0.05", "+trainer.weight_decay=0.1", "probe=[simple,interventions]"],
    "folds": ["batch.microbatch_size=256", "+probes.simple.num_folds=4", "probe=[simple,gns]"],
    "filtered": ["buffer=filtered", "probe=[simple,ess,measured]"],
    "psr": ["intervention=psr", "probe=[simple,measured]"],
}
# Settings of `offline.py` by name of the analysis, for the last checkpoint of the default run.
ANALYSES = {
    "analysis": ["evaluation.prompts=32", "update.prompts=16", "name=analysis"],
    "kernel": ["evaluation.prompts=8", "update.prompts=8", "kernel.enabled=true", "name=kernel"],
}
# Runs of tests/support/replay.py by their names there: given rollouts, under several launches.
LAYOUTS = ["plain_1", "plain_2", "zero2_2", "zero3_2", "fsdp2_2"]
# Estimates that are times, memory sizes, or pure rounding.
NOT_REPRODUCIBLE = ("probe_cost/", "step/formula_error")
IGNORED_KEYS = {"timing"}  # of a result.json


def run_program(tree: Path, *arguments: str | Path) -> None:
    """Run a program of a checkout with that checkout's code. If it fails, exit with its output."""
    environment = os.environ | {
        "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "WANDB_MODE": "offline",
        "TORCHDYNAMO_DISABLE": "1",
    }  # fmt: skip
    command = [sys.executable, *map(str, arguments)]
    done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")


def record(folder: Path, tree: Path, only: list[str]) -> None:
    """Run everything requested, each into a folder named after it."""
    for name, settings in TRAININGS.items():
        if not only or name in only:
            print(name, flush=True)
            run_program(tree, "train.py", *settings, *SHORT, f"run_dir={folder / name}")
    for name, settings in ANALYSES.items():
        if not only or name in only:
            print(name, flush=True)
            checkpoint = folder / "default" / "training_state" / "checkpoint-4"
            run_program(tree, "offline.py", f"checkpoint={checkpoint}", *settings, f"output={folder / name}")
    layouts = [name for name in LAYOUTS if not only or name in only]
    if layouts:
        print(*layouts, flush=True)
        replay = next((tree / "tests").glob("**/replay.py"))
        run_program(tree, replay, folder, *layouts)


def numbers_of(value: Any, name: str) -> Iterator[tuple[str, float]]:
    """Yield each number below a JSON value with the path that leads to it."""
    if isinstance(value, dict):
        for key, item in value.items():
            if key not in IGNORED_KEYS:
                yield from numbers_of(item, f"{name}/{key}")
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from numbers_of(item, f"{name}/{index}")
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        yield name, float(value)


def estimates_of(run: Path) -> Iterator[tuple[str, tuple[float, float]]]:
    """Yield (key, (value, standard error)) for each estimate. The key has its name, step and what it describes."""
    for line in (run / "logs" / "probes.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        if row["name"].startswith(NOT_REPRODUCIBLE):
            continue
        described = [f"{key}={row[key]}" for key in ("prompt", "response") if key in row]
        key = " ".join([f"step {row['step']}", f"about {row['about_step']}", row["name"], *described])
        value, stderr = (math.nan if row[field] is None else float(row[field]) for field in ("value", "stderr"))
        yield key, (value, stderr)


def results_of(folder: Path) -> Iterator[tuple[str, tuple[float, float]]]:
    """Yield the numbers of an analysis, from its result and the kernel's tables."""
    for path in sorted(folder.glob("**/result.json")):
        for key, number in numbers_of(json.loads(path.read_text(encoding="utf-8")), path.parent.name):
            yield key, (number, math.nan)
    for path in sorted(folder.glob("**/kernel/*.csv")):
        with path.open(encoding="utf-8", newline="") as table:
            for index, row in enumerate(csv.DictReader(table)):
                for column, text in row.items():
                    try:
                        yield f"{path.name}/{index}/{column}", (float(text), math.nan)
                    except (TypeError, ValueError):
                        continue


def weights_of(run: Path) -> str:
    """Return a digest of a run's final weights, or "" if it saved none."""
    checkpoints = sorted(run.glob("training_state/checkpoint-*/*model.safetensors"))
    if checkpoints:
        tensors = load_file(checkpoints[-1])
    elif (run / "0.pt").exists():
        tensors = torch.load(run / "0.pt", weights_only=False)["parameters"]
    else:
        return ""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(name.encode())
        digest.update(tensors[name].contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def relative_difference(before: tuple[float, float], after: tuple[float, float]) -> float:
    """Return the larger difference of value and error, relative to the larger of the two; inf if only one is nan."""
    scale = max((abs(number) for number in before if math.isfinite(number)), default=0.0)
    worst = 0.0
    for old, new in zip(before, after, strict=True):
        if math.isnan(old) != math.isnan(new):
            return math.inf
        if old != new and not math.isnan(old):
            worst = max(worst, abs(new - old) / scale if scale else math.inf)
    return worst


def compare(before: Path, after: Path) -> int:
    """Print the differences between two records, and return the exit code."""
    status = 0
    for run in sorted(path for path in before.iterdir() if path.is_dir()):
        other = after / run.name
        if not other.exists():
            print(f"{run.name}: not in {after}")
            status = 1
            continue
        read = estimates_of if (run / "logs" / "probes.jsonl").exists() else results_of
        old = dict(read(run))
        new = dict(read(other))
        off = {key: relative_difference(old[key], new[key]) for key in old.keys() & new.keys()}
        too_far = {key: value for key, value in off.items() if value > TOLERANCE}
        same_weights = weights_of(run) == weights_of(other)
        print(
            f"{run.name}: {len(off)} numbers, largest difference {max(off.values(), default=0.0):.1e}, "
            f"{len(too_far)} above {TOLERANCE}; weights {'the same' if same_weights else 'DIFFER'}"
        )
        for key in sorted(too_far, key=too_far.__getitem__, reverse=True)[:10]:
            print(f"    {key}: {old[key]} → {new[key]}")
        for title, names in (("gone", old.keys() - new.keys()), ("new", new.keys() - old.keys())):
            if names:
                kinds = sorted({name.split()[4] if " " in name else name for name in names})
                print(f"    {title}: {len(names)} numbers: {', '.join(kinds[:12])}{' …' if len(kinds) > 12 else ''}")
        if too_far or not same_weights:
            status = 1
    return status


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    recording = commands.add_parser("record", help="run everything and keep what it measured")
    recording.add_argument("folder", type=Path)
    recording.add_argument("--tree", type=Path, default=ROOT, help="the checkout whose code runs")
    recording.add_argument("--only", nargs="*", default=[], help="names of single runs")
    comparing = commands.add_parser("compare", help="say what differs")
    comparing.add_argument("before", type=Path)
    comparing.add_argument("after", type=Path)
    arguments = parser.parse_args()
    if arguments.command == "compare":
        return compare(arguments.before, arguments.after)
    record(arguments.folder.resolve(), arguments.tree.resolve(), arguments.only)
    return 0


if __name__ == "__main__":
    sys.exit(main())
