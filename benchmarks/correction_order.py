"""Does the order of corrections that one step predicts come true in whole runs? Registered before the runs were made.

    OMP_NUM_THREADS=1 python benchmarks/correction_order.py run FOLDER     trains every arm from every seed
    python benchmarks/correction_order.py table FOLDER                     prints what came out

correction_order_registered.json says what is compared, and how; `run` takes settings, arms and seeds from there. While
the run without a correction goes, the probe `interventions` predicts what each correction would do to reward and
entropy at that step. The truth is reward and entropy of the policies that were trained with each, on held-out prompts.
What is there is not made again. --small shrinks all, to see that it runs.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import rl_training.job.silence  # noqa: F401

import torch
from other_samplers import trainer_of
from scipy.special import stdtrit
from scipy.stats import spearmanr

from rl_training import Probe
from rl_training.engine.step import Step
from rl_training.mathematics.running_pairs import RunningPair
from rl_training.probes import InterventionsProbe, SamplerProbe
from rl_training.tasks.arithmetic import arithmetic

REGISTERED = Path(__file__).with_name("correction_order_registered.json")
NONE = "none"
FEWEST_STEPS = 16  # measured ones, for a prediction
ORDERS = (("delta_reward", "reward"), ("delta_reward", "last rewards"), ("delta_h", "entropy"), ("delta_h", "reward"))


class Predicted(InterventionsProbe):
    """Keeps the means over the first steps of what each correction would do, and over all."""

    def __init__(self, which: list[str], every: int, early: int) -> None:
        super().__init__(which, every=every, num_folds=8, decay=1.0)
        self.early = early
        self.means: dict[str, dict[str, Any]] = {}

    def prepare(self, step: Step) -> None:
        super().prepare(step)
        self.means["early" if step.number <= self.early else "all"] = {
            each.name: _numbers(self.running[each.name]) for each in self.which if self.running[each.name].steps
        }


def _numbers(running: RunningPair) -> dict[str, Any]:
    """Returns the means of Δreward and ΔH, each with its standard error, and of how many steps they are."""
    mean = running.mean()
    errors = mean.covariance.diagonal().clamp(min=0.0).sqrt().tolist()
    values = mean.values.tolist()
    return {"delta_reward": [values[1], errors[1]], "delta_h": [values[0], errors[0]], "steps": running.steps}


class Divergence(SamplerProbe):
    """Keeps KL and effective sample size of every step."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[list[float]] = []

    def prepare(self, step: Step) -> None:
        super().prepare(step)
        self.rows.append([self._answers[f"sampler/{name}"].value for name in ("kl", "ess")])


def trained(plan: dict[str, Any], setting: dict[str, Any], arm: str, seed: int) -> dict[str, Any]:
    """Returns what a run with this correction comes to; of the one without also what is predicted of all others."""
    others = [name for name in plan["arms"] if name != NONE]
    predicted, divergence = Predicted(others, plan["measured_every"], plan["early"]), Divergence()
    probes: list[Probe] = [divergence, predicted] if arm == NONE else []
    with tempfile.TemporaryDirectory() as scratch:
        trainer = trainer_of(
            scratch, probes, plan["steps"], setting["sampler"], learning_rate=setting["learning_rate"], seed=seed,
            interventions=[] if arm == NONE else [arm], per_device_train_batch_size=32,
            gradient_accumulation_steps=plan["prompts"] * 8 // 32, num_generations_eval=4,
            per_device_eval_batch_size=512, eval_dataset=arithmetic(num_eval=plan["evaluation_prompts"]).eval_dataset,
        )  # fmt: skip
        trainer.train()
        rewards = [row["reward"] for row in trainer.state.log_history if "reward" in row]
        trainer.evaluate()
        final = trainer.state.log_history[-1]
    result = {"reward": final["eval_reward"], "entropy": final["eval_entropy"], "rewards": rewards}
    if arm == NONE:
        result |= {"predicted": predicted.means, "kl_and_ess": divergence.rows}
    return result


