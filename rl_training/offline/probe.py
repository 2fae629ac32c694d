"""One checkpoint analysis: sample E and U, predict, measure, compare. The results are one flat dictionary.

    deltaH1              predicted change of entropy, nats per token; deltaH1_sequence, nats per sequence
    deltaH1/part/…       the same split by cause, deltaH1/layer/… and deltaH1/kind/… by place
    bars_dot             X̄·Ȳ = deltaH1 / learning_rate
    covariance           −Cov(log π, A) of U, whose scale is unknown (Cui et al.)
    deltaH_true          measured (PDIS); deltaH_snis, deltaH_odd beside it, all with …_sequence
    paired_error         deltaH1 − deltaH_true on the same E, with its own error; paired_error_odd against deltaH_odd
    second_order         deltaH_true − deltaH_odd

`…_se` is one standard error. That of deltaH1 includes the noise of E and U, the others only E's: they are for this
step. What is not available is nan, with the reason in `reasons`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from rl_training.mathematics.estimate import MIN_FOLDS_FOR_STDERR
from rl_training.mathematics.jackknife import Replicates
from rl_training.offline.buffers import EvaluationBuffer, UpdateBuffer, sample_evaluation, sample_update
from rl_training.offline.conditioning import condition
from rl_training.offline.covariance import covariance_of
from rl_training.offline.first_order import SEQUENCE, TOKEN, FirstOrder, predict
from rl_training.offline.phases import Phases, short_memory_says_what_to_lower
from rl_training.offline.restored import RestoredTrainer
from rl_training.offline.settings import Settings
from rl_training.offline.truth import Truth, measure, num_scorings
from rl_training.offline.update import Update, make_update

FEW_UNITS = f"fewer than {MIN_FOLDS_FOR_STDERR} blocks of E or folds of U: no error bar"
NOT_ASKED = "not asked for: {}"
SEVERAL_RATES = "parameter groups have different learning rates: there is no single one to divide by"


@dataclass(frozen=True)
class Analysis:
    """The results of a checkpoint analysis: the numbers to write, and the tensors that they follow from."""

    results: dict[str, float]
    reasons: dict[str, str]  # by key of a result that is nan
    tables: dict[str, list[dict[str, Any]]]  # "eta", "conditioning"
    seconds: dict[str, float]
    evaluation: EvaluationBuffer
    update_buffer: UpdateBuffer
    update: Update
    first_order: FirstOrder | None
    truth: Truth | None


def analyse(restored: RestoredTrainer, settings: Settings) -> Analysis:
    """Returns what the next step from this checkpoint does to entropy. The trainer is left unchanged."""
    phases = Phases(shown=restored.rank == 0 and not restored.trainer.args.disable_tqdm)
    memory, total = settings.memory, settings.evaluation.num_sequences
    with phases("sample U", settings.update.prompts * restored.trainer.num_generations) as progress:
        update_buffer = sample_update(restored, settings.update, memory.generation_size, progress)
    with phases("sample E", total) as progress:
        e = settings.evaluation
        evaluation = sample_evaluation(restored, e, update_buffer, memory.generation_size, progress)
    with phases("gradient of U", update_buffer.num_sequences) as progress:
        update = make_update(restored, update_buffer, memory, progress)
        covariance = covariance_of(restored, update_buffer) if settings.first_order.enabled else None
    first_order = truth = None
    if settings.first_order.enabled:
        with phases("gradient of E", total) as progress:
            first_order = predict(restored, evaluation, update, memory.microbatch_size, progress)
    if settings.truth.enabled:
        etas = sorted({1.0, *settings.truth.etas}, reverse=True)
        with phases("truth", total * num_scorings(etas, settings.truth.odd)) as progress:
            truth = measure(restored, evaluation, update.delta, etas, settings.truth.odd, progress)
    found = _Results()
    found.add_buffers(evaluation, update_buffer, update, restored)
    found.add_first_order(first_order, restored.learning_rate)
    found.add_replicates("covariance", covariance, NOT_ASKED.format("set first_order.enabled=true"))
    found.add_truth(truth, first_order)
    tables = {}
    if truth is not None:
        tables["eta"] = [
            {"eta": at.eta, "ESS": at.weights.ess, "resampled": at.resampled}
            | in_both_units({"deltaH_true": at.true, "deltaH_snis": at.snis, "deltaH_odd": at.odd})
            for at in truth.at
        ]
    if settings.conditioning and first_order is not None:
        with short_memory_says_what_to_lower("conditioning"):
            tables["conditioning"] = condition(restored, update, first_order.direction)
    return Analysis(
        found.values, found.reasons, tables, phases.seconds, evaluation, update_buffer, update, first_order, truth
    )  # fmt: skip


class _Results:
    """Collects numbers with their errors, per token and per sequence, and the reasons of those that are nan."""

    def __init__(self) -> None:
        self.values: dict[str, float] = {}
        self.reasons: dict[str, str] = {}

    def add(self, key: str, value: float, reason: str = "not a finite number") -> None:
        self.values[key] = float(value) if math.isfinite(value) else math.nan
        if math.isnan(self.values[key]):
            self.reasons[key] = reason

    def add_pair(self, key: str, value: Tensor, stderr: Tensor, reason: str = "not a finite number") -> None:
        """Adds (2,) numbers, per token and per sequence, and their standard errors."""
        for suffix, column in (("", TOKEN), ("_sequence", SEQUENCE)):
            self.add(f"{key}{suffix}", float(value[column]), reason)
            self.add(f"{key}{suffix}_se", float(stderr[column]), reason)

    def add_replicates(self, key: str, replicates: Replicates | None, reason: str) -> None:
        """Adds these numbers; nan with the reason where there are none."""
        for name, number in in_both_units({key: replicates}).items():
            self.add(name, number, *([reason] if replicates is None else []))

    def add_buffers(self, e: EvaluationBuffer, u: UpdateBuffer, update: Update, restored: RestoredTrainer) -> None:
        rollout = u.rollout
        assert rollout.rewards is not None
        rewards, mask = rollout.rewards.double(), rollout.completion_mask.double()
        sums = [rewards.sum(), mask.sum(), (rollout.advantages == 0).double().sum()]
        reward, length, idle = (float(restored.reduce(x)) / u.num_sequences for x in sums)
        self.values |= {
            "B_E": float(len(e.prompts)),
            "B_U": float(u.num_prompts),
            "G": float(u.responses_per_prompt),
            "avg_generation_length": float(e.scores.mask.double().sum()) / e.num_sequences,
            "avg_update_length": length,
            "avg_reward": reward,
            "zero_advantage": idle,
            "clip_coefficient": update.clip,
            "update_norm": float(update.delta.double().norm()),
            "gradient_norm": float(update.gradient.double().norm()),
        }

    def add_first_order(self, first_order: FirstOrder | None, learning_rate: float) -> None:
        self.add("learning_rate", learning_rate, SEVERAL_RATES)
        if first_order is None:
            reason = NOT_ASKED.format("first_order.enabled=true predicts")
            for key in ("deltaH1", "deltaH1_se", "deltaH1_sequence", "deltaH1_sequence_se", "bars_dot"):
                self.add(key, math.nan, reason)
            return
        value, stderr, of_evaluation = first_order.value, first_order.stderr, first_order.of_evaluation.stderr
        self.add_pair("deltaH1", value[0], stderr[0], FEW_UNITS)
        self.add("deltaH1_se_evaluation", float(of_evaluation[0, TOKEN]), FEW_UNITS)
        self.add("bars_dot", float(value[0, TOKEN]) / learning_rate, SEVERAL_RATES)
        self.add("bars_dot_se", float(stderr[0, TOKEN]) / learning_rate, SEVERAL_RATES)
        for number, label in enumerate(first_order.labels[1:], start=1):
            self.add_pair(f"deltaH1/{label}", value[number], stderr[number], FEW_UNITS)

    def add_truth(self, truth: Truth | None, first_order: FirstOrder | None) -> None:
        reason = NOT_ASKED.format("truth.enabled=true measures")
        if truth is None:
            for key in ("deltaH_true", "deltaH_snis", "deltaH_odd", "H_orig", "H_upd", "paired_error"):
                self.add_replicates(key, None, reason)
            return
        at = truth.whole_step
        second = None if at.odd is None else at.true - at.odd
        unasked = NOT_ASKED.format("set truth.odd=true")
        self.add_replicates("H_orig", truth.before, reason)
        self.add_replicates("H_upd", truth.before + at.true, reason)
        self.add_replicates("deltaH_true", at.true, reason)
        self.add_replicates("deltaH_snis", at.snis, reason)
        self.add_replicates("deltaH_odd", at.odd, unasked)
        self.add_replicates("second_order", second, unasked)
        if first_order is not None:
            predicted = replace(truth.first_order, value=first_order.value[0])  # the backward's; errors are of E alone
            self.add_replicates("paired_error", predicted - at.true, reason)
            self.add_replicates("paired_error_odd", None if at.odd is None else predicted - at.odd, unasked)
            off = (truth.first_order.value - first_order.value[0]).abs() / truth.first_order.stderr
            self.add("slope_check", float(off.max()))
        self.values |= {
            "floor": float(truth.floor.value[TOKEN]),
            "floor_sequence": float(truth.floor.value[SEQUENCE]),
            "resampled": float(at.resampled),
        }
        self.add("ESS", at.weights.ess)
        self.add("ESS_last_position", at.ess_last_position)
        self.add("w_max", at.weights.largest, "a weight is beyond what float64 holds")
        self.add("w_min", at.weights.smallest)


def in_both_units(numbers: Mapping[str, Replicates | None]) -> dict[str, float]:
    """Returns (2,) numbers with their standard errors, per token and per sequence; nan where there is none."""
    columns = {}
    for key, replicates in numbers.items():
        for suffix, column in (("", TOKEN), ("_sequence", SEQUENCE)):
            columns[f"{key}{suffix}"] = float(replicates.value[column]) if replicates else math.nan
            columns[f"{key}{suffix}_se"] = float(replicates.stderr[column]) if replicates else math.nan
    return columns
