"""Interventions at a checkpoint, as rows of tables: the settings, and the mean over several U.

Beside prediction and measurement on E (intervention_effects.py), a row has the leave-fold-out estimate of the training
probe, which needs only U. The error of the mean over several U includes their scatter:

    se² = se²_E + s²_U / number of U

This is one step; `branches.py` takes several.
"""

from __future__ import annotations

import functools
import math
import operator
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from tqdm.auto import tqdm

from rl_training.engine.batch import Batch
from rl_training.interventions.named import REMEDIES, Intervention, intervention
from rl_training.mathematics.estimate import Estimate
from rl_training.mathematics.jackknife import Replicates
from rl_training.mathematics.running_pairs import Pair
from rl_training.offline.branches import branches
from rl_training.offline.buffers import sample_update
from rl_training.offline.intervention_effects import Effect, OnEvaluation, effects
from rl_training.offline.loss import batch_of, step_of
from rl_training.offline.probe import Analysis
from rl_training.offline.restored import RestoredTrainer
from rl_training.offline.settings import Settings
from rl_training.offline.update import make_update
from rl_training.probes import InterventionsProbe

NOT_KNOWN = "the interval of its ΔH includes 0, or it was not measured"
SAME_REWARDS = "it changed the reward of no response of E, whose number is too small to tell the price"
QUANTITIES = ("delta_h", "delta_reward")


@dataclass(frozen=True)
class InterventionSettings:
    """Which interventions (all of them, none, or these), and how many real steps to take with each."""

    which: Literal["none", "all"] | Sequence[str] = "none"
    steps: int = 0

    def __post_init__(self) -> None:
        if isinstance(self.which, str) and self.which not in ("none", "all"):
            raise ValueError(f"interventions={self.which}: choose all, none, or a list, interventions=[{self.which}]")
        if type(self.steps) is not int or self.steps < 0:
            raise ValueError(f"interventions.steps={self.steps} must be a whole number, at least 0")
        if self.steps and not self.named:
            raise ValueError(f"interventions.steps={self.steps} takes steps with interventions: give interventions=all")
        names = [of.name for of in self.named]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"interventions: {', '.join(twice)} is named twice")

    @property
    def texts(self) -> list[str]:
        return list(REMEDIES) if self.which == "all" else [] if self.which == "none" else list(map(str, self.which))

    @property
    def named(self) -> list[Intervention]:
        """The interventions. ValueError for an unknown name or a meaningless strength."""
        return [intervention(text) for text in self.texts]

    @property
    def needs_reference(self) -> bool:
        return any("reference" in of.remedy.needs for of in self.named)


def rows_of(effects_of: Mapping[str, Sequence[Effect | str]], seed: int | None) -> list[dict[str, Any]]:
    """Returns a row for each name: what was predicted and measured, the mean over several U.

    seed  of the one U; None: of several
    """
    rows = []
    for name, found in effects_of.items():
        some = [effect for effect in found if isinstance(effect, Effect)]
        remarks = Counter(effect.remark if isinstance(effect, Effect) else effect for effect in found)
        row: dict[str, Any] = {
            "name": name,
            "update_seed": seed,
            "updates": len(some),
            "remark": _of_all(remarks),
        }
        for kind in ("predicted", "measured"):
            row |= columns_of(kind, [getattr(effect, kind) for effect in some])
        rows.append(row)
    return rows


def _of_all(remarks: Counter[str], total: int | None = None) -> str:
    """Returns the remarks on several U, each with the number of U it applies to unless it applies to all."""
    total = total or remarks.total()
    return "; ".join(f"{w} with {n} of {total} U" if n < total else w for w, n in remarks.items() if w)


def columns_of(kind: str, some: Sequence[Replicates]) -> dict[str, float]:
    """Returns the columns of several U together: ΔH, Δreward, standard errors, half 95 % intervals, and the price."""
    nan = Pair(torch.full((2,), math.nan), torch.full((2, 2), math.nan), 1.0)
    pair = pair_of(some) if some else nan
    columns: dict[str, float] = {}
    for number, quantity in enumerate(QUANTITIES):
        estimate = pair.estimate(number, NOT_KNOWN)
        columns |= {f"{kind}_{quantity}": estimate.value, f"{kind}_{quantity}_se": estimate.stderr}
        columns[f"{kind}_{quantity}_half"] = estimate.half_width()
    price = pair.minus_ratio(NOT_KNOWN) if some else Estimate.missing(NOT_KNOWN)
    if some and pair.covariance[1, 1] == 0:
        price = Estimate.missing(SAME_REWARDS)
    low, high = price.ends()
    return columns | {f"{kind}_price": price.value, f"{kind}_price_low": low, f"{kind}_price_high": high}


