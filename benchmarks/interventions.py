"""Do predictions of interventions come true? What the probe in training says, against what the same steps really do.

    OMP_NUM_THREADS=1 python benchmarks/interventions.py FOLDER [--parts single branches] [--tasks chains] [--states 5]

Everything is kept in FOLDER as it ends; what is there is not made again, and the tables are of all that is there: stop
it when you like. A plain run of each task, with all weights or with adapters, leaves a checkpoint at each state. At
each of them `offline.py` draws several batches U and one large sample E, and says of each intervention

    in training  what the probe `interventions` says from U alone, leave-fold-out
    measured     what the step from U with the intervention really does to E, beside the step as it is

Of differences between the two, over tasks, states, batches and interventions whose measured |ΔH| is above 1e-4 nats:

    coverage   share of the probe's 95 % intervals, E's own noise added, that hold what was measured
    sign       share of the probe's intervals without 0 whose sign is that of what was measured
    rank       Spearman's correlation over interventions, from one batch, and of the means over a state's batches
    slope      of what was measured on what was predicted, through 0, over the means of a state's batches
    nothing    whether interventions that are no-ops on-policy are exactly 0, predicted and measured

`branches` takes ten real steps with each, with common random numbers: the order then, against the order of one step.
"""

from __future__ import annotations

import argparse
import functools
import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import rl_training.job.silence  # noqa: F401

import torch
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig
from scipy.special import stdtrit
from scipy.stats import spearmanr

from rl_training.job.analysis import analyse_checkpoints
from rl_training.job.build import build_run
from rl_training.job.explain import CONF
from rl_training.offline.results import read_result
from rl_training.tasks.reasoning_gym import answered_examples
from rl_training.tasks.tiny import build_model, build_tokenizer, warm_start

SUMS = {"min_terms": 2, "max_terms": 3, "max_digits": 1}
OF_SUMS = [
    "data=reasoning_gym",
    "data.task=chain_sum",
    *(f"+data.settings.{key}={value}" for key, value in SUMS.items()),
]
TINY = ["model=hub", "++trainer.learning_rate=3e-4", "++trainer.adam_beta2=0.99"]  # as model=tiny has it
TASKS = {
    "chains": [],
    "long_chains": ["+data.min_operands=8", "+data.max_operands=9", "trainer.max_completion_length=48"],
    "sums": [*OF_SUMS, "+data.num_train=1024", "+data.num_eval=16", "trainer.max_completion_length=12", *TINY],
}
WEIGHTS = {"full": [], "lora": ["adapter=lora", "++trainer.learning_rate=1e-3"]}
INTERVENTIONS = [
    "bonus", "bonus:0.1", "psr", "nsr", "w_reinforce", "std_norm", "length_norm", "clip_cov", "clip_cov:0.02",
    "top_entropy", "steer", "lr:0.5", "lr:1.5", "kl",
]  # fmt: skip
NOTHINGS = ["kl_cov", "clip_higher"]
FOLDS = 8  # of the probe, as in training
SMALLEST = 1e-4  # nats
QUIET = ["logger=none", "probe=none", "++trainer.disable_tqdm=true"]


# --- what is made -----------------------------------------------------------------------------------------------------


def composed(name: str, words: Iterable[str]) -> DictConfig:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return compose(name, list(words))


def words_of(folder: Path, task: str, weights: str) -> list[str]:
    """Returns the settings of a run of a task, whose model is made where it is not there."""
    words = [*TASKS[task], *WEIGHTS[weights]]  # of a setting given twice, the last holds
    if "model=hub" in words:
        words.append(f"model.name={model_of(folder, task)}")
    return words


def model_of(folder: Path, task: str) -> Path:
    """Returns the folder of a tiny model that half knows this task of reasoning-gym."""
    path = folder / "models" / task
    if not (path / "model.safetensors").is_file():
        tokenizer = build_tokenizer()
        model = build_model(tokenizer, 0)
        warm_start(model, tokenizer, answered_examples("chain_sum", 0, SUMS))
        tokenizer.save_pretrained(path)
        model.save_pretrained(path)
    return path


def plain_run(folder: Path, task: str, weights: str, states: Sequence[int]) -> Path:
    """Returns a run without interventions, trained to the last of these states, with a checkpoint at each."""
    run = folder / "runs" / f"{task}-{weights}"
    every = functools.reduce(math.gcd, states)
    if not (run / "training_state" / f"checkpoint-{max(states)}").is_dir():
        steps = [f"trainer.max_steps={max(states)}", f"trainer.save_steps={every}", "++trainer.save_total_limit=null"]
        build_run(composed("train", [f"run_dir={run}", *words_of(folder, task, weights), *steps, *QUIET])).train()
    return run


