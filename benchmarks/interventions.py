"""Do predictions of interventions come true? What the probe in training says, against what the same steps really do.

    OMP_NUM_THREADS=1 python benchmarks/interventions.py FOLDER [--parts single branches] [--tasks chains] [--states 5]

Everything is kept in FOLDER as it ends; what is there is not made again, and the tables are of all that is there: stop
it when you like. A plain run of each task, with all weights or with adapters, leaves a checkpoint at each state. At
each of them several batches U and one large sample E are drawn, and for each intervention

    in training  what the probe `interventions` says from U alone, leave-fold-out
    measured     what the step from U with the intervention really does to E, beside the step as it is

Of differences between the two, over tasks, states, batches and interventions whose measured |ΔH| is above 1e-4 nats:

    coverage   share of the probe's 95 % intervals, E's own noise added, that hold what was measured; of Δreward, too
    sign       share of the probe's intervals without 0 whose sign is that of what was measured
    rank       Spearman's correlation over interventions, from one batch, and of the means over a state's batches
    slope      of what was measured on what was predicted, through 0, over the means of a state's batches
    nothing    whether interventions that are no-ops on-policy are exactly 0, predicted and measured

`branches` takes ten real steps with each, with common random numbers: the order then, against the order of one step.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import rl_training.job.silence  # noqa: F401

import torch
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig
from scipy.special import stdtrit
from scipy.stats import spearmanr

from rl_training.interventions.named import Intervention, intervention
from rl_training.job.build import build_restored, build_run
from rl_training.job.explain import CONF
from rl_training.job.run_settings import run_settings
from rl_training.offline.buffers import sample_evaluation, sample_update
from rl_training.offline.intervention_effects import OnEvaluation, branches, changed_steps
from rl_training.offline.interventions import columns_of, said_in_training
from rl_training.offline.restored import RestoredTrainer
from rl_training.offline.settings import Evaluation, Memory, Settings, UpdateConfig
from rl_training.offline.update import batch_of, make_update
from rl_training.records.atomic_write import write_atomically
from rl_training.records.jsonl import from_json, to_json
from rl_training.tasks.reasoning_gym import answered_examples
from rl_training.tasks.tiny import build_model, build_tokenizer, warm_start

SUMS = {"min_terms": 2, "max_terms": 3, "max_digits": 1}
OF_SUMS = [
    "data=reasoning_gym",
    "data.task=chain_sum",
    *(f"+data.settings.{key}={value}" for key, value in SUMS.items()),
]
TINY = ["model=hub", "++trainer.learning_rate=3e-4", "++trainer.adam_beta2=0.99"]  # as model=tiny has it
TASKS: dict[str, list[str]] = {
    "chains": [],
    "long_chains": ["+data.min_operands=8", "+data.max_operands=9", "trainer.max_completion_length=48"],
    "sums": [*OF_SUMS, "+data.num_train=1024", "+data.num_eval=16", "trainer.max_completion_length=12", *TINY],
}
WEIGHTS: dict[str, list[str]] = {"full": [], "lora": ["adapter=lora", "++trainer.learning_rate=1e-3"]}
INTERVENTIONS = [
    "bonus", "bonus:0.1", "psr", "nsr", "w_reinforce", "std_norm", "length_norm", "clip_cov", "clip_cov:0.02",
    "top_entropy", "steer", "lr:0.5", "lr:1.5", "kl",
]  # fmt: skip
NOTHINGS = ["kl_cov", "clip_higher"]
FOLDS = 8  # of the probe, as in training
SMALLEST = 1e-4  # nats
SINGLE, BRANCHES = "single", "branches"
PROMPTS, CHUNK = 32, 256  # of U; sequences generated at once
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


def kept(path: Path, rows_of: Callable[[], list[dict[str, Any]]]) -> None:
    """Writes the rows, and the processor time that they took, where they are not there."""
    if path.is_file():
        return
    begun = time.process_time()
    content = {"rows": rows_of(), "seconds": time.process_time() - begun}
    path.parent.mkdir(exist_ok=True)
    write_atomically({path: json.dumps(to_json(content)).encode()})


def at_state(run: Path, state: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Returns what the probe says and what is measured at a state, a row for each batch and intervention."""
    restored = restored_at(run, state)
    which, on = asked_for(options), on_evaluation(restored, options)
    rows = []
    for seed in range(1, options.batches + 1):
        buffer = sample_update(restored, UpdateConfig(PROMPTS, seed=seed), CHUNK)
        update, batch = make_update(restored, buffer, Memory()), batch_of(restored, buffer)
        said = said_in_training(restored, batch, [of.name for of in which])
        plain, _ = on.measured(update.delta)
        for name, delta in changed_steps(restored, update, batch, which):
            found = [] if isinstance(delta, str) else [on.measured(delta)[0] - plain]
            rows.append({"name": name, "update_seed": seed} | said[name] | columns_of("measured", found))
    return rows


