"""Do the bars of token classes hold? What the probe says of each class from one batch, against X of a large sample.

    OMP_NUM_THREADS=1 python benchmarks/token_classes.py FOLDER [--tasks chains] [--states 5 10 20 40] [--batches 8]

Everything is kept in FOLDER as it ends; what is there is not made again, and the tables are of all that is there. A
plain run of each task leaves a checkpoint at each state. At each of them several batches U of 32 × 8 responses are
drawn, and samples E of --evaluation responses, --samples of them, to as many random prompts each.

    said    the class's part of δH from U alone, leave-fold-out
    truth   X̄ · a ∘ g_c: the class's gradient in this very U, with the step's own factors, along X̄ of all E

Of classes whose |truth| is above 1e-5 nats, over all states and batches:

    coverage     share of 95 % intervals, the truth's own error added, that hold the truth of this U
    sign         share of intervals without 0 whose sign is the truth's
    one, mean    correlation of what is said with the truth over classes: of one U, and of a state's means over its U
"""

from __future__ import annotations

import argparse
import functools
import math
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import rl_training.job.silence  # noqa: F401

import numpy as np
import torch
from interventions import CHUNK, PROMPTS, kept, minutes, plain_run, restored_at, rows_in, share
from torch import Tensor

from rl_training import Estimate
from rl_training.engine.changed_steps import bases_of
from rl_training.engine.step import Step
from rl_training.offline.buffers import sample_evaluation, sample_update
from rl_training.offline.first_order import predict
from rl_training.offline.restored import RestoredTrainer
from rl_training.offline.settings import Evaluation, Memory, UpdateConfig
from rl_training.offline.update import Update, batch_of, make_update, step_of
from rl_training.probes.token_classes import CLASSES, TokenClassesProbe, weights_of

PART = "token_classes"
SMALLEST = 1e-5  # nats
FIRST_OF_E = 1000  # seeds of E; those of U begin at 1


