"""How an analysis depends on its settings, with few extra forwards. Each table row is a prediction and its truth.

    over_sizes     smaller E: its first n sequences, whole prompts, are an independent sample too. No forward.
    over_updates   other U (seeds, numbers of prompts, filtered or not) with the same E. Each U scores E again, without
                   another backward through E.
    multiples η    of the step are measured by truth.py itself.

Rows of one table share E, so their errors are correlated: differences between rows are known more precisely.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product as combinations
from typing import Any

from tqdm.auto import tqdm

from rl_training.entropy.per_decision import first_order_change
from rl_training.offline.analysis import DENOMINATORS, Analysis, per_token_and_sequence
from rl_training.offline.buffers import sample_update
from rl_training.offline.first_order import covariance_of, without_folds
from rl_training.offline.restored import RestoredTrainer
from rl_training.offline.settings import Settings, UpdateSettings
from rl_training.offline.truth import AtStep, Truth, measure
from rl_training.offline.update import make_update
from rl_training.statistics.jackknife import Replicates


def sweep_tables(restored: RestoredTrainer, analysis: Analysis, settings: Settings) -> dict[str, list[dict[str, Any]]]:
    """Return those of the tables "sizes" and "updates" that the settings ask for. Collective."""
    tables = {}
    sweep = settings.sweep
    if sweep.evaluation_sizes:
        assert analysis.truth is not None
        tables["sizes"] = over_sizes(analysis.truth, sorted(sweep.evaluation_sizes))
    if sweep.updates:
        tables["updates"] = over_updates(restored, analysis, settings)
    return tables


def over_sizes(truth: Truth, sizes: Sequence[int]) -> list[dict[str, Any]]:
    """Return one row per size n: prediction, truth and their difference on the first n sequences of E."""
    rows = []
    for size in sizes:
        at = truth.whole_step.first(size)
        logp_slopes, entropy_slopes = (slopes[:size] for slopes in truth.slopes)
        predicted = first_order_change(at.forward.before, logp_slopes, entropy_slopes, at.forward.units)
        rows.append({"evaluation_size": size, **_columns(predicted, at)})
    return rows


def over_updates(restored: RestoredTrainer, analysis: Analysis, settings: Settings) -> list[dict[str, Any]]:
    """Return one row per update: every combination of number of prompts, filtered or not, and seed. Collective."""
    assert analysis.first_order is not None
    base = settings.update
    memory = settings.memory
    sweep = settings.sweep
    choices = sweep.update_prompts or [base.prompts], sweep.update_filtered or [base.filtered]
    variants = [UpdateSettings(*choice) for choice in combinations(*choices, sweep.update_seeds or [base.seed])]
    rows = []
    shown = restored.rank == 0 and not restored.trainer.args.disable_tqdm
    for variant in tqdm(variants, desc=f"{'other updates':13}", unit="update", disable=not shown):
        buffer = sample_update(restored, variant, memory.generation_size)
        update = make_update(restored, buffer, memory)
        truth = measure(restored, analysis.evaluation, update.delta, [1.0], settings.truth.odd)
        at = truth.whole_step
        over_update = without_folds(restored, update, analysis.first_order.direction)
        value = over_update.value[0]
        stderr = over_update.stderr[0]
        predicted = Replicates(value, truth.first_order.without - truth.first_order.value + value)
        columns = _columns(predicted, at)
        columns |= per_token_and_sequence({"covariance": covariance_of(restored, buffer, update)})
        for suffix, column in DENOMINATORS:  # add U's error to E's
            columns[f"deltaH1{suffix}_se"] = math.hypot(columns[f"deltaH1{suffix}_se"], float(stderr[column]))
        rows.append({
            "update_prompts": variant.prompts, "update_filtered": bool(variant.filtered), "update_seed": variant.seed,
            "ESS": at.forward.weights.ess, "resampled": at.forward.is_resampled, **columns,
        })  # fmt: skip
    return rows


def _columns(predicted: Replicates, at: AtStep) -> dict[str, float]:
    return per_token_and_sequence({"deltaH1": predicted, **at.changes(), **at.errors_of(predicted)})
