"""Who predicts entropy best, and who warns in time? Two tables, and their pictures.

    OMP_NUM_THREADS=1 python benchmarks/leaderboard.py FOLDER [--part runs | tables] [--runs N]

Table 1, single steps: every predictor of benchmarks/predictors against the change of entropy measured on fresh
sequences (per-decision importance sampling), and its sums over ten steps against the change along the run. Table 2,
forecasts: every method of benchmarks/forecasters on the held-out runs alone, at 10, 20 and 50 steps, and as an alarm.

`runs` trains what is missing in FOLDER, one run after another; a run that has ended is not trained again, so stop it
and go on as you like. `tables` is made of the runs that are there. A new predictor or forecaster is one new file and
`--part tables`: no run is made again.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import rl_training.job.silence  # noqa: F401

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch
from leaderboard_forecasts import draw_forecasts, table_of_forecasts
from leaderboard_runs import RUNS, STEPS, make
from leaderboard_steps import ceiling, draw_steps, table_of_steps
from leaderboard_tables import Rows, load, markdown
from tqdm import tqdm


def train(folder: Path, number: int) -> None:
    """Trains the runs that are missing among the first so many."""
    todo = [(run, path) for run in RUNS[:number] if not (path := folder / "runs" / f"{run.name}.pt").exists()]
    with tqdm(total=len(todo) * STEPS, unit="step") as bar:
        for run, path in todo:
            bar.set_description(run.name)
            scratch = path.with_suffix(".part")
            scratch.parent.mkdir(parents=True, exist_ok=True)
            torch.save(make(folder, run, STEPS, bar), scratch)
            scratch.rename(path)


def tables(folder: Path) -> str:
    """Returns both tables of the runs that are there, and draws their pictures into the folder."""
    runs = load(folder)
    held_out = {run.name for run in RUNS if run.held_out}
    judged = [run for run in runs if run["name"] in held_out]
    choosing = [run for run in runs if run["name"] not in held_out]
    if not judged or not choosing:
        raise SystemExit(f"{folder}/runs has {len(runs)} runs: train at least 8 by --part runs --runs 8")
    steps, forecasts, best = table_of_steps(runs), table_of_forecasts(judged, choosing), ceiling(runs)
    for name, draw in (
        ("leaderboard_steps", lambda axes: draw_steps(axes, steps, best)),
        ("leaderboard_forecasts", lambda axes: draw_forecasts(axes, forecasts)),
    ):
        figure, axes = plt.subplots(figsize=(7, 3.2), layout="constrained")
        draw(axes)
        figure.savefig(folder / f"{name}.png", dpi=90)
    truths = sum(step["truth"] is not None for run in runs for step in run["steps"])
    return "\n\n".join([
        f"{truths} single steps of {len(runs)} runs; an exact prediction would correlate at {best:.2f}",
        *(markdown(some) for some in parted(steps)),
        f"{len(judged)} held-out runs, {len(choosing)} to choose by",
        *(markdown(some) for some in parted(forecasts)),
    ])  # fmt: skip


def parted(rows: Rows) -> tuple[Rows, Rows]:
    """Returns a wide table as two: columns without a colon in their name, and those with one."""
    first = next(iter(rows[0]))
    with_colon = [{k: v for k, v in row.items() if k == first or ":" in k} for row in rows]
    return [{k: v for k, v in row.items() if ":" not in k} for row in rows], with_colon


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where runs, tables and pictures are kept")
    parser.add_argument("--part", choices=("runs", "tables"), help="none: both, one after the other")
    parser.add_argument("--runs", type=int, default=len(RUNS), help="so many of the runs (default: %(default)s)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.part != "tables":
        train(options.folder, options.runs)
    if options.part != "runs":
        text = tables(options.folder)
        (options.folder / "leaderboard.md").write_text(text)
        print(text)


if __name__ == "__main__":
    main()