def at_state(run: Path, state: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Returns what is said and what is true at a state, a row for each batch and class."""
    restored, rows = restored_at(run, state), []
    directions: Tensor | None = None
    for seed in range(1, options.batches + 1):
        buffer = sample_update(restored, UpdateConfig(PROMPTS, seed=seed), CHUNK)
        update, step = make_update(restored, buffer, Memory()), step_of(restored, batch_of(restored, buffer))
        if directions is None:
            directions = of_evaluation(restored, update, options)
        probe = TokenClassesProbe(every=1)
        probe.prepare(step)
        for (kind, name), truths in truths_of(probe, step, update, directions).items():
            said = probe.results()[f"tokens/{kind}/{name}/delta_h"]
            rows.append({
                "kind": kind, "name": name, "update_seed": seed, "said": said.value, "said_se": said.stderr,
                "folds": said.num_samples, "truth": float(truths.mean()),
                "truth_se": float(truths.std()) / math.sqrt(len(truths)),
            })  # fmt: skip
    return rows


def of_evaluation(restored: RestoredTrainer, update: Update, options: argparse.Namespace) -> Tensor:
    """Returns ∂H_tok of each sample E, (samples, P)."""
    found = []
    for number in range(options.samples):
        asked = Evaluation(options.evaluation, seed=FIRST_OF_E + number)
        evaluation = sample_evaluation(restored, asked, None, CHUNK)
        found.append(predict(restored, evaluation, update, 64).direction[0])
    return torch.stack(found).double()


def truths_of(
    probe: TokenClassesProbe, step: Step, update: Update, directions: Tensor
) -> dict[tuple[str, str], Tensor]:
    """Returns what each class has in the step's change along each direction, (samples,)."""
    kinds = probe.kinds(step)
    names = [(kind, name) for kind in kinds for name in CLASSES[kind]]
    weights = [weights_of(step.batch, kinds[kind] == CLASSES[kind].index(name)) for kind, name in names]
    known = (step.policy, list(step.gradients.parameters.values()), step.entropy_change.layout)
    truths = {}
    for number, basis in bases_of(step.batch, *known, weights, step.ranks.reduce):
        part = torch.zeros_like(directions[0])
        for piece in update.pieces:
            gradient = update.clip * update.gradient[piece.flat]
            factor = update.clip * piece.state.gradient_factor(piece.param, gradient)
            part[piece.flat] = (factor * piece.of(basis.mean)).double()
        truths[names[number]] = directions @ part
    return truths


def half_width(row: dict[str, Any]) -> float:
    return Estimate(row["said"], row["said_se"], row["folds"]).half_width()


def correlation(rows: Sequence[dict[str, Any]]) -> float:
    return float(np.corrcoef([row["said"] for row in rows], [row["truth"] for row in rows])[0, 1])


def means(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the means over batches of each class."""
    grouped = by(rows, lambda row: (row["kind"], row["name"])).values()
    return [of[0] | {key: statistics.fmean(row[key] for row in of) for key in ("said", "truth")} for of in grouped]


def by(rows: Sequence[dict[str, Any]], key: Callable[[dict[str, Any]], Any]) -> dict[Any, list[dict[str, Any]]]:
    found: dict[Any, list[dict[str, Any]]] = {}
    for row in rows:
        found.setdefault(key(row), []).append(row)
    return found


def cells(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Returns what the table says of these rows of one task."""
    large = [row for row in rows if abs(row["truth"]) > SMALLEST]
    covered = [abs(row["said"] - row["truth"]) <= math.hypot(half_width(row), 1.96 * row["truth_se"]) for row in large]
    signs = [row["said"] * row["truth"] > 0 for row in large if abs(row["said"]) > half_width(row)]
    single, together = [], []
    for at in by(rows, lambda row: row["state"]).values():
        single += [correlation(of) for of in by(at, lambda row: row["update_seed"]).values()]
        together.append(correlation(means(at)))
    return [share(covered), share(signs), f"{statistics.median(single):.2f}",
            " ".join(f"{value:.2f}" for value in together)]  # fmt: skip


def print_tables(folder: Path) -> None:
    of_class = by(list(rows_in(folder, PART)), lambda row: (row["task"], row["state"], row["kind"], row["name"]))
    # Of classes that are empty, or have no weight, nothing is to be told.
    rows = [row for of in of_class.values() if len(of) > 1 and all(row["said_se"] > 0 for row in of) for row in of]
    if not rows:
        return
    print("\n| task | coverage (cases) | sign (asserted) | one | mean, by state |\n" + "|---" * 5 + "|")
    for task, some in by(rows, lambda row: row["task"]).items():
        print(f"| {task} | {' | '.join(cells(some))} |")
    for task, some in by(rows, lambda row: row["task"]).items():
        states = sorted({row["state"] for row in some})
        print(f"\nIn {task}, truth (and mean said) in 1e-3 nats a step, by state {states}:\n")
        for kind, name in dict.fromkeys((row["kind"], row["name"]) for row in some):
            at = by([row for row in some if (row["kind"], row["name"]) == (kind, name)], lambda row: row["state"])
            told = [means(at[state])[0] for state in states if state in at]
            print(f"{kind}/{name}: " + ", ".join(f"{1e3 * m['truth']:+.3f} ({1e3 * m['said']:+.3f})" for m in told))
    print(f"\n{minutes(folder, PART)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tasks", nargs="*", default=["chains", "long_chains"], help="none: the tables alone")
    parser.add_argument("--states", type=int, nargs="+", default=[5, 10, 20, 40])
    parser.add_argument("--batches", type=int, default=8, help="at each state")
    parser.add_argument("--evaluation", type=int, default=512, help="responses of each E")
    parser.add_argument("--samples", type=int, default=8, help="samples E")
    options = parser.parse_args()
    torch.set_num_threads(1)
    for task in options.tasks:
        run = plain_run(options.folder.resolve(), task, "full", options.states)
        for state in options.states:
            kept(run / PART / f"{state}.json", functools.partial(at_state, run, state, options))
            print(f"{task}: state {state}", flush=True)
    print_tables(options.folder)


if __name__ == "__main__":
    main()
