"""Interventions at a checkpoint, as rows of tables: the settings, and the mean over several U.

Beside prediction and measurement on E (intervention_effects.py), a row has the leave-fold-out estimate of the training
probe, which needs only U. The error of the mean over several U includes their scatter:

    se² = se²_E + s²_U / number of U

This is one step; branches take several.
"""

from __future__ import annotations

import functools
import math
import operator
from collections import Counter, defaultdict
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
from rl_training.offline.buffers import sample_update
from rl_training.offline.intervention_effects import Effect, OnEvaluation, branches, effects
from rl_training.offline.probe import Analysis
from rl_training.offline.restored import RestoredTrainer
from rl_training.offline.settings import Settings, refuse_less
from rl_training.offline.update import batch_of, make_update, step_of
from rl_training.probes import InterventionsProbe

NOT_KNOWN = "the interval of its ΔH includes 0, or it was not measured"
SAME_REWARDS = "it changed the reward of no response of E, whose number is too small to tell the price"
QUANTITIES = ("delta_h", "delta_reward")
Row = dict[str, Any]


@dataclass(frozen=True)
class InterventionSettings:
    """Which interventions (all of them, none, or these), and how many real steps to take with each."""

    which: Literal["none", "all"] | Sequence[str] = "none"
    steps: int = 0

    def __post_init__(self) -> None:
        if isinstance(self.which, str) and self.which not in ("none", "all"):
            raise ValueError(f"interventions={self.which}: choose all, none, or a list, interventions=[{self.which}]")
        refuse_less("interventions.steps", self.steps, 0)
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


def rows_of(
    found_of: Mapping[str, Sequence[Effect | str]], kinds: Sequence[str] = ("predicted", "measured"), **about: Any
) -> list[Row]:
    """Returns a row for each name: what was predicted and measured, the mean over several U, each with a remark that
    has the number of U it applies to unless it applies to all.

    about  further columns
    """
    rows = []
    for name, found in found_of.items():
        some = [effect for effect in found if isinstance(effect, Effect)]
        remarks = Counter(effect.remark if isinstance(effect, Effect) else effect for effect in found)
        total = len(found)
        remark = "; ".join(f"{w} with {n} of {total} U" if n < total else w for w, n in remarks.items() if w)
        row: Row = {"name": name, **about, "updates": len(some), "remark": remark}
        for kind in kinds:
            row |= columns_of(kind, [getattr(effect, kind) for effect in some])
        rows.append(row)
    return rows


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
) -> dict[str, list[Row]]:
    """Returns "interventions", a row for each on the mean over all U, and "interventions_by_update", a row for each U;
    and "branches", after several steps with each, if any are asked for.

    seeds  of further U, beside the analysis's own
    """
    own, which = settings.update, asked.named
    on = OnEvaluation(restored, analysis.evaluation)
    by_update: list[Row] = []
    found: dict[str, list[Effect | str]] = defaultdict(list)
    after_steps: dict[str, list[Effect | str]] = defaultdict(list)
    hidden = restored.rank > 0 or restored.trainer.args.disable_tqdm
    for seed in tqdm(list(dict.fromkeys([own.seed, *seeds])), desc="interventions", unit="update", disable=hidden):
        buffer, update = analysis.update_buffer, analysis.update
        if seed != own.seed:
            buffer = sample_update(restored, replace(own, seed=seed), settings.memory.generation_size)
            update = make_update(restored, buffer, settings.memory)
        batch = batch_of(restored, buffer)
        of_seed = dict(effects(on, restored, update, batch, which))
        in_loop = said_in_training(restored, batch, asked.texts)
        for row in rows_of({name: [effect] for name, effect in of_seed.items()}, update_seed=seed):
            by_update.append(row | in_loop.get(row["name"], {}))
        for name, effect in of_seed.items():
            found[name].append(effect)
        for name, change in branches(on, restored, settings, which, asked.steps, seed) if asked.steps else ():
            after_steps[name].append(change if isinstance(change, str) else Effect(None, change))
    tables = {"interventions": rows_of(found, update_seed=None), "interventions_by_update": by_update}
    if asked.steps:
        tables["branches"] = rows_of(after_steps, ["measured"], steps=asked.steps)
    typed = {of.name: text for of, text in zip(which, asked.texts, strict=True)}
    for row in (*tables["interventions"], *tables.get("branches", ())):
        row["asked"] = typed.get(row["name"], "")
    return tables
