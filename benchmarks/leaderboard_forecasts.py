"""Table 2: where methods say that entropy will be, and whether they warn in time, on held-out runs."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import forecasters
import torch
from forecasters import History
from leaderboard_scores import alarms, brier, held, over_runs, rms
from leaderboard_tables import Rows, entropies, files_of
from matplotlib.axes import Axes
from torch import Tensor
from tqdm import tqdm

from rl_training.mathematics.forecast import HORIZONS, Ahead

WINDOW = 5  # batches whose mean is the entropy at a step; one alone is too noisy
FIRST = 9  # the first step that is asked, from 0
AHEAD = 20  # steps, of alarms
LEVELS = (0.05, 0.1)  # nats per token
CERTAIN = 1e-9  # the standard deviation of what says yes or no


@dataclass(frozen=True)
class Foretold:
    """What one method said along one run, and what came."""

    errors: dict[int, Tensor]  # by horizon, log H̄ − mean at each step that has both
    sds: dict[int, Tensor]
    noise: dict[int, Tensor]  # of H̄, relative
    at: list[list[Ahead]]  # at each step from FIRST on, by horizon


def foretell(method: Callable[..., list[Ahead]], run: Mapping[str, Any]) -> Foretold:
    products = [step["facts"].products for step in run["steps"]]
    entropy, stderr, forward, forward_se = torch.tensor(
        [(p["entropy"].value, p["entropy"].stderr, p["forward"].value, p["forward"].stderr) for p in products],
        dtype=torch.float64,
    ).unbind(-1)
    at = [
        method(History(*(x[: step + 1] for x in (entropy, stderr, forward, forward_se))), HORIZONS)
        for step in range(FIRST, len(entropy))
    ]
    level = entropy.unfold(0, WINDOW, 1).mean(dim=-1).log()  # [k]: around step k + WINDOW // 2
    noise = (stderr / entropy).unfold(0, WINDOW, 1).square().mean(dim=-1).div(WINDOW).sqrt()
    errors, sds, of_truth = {}, {}, {}
    for which, horizon in enumerate(HORIZONS):
        due = FIRST + horizon - WINDOW // 2  # where the first of them comes due, in `level`
        said = at[: max(0, len(level) - due)]
        means = torch.tensor([ahead[which].mean for ahead in said], dtype=torch.float64)
        errors[horizon] = level[due:] - means
        sds[horizon] = torch.tensor([ahead[which].sd for ahead in said], dtype=torch.float64)
        of_truth[horizon] = noise[due:]
    return Foretold(errors, sds, of_truth, at)


def chances_below(told: Foretold, sd: float, level: float) -> list[float]:
    """Returns the chance at each step, from 0, to be below the level in AHEAD steps; before FIRST none is asked."""
    which = HORIZONS.index(AHEAD)
    said = [Ahead(of[which].mean, sd if math.isnan(of[which].sd) else of[which].sd) for of in told.at]
    return [0.0] * FIRST + [ahead.chance_below(level) for ahead in said]


def is_below(run: Mapping[str, Any], level: float) -> list[bool]:
    """Returns at each step whether the mean of the last WINDOW batches is below the level."""
    entropy = entropies(run)
    means = [float(entropy[max(0, step + 1 - WINDOW) : step + 1].mean()) for step in range(len(entropy))]
    return [mean < level for mean in means]


def brier_of(chances: Sequence[float], below: Sequence[bool]) -> tuple[Tensor, Tensor]:
    """Returns the chances said at steps above the level, and whether it was below AHEAD steps later."""
    steps = [step for step in range(FIRST, len(below) - AHEAD) if not below[step]]
    came = torch.tensor([below[step + AHEAD] for step in steps])
    return torch.tensor([chances[step] for step in steps], dtype=torch.float64), came


def table_of_forecasts(runs: Sequence[Mapping[str, Any]], choosing: Sequence[Mapping[str, Any]]) -> Rows:
    """Returns a row for each method, scored on `runs`. What has no standard deviation gets its errors on `choosing`."""
    methods = files_of(forecasters)
    told = {name: [foretell(m.forecast, run) for run in tqdm(runs, desc=name)] for name, m in methods.items()}
    rows: Rows = []
    for name, module in methods.items():
        alarm_only, own = getattr(module, "ALARM_ONLY", False), bool(told[name][0].sds[AHEAD].isfinite().all())
        before = [] if own or alarm_only else [foretell(module.forecast, run) for run in choosing]
        sd = {
            h: statistics.fmean(rms(of.errors[h]) for of in before if len(of.errors[h])) if before else CERTAIN
            for h in HORIZONS
        }
        row: dict[str, Any] = {"forecast": name, "its own 95 %": "yes" if own else "no"}
        for horizon in HORIZONS:
            both = [
                (of.errors[horizon], stays.errors[horizon]) for of, stays in zip(told[name], told["stays"], strict=True)
            ]
            errors = [(rms(of), rms(stays)) for of, stays in both if len(of)]
            row[f"error, {horizon} steps"] = "–" if alarm_only else f"{statistics.fmean(of for of, _ in errors):.3f}"
            row[f"of stays, {horizon}"] = "–" if alarm_only else over_runs(errors)
            row[f"holds, {horizon}"] = "–" if alarm_only else f"{holds(told[name], horizon, sd[horizon]):.2f}"
        for level in LEVELS:
            row |= of_level(level, [chances_below(of, sd[AHEAD], level) for of in told[name]], runs)
        rows.append(row)
    return rows


def holds(told: Sequence[Foretold], horizon: int, sd: float) -> float:
    """Returns the share of what came inside the 95 % interval, a mean over runs."""
    shares = []
    for of in told:
        if len(of.errors[horizon]):
            sds = torch.where(of.sds[horizon].isnan(), sd, of.sds[horizon])
            shares.append(held(of.errors[horizon], sds, of.noise[horizon]))
    return statistics.fmean(shares)


def of_level(level: float, chances: Sequence[list[float]], runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    below = [is_below(run, level) for run in runs]
    scored = [brier_of(c, b) for c, b in zip(chances, below, strict=True)]
    came = [alarms(c, b, FIRST, AHEAD) for c, b in zip(chances, below, strict=True)]
    right, wrong = sum(a.right for a in came), sum(a.wrong for a in came)
    leads = [lead for a in came for lead in a.leads]
    crossed = [a for a in came if a.crosses]
    return {
        f"{level}: Brier": f"{brier(*(torch.cat(parts) for parts in zip(*scored, strict=True))):.3f}",
        f"{level}: alarms right": f"{right} of {right + wrong}",
        f"{level}: runs with a false one": f"{sum(a.wrong > 0 for a in came)} of {len(runs)}",
        f"{level}: crossings foretold": f"{sum(a.right > 0 for a in crossed)} of {len(crossed)}",
        f"{level}: lead": f"{statistics.median(leads):g}" if leads else "–",
    }


def draw_forecasts(axes: Axes, rows: Rows) -> None:
    """Draws the error of each method over that of `stays`, with intervals, at each horizon."""
    scored = [row for row in rows if isinstance(row[f"of stays, {AHEAD}"], tuple) and row["forecast"] != "stays"]
    for which, horizon in enumerate(HORIZONS):
        for place, row in enumerate(scored):
            value, low, high = row[f"of stays, {horizon}"]
            height = place + 0.2 * (1 - which)
            axes.plot([low, high], [height, height], color=f"C{which}", lw=2)
            axes.plot(value, height, "o", color=f"C{which}", label=f"{horizon} steps ahead" if place == 0 else None)
    axes.axvline(1, color="black", lw=0.5)
    axes.set_xscale("log")
    axes.set_yticks(range(len(scored)), [row["forecast"] for row in scored])
    axes.set_xlabel("error of log entropy, over that of “stays as it is”")
    axes.legend(fontsize="small")
