"""The page shows what probes of one's own measured, and calls missing only what is missing."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from rl_training import Estimate
from rl_training.engine.kl_bound import KLBound
from rl_training.probes import BUILT_IN
from rl_training.records.report import write_report
from rl_training.records.report.sections.appendix import gaps
from rl_training.records.report.sections.own_probes import SHOWN, own_metrics
from rl_training.records.report.summary import summarize
from rl_training.records.table.missing import missing_notes
from rl_training.records.table.reading import read_run
from rl_training.records.writer import Records
from rl_training.vocabulary import BUILT_IN_NAMES

LONG = "a remark that is longer than a row of the table is wide, " * 4


def run_of(folder: Path, steps: int = 3) -> Path:
    records = Records(folder / "logs")
    for step in range(1, steps + 1):
        records.write_metrics(step, {"reward": 0.5})
        records.write_estimates(step, 1, "simple", {"entropy/token": Estimate(0.5, 0.1, 8)})
        own = {
            "mine/bare": Estimate(0.25 * step),
            "mine/noted": Estimate(2.0, reason=LONG),
            "mine/sure": Estimate(1.0, 0.1, 1000),
            "mine/lost": Estimate.missing("it needs a second model"),
            "mine/ended": Estimate(3.0, 0.1, 1000) if step == 1 else Estimate.missing("it ended"),
        }
        records.write_estimates(step, 1, "mine", own)
    return folder


def test_what_a_bounded_step_records_is_no_probe_of_ones_own(tmp_path: Path) -> None:
    Records(run_of(tmp_path) / "logs").write_estimates(3, 1, KLBound.name, {"bound/kl": Estimate(0.01)})
    assert not any(row[0] == "bound/kl" for row in own_metrics(read_run(tmp_path)))


def test_an_own_metric_is_shown_with_its_value_with_or_without_an_error_bar(tmp_path: Path) -> None:
    headings, *rows = own_metrics(read_run(run_of(tmp_path)))
    assert headings == ["metric", "last value", "step", "note"]
    assert rows == [
        ["mine/bare", "0.75", "3", "without an error bar"],
        ["mine/noted", "2", "3", LONG.strip()],
        ["mine/sure", "1.00 ± 0.20", "3", ""],
        ["mine/lost", "–", "–", "it needs a second model"],
        ["mine/ended", "3.00 ± 0.20", "1", ""],
    ]
    assert [(gap.what, gap.names) for gap in gaps(read_run(tmp_path))] == [
        ("value", ["mine/lost"]), ("value", ["mine/ended"]),
    ]  # fmt: skip
    page = write_report(tmp_path).read_text(encoding="utf-8")
    assert f'<td class="note">{LONG.strip()}</td>' in page  # a class that wraps, unlike the other cells of wide tables


def test_an_estimate_that_two_probes_recorded_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    records = Records(run_of(tmp_path) / "logs")
    read_run(tmp_path)
    assert not caplog.messages
    records.write_estimates(3, 1, "other", {"mine/sure": Estimate(2.0)})
    read_run(tmp_path)
    told = "probes 'mine' and 'other' recorded 'mine/sure'; only the last one's is shown"
    assert caplog.messages == [f"{tmp_path}: {told}"]


def test_the_setting_that_turns_probes_on_names_those_of_ones_own(tmp_path: Path) -> None:
    rows = {row.label: row for row in summarize(read_run(run_of(tmp_path)))}
    assert rows["probes that were off"].note.endswith('"interventions"] beside your own: mine')


def test_a_run_without_own_probes_has_no_such_table(tmp_path: Path) -> None:
    records = Records(tmp_path / "logs")
    records.write_metrics(1, {"reward": 0.5})
    for probe in sorted(SHOWN):
        records.write_estimates(1, 1, probe, {f"{probe}/x": Estimate(1.0)})
    assert own_metrics(read_run(tmp_path)) == []
    assert tuple(BUILT_IN) == BUILT_IN_NAMES


def test_steps_before_the_first_error_bar_are_no_warning_and_later_ones_are(tmp_path: Path) -> None:
    records = Records(tmp_path / "logs")
    for step in range(1, 7):
        records.write_metrics(step, {"reward": 0.5})
        late = Estimate(1.0, math.nan, 8, "it needs 3 steps") if step < 3 else Estimate(1.0, 0.1, 8)
        gap = Estimate(1.0, math.nan, 8, "few prompts") if step == 4 else Estimate(1.0, 0.1, 8)
        never = Estimate(1.0, math.nan, 8, "few folds")
        records.write_estimates(step, 1, "simple", {"late": late, "gap": gap, "never": never})
    run = read_run(tmp_path)
    assert missing_notes({name: run.rows(name) for name in ("late", "gap", "never")}) == [
        "error bars of gap, steps 4–4 – few prompts", "error bars of never, steps 1–6 – few folds",
    ]  # fmt: skip
