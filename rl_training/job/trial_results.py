"""What came of a trial: values by seed and prompt, differences to plain paired over both, and what they say to do.

With d_sr what a candidate is better by at seed s and prompt r than plain, in the model μ + a_s + b_r + e_sr,

    mean    the mean of all d_sr
    stderr² 2 σ² / S + var_r(mean over s) / R − var(e) / (S R)

since each of the first two has the last in it. σ² is the variance over seeds of an arm's mean, what the arms share at
a seed apart, from all arms together, plain too: (arms − 1)(S − 1) degrees of freedom, where one difference has S − 1.
It takes seeds to scatter alike in all arms. Student's t has Satterthwaite's degrees of freedom. The intervals of k
candidates hold together with 95 % (Bonferroni).

Source: Dunnett 1955, "A multiple comparison procedure for comparing several treatments with a control".
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from scipy.special import stdtr, stdtrit

from rl_training.interventions.named import intervention
from rl_training.mathematics.estimate import Estimate
from rl_training.mathematics.pass_at_k import pass_at_k
from rl_training.records.evaluated import RESPONSES
from rl_training.records.jsonl import read_metrics
from rl_training.records.report.charts import BLUE, GREY, Chart, Series, draw
from rl_training.records.report.series import to_rows

PLAIN = "plain"
ONE_SEED = "one seed says nothing of other seeds"
LIKELY = 0.9  # that a candidate is better than plain, one alone looked at: from then on it is leaned to


def values_of(evaluation: Path, step: int) -> pd.DataFrame:
    """Returns by row of the evaluation split what the responses of a branch are worth, a column for each quantity.

    reward, pass@1 … pass@k   means over the responses to a prompt       entropy, in nats per token       length
    """
    lines = (evaluation / f"step_{step}" / RESPONSES).read_text(encoding="utf-8").splitlines()
    responses = pd.DataFrame(map(json.loads, lines))
    by_row = responses[responses["response_number"] != "greedy"].groupby("row")
    num = int(by_row.size().min())
    right = torch.tensor((by_row.head(num)["reward"] >= 1).groupby(responses["row"]).sum().to_list())
    means = by_row[["reward", "mean_entropy", "length"]].mean().rename(columns={"mean_entropy": "entropy"})
    passed = {f"pass@{k}": pass_at_k(right, num, k).numpy() for k in dict.fromkeys((1, num))}
    return means.assign(**passed)[["reward", *passed, "entropy", "length"]]


def scatter_over_seeds(means: np.ndarray) -> tuple[float, int]:
    """Returns σ² of the means (arms, S) by arm and seed, and its degrees of freedom.

    Example: of two arms it is half of the variance of their differences.
    """
    rest = means - means.mean(axis=0) - means.mean(axis=1, keepdims=True) + means.mean()
    freedom = (len(means) - 1) * (means.shape[1] - 1)
    return float((rest**2).sum()) / max(freedom, 1), freedom


def paired(differences: np.ndarray, scatter: tuple[float, int], comparisons: int = 1) -> Estimate:
    """Returns the mean of (S, R) differences, with an interval that holds together with those of other comparisons.

    scatter  of all arms over seeds
    """
    seeds, prompts = differences.shape
    mean = float(differences.mean())
    if seeds < 2 or prompts < 2 or not scatter[1]:
        return Estimate(mean, reason="one prompt says nothing of other prompts" if prompts < 2 else ONE_SEED)
    by_seed, by_prompt = differences.mean(axis=1, keepdims=True), differences.mean(axis=0, keepdims=True)
    rest = differences - by_seed - by_prompt + mean
    parts = np.array([2 * scatter[0] / seeds, by_prompt.var(ddof=1) / prompts])
    degrees = np.array([scatter[1], prompts - 1])
    cell = float((rest**2).sum()) / ((seeds - 1) * (prompts - 1)) / (seeds * prompts)
    # The seeds' part alone is an upper bound where the difference comes out below it.
    variance = max(parts.sum() - cell, parts.max())
    freedom = max(variance**2 / (parts**2 / degrees).sum(), 1.0) if variance else 1.0
    reach = float(stdtrit(freedom, 1 - 0.025 / comparisons)) * math.sqrt(variance)
    interval = (mean - reach, mean + reach)
    return Estimate(mean, math.sqrt(variance), seeds * prompts, detail={"freedom": freedom}, interval=interval)


@dataclass(frozen=True)
class Candidate:
    """A candidate at its last evaluation: means by quantity, differences to plain, and why and when it was stopped."""

    name: str
    step: int
    means: Mapping[str, float]
    differences: Mapping[str, Estimate]
    seeds: int
    stopped: str = ""


def candidates(values: Mapping[str, Mapping[int, pd.DataFrame]], step: int, comparisons: int) -> list[Candidate]:
    """Returns the candidates that have finished a seed which plain has too, from values by arm, plain too, and seed."""
    arms = {name: by_seed for name, by_seed in values.items() if by_seed}
    plain = arms.pop(PLAIN, {})
    arms = {name: by_seed for name, by_seed in arms.items() if by_seed.keys() & plain.keys()}
    if not arms:
        return []
    everywhere = sorted(set(plain).intersection(*arms.values()))
    rows = sorted(set.intersection(*(set(each.index) for some in (plain, *arms.values()) for each in some.values())))
    found: dict[str, dict[str, Estimate]] = {name: {} for name in arms}
    means: dict[str, dict[str, float]] = {name: {} for name in arms}
    for quantity in map(str, next(iter(plain.values()))):
        table = {
            name: {seed: each.loc[rows, quantity].to_numpy() for seed, each in by_seed.items()}
            for name, by_seed in (*arms.items(), (PLAIN, plain))
        }
        scatter = scatter_over_seeds(np.array([[row[seed].mean() for seed in everywhere] for row in table.values()]))
        for name, by_seed in arms.items():
            own, theirs = (
                np.array([table[arm][seed] for seed in sorted(by_seed.keys() & plain.keys())]) for arm in (name, PLAIN)
            )
            means[name][quantity] = float(own.mean())
            found[name][quantity] = paired(own - theirs, scatter, comparisons)
    return [
        Candidate(name, step, means[name], found[name], len(by_seed.keys() & plain.keys()))
        for name, by_seed in arms.items()
    ]


def largest_pass(quantities: Sequence[str]) -> str:
    """Returns the pass@k of the largest k."""
    return max((name for name in quantities if name.startswith("pass@")), key=lambda name: int(name[5:]))


def chance(difference: Estimate) -> float:
    """Returns the chance that a difference is above 0, were it the only one that is looked at; nan without an error."""
    freedom = float(difference.detail.get("freedom", math.nan))
    return float(stdtr(freedom, difference.value / (difference.stderr or math.nan)))


def to_stop(found: Sequence[Candidate]) -> list[Candidate]:
    """Returns, with the reason, those of the worse half by pass@k that are behind the best with a chance of .9 or more.

    Arms scatter alike, so a candidate is as uncertain against the best one as against plain.
    """
    goal = largest_pass(list(found[0].means)) if found else ""
    ordered = sorted(found, key=lambda each: -each.differences[goal].value)
    lead = {each.name: ordered[0].differences[goal].value - each.differences[goal].value for each in ordered}
    return [
        replace(each, stopped=f"after {each.step} steps: {goal} {in_words(each.differences[goal])}, place "
                f"{ordered.index(each) + 1} of {len(ordered)}") for each in ordered[(len(ordered) + 1) // 2 :]
        if chance(replace(each.differences[goal], value=lead[each.name])) >= LIKELY
    ]  # fmt: skip


def verdict(candidates: Sequence[Candidate]) -> tuple[str, Candidate | None]:
    """Returns what to do, in a sentence, and the candidate to go on with, if there is one.

    It is for pass@k, the largest k. A candidate is taken where it is better than plain by more than noise; where none
    is, the likeliest is leaned to from odds of 9 to 1 on. Those that are not told apart are not ordered.
    """
    finished = [each for each in candidates if not each.stopped]
    if not finished:
        return "No candidate has come to the end together with plain.", None
    goal = largest_pass(list(finished[0].means))
    better = [each for each in finished if each.differences[goal].ends()[0] > 0]
    if not better:
        return _not_told(finished, goal)
    best = max(better, key=lambda each: each.differences[goal].value)
    low = best.differences[goal].ends()[0]  # above another's interval: a careful test, for plain is in both
    others = [each.name for each in better if each is not best and not low > each.differences[goal].ends()[1]]
    changes = ", ".join(f"{name} {in_words(best.differences[name])}" for name in (goal, "pass@1", "reward"))
    beside = f" Not told apart from {', '.join(others)}." if others else ""
    return f"Take {best.name}: after {best.step} steps {changes}.{beside}", best


def _not_told(candidates: Sequence[Candidate], goal: str) -> tuple[str, Candidate | None]:
    """Returns what is likely where nothing is sure, and what three more seeds would tell."""
    none = f"None is better than plain by more than noise in {goal}."
    known = [each for each in candidates if each.differences[goal].interval]
    if not known:
        return f"{none} {ONE_SEED.capitalize()}: give seeds=3.", None
    best = max(known, key=lambda each: each.differences[goal].value)
    difference, more = best.differences[goal], best.seeds + 3
    # As if all of the error were the seeds': their degrees of freedom grow with them.
    freedom = float(difference.detail["freedom"])
    after = freedom * (more - 1) / (best.seeds - 1)
    shrink = math.sqrt(best.seeds / more) * float(stdtrit(after, 0.975) / stdtrit(freedom, 0.975))
    reach = f"seeds={more} would tell about {shrink * (difference.ends()[1] - difference.value):.2g}."
    likely = chance(difference)
    if not likely >= LIKELY:
        return f"{none} The nearest is {best.name}, {in_words(difference)}; {reach}", None
    lean = f"Lean to {best.name}: after {best.step} steps {goal} {in_words(difference)}"
    return f"{lean}, better than plain with a chance of {likely:.2f}. {none[:-1]}; {reach}", best


def against_plain(found: Sequence[Candidate]) -> Chart:
    """Returns the chart of the differences to plain in pass@k, the largest k; of those that were stopped in grey."""
    goal, series = largest_pass(list(found[0].means)), []
    for each in found:
        x = to_rows({each.step: each.differences[goal]})
        series.append(Series.cloud(each.name, GREY if each.stopped else BLUE, "circle", x, [each.name]))
    return draw("trial", series, names=[each.name for each in found], height=40 + 30 * len(found), goal=goal)


def in_words(difference: Estimate) -> str:
    """Returns +.41 ± .07, with half of the 95 % interval."""
    reach = f" ± {difference.ends()[1] - difference.value:.3f}" if difference.interval else ""
    return f"{difference.value:+.3f}{reach}"


def foretold(logs: Path, name: str) -> str:
    """Returns what the run's last measured step foretold of a candidate, "" where it was not measured.

    Where it was measured at another strength, that one is named.
    """
    own = intervention(name).name
    latest = {
        key.split("/")[1]: value
        for row in read_metrics(logs)
        for key, value in row.items()
        if re.fullmatch("intervention/[^/]+/delta_h", key) and math.isfinite(value)
    }
    names = [own, *(other for other in latest if other.partition(":")[0] == own.partition(":")[0])]
    measured = next((each for each in names if each in latest), "")
    at = "" if measured == own else f", of {measured}"
    return f"{latest[measured]:+.2g} nats per token by one step{at}" if measured else ""
