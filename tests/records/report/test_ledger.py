"""The ledger of where a run's entropy went: it closes, and its intervals hold what they claim."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from logged_runs import log_run

from rl_training import Estimate
from rl_training.records.pages.writing import milli
from rl_training.records.report.sections.ledger import Ledger, caption, ledger_of, table, waterfall
from rl_training.records.report.summary import summarize
from rl_training.records.table.reading import read_run

STEPS, NOISE, LEVEL_NOISE = 20, 2e-4, 1e-3
TRUE = {"momentum": -3e-3, "gradient": -5e-4, "decay": 0.0}  # of each step; the second order takes back a third of it
SECOND_ORDER = 1e-3
GROUPS = {"0-1": 0.75, "outside": 0.25}


def log_ledger(folder: Path, seed: int, missing: tuple[int, ...] = ()) -> Ledger:
    """Return the ledger of a run in which each batch's noise is a factor on forward and backward alike.

    Args:
        missing: Steps without a prediction.
    """
    generator = np.random.default_rng(seed)
    noise, level_noise = generator.normal(0.0, 1.0, (2, STEPS + 1))
    first_order = sum(TRUE.values())
    share = NOISE / abs(first_order)

    def scaled(true: float) -> Callable[[int], Estimate]:
        def of(step: int) -> Estimate:
            error = abs(true) * share
            return Estimate(true + error * noise[step] * math.copysign(1.0, true), error, 1000)

        return lambda step: Estimate.missing("not measured") if step in missing else of(step)

    def backward(step: int) -> Estimate:
        true = first_order + 2.0 * SECOND_ORDER
        error = abs(true) * share
        value = true - error * noise[step]
        return Estimate.missing("first step") if step == 1 else Estimate(value, error, 1000, about_step=step - 1)

    change = first_order + SECOND_ORDER
    estimates = {
        "entropy/token": lambda s: Estimate(1.0 + change * s + LEVEL_NOISE * level_noise[s], LEVEL_NOISE, 1000),
        "delta_h/forward": scaled(first_order),
        "delta_h/backward": backward,
        **{f"delta_h/part/{cause}": scaled(true) for cause, true in TRUE.items()},
        **{f"delta_h/group/{cause}/{group}": scaled(part * true)
           for cause, true in TRUE.items() for group, part in GROUPS.items()},
    }  # fmt: skip
    account = ledger_of(read_run(log_run(folder, STEPS, estimates)))
    assert account is not None
    return account


def test_the_rows_add_up_to_the_measured_change_with_or_without_missing_steps(tmp_path: Path) -> None:
    for number, missing in enumerate([(), (5, 6), tuple(range(1, 18))]):
        account = log_ledger(tmp_path / str(number), 0, missing)
        levels = read_run(tmp_path / str(number)).values("entropy/token")
        assert account.measured.value == pytest.approx(levels.iloc[-1] - levels.iloc[0], rel=1e-12)
        assert sum(entry.change.value for entry in account.entries) == pytest.approx(account.measured.value, rel=1e-12)
        for cause in account.causes:
            parts = [entry.change.value for entry in account.groups if entry.cause == cause.cause]
            assert sum(parts) == pytest.approx(cause.change.value, rel=1e-12)
        assert account.num_predicted == STEPS - 1 - sum(step < STEPS for step in missing)
        assert [entry.cause for entry in account.causes] == ["momentum", "this step's gradient"]  # nothing decays
        bars = waterfall(account).series
        ends = [bar.x[0] for bar in bars]
        assert [bar.base[0] for bar in bars] == pytest.approx([0.0, *ends[:-2], 0.0])
        assert ends[-1] == pytest.approx(ends[-2])  # the last row is the whole
        headings, *rows = table(account)
        assert headings[1:] == ["momentum", "this step's gradient", "sum"]
        names = ["layers 0-1", "outside layers", "all layers", "second order", "not explained", "measured"]
        assert [row[0] for row in rows] == names
        assert {len(row) for row in rows} == {len(headings)}


def test_of_several_predictions_about_one_step_the_last_recorded_counts(tmp_path: Path) -> None:
    account = log_ledger(tmp_path, 0)
    file = tmp_path / "logs" / "probes.jsonl"
    lines = file.read_text()
    rows = [json.loads(line) for line in lines.splitlines()]
    later = next(row for row in rows if (row["name"], row["about_step"]) == ("delta_h/backward", 7))
    file.write_text(json.dumps(later | {"step": 0, "value": 1.0}) + "\n" + lines)
    assert ledger_of(read_run(tmp_path)) == account


def test_one_quantity_has_one_error_on_a_page(tmp_path: Path) -> None:
    """The measured change is the summary's, and the sum of all causes has the error of forward, not those of its parts.

    Forward has an error of .1 thousandths a step; momentum and gradient, which nearly cancel, have one of .4 each.
    """
    folder = log_run(tmp_path, 10, {
        "entropy/token": lambda step: Estimate(1.0 - 2e-3 * step, 1e-3, 8),
        "delta_h/cumulative_measured": lambda step: Estimate(-2e-3 * (step - 1), 1e-3 * (step > 1), 8),
        "delta_h/cumulative_predicted": lambda step: Estimate(-2e-3 * (step - 1), 1e-3 * (step > 1), 8),
        "delta_h/forward": lambda step: Estimate(-2e-3, 1e-4, 1000),
        "delta_h/backward": lambda step: Estimate(-2e-3, 1e-4, 1000, about_step=step - 1),
        "delta_h/part/momentum": lambda step: Estimate(-3e-3, 4e-4, 1000),
        "delta_h/part/gradient": lambda step: Estimate(1e-3, 4e-4, 1000),
        "delta_h/part/decay": lambda step: Estimate(0.0, 0.0, 1000),
    })  # fmt: skip
    run = read_run(folder)
    account, rows = ledger_of(run), {row.label: row.value for row in summarize(run)}
    assert account is not None
    cells = {row[0]: row for row in table(account)}
    assert cells["measured"][-1] == milli(run.last("delta_h/cumulative_measured")) == "-18.0 ± 2.4"
    assert rows["measured ΔH"] == "-0.0180 ± 0.0024"
    assert cells["all layers"][-1] == "-18.00 ± 0.59"  # 1.96 · 3 · 1e-4
    assert "All layers and the second order together are the predicted ΔH of the summary." in caption(account)


def test_the_intervals_hold_the_true_sums(tmp_path: Path) -> None:
    """In 25 runs, 95 % intervals of momentum, of the second order and of the rest hold in at least 21 (p < .01).

    They are not much too wide for momentum, whose variances add up, and for the second order, where noise cancels.
    """
    held, scatter = np.zeros(3), np.zeros((0, 2))
    count, steps = 25, STEPS - 1
    for seed in range(count):
        account = log_ledger(tmp_path / str(seed), seed)
        truths = {steps * TRUE["momentum"]: account.causes[0].change, steps * SECOND_ORDER: account.second_order,
                  0.0: account.rest}  # fmt: skip
        held += [low <= true <= high for true, (low, high) in ((t, e.bounds()) for t, e in truths.items())]
        pairs = [(estimate, true) for true, estimate in truths.items()][:2]
        scatter = np.vstack([scatter, [(estimate.value - true) / estimate.stderr for estimate, true in pairs]])
    assert (held >= 21).all(), held
    assert all(0.65 < value < 1.4 for value in scatter.std(axis=0)), scatter.std(axis=0)


def test_without_the_parts_of_a_step_or_their_errors_the_sum_still_closes(tmp_path: Path) -> None:
    """At step 3 one part is missing; then no row has an error, as with two folds."""
    log_ledger(tmp_path / "whole", 0)
    rows = (tmp_path / "whole/logs/probes.jsonl").read_text(encoding="utf-8").splitlines()
    without_part = [row for row in rows if not ('"step": 3,' in row and "part/gradient" in row)]
    without_errors = [re.sub(r'"stderr": [^,}]*', '"stderr": null', row) for row in rows]
    for name, lines in (("parts", without_part), ("errors", without_errors)):
        shutil.copytree(tmp_path / "whole", tmp_path / name)
        (tmp_path / name / "logs/probes.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
        account = ledger_of(read_run(tmp_path / name))
        assert account is not None
        assert sum(entry.change.value for entry in account.entries) == pytest.approx(account.measured.value)
        assert len(account.causes) == (1 if name == "parts" else 2)
        assert math.isnan(account.rest.stderr) == (name == "errors")
        assert len(waterfall(account).series) == len(account.entries) + 1
        assert table(account)[-1][0] == "measured"


def test_too_few_predicted_steps_make_no_ledger(tmp_path: Path) -> None:
    assert ledger_of(read_run(log_run(tmp_path, 5))) is None