def analysed(run: Path, state: int, name: str, options: Iterable[str]) -> Path:
    """Returns the result of an analysis of a run's state, which is made where it is not there."""
    path = run / "offline" / name / f"checkpoint-{state}" / "result.json"
    if not path.is_file():
        which = ",".join(f'"{of}"' for of in (*INTERVENTIONS, *NOTHINGS))
        words = [
            f"checkpoint={run}/training_state/checkpoint-{state}",
            f"interventions.which=[{which}]",
            f"name={name}",
        ]
        words += ["report=false", "dashboards=false", "log.level=none", "conditioning=false", "truth.odd=false"]
        analyse_checkpoints(composed("offline", [*words, *options, 'run=["++trainer.disable_tqdm=true"]']))
    return path


def make(folder: Path, options: argparse.Namespace) -> None:
    """Makes what is asked for and not there yet: all single steps first, then branches."""
    cases = list(product(options.weights, options.tasks))
    if "single" in options.parts:
        seeds = f"sweep.update_seeds={list(range(2, options.batches + 1))}"
        for weights, task in cases:
            run = plain_run(folder, task, weights, options.states)
            for state in options.states:
                analysed(run, state, "single", [f"evaluation.prompts={options.evaluation}", seeds])
    if "branches" in options.parts:
        seeds = f"sweep.update_seeds={list(range(2, options.branches + 1))}"
        for weights, task in cases:
            run = plain_run(folder, task, weights, options.states)
            size = f"evaluation.prompts={options.evaluation}"
            analysed(run, options.branch_state, "branches", [size, seeds, f"interventions.steps={options.steps}"])


# --- what is said of it -----------------------------------------------------------------------------------------------


def rows_in(folder: Path, name: str, table: str) -> Iterator[dict[str, Any]]:
    """Yields the rows of a table in all results of this name, each with its task, weights and state."""
    for path in sorted((folder / "runs").glob(f"*/offline/{name}/*/result.json")):
        task, _, weights = path.parents[3].name.rpartition("-")
        for row in read_result(path)["tables"].get(table, []):
            if row["name"] != "plain":
                yield row | {"task": task, "weights": weights, "state": int(path.parent.name.rpartition("-")[2])}


def half_width(row: dict[str, Any], with_truth: bool) -> float:
    """Returns half of the 95 % interval that the probe gives; with the noise of what it is held against."""
    own = float(stdtrit(FOLDS - 1, 0.975)) * row["in_loop_delta_h_se"]
    return math.hypot(own, 1.96 * row["measured_delta_h_se"]) if with_truth else own


def is_known(row: dict[str, Any]) -> bool:
    return math.isfinite(row["in_loop_delta_h"]) and math.isfinite(row["measured_delta_h"])


def share(hits: Sequence[bool]) -> str:
    return f"{sum(hits) / len(hits):.3f} ({len(hits)})" if hits else "–"


def rank(one: Sequence[float], other: Sequence[float]) -> float:
    return float(spearmanr(one, other).statistic) if len(one) > 2 else math.nan


def pooled(rows: Sequence[dict[str, Any]]) -> dict[str, tuple[float, float]]:
    """Returns (predicted, measured) by intervention, means over a state's batches."""
    by_name = defaultdict(list)
    for row in rows:
        by_name[row["name"]].append((row["in_loop_delta_h"], row["measured_delta_h"]))
    return {name: tuple(map(statistics.fmean, zip(*pairs, strict=True))) for name, pairs in by_name.items()}


def case_row(rows: Sequence[dict[str, Any]]) -> tuple[list[str], float]:
    """Returns the cells of one task with one kind of weights, and its pooled rank correlation (median over states)."""
    effects = [row for row in rows if abs(row["measured_delta_h"]) > SMALLEST]
    covered = [abs(r["in_loop_delta_h"] - r["measured_delta_h"]) <= half_width(r, True) for r in effects]
    asserted = [row for row in rows if abs(row["in_loop_delta_h"]) > half_width(row, False)]
    right = [row["in_loop_delta_h"] * row["measured_delta_h"] > 0 for row in asserted]
    single, together, pairs = [], [], []
    for state in sorted({row["state"] for row in rows}):
        at = [row for row in rows if row["state"] == state]
        for seed in sorted({row["update_seed"] for row in at}):
            of = [row for row in at if row["update_seed"] == seed]
            single.append(rank([r["in_loop_delta_h"] for r in of], [r["measured_delta_h"] for r in of]))
        means = list(pooled(at).values())
        together.append(rank(*zip(*means, strict=True)))
        pairs += means
    slope = sum(p * m for p, m in pairs) / sum(p * p for p, _ in pairs)
    middle = statistics.median(together)
    ranks = [f"{statistics.median(single):.2f}", " ".join(f"{value:.2f}" for value in together)]
    return [share(covered), share(right), *ranks, f"{slope:.2f}"], middle