def pair_of(some: Sequence[Replicates]) -> Pair:
    """Returns the mean over several U, with the errors of E's prompts and of the scatter over U; of one, E's alone.

    The degrees of freedom are Satterthwaite's, of ΔH.
    """
    mean = functools.reduce(operator.add, some) * (1.0 / len(some))
    count = len(mean.without)
    apart = mean.without - mean.without.mean(dim=0)
    of_prompts = (count - 1) / count * apart.T @ apart
    of_updates = torch.zeros_like(of_prompts)
    if len(some) > 1:
        of_updates = torch.cov(torch.stack([of.value for of in some]).T) / len(some)
    one, other = float(of_prompts[0, 0]), float(of_updates[0, 0])
    degrees = float(count - 1)
    if other > 0.0:
        degrees = (one + other) ** 2 / (one**2 / (count - 1) + other**2 / (len(some) - 1))
    return Pair(mean.value, of_prompts + of_updates, degrees)


def said_in_training(restored: RestoredTrainer, batch: Batch, texts: Sequence[str]) -> dict[str, dict[str, float]]:
    """Returns by name the training probe's estimates from U alone, with standard errors."""
    probe = InterventionsProbe(texts, every=1)
    probe.prepare(step_of(restored, batch))
    found = probe.results()
    columns: dict[str, dict[str, float]] = {}
    for of in probe.which:
        columns[of.name] = {}
        for quantity in QUANTITIES:
            estimate = found[f"intervention/{of.name}/{quantity}"]
            columns[of.name] |= {f"in_loop_{quantity}": estimate.value, f"in_loop_{quantity}_se": estimate.stderr}
    return columns


def intervention_tables(
    restored: RestoredTrainer, analysis: Analysis, settings: Settings, seeds: Sequence[int], asked: InterventionSettings
) -> dict[str, list[dict[str, Any]]]:
    """Returns "interventions", a row for each on the mean over all U, and "interventions_by_update", a row for each U.

    seeds  of further U, beside the analysis's own
    """
    own, memory, which = settings.update, settings.memory, asked.named
    on = OnEvaluation(restored, analysis.evaluation)
    by_update: list[dict[str, Any]] = []
    found: dict[str, list[Effect | str]] = {}
    all_seeds = list(dict.fromkeys([own.seed, *seeds]))
    hidden = restored.rank > 0 or restored.trainer.args.disable_tqdm
    for seed in tqdm(all_seeds, desc="interventions", unit="update", disable=hidden):
        buffer, update = analysis.update_buffer, analysis.update
        if seed != own.seed:
            buffer = sample_update(restored, replace(own, seed=seed), memory.generation_size)
            update = make_update(restored, buffer, memory)
        batch = batch_of(restored, buffer)
        of_seed = dict(effects(on, restored, update, batch, which))
        in_loop = said_in_training(restored, batch, asked.texts)
        for row in rows_of({name: [effect] for name, effect in of_seed.items()}, seed):
            by_update.append(row | in_loop.get(row["name"], {}))
        for name, effect in of_seed.items():
            found.setdefault(name, []).append(effect)
    tables = {"interventions": rows_of(found, None), "interventions_by_update": by_update}
    typed = {of.name: text for of, text in zip(which, asked.texts, strict=True)}
    if asked.steps:
        after_steps: dict[str, list[Replicates | str]] = {}
        for seed in tqdm(all_seeds, desc="branches", unit="update", disable=hidden):
            for name, change in branches(on, restored, settings, which, asked.steps, seed):
                after_steps.setdefault(name, []).append(change)
        tables["branches"] = [_branch_row(name, asked.steps, some) for name, some in after_steps.items()]
    for row in (*tables["interventions"], *tables.get("branches", ())):
        row["asked"] = typed.get(row["name"], "")
    return tables


def _branch_row(name: str, steps: int, found: Sequence[Replicates | str]) -> dict[str, Any]:
    some = [change for change in found if isinstance(change, Replicates)]
    remarks = Counter(change for change in found if isinstance(change, str))
    row = {"name": name, "steps": steps, "updates": len(some), "remark": _of_all(remarks, len(found))}
    return row | columns_of("measured", some)
