"""What a checkpoint analysis is worth: errors by |E|, coverage of the error bars, linearity, agreement with the loop.

    python benchmarks/offline.py pool RUN/training_state/checkpoint-20 --pool 4096 --draws 200
    python train.py probe=simple run_dir=RUN trainer.max_steps=24 trainer.save_steps=1 trainer.save_total_limit=99
    python benchmarks/offline.py loop RUN
    python train.py probe=[simple,ground_truth] probes.ground_truth.every=1 run_dir=RUN
    python benchmarks/offline.py variances RUN

`pool` scores one large E at θ ± η δθ once; every smaller E is a draw without replacement of its rows, so that 200 of
them cost seconds. Deviations are taken from the pool's own values, and multiplied by 1/√(1 − n/N) for that. Baselines,
levels and normalisers are made anew from the rows of each draw.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path

import rl_training.job.silence  # noqa: F401

import torch
from hydra import initialize_config_dir
from scipy.special import stdtrit
from torch import Tensor

from rl_training.job.build import build_restored
from rl_training.job.run_settings import run_settings
from rl_training.mathematics.entropy import surrogate_weights
from rl_training.mathematics.importance import reweighted_replicates, sequence_totals
from rl_training.mathematics.jackknife import JackknifeUnits, Replicates
from rl_training.mathematics.per_decision import first_order_change, per_decision_change
from rl_training.mathematics.scores import Scores
from rl_training.offline.buffers import sample_evaluation, sample_update
from rl_training.offline.first_order import MOST_BLOCKS, without_blocks
from rl_training.offline.probe import analyse
from rl_training.offline.settings import Evaluation, Memory, Settings, TruthSettings, UpdateConfig
from rl_training.offline.truth import Truth, measure
from rl_training.offline.update import make_update
from rl_training.records.checkpoints import checkpoints_named, steps_taken
from rl_training.records.jsonl import read_estimates

CONF = Path(__file__).parents[1] / "conf"
ETAS = [2.0**-k for k in range(7)]
SIZES = [2**k for k in range(4, 12)]
COLUMNS = ("sd/|dH|", "se/sd", "bias/sd", "coverage")


def take(scores: Scores, rows: Tensor) -> Scores:
    return Scores(scores.logps[rows], scores.entropies[rows], scores.mask[rows])


def in_blocks(scores: Scores, slopes: Sequence[Tensor]) -> Replicates:
    """Returns δH₁ with the error bar that an analysis gives it: without each block of sequences."""
    count = len(scores.mask)
    blocks = JackknifeUnits.of_rows(scores.mask).in_blocks(max(1, count // MOST_BLOCKS))
    columns = []
    for target in ("token", "sequence"):
        known = (scores.entropies, scores.mask, torch.arange(count))
        w, u = surrogate_weights(*known, target=target, baseline="buffer")  # type: ignore[arg-type]
        columns.append((w * slopes[0] + u * slopes[1]).sum(dim=1) / count)
    of_sequence = torch.stack(columns, dim=1).unsqueeze(1)  # (N, 1 label, 2)
    return without_blocks(blocks.gather(of_sequence), scores.mask, blocks)


def estimates(before: Scores, truth: Truth, behind: Scores, rows: Tensor) -> dict[str, Replicates]:
    """Returns every estimate from these rows of E alone, (2,) per token and per sequence."""
    own, ahead = take(before, rows), take(truth.at[0].ahead.scores, rows)
    slopes = [slope[rows] for slope in truth.slopes]
    true = per_decision_change(own, ahead)
    odd = (true - per_decision_change(own, take(behind, rows))) * 0.5
    first_order = first_order_change(own, *slopes)
    snis = reweighted_replicates(sequence_totals(own), sequence_totals(ahead))
    blocks = in_blocks(own, slopes)
    return {
        "deltaH1": Replicates(blocks.value[0], blocks.without[:, 0]),
        "deltaH_true": true,
        "deltaH_odd": odd,
        "deltaH_snis": snis,
        "deltaH1 - deltaH_true": first_order - true,
        "deltaH1 - deltaH_odd": first_order - odd,
        "deltaH1 - deltaH_snis": first_order - snis,
    }


def pool(checkpoint: Path, size: int, draws: int) -> None:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        restored = build_restored(run_settings(checkpoint, []), checkpoint)
    update_buffer = sample_update(restored, UpdateConfig(), 128)
    update = make_update(restored, update_buffer, Memory())
    e = sample_evaluation(restored, Evaluation(size), None, 256)
    truth = measure(restored, e, update.delta, list(reversed(ETAS)), True)
    truth = Truth(tuple(reversed(truth.at)), truth.before, truth.floor, truth.first_order, truth.slopes)
    line("eta", "deltaH_true", "deltaH_odd")
    for at in truth.at:
        assert at.odd is not None
        line(at.eta, float(at.true.value[0]), float(at.odd.value[0]))
    for name in ("true", "snis", "odd"):
        slope, r2 = log_log([at.eta for at in truth.at], [float(getattr(at, name).value[0]) for at in truth.at])
        line(f"slope of deltaH_{name}", slope, f"1 - R2 = {1 - r2:.1e}")
    assert truth.at[0].behind is not None
    everything = estimates(e.scores, truth, truth.at[0].behind.scores, torch.arange(size))
    true = everything["deltaH_true"].value
    line("of the pool", *(f"{name} {float(r.value[0]):+.6f}" for name, r in everything.items()))
    line("|E|", "estimate", *(f"{column}{unit}" for unit in ("", " seq") for column in COLUMNS))
    generator = torch.Generator().manual_seed(0)
    for count in SIZES:
        found: dict[str, list[tuple[Tensor, Tensor, int]]] = {name: [] for name in everything}
        for _ in range(draws):
            rows = torch.randperm(size, generator=generator)[:count]
            for name, r in estimates(e.scores, truth, truth.at[0].behind.scores, rows).items():
                found[name].append((r.value, r.stderr, len(r.without)))
        for name, given in found.items():
            values, errors = torch.stack([v for v, _, _ in given]), torch.stack([s for _, s, _ in given])
            deviation = (values - everything[name].value) / math.sqrt(1 - count / size)
            bar = stdtrit(given[0][2] - 1, 0.975) * errors
            sd, covered = deviation.square().mean(dim=0).sqrt(), (deviation.abs() <= bar).double().mean(dim=0)
            se = errors.square().mean(dim=0).sqrt()
            bias = deviation.mean(dim=0) / sd
            columns = torch.stack([sd / true.abs(), se / sd, bias, covered], dim=1)
            line(count, name, *columns[0].tolist(), *columns[1].tolist())


def loop(run: Path) -> None:
    """Holds analyses of every checkpoint of a run against what the loop itself said of the step after it."""
    said = {(row["step"], row["name"]): row for row in read_estimates(run / "logs")}
    line("step", "offline", "se", "loop", "se", "z")
    settings = Settings(Evaluation(), UpdateConfig(), truth=TruthSettings(enabled=False), conditioning=False)
    zs, predicted, live = [], [], []
    for checkpoint in checkpoints_named(str(run / "training_state"), run):
        forward = said.get((steps_taken(checkpoint) + 1, "delta_h/forward"))
        if forward is None:
            continue
        with initialize_config_dir(str(CONF), version_base="1.3"):
            restored = build_restored(run_settings(checkpoint, []), checkpoint)
        found = analyse(restored, settings).results
        error = math.hypot(found["deltaH1_se"], forward["stderr"])
        zs.append((found["deltaH1"] - forward["value"]) / error)
        predicted.append(found["deltaH1"])
        live.append(forward["value"])
        line(forward["step"], found["deltaH1"], found["deltaH1_se"], forward["value"], forward["stderr"], zs[-1])
    z = torch.tensor(zs)
    r = float(torch.corrcoef(torch.tensor([predicted, live]))[0, 1])
    line(
        "steps",
        len(zs),
        "mean z",
        float(z.mean()),
        "rms z",
        float(z.square().mean().sqrt()),
        "max |z|",
        float(z.abs().max()),
    )
    line("sum offline", sum(predicted), "sum loop", sum(live), "correlation", r)


def variances(run: Path) -> None:
    """Holds the variance of the measured change by PDIS, in the loop, against that of SNIS on the same sequences."""
    squares: dict[str, list[float]] = {"delta_h/true": [], "delta_h/true_snis": []}
    for row in read_estimates(run / "logs"):
        if row["name"] in squares:
            squares[row["name"]].append(row["stderr"] ** 2)
    pdis, snis = (torch.tensor(of_steps, dtype=torch.float64) for of_steps in squares.values())
    without = (snis.sum() - snis) / (pdis.sum() - pdis)
    ratio = Replicates(snis.sum() / pdis.sum(), without)
    line("steps", len(pdis), "variance of SNIS / of PDIS", float(ratio.value), "se", float(ratio.stderr))
    line("median over steps", float((snis / pdis).median()), "steps in which it is above 1", int((snis > pdis).sum()))


def log_log(x: Sequence[float], y: Sequence[float]) -> tuple[float, float]:
    """Returns slope and R² of log |y| on log x."""
    a, b = torch.tensor(x).double().log(), torch.tensor(y).double().abs().log()
    a, b = a - a.mean(), b - b.mean()
    slope = float((a @ b) / (a @ a))
    return slope, 1 - float((b - slope * a).square().sum() / b.square().sum())


def line(*cells: object) -> None:
    print("\t".join(f"{cell:.6g}" if isinstance(cell, float) else str(cell) for cell in cells), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["pool", "loop", "variances"])
    parser.add_argument("path", type=Path, help="a checkpoint for pool, else a run")
    parser.add_argument("--pool", type=int, default=4096, help="sequences; more than any |E|")
    parser.add_argument("--draws", type=int, default=200)
    arguments = parser.parse_args()
    if arguments.what == "pool":
        pool(arguments.path, arguments.pool, arguments.draws)
    elif arguments.what == "loop":
        loop(arguments.path)
    else:
        variances(arguments.path)


if __name__ == "__main__":
    main()
