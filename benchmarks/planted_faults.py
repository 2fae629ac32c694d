"""Does a report name the fault of a training? Plants faults into short trainings, and runs healthy ones as controls.

    OMP_NUM_THREADS=1 python benchmarks/planted_faults.py --out FOLDER --seed 0 1    trains what is missing, then judges
    OMP_NUM_THREADS=1 python benchmarks/planted_faults.py --out FOLDER --only judge  judges existing records

A training is a plain trl.GRPOTrainer on the default task with probes attached, or a DrGRPOTrainer if a separate engine
samples: 16 prompts × 8 responses a step. Each is judged twice: by all records, and by TRL's own logs alone. A fault is
found if "what stands out" has a line that names it. Any line for a healthy training is a false alarm.
"""

from __future__ import annotations

import argparse
import functools
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import rl_training.job.silence  # noqa: F401

import torch
from default_task import in_a_fork
from faults_to_plant import FAULTS, HEALTHY, SETTINGS, ChangesAt, Planted
from trl import GRPOConfig, GRPOTrainer

from rl_training import DrGRPOConfig, DrGRPOTrainer, Records, attach
from rl_training.models.load import load_tiny
from rl_training.probes import (
    EffectiveSampleSizeProbe,
    GradientNoiseScaleProbe,
    MeasuredStepProbe,
    SamplerProbe,
    SimpleEntropyProbe,
)
from rl_training.records.jsonl import METRICS_FILE
from rl_training.records.report.standing_out import shown, standing_out
from rl_training.records.table.reading import read_run
from rl_training.records.table.series import Run
from rl_training.tasks.arithmetic import arithmetic

OF_PROBES = r"(delta_|measured/|gns/|ess/|sampler/|update/|step/|entropy/|probe_cost/)"  # how their numbers begin


def train(planted: Planted, folder: Path, seed: int) -> None:
    """Train with the planted fault, and leave the records in `folder`."""
    torch.manual_seed(seed)
    random.seed(seed)
    model, tokenizer = load_tiny()
    if planted.end_token is not None:
        tokenizer.eos_token = tokenizer.convert_ids_to_tokens(planted.end_token)
        model.config.eos_token_id = model.generation_config.eos_token_id = planted.end_token
    if planted.change:
        planted.change(model)
    low, high = planted.operands
    task = arithmetic(num_train=4096, num_eval=8, seed=seed, min_operands=low, max_operands=high)
    reward = ChangesAt(17, planted.from_step_17) if planted.from_step_17 else planted.reward
    args = {**SETTINGS, **planted.settings, "seed": seed, "output_dir": str(folder / "state")}
    shared = {"processing_class": tokenizer, "train_dataset": task.train_dataset}
    probes = [SimpleEntropyProbe(), MeasuredStepProbe(), GradientNoiseScaleProbe(), EffectiveSampleSizeProbe(),
              SamplerProbe()]  # fmt: skip
    records = Records(folder / "logs")
    if planted.engine:  # a plain GRPOTrainer drops the log-probabilities that such an engine returns
        options = {"rollout_func": planted.engine(), "probes": probes, "records": records}
        DrGRPOTrainer(model, reward, DrGRPOConfig(**args), **shared, **options).train()
    else:
        trainer = GRPOTrainer(model, reward, GRPOConfig(**args), **shared)
        with attach(trainer, records, probes, whole_prompts=True):
            trainer.train()
    (folder / "done").touch()


def folders(out: Path, seed: int) -> Iterator[tuple[str, Planted, Path]]:
    """Yield the name of each training, what is planted in it, and the folder of its records."""
    for kind, planted in (("fault", FAULTS), ("healthy", HEALTHY)):
        for name, fault in planted.items():
            yield name, fault, out / f"{kind} {name}".replace(" ", "_").replace(",", "") / f"seed_{seed}"


def judge(out: Path, seed: int) -> list[list[str]]:
    """Return a row for each finished training.

    Returns:
        Its name, the lines that would name its fault, its lines from all records, and its lines from TRL's logs alone.
    """
    rows = []
    for name, planted, folder in folders(out, seed):
        if (folder / "done").exists():
            run = read_run(folder)
            lines = [shown(standing_out(records)) for records in (run, logged_by_trl(run))]
            said = [", ".join(finding.name for finding in findings) for findings in lines]
            rows.append([name, " or ".join(planted.names), *said])
    return rows


def logged_by_trl(run: Run) -> Run:
    """Return only the records that a trainer without probes would have written."""
    of_trl = (run.table["file"] == METRICS_FILE) & ~run.table["name"].str.match(OF_PROBES)
    return replace(run, table=run.table[of_trl])


def print_table(rows: list[list[str]]) -> None:
    """Print the rows as a table, with the number of faults found and of false alarms."""
    print("| planted | named by | lines, all records | lines, what TRL logs |", "|---|---|---|---|", sep="\n")
    for row in rows:
        print(f"| {' | '.join(cell or '–' for cell in row)} |")
    faults, healthy = ([row for row in rows if bool(row[1]) is planted] for planted in (True, False))
    for column, what in ((2, "all records"), (3, "what TRL logs")):
        named = sum(any(name in row[column].split(", ") for name in row[1].split(" or ")) for row in faults)
        false = sum(bool(row[column]) for row in healthy)
        print(
            f"\nBy {what}: {named} of {len(faults)} faults found, {false} of {len(healthy)} healthy ones with a line."
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="where the records go")
    parser.add_argument("--seed", type=int, nargs="+", default=[0])
    parser.add_argument("--only", choices=["train", "judge"])
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    for seed in chosen.seed:
        for name, planted, folder in folders(chosen.out, seed) if chosen.only != "judge" else ():
            if not (folder / "done").exists():
                in_a_fork(folder, functools.partial(train, planted, folder, seed))
                print(name, "trained" if (folder / "done").exists() else f"failed: see {folder / 'log'}", flush=True)
        if chosen.only != "train":
            print(f"\nSeed {seed}\n")
            print_table(judge(chosen.out, seed))


if __name__ == "__main__":
    main()