def file_of(folder: Path, setting: str, arm: str, seed: int) -> Path:
    return folder / f"{setting}-{arm.replace(':', '_')}-{seed}.json"


def run(plan: dict[str, Any], folder: Path) -> None:
    """Trains what is not there yet, a seed after another, so that what is there is a whole test of fewer seeds."""
    folder.mkdir(parents=True, exist_ok=True)
    for seed in plan["seeds"]:
        for name, setting in plan["settings"].items():
            for arm in plan["arms"]:
                file = file_of(folder, name, arm, seed)
                if not file.is_file():
                    start = time.perf_counter()
                    result = trained(plan, setting, arm, seed)
                    file.write_text(json.dumps(result), encoding="utf-8")
                    print(f"{file.stem}: reward {result['reward']:.3f}, entropy {result['entropy']:.4f}, "
                          f"{time.perf_counter() - start:.0f} s", flush=True)  # fmt: skip


class Outcome:
    """What came of a setting: of each arm the mean over seeds of each truth, and what was predicted of it."""

    def __init__(self, plan: dict[str, Any], folder: Path, setting: str, window: str) -> None:
        """window: of the predictions, "early" or "all"."""
        self.arms = plan["arms"]
        runs = {arm: [json.loads(path.read_text(encoding="utf-8")) for seed in plan["seeds"]
                      if (path := file_of(folder, setting, arm, seed)).is_file()] for arm in self.arms}  # fmt: skip
        self.seeds = min(map(len, runs.values()))
        self.tables = {
            "reward": [[run["reward"] for run in runs[arm][: self.seeds]] for arm in self.arms],
            "entropy": [[run["entropy"] for run in runs[arm][: self.seeds]] for arm in self.arms],
            "last rewards": [[statistics.fmean(run["rewards"][-10:]) for run in runs[arm][: self.seeds]]
                             for arm in self.arms],
        }  # fmt: skip
        self.truth = {name: [statistics.fmean(row) for row in table] for name, table in self.tables.items()}
        rows = [row for run in runs[NONE] for row in run["kl_and_ess"]]
        self.divergence = [statistics.fmean(row[i] for row in rows) for i in range(2)]
        means = [run["predicted"].get(window, {}) for run in runs[NONE]]
        self.steps = sum(mean[self.arms[1]]["steps"] for mean in means if mean)
        self.predicted = {
            quantity: [(0.0, 0.0), *(_pooled([mean[arm] for mean in means if mean], quantity) for arm in self.arms[1:])]
            for quantity in ("delta_reward", "delta_h")
        }

    def half_width(self, truth: str) -> float:
        """Returns that of the 95 % interval of a difference of two arms, by what arm and seed leave of the variance."""
        table = torch.tensor(self.tables[truth], dtype=torch.float64)
        rest = table - table.mean(dim=0) - table.mean(dim=1, keepdim=True) + table.mean()
        freedom = (len(self.arms) - 1) * (self.seeds - 1)
        return float(stdtrit(freedom, 0.975)) * math.sqrt(2.0 * float(rest.square().sum()) / freedom / self.seeds)

    def rank(self, quantity: str, truth: str) -> float:
        return float(spearmanr([value for value, _ in self.predicted[quantity]], self.truth[truth]).statistic)

    def choices(self) -> dict[str, str]:
        """Returns the arm that each way chooses."""
        best = {f"largest {name}": self.arms[max(range(len(self.arms)), key=lambda i: self.predicted[name][i][0])]
                for name in self.predicted}  # fmt: skip
        return best | {f"always {arm}": arm for arm in (NONE, "seq_mask:3", "tis:2")}

    def signs(self) -> list[tuple[bool, bool]]:
        """Returns of each asserted ΔH whether entropy ended on that side, and whether by more than its interval."""
        differences = [value - self.truth["entropy"][0] for value in self.truth["entropy"]]
        width = self.half_width("entropy")
        return [(value * difference > 0, abs(difference) > width)
                for (value, error), difference in zip(self.predicted["delta_h"], differences, strict=True)
                if abs(value) > 1.96 * error]  # fmt: skip


