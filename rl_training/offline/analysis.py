"""One checkpoint analysis: sample E and U, predict, measure, compare. The results are one flat dictionary.

Their names are explained in docs/reference/run_folder.md. `…_se` is one standard error. The error of deltaH1 includes
the noise of both E and U. All others include E's only: they hold for this particular step. A result that is not
available is nan, with the reason in `reasons`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rl_training.offline.buffers import SampledBuffer, UpdateBuffer, sample_evaluation, sample_update
from rl_training.offline.first_order import SEQUENCE, TOKEN, FirstOrder, compare_preconditioners, covariance_of, predict
from rl_training.offline.phases import Phases, explain_out_of_memory
from rl_training.offline.restored import RestoredTrainer
from rl_training.offline.settings import Settings
from rl_training.offline.truth import Truth, measure, num_scorings
from rl_training.offline.update import Update, make_update
from rl_training.parallel.vectors import Vector, dot
from rl_training.statistics.jackknife import MIN_UNITS_OFFLINE, Replicates

Numbers = tuple[dict[str, float], str]  # numbers by name, and the reason for those that are nan
DENOMINATORS = (("", TOKEN), ("_sequence", SEQUENCE))  # the suffix of a number per token or sequence, and its column
MEASURED = ("H_orig", "H_upd", "deltaH_true", "deltaH_snis", "deltaH_odd", "second_order", "paired_error")
NOT_PREDICTED = "not predicted: set first_order.enabled=true"
NOT_MEASURED = "not measured: set truth.enabled=true"
NOT_ODD = "not measured: set truth.odd=true"
NOT_FINITE = "not a finite number"
FEW = f"fewer than {MIN_UNITS_OFFLINE} blocks of E or folds of U: no error bar"
SEVERAL_RATES = "parameter groups have different learning rates: there is no single one to divide by"
NO_DIRECTION = "the direction is 0: it cannot be scaled to the length of the step"
OVERFLOW = "an importance weight is too large for float64"


@dataclass(frozen=True)
class Analysis:
    """The results of a checkpoint analysis: the numbers to write, and the data that they were computed from."""

    results: dict[str, float]
    reasons: dict[str, str]  # for every key of `results` whose value is nan
    tables: dict[str, list[dict[str, Any]]]  # "eta", "conditioning"
    seconds: dict[str, float]
    evaluation: SampledBuffer
    update_buffer: UpdateBuffer
    update: Update
    first_order: FirstOrder | None
    truth: Truth | None

    def add(self, groups: Sequence[Numbers]) -> None:
        """Add further numbers to the results, with the reason for each nan."""
        results, reasons = _with_reasons(groups)
        self.results.update(results)
        self.reasons.update(reasons)


def analyze(restored: RestoredTrainer, settings: Settings) -> Analysis:
    """Analyze how the next step from a checkpoint changes entropy. The trainer is left unchanged. Collective."""
    phases = Phases(shown=restored.rank == 0 and not restored.trainer.args.disable_tqdm)
    memory = settings.memory
    e = settings.evaluation
    total = e.num_sequences
    with phases("sample U", settings.update.prompts * restored.trainer.num_generations) as progress:
        update_buffer = sample_update(restored, settings.update, memory.generation_size, progress)
    with phases("sample E", total) as progress:
        evaluation = sample_evaluation(restored, e, update_buffer, memory.generation_size, progress)
    with phases("gradient of U", update_buffer.num_sequences) as progress:
        update = make_update(restored, update_buffer, memory, progress)
        covariance = covariance_of(restored, update_buffer, update) if settings.first_order.enabled else None
    first_order = truth = None
    if settings.first_order.enabled:
        with phases("gradient of E", total) as progress:
            first_order = predict(restored, evaluation, update, memory.microbatch_size, progress)
    if settings.truth.enabled:
        etas = sorted({1.0, *settings.truth.etas}, reverse=True)
        with phases("truth", total * num_scorings(etas, settings.truth.odd)) as progress:
            truth = measure(restored, evaluation, update.delta, etas, settings.truth.odd, progress)
    numbers: list[Numbers] = [({"B_E": float(e.num_prompts)}, NOT_FINITE)]
    numbers += _buffer_numbers(restored, evaluation, update_buffer, update)
    numbers += _predicted(first_order, restored.learning_rate)
    numbers += [(per_token_and_sequence({"covariance": covariance}), NOT_FINITE if covariance else NOT_PREDICTED)]
    numbers += _measured(truth, first_order)
    results, reasons = _with_reasons(numbers)
    tables = {}
    if truth is not None:
        tables["eta"] = [
            {"eta": at.eta, "ESS": at.forward.weights.ess, "resampled": at.forward.is_resampled}
            | per_token_and_sequence(at.changes())
            for at in truth.at
        ]
    if settings.conditioning and first_order is not None:
        with explain_out_of_memory("conditioning"):
            tables["conditioning"] = compare_preconditioners(restored, update, first_order.direction)
        pointless = [row["name"] for row in tables["conditioning"] if math.isnan(row["delta_h1"])]
        reasons |= {f"conditioning/{name}": NO_DIRECTION for name in pointless}
    return Analysis(
        results, reasons, tables, phases.seconds, evaluation, update_buffer, update, first_order, truth
    )  # fmt: skip


def _with_reasons(groups: Sequence[Numbers]) -> tuple[dict[str, float], dict[str, str]]:
    """Return all numbers, with nan in place of infinities, and the reason for each nan."""
    results = dict[str, float]()
    reasons = dict[str, str]()
    for numbers, reason in groups:
        results |= {key: value if math.isfinite(value) else math.nan for key, value in numbers.items()}
        reasons |= {key: reason for key, value in numbers.items() if not math.isfinite(value)}
    return results, reasons


def _buffer_numbers(restored: RestoredTrainer, e: SampledBuffer, u: UpdateBuffer, update: Update) -> list[Numbers]:
    rollout = u.rollout
    assert rollout.rewards is not None
    rewards = rollout.rewards.double()
    mask = rollout.completion_mask.double()
    sums = [rewards.sum(), mask.sum(), (rollout.advantages == 0).double().sum()]
    reward, length, zero_advantage = (float(restored.reduce(x)) / u.num_sequences for x in sums)
    numbers = {
        "N_E": float(e.num_sequences),
        "B_U": float(u.num_prompts),
        "G": float(u.responses_per_prompt),
        "avg_generation_length": float(e.scores.mask.double().sum()) / e.num_sequences,
        "avg_update_length": length,
        "avg_reward": reward,
        "zero_advantage": zero_advantage,
        "clip_coefficient": update.whole.clip,
        "update_norm": _norm(restored, update.delta),
        "gradient_norm": _norm(restored, update.gradient),
    }
    return [(numbers, NOT_FINITE)]


def _norm(restored: RestoredTrainer, vector: Vector) -> float:
    return math.sqrt(restored.reduce(dot(vector, vector)))


def _predicted(first_order: FirstOrder | None, learning_rate: float) -> list[Numbers]:
    rate: Numbers = ({"learning_rate": learning_rate}, SEVERAL_RATES)
    if first_order is None:
        return [rate, ({"bars_dot": math.nan, **per_token_and_sequence({"deltaH1": None})}, NOT_PREDICTED)]
    value = first_order.value.tolist()
    stderr = first_order.stderr.tolist()
    values = dict[str, float]()
    errors = dict[str, float]()
    for number, label in enumerate(first_order.labels):
        key = f"deltaH1/{label}" if number else "deltaH1"
        for suffix, column in DENOMINATORS:
            values[f"{key}{suffix}"] = value[number][column]
            errors[f"{key}{suffix}_se"] = stderr[number][column]
    errors["deltaH1_se_evaluation"] = float(first_order.over_evaluation.stderr[0, TOKEN])
    per_rate = values["deltaH1"] / learning_rate
    per_rate_error = errors["deltaH1_se"] / learning_rate
    no_error = SEVERAL_RATES if math.isnan(learning_rate) else FEW
    return [
        rate, ({"bars_dot": per_rate}, SEVERAL_RATES), ({"bars_dot_se": per_rate_error}, no_error),
        (values, NOT_FINITE), (errors, FEW),
    ]  # fmt: skip


def _measured(truth: Truth | None, first_order: FirstOrder | None) -> list[Numbers]:
    if truth is None:
        return [(per_token_and_sequence(dict.fromkeys(MEASURED)), NOT_MEASURED)]
    at = truth.whole_step
    true = at.forward.true
    odd = at.odd
    numbers = {"H_orig": truth.before, "H_upd": truth.before + true, **at.changes()}
    numbers["second_order"] = None if odd is None else true - odd
    more_numbers = {
        "floor": float(truth.floor.value[TOKEN]),
        "floor_sequence": float(truth.floor.value[SEQUENCE]),
        "resampled": float(at.forward.is_resampled),
        "ESS": at.forward.weights.ess,
        "w_min": at.forward.weights.smallest,
    }
    if first_order is not None:
        predicted = replace(truth.first_order, value=first_order.value[0])  # from the backward; errors of E only
        numbers |= at.errors_of(predicted)
        deviation = (truth.first_order.value - first_order.value[0]).abs() / truth.first_order.stderr
        more_numbers["slope_check"] = float(deviation.max())
    available = {key: replicates for key, replicates in numbers.items() if replicates is not None}
    return [
        (per_token_and_sequence(available), NOT_FINITE),
        (per_token_and_sequence({key: None for key in numbers if key not in available}), NOT_ODD),
        (more_numbers, NOT_FINITE),
        ({"w_max": at.forward.weights.largest}, OVERFLOW),
    ]


def per_token_and_sequence(numbers: Mapping[str, Replicates | None]) -> dict[str, float]:
    """Flatten (2,) numbers to a value and a standard error per token and per sequence; nan for None."""
    columns = {}
    for key, replicates in numbers.items():
        for suffix, column in DENOMINATORS:
            columns[f"{key}{suffix}"] = float(replicates.value[column]) if replicates else math.nan
            columns[f"{key}{suffix}_se"] = float(replicates.stderr[column]) if replicates else math.nan
    return columns