def print_single(folder: Path) -> None:
    every = list(rows_in(folder, "single", "interventions_by_update"))
    known = [row for row in every if is_known(row)]
    rows = [row for row in known if row["name"] not in NOTHINGS]
    if not rows:
        return
    print(
        "\n| task | weights | coverage (effects) | sign (asserted) | rank, one batch | rank, pooled, by state | slope |"
    )
    print("|---|---|---|---|---|---|---|")
    middles = []
    for weights, task in sorted({(row["weights"], row["task"]) for row in rows}):
        cells, middle = case_row([row for row in rows if (row["weights"], row["task"]) == (weights, task)])
        middles.append(middle)
        print(f"| {task} | {weights} | {' | '.join(cells)} |")
    cells, _ = case_row_of_all(rows)
    print(f"| all | | {cells[0]} | {cells[1]} | | median {statistics.median(middles):.2f} | |")
    exact = [
        all(row[key] == 0.0 for key in ("in_loop_delta_h", "measured_delta_h", "predicted_delta_h"))
        for row in known
        if row["name"] in NOTHINGS
    ]
    print(f"\nExactly 0 on-policy ({', '.join(NOTHINGS)}): {sum(exact)} of {len(exact)}.")
    seconds = [read_result(path)["timing"]["all"] for path in (folder / "runs").glob("*/offline/single/*/result.json")]
    print(f"{len(seconds)} analyses, {sum(seconds) / 60:.0f} minutes.")


def case_row_of_all(rows: Sequence[dict[str, Any]]) -> tuple[list[str], float]:
    """Returns coverage and sign over all cases: states of unlike cases are told apart."""
    return case_row([{**row, "state": (row["task"], row["weights"], row["state"])} for row in rows])


def print_branches(folder: Path) -> None:
    after = list(rows_in(folder, "branches", "branches"))
    once = {
        (row["task"], row["weights"], row["state"], row["name"]): row["measured_delta_h"]
        for name in ("branches", "single")
        for row in rows_in(folder, name, "interventions")
    }
    if not after:
        return
    print("\n| task | weights | state | steps | rank of one step with these | without kl | kl: one step, then |")
    print("|---|---|---|---|---|---|---|")
    for case in sorted({(row["task"], row["weights"], row["state"], row["steps"]) for row in after}):
        pairs = {
            row["name"]: (once[(*case[:3], row["name"])], row["measured_delta_h"])
            for row in after
            if (row["task"], row["weights"], row["state"], row["steps"]) == case and row["name"] not in NOTHINGS
        }
        without = [pair for name, pair in pairs.items() if name != "kl"]
        of_kl = " → ".join(f"{1e3 * value:+.2f}" for value in pairs.get("kl", ()))
        ranks = (f"{rank(*zip(*some, strict=True)):.2f}" for some in (list(pairs.values()), without))
        print(f"| {' | '.join(map(str, case))} | {' | '.join(ranks)} | {of_kl} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--parts", nargs="*", default=["single", "branches"], help="none: the tables alone")
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), choices=list(TASKS))
    parser.add_argument("--weights", nargs="+", default=list(WEIGHTS), choices=list(WEIGHTS))
    parser.add_argument("--states", type=int, nargs="+", default=[5, 20, 40, 80])
    parser.add_argument("--batches", type=int, default=4, help="at each state")
    parser.add_argument("--evaluation", type=int, default=1024, help="responses of E, to as many prompts")
    parser.add_argument("--branch-state", type=int, default=20)
    parser.add_argument("--branches", type=int, default=2, help="repeats of each, on other batches")
    parser.add_argument("--steps", type=int, default=10, help="of a branch")
    options = parser.parse_args()
    torch.set_num_threads(1)
    make(options.folder.resolve(), options)
    print_single(options.folder)
    print_branches(options.folder)


if __name__ == "__main__":
    main()
