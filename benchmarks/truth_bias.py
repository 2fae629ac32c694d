"""How far importance weights can be trusted: bias of the measured change of entropy against effective sample size.

    python train.py probe=simple run_dir=RUN
    python benchmarks/truth_bias.py RUN

From each checkpoint of RUN, along the steps that several U make, 1, 2, 3, 5 and 10 times as long: PDIS on disjoint E's
of one large pool, held against responses drawn afresh to its prompts, at the moved parameters with common random
numbers. Of each E: ESS/N, Pareto's k̂ of its weights, the even part of the change over the odd one. The last tables are
over all E's of all steps, in classes of such a sign: how often 95 % intervals hold, and by how many bars they are off.
"""

from __future__ import annotations

import argparse
import itertools
import math
from pathlib import Path

import rl_training.job.silence  # noqa: F401

import torch
from hydra import initialize_config_dir
from torch import Tensor

from rl_training.job.build import build_restored
from rl_training.job.run_settings import run_settings
from rl_training.mathematics.importance import LOGP, importance_weights, paired_replicates, sequence_totals
from rl_training.mathematics.per_decision import per_decision_change
from rl_training.mathematics.scores import Scores
from rl_training.offline.buffers import EvaluationBuffer, gather_scores, sample_again, sample_evaluation, sample_update
from rl_training.offline.restored import RestoredTrainer
from rl_training.offline.settings import Evaluation, Memory, UpdateConfig
from rl_training.offline.truth import by_name
from rl_training.offline.update import make_update
from rl_training.records.checkpoints import checkpoints_named

CONF = Path(__file__).parents[1] / "conf"
ETAS = (1.0, 2.0, 3.0, 5.0, 10.0)
CHUNK = 256  # sequences generated at once
ESS, K_HAT, EVEN, PDIS, PDIS_BAR, PAIRED, PAIRED_BAR, FRESH = range(8)  # columns of an E, nats per sequence
CLASSES = {
    "ESS/N": (ESS, (0.0, 0.5, 0.7, 0.8, 0.85, 0.9, 0.95, 0.97, 1.0)),
    "Pareto k": (K_HAT, (-math.inf, 0.0, 0.1, 0.2, 0.3, 0.5, 0.7, math.inf)),
    "|even/odd|": (EVEN, (0.0, 0.1, 0.2, 0.4, 0.8, math.inf)),
}


def take(scores: Scores, rows: slice) -> Scores:
    return Scores(scores.logps[rows], scores.entropies[rows], scores.mask[rows])