def after_steps(run: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Returns what has become of entropy after several steps with each intervention, from one state."""
    restored = restored_at(run, options.branch_state)
    which, on = asked_for(options), on_evaluation(restored, options)
    found = defaultdict(list)
    for seed in range(1, options.branches + 1):
        for name, change in branches(on, restored, Settings(), which, options.steps, seed):
            found[name] += [] if isinstance(change, str) else [change]
    return [{"name": name} | columns_of("measured", some) for name, some in found.items()]


def asked_for(options: argparse.Namespace) -> list[Intervention]:
    return [intervention(text) for text in (*options.interventions, *NOTHINGS)]


def on_evaluation(restored: RestoredTrainer, options: argparse.Namespace) -> OnEvaluation:
    return OnEvaluation(restored, sample_evaluation(restored, Evaluation(options.evaluation), None, CHUNK))


def restored_at(run: Path, state: int) -> RestoredTrainer:
    checkpoint = run / "training_state" / f"checkpoint-{state}"
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return build_restored(run_settings(checkpoint, ["++trainer.disable_tqdm=true"]), checkpoint, keep_first=True)


def make(folder: Path, options: argparse.Namespace) -> None:
    """Makes what is asked for and not there yet: all single steps first, then branches."""
    for part, weights, task in product(options.parts, options.weights, options.tasks):
        run = plain_run(folder, task, weights, options.states)
        if part == SINGLE:
            for state in options.states:
                kept(run / SINGLE / f"{state}.json", functools.partial(at_state, run, state, options))
        else:
            kept(run / BRANCHES / f"{options.branch_state}.json", functools.partial(after_steps, run, options))
        print(f"{part}: {run.name}", flush=True)


# --- what is said of it -----------------------------------------------------------------------------------------------


def rows_in(folder: Path, part: str) -> Iterator[dict[str, Any]]:
    """Yields the rows of a part, each with its task, weights and state."""
    for path in sorted((folder / "runs").glob(f"*/{part}/*.json")):
        task, _, weights = path.parents[1].name.rpartition("-")
        for row in from_json(json.loads(path.read_text()))["rows"]:
            yield row | {"task": task, "weights": weights, "state": int(path.stem)}


def minutes(folder: Path, part: str) -> str:
    """Returns how many states a part has, and the processor time that they took."""
    found = [json.loads(path.read_text())["seconds"] for path in (folder / "runs").glob(f"*/{part}/*.json")]
    return f"{len(found)} states, {sum(found) / 60:.0f} minutes of processor time."


def half_width(row: dict[str, Any], with_truth: bool, of: str = "delta_h") -> float:
    """Returns half of the 95 % interval that the probe gives; with the noise of what it is held against."""
    own = float(stdtrit(FOLDS - 1, 0.975)) * row[f"in_loop_{of}_se"]
    return math.hypot(own, 1.96 * row[f"measured_{of}_se"]) if with_truth else own


def coverage(rows: Sequence[dict[str, Any]], of: str) -> str:
    """Returns the share of intervals that hold what was measured, over effects above SMALLEST."""
    effects = [row for row in rows if abs(row[f"measured_{of}"]) > SMALLEST]
    return share([abs(r[f"in_loop_{of}"] - r[f"measured_{of}"]) <= half_width(r, True, of) for r in effects])


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
    covered = [coverage(rows, of) for of in ("delta_h", "delta_reward")]
    return [*covered, share(right), *ranks, f"{slope:.2f}"], middle


def print_single(folder: Path) -> None:
    known = [row for row in rows_in(folder, SINGLE) if is_known(row)]
    rows = [row for row in known if row["name"] not in NOTHINGS]
    if not rows:
        return
    print("\n| task | weights | coverage (effects) | of Δreward | sign (asserted) | rank, one batch | pooled | slope |")
    print("|---|---|---|---|---|---|---|---|")
    middles = []
    for weights, task in sorted({(row["weights"], row["task"]) for row in rows}):
        cells, middle = case_row([row for row in rows if (row["weights"], row["task"]) == (weights, task)])
        middles.append(middle)
        print(f"| {task} | {weights} | {' | '.join(cells)} |")
    apart = [{**row, "state": (row["task"], row["weights"], row["state"])} for row in rows]
    cells, _ = case_row(apart)
    cells[4] = f"median {statistics.median(middles):.2f}"
    print(f"| all | | {' | '.join(cells)} |")
    exact = [row["in_loop_delta_h"] == row["measured_delta_h"] == 0.0 for row in known if row["name"] in NOTHINGS]
    print(f"\nExactly 0 on-policy ({', '.join(NOTHINGS)}): {sum(exact)} of {len(exact)}. {minutes(folder, SINGLE)}")


def print_branches(folder: Path) -> None:
    after = [row for row in rows_in(folder, BRANCHES) if row["name"] not in NOTHINGS]
    if not after:
        return
    once = defaultdict(list)
    for row in rows_in(folder, SINGLE):
        once[row["task"], row["weights"], row["state"], row["name"]].append(row["measured_delta_h"])
    print("\n| task | weights | state | rank of one step with several | without kl | kl: one step, several |")
    print("|---|---|---|---|---|---|")
    for case in sorted({(row["task"], row["weights"], row["state"]) for row in after}):
        pairs = {
            row["name"]: (statistics.fmean(once[(*case, row["name"])]), row["measured_delta_h"])
            for row in after
            if (row["task"], row["weights"], row["state"]) == case and once[(*case, row["name"])]
        }
        without = [pair for name, pair in pairs.items() if name != "kl"]
        ranks = (f"{rank(*zip(*some, strict=True)):.2f}" for some in (list(pairs.values()), without))
        of_kl = ", ".join(f"{1e3 * value:+.2f}" for value in pairs.get("kl", ()))
        print(f"| {' | '.join(map(str, case))} | {' | '.join(ranks)} | {of_kl} |")
    print(f"\n{minutes(folder, BRANCHES)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--parts", nargs="*", default=[SINGLE, BRANCHES], help="none: the tables alone")
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), choices=list(TASKS))
    parser.add_argument("--weights", nargs="+", default=list(WEIGHTS), choices=list(WEIGHTS))
    parser.add_argument("--states", type=int, nargs="+", default=[5, 20, 40, 80])
    parser.add_argument("--interventions", nargs="+", default=INTERVENTIONS)
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