def _pooled(means: list[dict[str, Any]], quantity: str) -> tuple[float, float]:
    """Returns a mean over seeds with its standard error, each weighing as many steps as it has."""
    steps = sum(mean["steps"] for mean in means)
    value = sum(mean["steps"] * mean[quantity][0] for mean in means) / steps
    return value, math.sqrt(sum((mean["steps"] * mean[quantity][1]) ** 2 for mean in means)) / steps


def print_table(plan: dict[str, Any], folder: Path, window: str) -> None:
    """Prints what came of every setting, and all that is registered as to be compared."""
    outcomes = {name: Outcome(plan, folder, name, window) for name in plan["settings"]}
    for name, outcome in outcomes.items():
        kl, ess = outcome.divergence
        widths = {truth: outcome.half_width(truth) for truth in outcome.truth}
        print(f"\n{name}: {outcome.seeds} seeds, {outcome.steps} measured steps, KL {kl:.2g}, ESS {ess:.2f}; 95 % of a "
              "difference: " + ", ".join(f"{truth} ± {width:.4f}" for truth, width in widths.items()))  # fmt: skip
        for i, arm in enumerate(plan["arms"]):
            said = [f"{quantity} {1e3 * rows[i][0]:+.3f} ± {1.96e3 * rows[i][1]:.3f}"
                    for quantity, rows in outcome.predicted.items()]  # fmt: skip
            ends = [f"{truth} {values[i]:.4f}" for truth, values in outcome.truth.items()]
            by_seed = " ".join(f"{value:.2f}" for value in outcome.tables["reward"][i])
            print(f"  {arm:13} {', '.join(said)} (1e-3); {', '.join(ends)}; rewards {by_seed}")
    outcomes = {name: outcome for name, outcome in outcomes.items() if outcome.steps >= FEWEST_STEPS}
    print(f"\npredicted: {', '.join(outcomes)}")
    for quantity, truth in ORDERS:
        ranks = [outcome.rank(quantity, truth) for outcome in outcomes.values()]
        by_setting = " ".join(f"{rank:+.2f}" for rank in ranks)
        print(f"rank of {quantity} and {truth}: {by_setting}, mean {statistics.fmean(ranks):+.2f}")
    for way in next(iter(outcomes.values())).choices():
        regrets, chosen = [], []
        for outcome in outcomes.values():
            arm, rewards = outcome.choices()[way], outcome.truth["reward"]
            regrets.append(max(rewards) - rewards[plan["arms"].index(arm)])
            chosen.append(f"{arm} {regrets[-1]:.3f}" + " (level)" * (regrets[-1] <= outcome.half_width("reward")))
        print(f"{way}: {', '.join(chosen)}; median {statistics.median(regrets):.3f}, sum {sum(regrets):.3f}")
    signs = [sign for outcome in outcomes.values() for sign in outcome.signs()]
    for words, held in (
        ("all", [right for right, _ in signs]),
        ("clear ends", [right for right, clear in signs if clear]),
    ):
        print(f"asserted signs of ΔH, {words}: {sum(held)} of {len(held)} right")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("part", choices=["run", "table"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--small", action="store_true", help="to see that it runs")
    parser.add_argument("--early", action="store_true", help="predictions of the first steps alone")
    options = parser.parse_args()
    torch.set_num_threads(1)
    plan = json.loads(REGISTERED.read_text(encoding="utf-8"))
    if options.small:
        plan |= {"steps": 4, "early": 2, "seeds": [0, 1]}
    if options.part == "run":
        run(plan, options.folder)
    else:
        print_table(plan, options.folder, "early" if options.early else "all")


if __name__ == "__main__":
    main()