def pareto_k(weights: Tensor) -> float:
    """Returns k̂ of the generalised Pareto law of the largest weights, about 3√N of them.

    The estimate of Zhang & Stephens 2009 with the prior of Vehtari et al. 2024, "Pareto smoothed importance sampling".
    """
    ordered = weights.double().sort().values
    count = math.ceil(min(0.2 * len(ordered), 3.0 * math.sqrt(len(ordered))))
    tail = ordered[-count:] - ordered[-count - 1]
    places = 30 + int(math.sqrt(count))
    grid = 1 / tail[-1] + (1 - (places / (torch.arange(1, places + 1) - 0.5)).sqrt()) / (3 * tail[count // 4 - 1])
    ks = torch.log1p(-grid.unsqueeze(1) * tail).mean(dim=1)  # k at each place of the grid
    likelihood = count * ((-grid / ks).log() - ks - 1)
    best = (grid * likelihood.softmax(dim=0)).sum()
    k = float(torch.log1p(-best * tail).mean())
    return (k * count + 0.5 * 10) / (count + 10)


def measured(restored: RestoredTrainer, pool: EvaluationBuffer, delta: Tensor, eta: float, size: int) -> Tensor:
    """Returns (pool / size, 8), a row of numbers for each E of the pool at θ + η δθ."""

    def at(eta: float) -> Scores:
        with restored.policy.shifted(by_name(restored, eta * delta)):
            return gather_scores(restored, pool.rollout, pool.number, pool.num_sequences)

    ahead, behind = at(eta), at(-eta)
    with restored.policy.shifted(by_name(restored, eta * delta)):
        fresh = sequence_totals(sample_again(restored, pool)[1])
    all_before = sequence_totals(pool.scores)
    truth = float(paired_replicates(all_before, fresh).value[1])
    rows = []
    for first in range(0, pool.num_sequences, size):
        own = slice(first, first + size)
        before, after = all_before[own], sequence_totals(take(ahead, own))
        change = per_decision_change(take(pool.scores, own), take(ahead, own))
        back = per_decision_change(take(pool.scores, own), take(behind, own))
        paired = paired_replicates(before, fresh[own])
        even, odd = float(change.value[1] + back.value[1]), float(change.value[1] - back.value[1])
        rows.append([
            importance_weights(before, after).ess / size, pareto_k((after - before)[:, LOGP].exp()), abs(even / odd),
            float(change.value[1]), float(change.stderr[1]), float(paired.value[1]), float(paired.stderr[1]), truth,
        ])  # fmt: skip
    return torch.tensor(rows, dtype=torch.float64)


def show_step(checkpoint: Path, seed: int, eta: float, rows: Tensor) -> None:
    mean, root = rows.mean(dim=0), math.sqrt(len(rows))
    off = rows[:, PDIS] - rows[:, PAIRED]
    line(
        checkpoint.name, seed, f"{eta:g}", mean[ESS], mean[K_HAT], mean[FRESH], mean[PDIS], off.mean(),
        off.std() / root, mean[PDIS_BAR], mean[PAIRED_BAR],
    )  # fmt: skip


def show_classes(name: str, rows: Tensor) -> None:
    column, bounds = CLASSES[name]
    of_both = ("bias/bar", "se", "95 % hold", "rms z", "afresh: bias/bar", "95 % hold", "rms z", "its bar / PDIS's")
    line(name, "E's", *of_both)
    for low, high in itertools.pairwise(bounds):
        own = rows[(rows[:, column] > low) & (rows[:, column] <= high)]
        if len(own) < 2:
            continue
        z = (own[:, PDIS] - own[:, FRESH]) / own[:, PDIS_BAR]
        paired = (own[:, PAIRED] - own[:, FRESH]) / own[:, PAIRED_BAR]
        line(
            f"{low:g} .. {high:g}", len(own), z.mean(), z.std() / math.sqrt(len(own)), (z.abs() < 1.97).double().mean(),
            z.square().mean().sqrt(), paired.mean(), (paired.abs() < 1.97).double().mean(),
            paired.square().mean().sqrt(), (own[:, PAIRED_BAR] / own[:, PDIS_BAR]).median(),
        )  # fmt: skip


def line(*cells: object) -> None:
    print("\t".join(f"{float(c):.3g}" if isinstance(c, float | Tensor) else str(c) for c in cells), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--pool", type=int, default=4096, help="sequences, from which E's are cut")
    parser.add_argument("--size", type=int, default=256, help="sequences of an E")
    parser.add_argument("--updates", type=int, default=3, help="U's at each checkpoint")
    parser.add_argument("--first", type=int, default=1, help="seed of the first U; the pools have the one before")
    parser.add_argument("--etas", type=float, nargs="+", default=ETAS, help="multiples of the step")
    arguments = parser.parse_args()
    found = []
    line("checkpoint", "U", "eta", "ESS/N", "k", "fresh", "PDIS", "bias", "se", "bar of an E", "bar afresh")
    for checkpoint in checkpoints_named(str(arguments.run / "training_state"), arguments.run):
        with initialize_config_dir(str(CONF), version_base="1.3"):
            restored = build_restored(run_settings(checkpoint, []), checkpoint)
        of_pool = arguments.first - 1
        pool = sample_evaluation(restored, Evaluation(arguments.pool, seed=of_pool), None, CHUNK)
        for seed in range(arguments.first, arguments.first + arguments.updates):
            update = make_update(restored, sample_update(restored, UpdateConfig(seed=seed), 128), Memory())
            for eta in arguments.etas:
                rows = measured(restored, pool, update.delta, eta, arguments.size)
                show_step(checkpoint, seed, eta, rows)
                found.append(rows)
    for name in CLASSES:
        show_classes(name, torch.cat(found))


if __name__ == "__main__":
    main()
