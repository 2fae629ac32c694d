"""What came of a trial: values by seed and prompt, differences to plain paired over both, and what they say to do.

With m_sr the mean of a candidate at seed s and prompt r less that of plain, in the model μ + a_s + b_r + e_sr,

    mean    the mean of all m_sr
    stderr² var_s(mean over r) / S + var_r(mean over s) / R − var(e) / (S R)

since each of the first two has the last in it. Student's t has Satterthwaite's degrees of freedom. The intervals of k
candidates hold together with 95 % (Bonferroni).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from scipy.special import stdtrit

from rl_training.mathematics.estimate import Estimate
from rl_training.mathematics.pass_at_k import pass_at_k
from rl_training.records.evaluated import RESPONSES
from rl_training.records.jsonl import read_metrics

PLAIN = "plain"
ONE_SEED = "one seed says nothing of other seeds"


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


def paired(differences: np.ndarray, comparisons: int = 1) -> Estimate:
    """Returns the mean of (S, R) differences, with an interval that holds together with those of other comparisons."""
    seeds, prompts = differences.shape
    mean = float(differences.mean())
    if seeds < 2 or prompts < 2:
        return Estimate(mean, reason=ONE_SEED if seeds < 2 else "one prompt says nothing of other prompts")
    by_seed, by_prompt = differences.mean(axis=1, keepdims=True), differences.mean(axis=0, keepdims=True)
    rest = differences - by_seed - by_prompt + mean
    parts = np.array([by_seed.var(ddof=1) / seeds, by_prompt.var(ddof=1) / prompts])
    degrees = np.array([seeds - 1, prompts - 1])
    cell = float((rest**2).sum()) / math.prod(degrees) / (seeds * prompts)
    # The seeds' part alone is an upper bound where the difference comes out below it.
    variance = max(parts.sum() - cell, parts.max())
    freedom = variance**2 / (parts**2 / degrees).sum() if variance else 1.0
    reach = float(stdtrit(max(freedom, 1.0), 1 - 0.025 / comparisons)) * math.sqrt(variance)
    return Estimate(mean, math.sqrt(variance), seeds * prompts, interval=(mean - reach, mean + reach))


@dataclass(frozen=True)
class Candidate:
    """A candidate at its last evaluation: means by quantity, differences to plain, and why and when it was stopped."""

    name: str
    step: int
    means: Mapping[str, float]
    differences: Mapping[str, Estimate]
    seeds: int
    stopped: str = ""


def candidate(
    name: str, step: int, own: Sequence[pd.DataFrame], plain: Sequence[pd.DataFrame], comparisons: int
) -> Candidate:
    """Returns a candidate from values of the same seeds, in the same order, of its branches and of plain's."""
    means, differences = {}, {}
    rows = sorted(set.intersection(*(set(values.index) for values in (*own, *plain))))
    for quantity in map(str, own[0]):
        mine, theirs = (np.array([values.loc[rows, quantity] for values in some]) for some in (own, plain))
        means[quantity] = float(mine.mean())
        differences[quantity] = paired(mine - theirs, comparisons)
    return Candidate(name, step, means, differences, len(own))


def largest_pass(quantities: Sequence[str]) -> str:
    """Returns the pass@k of the largest k."""
    return max((name for name in quantities if name.startswith("pass@")), key=lambda name: int(name[5:]))


def to_stop(found: Sequence[Candidate]) -> list[Candidate]:
    """Returns the worse half of the candidates by their difference to plain in pass@k, with the reason."""
    goal = largest_pass(list(found[0].means)) if found else ""
    ordered = sorted(found, key=lambda each: -each.differences[goal].value)
    worse = ordered[(len(ordered) + 1) // 2 :]
    return [
        replace(each, stopped=f"after {each.step} steps: {goal} {in_words(each.differences[goal])}, place "
                f"{ordered.index(each) + 1} of {len(ordered)}") for each in worse
    ]  # fmt: skip


def verdict(candidates: Sequence[Candidate]) -> tuple[str, Candidate | None]:
    """Returns what to do, in a sentence, and the candidate that it takes, if there is one.

    A candidate is taken for its pass@k, the largest k. Those that are not told apart are not ordered.
    """
    finished = [each for each in candidates if not each.stopped]
    if not finished:
        return "No candidate has come to the end together with plain.", None
    goal = largest_pass(list(finished[0].means))
    better = [each for each in finished if each.differences[goal].ends()[0] > 0]
    if not better:
        return f"None is better than plain by more than noise in {goal}.{_more_seeds(finished, goal)}", None
    best = max(better, key=lambda each: each.differences[goal].value)
    low = best.differences[goal].ends()[0]  # above another's interval: a careful test, for plain is in both
    others = [each.name for each in better if each is not best and not low > each.differences[goal].ends()[1]]
    told = ", ".join(f"{name} {in_words(best.differences[name])}" for name in (goal, "pass@1", "reward"))
    beside = f" Not told apart from {', '.join(others)}." if others else ""
    return f"Take {best.name}: {told}.{beside}", best


def _more_seeds(candidates: Sequence[Candidate], goal: str) -> str:
    """Returns what three more seeds would tell, if all of the error were the seeds'."""
    known = [each for each in candidates if each.differences[goal].interval]
    if not known:
        return f" {ONE_SEED.capitalize()}: give seeds=3."
    best = max(known, key=lambda each: each.differences[goal].value)
    before, after = best.seeds, best.seeds + 3
    shrink = math.sqrt(before / after) * float(stdtrit(after - 1, 0.975) / stdtrit(before - 1, 0.975))
    reach = shrink * (best.differences[goal].ends()[1] - best.differences[goal].value)
    return (
        f" The nearest is {best.name}, {in_words(best.differences[goal])}; seeds={after} would tell about {reach:.2g}."
    )


def in_words(difference: Estimate) -> str:
    """Returns +.41 ± .07, with half of the 95 % interval."""
    reach = f" ± {difference.ends()[1] - difference.value:.3f}" if difference.interval else ""
    return f"{difference.value:+.3f}{reach}"


def foretold(logs: Path, name: str) -> str:
    """Returns what the run's last measured step foretold of a candidate, "" where it was not measured."""
    key = f"intervention/{name.rpartition('/')[2].partition(':')[0]}/delta_h"
    found = [row[key] for row in read_metrics(logs) if math.isfinite(row.get(key, math.nan))]
    return f"{found[-1]:+.2g} nats per token by one step" if found else ""
