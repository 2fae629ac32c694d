"""Claims on the report: at which step each number is shown, with which error, and what it says about missing numbers.

The runs are written through Records. The numbers of `record_run` can be checked by hand: reuse is −1, −2, −4, … at
steps 1, 2, 3, …; measured and predicted sums fall by 1 per step, with standard errors 0.2 and 0.1 from 8 folds.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from full_disk import files_of_at_most
from logged_runs import log_run, noisy
from recorded_runs import record_run

from rl_training.errors import UserError
from rl_training.job.errors import SIGNALS, run_command
from rl_training.probes.running_sum import SOME_STEPS
from rl_training.probes.sampler import TRUNCATED_SAMPLER
from rl_training.records.evaluated import write_step
from rl_training.records.jsonl import METRICS_FILE
from rl_training.records.pages.charts import BLUE, Series
from rl_training.records.pages.drawing import draw, heatmap
from rl_training.records.pages.page import javascript, pictures
from rl_training.records.pages.preview import preview
from rl_training.records.pages.writing import MISSING, format_estimate, milli, normal_milli, percent, size_and_side
from rl_training.records.report import print_summary, write_report
from rl_training.records.report.opening import opening
from rl_training.records.report.predictions import why_no_predictions
from rl_training.records.report.sections.appendix import gaps
from rl_training.records.report.sections.figures import _noise_scale, _predictors, _reward, draw_figures
from rl_training.records.report.sections.sampler import sampler_and_trainer
from rl_training.records.report.story.reward_functions import held_out_rewards
from rl_training.records.report.summary import summarize
from rl_training.records.report.summary.step_numbers import step_numbers
from rl_training.records.report_command import main
from rl_training.records.table.cumulative import BEGAN_ELSEWHERE, naive_sums
from rl_training.records.table.missing import ending_reason
from rl_training.records.table.reading import read_run
from rl_training.records.writer import Records
from rl_training.statistics.estimate import Estimate
from rl_training.statistics.jackknife import FEW_FOLDS, stderr_reason
from rl_training.statistics.unavailable import Unavailable
from rl_training.version import REPOSITORY

T_7 = 2.364624  # 97.5 % quantile of Student's t with 7 degrees of freedom, from a printed table
HOSTILE = "<script>alert('$\\frac{')</script> [/bold] {{ 7 * 7 }} &amp;"


def summary(folder: Path) -> dict[str, tuple[str, str]]:
    return {row.label: (row.value, row.note) for row in summarize(read_run(folder))}


def test_the_naive_curve_at_a_step_sums_the_updates_before_that_step(tmp_path: Path) -> None:
    """Reuse is −1, −2, −4, −8 at steps 1 to 4.

    Batch 1 comes before any update, batch 2 after step 1 (−1), batch 3 after steps 1 and 2 (−3), batch 4 after steps 1
    to 3 (−7). No batch comes after step 4 (−8).
    """
    naive = naive_sums(read_run(record_run(tmp_path, range(1, 5))))
    assert naive["value"].to_dict() == {1: 0, 2: -1, 3: -3, 4: -7}
    assert summary(tmp_path)["naive product"][0] == "-7"
    assert summary(tmp_path)["naive / measured"][0] == "2.33"  # −7 / −3


def test_the_naive_curve_starts_where_the_other_sums_start(tmp_path: Path) -> None:
    """Step 1 could not be measured, and at step 4 the probe started over, so sums are 0 at steps 2 and 4."""
    record_run(tmp_path, [1], reason="off-policy")
    record_run(tmp_path, [2, 3])
    record_run(tmp_path, [4, 5])
    naive = naive_sums(read_run(tmp_path))
    assert naive["value"].to_dict() == {2: 0, 3: -2, 4: 0, 5: -8}


def test_a_branch_has_no_naive_curve_beside_sums_from_its_original_run(tmp_path: Path) -> None:
    """Its sums continue from −20 at step 21. Its own two products are only a tenth of the sums next to them."""
    records = Records(tmp_path / "logs")
    for step in (21, 22, 23):
        change = Estimate(1.0 - step, 0.2, 8, about_step=step - 1)
        estimates = {"reuse": Estimate(-1.0), "cumulative_predicted": change, "cumulative_measured": change}
        records.write_estimates(
            step, 1, "simple", {f"delta_h/{name}": estimate for name, estimate in estimates.items()}
        )
        records.write_metrics(step, {"reward": 0.5})
    told = summary(tmp_path)
    assert told["naive product"] == ("–", BEGAN_ELSEWHERE)
    assert "naive / measured" not in told
    assert told["predicted / measured"][0] == "1.00"
    assert "to step 23 from the first step of the run that this one continues" in told["measured ΔH"][1]


def test_the_naive_curve_is_nan_after_a_gap_and_names_the_step(tmp_path: Path) -> None:
    naive = naive_sums(read_run(record_run(tmp_path, [1, 2, 5, 6])))
    assert naive["value"].loc[[1, 2]].tolist() == [0, -1]
    assert naive["value"].loc[[5, 6]].isna().all()
    assert naive["reason"].loc[[5, 6]].str.contains("step 4 was not measured").all()


def test_the_band_is_the_student_t_half_width_of_the_recorded_error(tmp_path: Path) -> None:
    run = read_run(record_run(tmp_path, range(1, 4)))
    predicted = run.finite_rows("delta_h/cumulative_predicted")
    for end, sign in (("low", -1), ("high", 1)):
        reach = sign * (predicted[end] - predicted["value"])
        assert reach.tolist() == pytest.approx([0, 0.1 * T_7, 0.1 * T_7])
    assert summary(tmp_path)["measured ΔH"][0] == "-2.00 ± 0.47"  # 0.2 · T_7 = 0.473
    assert summary(tmp_path)["predicted ΔH"][0] == "-2.00 ± 0.24"
    assert summary(tmp_path)["predicted / measured"][0] == "1.00"


def test_backward_is_drawn_at_the_step_it_is_about(tmp_path: Path) -> None:
    (drawn,) = (chart for chart in draw_figures(read_run(record_run(tmp_path, range(1, 4)))) if chart.name == "delta_h")
    assert [[round(step) for step in series.x] for series in drawn.series] == [[1, 2, 3], [1, 2]]  # forward, backward


@pytest.mark.parametrize("steps", [3, 6, 12, 60])
def test_headline_and_table_show_the_same_reward_and_entropy(tmp_path: Path, steps: int) -> None:
    """Also of single reward functions, and in a run too short for a verdict."""
    level, falling = noisy(lambda step: 0.5, 0.03, 1), noisy(lambda step: 0.7 - 0.4 * step / steps, 0.03, 2)
    parts = {"rewards__right__mean": falling, "rewards__form__mean": noisy(lambda step: 0.3 + 0.7 * step / steps, 0.03)}
    run = read_run(log_run(tmp_path, steps, reward=level, entropy=noisy(falling, 0.01, 4), **parts))
    first, rows = opening(run), summary(tmp_path)
    said = first.sentence
    for label in ("reward", "token entropy"):
        assert rows[label][0] in said
    if steps == 60:
        assert first.kind == "part"
        assert rows["reward right"][0].split(" → ")[1] in said
        assert rows["reward form"][0] in said


def test_the_steps_behind_a_level_are_named_once(tmp_path: Path) -> None:
    """Of 60 logged steps the first level averages 3; the entropy that a probe measured at every tenth is not used."""
    run = log_run(tmp_path, 60, reward=noisy(lambda step: 0.5, 0.03), entropy=noisy(lambda step: 0.5, 0.01))
    for step in (1, 11, 21):
        Records(run / "logs").write_estimates(step, 1, "simple", {"entropy/token": Estimate(0.9, 0.01, 8)})
    rows = summary(run)
    assert rows["reward"][1] == "mean of steps 1–3 → smoothed level at step 60, ± two standard errors"
    assert rows["token entropy"][1] == "nats per token, as TRL logs it"
    assert rows["token entropy"][0].startswith("0.50 → 0.5")


def test_a_run_too_short_for_a_verdict_says_the_numbers_that_there_are(tmp_path: Path) -> None:
    first = opening(read_run(record_run(tmp_path, range(1, 5))))
    assert first.evidence == (
        "4 steps are logged, and a verdict needs 8. So far: reward 0.15 → 0.35, token entropy 4.50 → 2.50 nats "
        "(means of steps 1–2 and 3–4)."
    )


def test_the_reward_function_that_has_fallen_has_a_row_among_many_others(tmp_path: Path) -> None:
    """The eighth of nine functions falls: it takes the place of the sixth, and what has no row is named."""
    level, fallen = noisy(lambda step: 0.4, 0.01), noisy(lambda step: 0.9 - 0.01 * step, 0.01, 1)
    rows = summary(
        log_run(tmp_path, **{f"rewards__{name}__mean": fallen if name == "h" else level for name in "abcdefghi"})
    )
    assert [label for label in rows if label.startswith("reward ")] == [f"reward {name}" for name in "abcdeh"]
    assert rows["further reward functions"] == ("3", "f, g, i: the chart of reward has them")


def test_the_row_on_hacking_says_what_was_not_checked_or_what_fell(tmp_path: Path) -> None:
    """One function, three steps of two, two that rise, and one that falls while the other rises."""
    rising, falling = noisy(lambda step: 0.3 + 0.01 * step, 0.03), noisy(lambda step: 0.7 - 0.01 * step, 0.03, 2)
    two = {"rewards__right__mean": rising, "rewards__form__mean": rising}
    hacked = {**two, "rewards__right__mean": falling}
    value, note = summary(log_run(tmp_path / "one", rewards__right__mean=rising))["is it hacked?"]
    assert value == "not checked"
    assert "one reward function: nothing to compare it with" in note
    assert "with weight 0 if it must not be paid" in note
    assert summary(log_run(tmp_path / "short", 3, **two))["is it hacked?"][0] == "not known yet"
    assert summary(log_run(tmp_path / "honest", **two))["is it hacked?"][0] == "no sign of it"
    value, note = summary(log_run(tmp_path / "hacked", **hacked))["is it hacked?"]
    assert (value, note) == ("perhaps", "right fell while form rose: read responses")
    cheap = log_run(tmp_path / "cheap", settings={"reward_weights": [0.02, 1.0]}, reward=rising, **hacked)
    value, note = summary(cheap)["is it hacked?"]
    assert value == "no sign of it"
    assert note.startswith("right fell, at less than 5% of what the others gained; ")


def test_rows_link_to_pages_of_the_documentation_that_exist_and_the_terminal_names_them(tmp_path: Path, capsys) -> None:
    folder = record_noise_scale(tmp_path, 100.0, 400.0)
    links = {row.label: row.see for row in summarize(read_run(folder)) if row.see}
    assert {*links} == {"is it hacked?", "noise scale"}
    html = write_report(folder).read_text(encoding="utf-8")
    print_summary(folder)
    printed = "".join(capsys.readouterr().out.split())
    for text, address in links.values():
        assert (Path(__file__).parents[3] / text).is_file()
        assert address == f"{REPOSITORY}/blob/main/{text}"
        assert f'<a class="see" href="{address}">{text}</a>' in html
        assert text in printed


def test_probes_that_were_off_are_named_with_what_they_tell_and_the_setting(tmp_path: Path) -> None:
    """The setting keeps the probes that were on."""
    folder = log_run(tmp_path, 3)
    for probe, name in (
        ("simple", "delta_h/forward"),
        ("ess", "ess/advantage"),
        ("gns", "gns/trace"),
        ("engine", "step/formula_error"),
    ):  # which is no probe
        Records(folder / "logs").write_estimates(1, 1, probe, {name: Estimate(-1e-3, 1e-4, 8)})
    rows = summary(folder)
    value, note = rows["probes that were off"]
    assert value == "3"
    assert "token_classes: which tokens take entropy; " in note
    assert note.endswith('probes=["simple", "gns", "ess", "measured", "token_classes", "interventions"]')
    assert [*rows].index("probes that were off") < 5  # where it is seen


@pytest.mark.parametrize("width", [40, 60, 80, 300])
def test_every_setting_is_in_one_piece_in_a_terminal_of_any_width(tmp_path, capsys, monkeypatch, width: int) -> None:
    """A setting of 74 characters in the table, and one of the advice that names a path with spaces."""
    monkeypatch.setenv("COLUMNS", str(width))
    rewards, entropies = noisy(lambda step: 0.8 if step < 25 else 0.2, 0.03, 1), noisy(lambda step: 0.5, 0.01, 2)
    folder = log_run(tmp_path / "a b", reward=rewards, entropy=entropies, others={"made_by": "job"})
    Records(folder / "logs").write_estimates(1, 1, "simple", {"delta_h/forward": Estimate(-1e-3, 1e-4, 8)})
    (folder / "training_state" / "checkpoint-20").mkdir(parents=True)
    run = read_run(folder)
    settings = {setting for row in summarize(run) for setting in row.settings} | {*opening(run).advice.settings}
    assert len(settings) == 3
    print_summary(run)
    printed = capsys.readouterr().out
    assert all(printed.count(setting) == 1 for setting in settings)
    assert ("To paste" in printed) == (width < 300)
    assert "interventions…" not in printed


def test_the_effective_sample_and_the_share_without_advantage_are_of_the_last_ten_steps(tmp_path: Path) -> None:
    told = {"ess/advantage": lambda step: Estimate(9.0),
            "ess/advantage_fraction": lambda step: Estimate(0.5 if step > 10 else 0.0),
            "ess/zero_advantage_prompts": lambda step: Estimate(0.25 if step > 10 else 1.0)}  # fmt: skip
    value, note = summary(log_run(tmp_path, 20, told))["effective sample"]
    assert value == "50%"
    assert "mean of steps 11–20" in note
    assert "25% of the prompts have zero advantage" in note


def test_the_probe_cost_is_a_mean_over_all_steps_beside_the_most_expensive_one(tmp_path: Path) -> None:
    records = Records(tmp_path / "logs")
    for step, cost in ((1, {"probe_cost/fraction_of_step": 0.71}), (2, {}), (3, {"probe_cost/fraction_of_step": 0.13})):
        records.write_metrics(step, {"reward": 0.5, **cost})
    value, note = summary(tmp_path)["probe cost"]
    assert value == "28.0%"
    assert note.endswith("71.0% at the most expensive of the 2 measured ones")


@pytest.mark.parametrize("last", ["logged", "measured", "saved"])
def test_the_number_of_steps_includes_steps_that_were_not_logged(tmp_path: Path, last: str) -> None:
    folder = record_run(tmp_path, range(1, 11))
    if last == "measured":
        Records(folder / "logs").write_estimates(12, 1, "gns", {"gns/trace": Estimate(1.0)})
    elif last == "saved":
        for name in ("checkpoint-12", "checkpoint-20-backup"):
            (folder / "training_state" / name).mkdir(parents=True)
    assert summary(folder)["steps"] == (("10", "") if last == "logged" else ("12", "10 of them logged"))


def test_a_measured_change_within_its_error_of_zero_gives_no_ratio(tmp_path: Path) -> None:
    records = Records(record_run(tmp_path, [1]) / "logs")
    sums = ("delta_h/cumulative_measured", "delta_h/cumulative_predicted")
    records.write_estimates(2, 1, "simple", {name: Estimate(-0.2, 0.1, 8) for name in sums})  # ± 0.24
    assert summary(tmp_path)["predicted / measured"] == (
        MISSING,
        "the measured change is not detectably different from 0",
    )


@pytest.mark.parametrize(
    ("low", "high", "value", "words"),
    [
        (
            100.0,
            400.0,
            "200 (100 … 400) prompts",
            "0.08 to 0.32 of it: 100 prompts a step would take about 52 to 63 % fewer steps and "
            "16 to 52 % more responses",
        ),
        (
            4.0,
            10.0,
            "200 (4 … 10) prompts",
            "3.20 to 8.00 of it: 16 prompts a step would take about 11 to 24 % more steps and "
            "38 to 44 % fewer responses",
        ),
        (20.0, 60.0, "200 (20 … 60) prompts", "it is about right"),
        (20.0, 100.0, "200 (20 … 100) prompts", "it may be too small or too large; more steps will tell"),
        (
            40.0,
            100.0,
            "200 (40 … 100) prompts",
            "0.32 to 0.80 of it: 64 prompts a step would take about 28 to 38 % fewer steps and "
            "24 to 44 % more responses",
        ),
        (
            120.0,
            math.inf,
            "above 120 prompts",
            "0.00 to 0.27 of it: 120 prompts a step would take about 58 to 73 % fewer steps and "
            "0 to 58 % more responses",
        ),
        (30.0, math.inf, "above 30 prompts", "it may be too small or too large; more steps will tell"),
        (math.inf, math.inf, "unbounded", "twice the batch would take about 50 % fewer steps and as many responses"),
    ],
)
def test_the_advice_on_the_batch_size_follows_the_noise_scale_interval(
    tmp_path: Path, low: float, high: float, value: str, words: str
) -> None:
    text, note = summary(record_noise_scale(tmp_path, low, high))["noise scale"]
    assert text == value
    assert words in note


@pytest.mark.parametrize(
    ("curves", "note"),
    [
        ({"reward": lambda step: 0.98 - 0.5 * 0.85**step}, "it grows as the reward's highest value is reached"),
        ({"frac_reward_zero_std": 0.95, "reward": 0.5}, "only 5% of the prompts have unequal rewards"),
        ({"learning_rate": 0.0}, "what the first lines say comes before the size of the batch"),
        ({"entropy": lambda step: 1.0 if step < 10 else 0.02}, "what the first lines say comes before"),
        ({"reward": noisy(lambda step: 0.6 if step < 25 else 0.2, 0.03)}, "what the first lines say comes before"),
        ({"reward": noisy(lambda step: 0.3 + 0.01 * step, 0.03)}, "100 prompts a step would take about"),
    ],
    ids=["learned", "equal", "no rate", "gone", "fallen", "learns"],
)  # fmt: skip
def test_no_batch_is_called_for_where_nothing_is_learned_from_it(tmp_path: Path, curves, note: str) -> None:
    folder = log_run(tmp_path, **curves)
    record_noise_scale(folder, 100.0, 400.0, steps=[])
    assert summary(folder)["noise scale"][0] == "200 (100 … 400) prompts"
    assert note in summary(folder)["noise scale"][1]


def test_a_reward_that_fell_as_steps_follow_noise_calls_for_a_larger_batch(tmp_path: Path) -> None:
    scale = {"batch_ratio": 0.05, "batch_ratio_low": 0.02, "batch_ratio_high": 0.1, "noise_scale_prompts": 200.0,
             "noise_scale_prompts_low": 100.0, "noise_scale_prompts_high": 400.0}  # fmt: skip
    told = {f"gns/{name}": lambda step, value=value: Estimate(value, 0.01, 20) for name, value in scale.items()}
    falls = noisy(lambda step: 0.6 if step < 25 else 0.2, 0.03)
    folder = log_run(tmp_path, estimates=told, reward=falls, entropy=noisy(lambda step: 0.5, 0.01, 1))
    assert "would take about" in summary(folder)["noise scale"][1]


@pytest.mark.parametrize("high", [400.0, math.inf])
def test_a_noise_scale_with_an_unbounded_interval_is_drawn(tmp_path: Path, high: float) -> None:
    drawn = _noise_scale(read_run(record_noise_scale(tmp_path, 100.0, high)))
    scale, batch = drawn.series
    top = 1.5 * max(*scale.y, *batch.y)
    assert list(scale.high)[-1] == min(high, 2 * top)
    assert pictures([drawn], "png")["noise_scale.png"].startswith(b"\x89PNG")


def test_axes_of_entropy_and_counts_do_not_go_below_zero() -> None:
    """Entropy starts at .225 and the naive sum reaches −.5, below zero entropy. Sizes fall from 100 to 20."""
    falls, sizes = (Series("one", BLUE, [1, 2, 3], values) for values in ([0.0, -0.2, -0.5], [100.0, 20.0, 30.0]))
    drawn = pictures([draw("entropy", [falls], start=0.225), draw("ess", [sizes])], "svg")
    _, right = drawn["entropy.svg"].decode().split("Y-axis titled 'token entropy (nats)'")
    ticks, labels = right.split("role-axis-tick")[1].split("role-axis-label")
    assert ticks.count('opacity="1"') == 3
    assert re.findall(r">([^<]+)</text>", labels.split("role-axis-title")[0]) == ["0.025", "0.125", "0.225"]
    numbers = re.findall(r">(−?\d+)</text>", drawn["ess.svg"].decode())
    assert numbers == ["1", "2", "3", "0", "20", "40", "60", "80", "100"]


def record_noise_scale(folder: Path, low: float, high: float, steps: Sequence[int] = (1, 2)) -> Path:
    """Write a run with 32 prompts a step and a noise scale of 200 with this interval, and return its folder."""
    numbers = {"noise_scale_prompts": 200.0, "noise_scale_prompts_low": low, "noise_scale_prompts_high": high}
    numbers |= {"batch_ratio": 0.16, "batch_ratio_low": 32 / high, "batch_ratio_high": 32 / low}
    record_run(folder, steps)
    estimates = {f"gns/{name}": Estimate(v, 1.0, 20) for name, v in numbers.items()}
    Records(folder / "logs").write_estimates(2, 1, "gns", estimates)
    return folder


def test_reasons_are_listed_once_with_their_first_step(tmp_path: Path) -> None:
    listed = {gap.reason: gap for gap in gaps(read_run(record_run(tmp_path, [1, 6, 11], hole="needs every=1")))}
    assert set(listed) == {"no error bar: biased", "needs every=1"}
    assert (listed["no error bar: biased"].what, listed["needs every=1"].what) == ("error bar", "value")
    hole = listed["needs every=1"]
    assert (hole.first_step, hole.num_steps) == (1, 3)
    assert hole.names == ["delta_h/backward", "delta_h/cumulative_predicted"]


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the page of a run of twelve steps."""
    folder = tmp_path_factory.mktemp("reported")
    (folder / "config.yaml").write_text("trainer:\n  learning_rate: 0.0003\n")
    return write_report(record_run(folder, range(1, 13)), pictures="png")


def test_the_report_has_a_page_pictures_and_the_printed_numbers(page, capsys, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    folder = page.parents[1]
    assert page == folder / "report" / "report.html"
    assert (page.parent / "reward.png").read_bytes().startswith(b"\x89PNG")
    print_summary(folder)
    printed, html = capsys.readouterr().out, page.read_text(encoding="utf-8")
    for value, _ in summary(folder).values():
        assert value in printed
        assert value in html
    assert "learning_rate: 0.0003" in html
    assert str(page) in printed
    for said in (printed, html):
        assert f"To compare runs: {'<code>' * (said is html)}rl-training report {folder} OTHER_RUN …" in said


class Page(HTMLParser):
    """The tags and the text of a page as a browser parses them."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_page_loads_nothing_from_elsewhere(page: Path) -> None:
    html = re.sub(r"<script>.*?</script>", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    html = html.replace(f'<a class="see" href="{REPOSITORY}/', "")  # a link, which loads nothing by itself
    assert not any(word in html for word in ("http://", "https://", "url(", "@import"))
    tags = Page(html).tags
    assert not {"link", "iframe", "object", "base", "img"} & {tag for tag, _ in tags}
    assert not any("src" in attributes for _, attributes in tags)
    assert "default-src 'none'" in html
    assert page.stat().st_size < 1.5e6


def test_the_page_allows_only_its_own_scripts_by_their_hashes(page: Path) -> None:
    html = page.read_text(encoding="utf-8")
    scripts = re.findall(r"<script>(.*?)</script>", html, re.DOTALL)
    assert len(scripts) == 2
    digests = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    (policy,) = [a["content"] for tag, a in Page(html).tags if a.get("http-equiv") == "Content-Security-Policy"]
    hashes = " ".join(f"'sha256-{digest}'" for digest in digests)
    assert f"script-src 'unsafe-eval' {hashes}" in str(policy)


def test_drawing_leaves_no_threads_that_would_block_a_fork(page: Path) -> None:
    drawn = {path.stem for path in page.parent.glob("*.png")}
    assert drawn == {"reward", "token_entropy", "entropy", "delta_h", "ledger"}
    assert "vl_convert" not in sys.modules


def test_a_report_does_not_import_torch() -> None:
    """Importing torch alone takes longer than the page."""
    program = "import sys, rl_training.records.report; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_the_table_of_contents_links_to_every_heading(page: Path) -> None:
    html = page.read_text(encoding="utf-8")
    links = re.findall(r'<a href="#(.*?)">(.*?)</a>', html)
    headings = re.findall(r'<(?:h2|summary) id="(.*?)">(.*?)</', html)
    assert links == headings
    assert len(links) >= 5
    page_text = re.sub(r"<script>.*?</script>", "", html, flags=re.DOTALL)
    assert page_text.count("<h2") + page_text.count("<summary") == len(links)


def test_heatmap_cells_fill_their_frame() -> None:
    chart = heatmap("layers", pd.DataFrame([[1.0, -1.0]], index=["0"], columns=[3, 5]), 1.0)
    assert chart.spec["encoding"]["x"]["scale"]["domain"] == [2.0, 6.0]


def test_the_tooltip_of_a_point_has_its_curve_step_and_band(page: Path) -> None:
    run = read_run(page.parents[1])
    (drawn,) = [series for series in draw_figures(run) if series.name == "delta_h"]
    forward = run.estimates("delta_h/forward")[2]
    (row,) = [
        r for r in drawn.standalone()["datasets"]["rows"] if r["series"].startswith("forward") and round(r["x"]) == 2
    ]
    low, high = forward.bounds()
    assert [row[name] for name in ("y", "low", "high")] == pytest.approx([forward.value, low, high], rel=1e-4)
    (pointed,) = [layer for layer in drawn.spec["layer"][0]["layer"][-1]["layer"] if "tooltip" in layer["encoding"]]
    said = {part["as"]: part["calculate"] for part in pointed["transform"] if "as" in part}
    assert said["words"].startswith("datum.series + ': ' + (over_steps ? 'step ' + ")
    assert {"name": "over_steps", "value": True} in drawn.spec["params"]
    assert pointed["params"][0]["select"]["on"] == "pointerover"  # unquoted, YAML reads `on` as true
    assert "datum.low" in said["at_y"]


def test_hostile_text_in_records_and_config_is_shown_and_never_executed(tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    folder = tmp_path / "<i>run [red]"
    Records(record_run(folder, [1, 2], reason=HOSTILE) / "logs").write_metrics(3, {"reward": HOSTILE, HOSTILE: 1})
    (folder / "config.yaml").write_text(f"name: {HOSTILE}\n")
    page = Page(write_report(folder).read_text(encoding="utf-8"))
    assert "i" not in {tag for tag, _ in page.tags}
    assert page.text.count("alert(") == page.text.count(HOSTILE)
    assert f"name: {HOSTILE}" in page.text
    assert page.text.count(HOSTILE) >= 5  # including below the pictures and in the tables
    print_summary(folder)
    printed = capsys.readouterr().out
    assert "<i>run [red]" in printed
    assert HOSTILE in printed


def test_reasons_in_the_terminals_table_of_one_step_are_no_markup_and_no_commands(tmp_path: Path, capsys) -> None:
    records = Records(record_run(tmp_path, range(1, 4)) / "logs")
    for step in range(1, 4):
        lost = Estimate.missing("\x1b]0;title\x07 [/red]")
        names = ("measured/delta_h", "measured/delta_reward")
        predicted = {"delta_reward/forward": Estimate(0.1, 0.01, 8)}
        records.write_estimates(step, 1, "others", dict.fromkeys(names, lost) | predicted)
    print_summary(tmp_path)
    printed = capsys.readouterr().out
    assert "\x1b]0" not in printed
    assert "\\x1b]0;title\\x07 [/red]" in " ".join(printed.split())


def test_without_probes_the_report_has_the_reward_and_says_nothing_was_measured(tmp_path: Path) -> None:
    records = Records(tmp_path / "logs")
    for step in (1, 2):
        records.write_metrics(step, {"reward": 0.5 * step, "entropy": 0.4})
    text = Page(write_report(tmp_path).read_text(encoding="utf-8")).text
    assert summary(tmp_path)["reward"] == ("0.50 → 1.00", "steps 1 and 2")
    assert summary(tmp_path)["token entropy"] == ("0.40 → 0.40", "nats per token, as TRL logs it")
    lost = [row.label for row in summarize(read_run(tmp_path)) if row.value == MISSING]
    assert lost == ["change of entropy", "probe cost"]  # one line per reason
    for claim in ("No probe measured anything", "No probe was timed", "holds no config.yaml"):
        assert claim in text


def test_one_step_has_no_change_to_compare(tmp_path: Path) -> None:
    text = Page(write_report(record_run(tmp_path, [1])).read_text(encoding="utf-8")).text
    rows = summary(tmp_path)
    assert rows["reward"] == ("0.10", "step 1 alone")
    assert rows["change of entropy"] == (MISSING, "one measured step: there is no later batch to compare it with")
    assert not {"measured ΔH", "predicted ΔH", "naive product", "predicted / measured", "naive / measured"} & {*rows}
    assert "one measured step: there is no later batch" in text


def test_too_few_prompts_for_an_error_bar_are_said_once_in_the_opening(tmp_path: Path) -> None:
    few = stderr_reason(2)
    assert few is not None
    records = Records(tmp_path / "logs")
    for step in (1, 2):
        records.write_metrics(step, {"reward": 0.5, "entropy": 0.5})
        records.write_estimates(step, 1, "simple", {"delta_h/forward": Estimate(-1e-3, num_samples=2, reason=few)})
    said = "No prediction has an error bar: it needs 4 folds of whole prompts, the step has 2."
    assert why_no_predictions(read_run(tmp_path)) == said


def test_the_summary_is_one_table_above_the_charts_below_the_first_screen(tmp_path: Path) -> None:
    page = write_report(record_run(tmp_path, [1, 2, 3])).read_text(encoding="utf-8")
    assert page.count('<table class="summary">') == 1
    assert page.index("<td>naive product</td>") < page.index("<nav")


def test_with_gaps_the_measured_change_is_kept_and_sums_have_a_reason(tmp_path: Path) -> None:
    text = Page(write_report(record_run(tmp_path, [1, 6, 11], hole="needs every=1")).read_text(encoding="utf-8")).text
    rows = summary(tmp_path)
    assert rows["measured ΔH"][0] == "-2.00 ± 0.47"
    assert rows["predicted ΔH"] == (MISSING, "needs every=1")
    assert rows["naive product"] == (MISSING, "step 5 was not measured, so the sum is incomplete")
    assert not {"predicted / measured", "naive / measured"} & {*rows}  # the lines above say why
    assert "Missing: predicted – from step 6 on: needs every=1" in text
    assert "Missing: backward – needs every=1" in text


def test_where_everything_is_nan_every_row_has_a_reason(tmp_path: Path) -> None:
    records = Records(tmp_path / "logs")
    for step in (1, 2):
        records.write_metrics(step, {"reward": math.nan, "entropy": math.inf})
        missing = Estimate.missing("the optimizer is unknown")
        sums = ("cumulative_measured", "cumulative_predicted", "forward", "backward", "reuse")
        records.write_estimates(step, 1, "simple", {f"delta_h/{name}": missing for name in sums})
    write_report(tmp_path)
    rows = summary(tmp_path)
    assert all(value == MISSING and note for label, (value, note) in rows.items()
               if label not in ("steps", "probes that were off"))  # fmt: skip
    assert rows["change of entropy"][1] == "the optimizer is unknown"


def test_long_runs_are_drawn_without_infinite_values(tmp_path: Path) -> None:
    records = Records(tmp_path / "logs")
    for step in range(1, 202):
        value = -math.inf if step == 201 else -0.1
        records.write_metrics(step, {"reward": value})
        names = ("delta_h/forward", "delta_h/backward", "delta_h/cumulative_measured")
        records.write_estimates(step, 1, "simple", {name: Estimate(value, 0.1, 8) for name in names})
    write_report(tmp_path)
    run = read_run(tmp_path)
    assert len(run.logged("reward")) == len(run.finite_rows("delta_h/forward")) == 200
    assert ending_reason(run.rows("delta_h/forward")) == "from step 201 on: not a finite number"


def test_a_line_left_unfinished_by_a_kill_is_not_a_step(tmp_path: Path) -> None:
    with open(record_run(tmp_path, [1, 2]) / "logs" / METRICS_FILE, "a", encoding="utf-8") as file:
        file.write('{"step": 3, "rew')
    assert summary(tmp_path)["steps"][0] == "2"


def test_the_same_records_give_the_same_page_byte_for_byte(page: Path) -> None:
    before = page.read_bytes()
    assert write_report(page.parents[1]).read_bytes() == before


@pytest.mark.parametrize(
    "content", [None, "", '{"step": 1, "rew', "not json\n"], ids=["no file", "empty", "unfinished line", "damaged"]
)
def test_the_command_names_the_missing_records_file(tmp_path, capsys, content: str | None) -> None:
    if content is not None:
        (tmp_path / "logs").mkdir()
        (tmp_path / "logs" / METRICS_FILE).write_text(content)
    with pytest.raises(UserError, match=str(tmp_path / "logs" / METRICS_FILE)) as raised:
        main([str(tmp_path)])
    fix = "fix or delete that line" if content == "not json\n" else "give the folder of a run"
    assert fix in str(raised.value)
    assert not capsys.readouterr().out
    assert not (tmp_path / "report").exists()


def test_a_damaged_config_is_named_with_the_fix(tmp_path: Path) -> None:
    (record_run(tmp_path, [1]) / "config.yaml").write_text("trainer: [1")
    with pytest.raises(ValueError, match=str(tmp_path / "config.yaml")):
        write_report(tmp_path)


def test_the_command_writes_only_the_report_and_prints_the_table(tmp_path, capsys) -> None:
    run = record_run(tmp_path / "runs" / "one", range(1, 4))
    for given in (run, run.parent):  # a folder of runs that holds one
        main([str(given)])
        printed = capsys.readouterr().out
        assert "-2.00 ± 0.47" in printed
        assert str(run / "report" / "report.html") in printed.replace("\n", "")
        assert [path.name for path in (run / "report").iterdir()] == ["report.html"]
        shutil.rmtree(run / "report")
    main([str(run.parent), "--json"])
    assert json.loads(capsys.readouterr().out)["run"] == "one"


def test_pictures_including_those_of_interventions_are_drawn_on_request(tmp_path: Path) -> None:
    records = Records(record_run(tmp_path, range(1, 4)) / "logs")
    mean = Estimate(0.1, 0.01, 8, detail={"measured_steps": 1})
    effect = {f"intervention/kl/mean_{name}": mean for name in ("delta_h", "delta_reward")}
    records.write_estimates(3, 1, "interventions", effect)
    main([str(tmp_path), "--pictures", "svg"])
    drawn = {path.name: path.read_text(encoding="utf-8") for path in (tmp_path / "report").glob("*.svg")}
    charts = ("reward", "token_entropy", "entropy", "delta_h", "ledger", "interventions")
    assert {*drawn} == {f"{name}.svg" for name in charts}
    assert all(svg.startswith("<svg") for svg in drawn.values())
    with pytest.raises(ValueError, match=r"^pictures='pdf'.*'png'.*'svg'"):
        write_report(tmp_path, pictures="pdf")


def test_watching_redraws_the_page_until_ctrl_c_and_leaves_a_final_one(tmp_path, monkeypatch, capsys) -> None:
    folder, seen = record_run(tmp_path, range(1, 4)), []

    def trains_on(seconds: float) -> None:
        html = (folder / "report" / "report.html").read_text(encoding="utf-8")
        seen.append(('<meta http-equiv="refresh" content="5">' in html, "1–2 and 3–4" in html))
        if len(seen) == 2:
            signal.raise_signal(signal.SIGINT)
        record_run(tmp_path, [4])

    monkeypatch.setattr("time.sleep", trains_on)
    monkeypatch.setattr(sys, "argv", ["report", str(folder), "--watch", "5"])
    before = {signum: signal.getsignal(signum) for signum in SIGNALS}
    try:
        run_command(main)  # with the command's own handler of Ctrl-C
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
    assert seen == [(True, False), (True, True)]
    page_text = re.sub(r"<script>.*?</script>", "", (folder / "report" / "report.html").read_text(), flags=re.DOTALL)
    assert 'http-equiv="refresh"' not in page_text
    assert "To compare runs: " in capsys.readouterr().out, "the summary follows"


def test_a_page_is_written_although_its_libraries_cannot_be_cached(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    bundle = "rl_training.records.pages.page._run"
    monkeypatch.setattr(bundle, lambda program: "drawing</script>")  # the libraries take seconds
    with files_of_at_most(3):
        assert javascript() == "drawing<\\/script>"
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
    assert javascript() == "drawing<\\/script>"
    monkeypatch.delattr(bundle)
    assert javascript() == "drawing<\\/script>", "from the cache"


def test_held_out_rewards_of_every_kind_of_evaluation_are_in_summary_and_picture(tmp_path: Path) -> None:
    """Training at steps 2 and 4, of the checkpoint of step 4 (its error has 15 degrees of freedom), and by a loop."""
    folder = record_run(tmp_path, range(1, 5))
    without = _reward(read_run(folder))
    Records(folder / "logs").write_metrics(5, {"reward": 0.5, "eval_reward": 0.25})
    for step in (2, 4):
        Records(folder / "logs").write_evaluation(step, {"eval_loss": 0.1, "eval_reward": 0.2 * step})
    estimates = {"reward": Estimate(0.75, 0.0625, 16), "pass_at_1": Estimate(0.75, 0.0625, 16)}
    write_step(folder / "evaluations" / "new", 4, {}, estimates, [])
    rows = [row for row in summarize(read_run(folder)) if row.label == "held-out reward"]
    assert [(row.value, row.note) for row in rows] == [
        ("0.4 → 0.8", "evaluation in training, steps 2 and 4"),
        ("0.75 ± 0.13", "evaluation new, step 4; ± 95 % over prompts"),
        ("0.25", "eval_reward of the log, step 5"),
    ]
    drawn = _reward(read_run(folder))
    assert "Held out: prompts that training never sees." in drawn.caption
    assert "Held out" not in without.caption
    kinds = ("evaluation in training", "evaluation new", "eval_reward of the log")
    assert set(drawn.legend) - set(without.legend) == {f"held out: {kind}" for kind in kinds}


def test_pictures_say_why_an_error_bar_or_a_band_is_missing(tmp_path: Path) -> None:
    records = Records(record_run(tmp_path, [1, 2]) / "logs")
    records.write_estimates(3, 1, "simple", {"delta_h/forward": Estimate(-0.5, reason="two folds only")})
    records.write_estimates(3, 1, "ess", {"ess/advantage": Estimate(9.0, reason="it is this batch's own")})
    records.write_estimates(3, 1, "gns", {"gns/noise_scale_prompts": Estimate.missing("8 steps are needed")})
    missing = {chart.name: chart.missing for chart in draw_figures(read_run(tmp_path))}
    assert "error bars of forward, steps 3–3 – two folds only" in missing["delta_h"]
    assert "error bars of weights |A|, steps 3–3 – it is this batch's own" in missing["ess"]
    assert any("8 steps are needed" in line for line in missing["noise_scale"])


def test_evaluations_of_checkpoints_are_in_the_report_with_their_errors(tmp_path: Path) -> None:
    folder = record_run(tmp_path / "run", range(1, 11))
    home = folder / "evaluations" / "<b>held out"
    for step, reward in ((5, 0.25), (10, 0.75)):
        numbers = {"reward": Estimate(reward, 0.0625, 16), "pass_at_1": Estimate(reward, num_samples=1, reason="one")}
        write_step(home, step, {}, numbers | {"kl/token": Estimate.missing("no first model")}, [])
    page = write_report(folder).read_text(encoding="utf-8")
    assert "Evaluation &lt;b&gt;held out: all numbers" in page
    row = page[page.index("<code>reward</code>") :]
    assert "<td>0.25 ± 0.13</td><td>0.75 ± 0.13</td>" in row[:200]
    assert "<code>kl/token</code></td><td>–</td><td>–</td>" in page
    first, second = (page.index(f"Evaluation &lt;b&gt;held out: {what}") for what in ("what is solved", "entropy and"))
    assert first < second


def test_a_report_opens_with_verdict_advice_and_whether_predictions_hold(tmp_path, capsys) -> None:
    """Entropy falls from 5 by 1 per step, and forward is −0.9 at each. Four steps of reward are too few for a line."""
    first = opening(read_run(record_run(tmp_path, range(1, 5))))
    assert first.headline == "What the run does cannot be told yet"
    assert first.advice.text == "There is nothing to do yet: more steps are needed to tell."
    assert first.further == [
        "The predictions hold so far: they add up to -3.00 ± 0.24 nats, and -3.00 ± 0.47 was measured.",
    ]
    text = " ".join(Page(write_report(tmp_path).read_text(encoding="utf-8")).text.split())
    print_summary(tmp_path)
    for shown in (text, " ".join(capsys.readouterr().out.split())):
        assert first.sentence in shown
        assert first.advice.text in shown
        assert first.further[0] in shown


def test_the_first_screen_has_the_setting_to_paste_both_charts_and_at_most_ten_rows(tmp_path: Path) -> None:
    """Without scripts too: both charts are drawn as plain curves, every reward function among them."""
    folder = log_run(tmp_path, reward=noisy(lambda step: 0.7 if step < 25 else 0.2, 0.03),
                     rewards__right__mean=0.3, rewards__form__mean=0.4)  # fmt: skip
    page = write_report(folder).read_text(encoding="utf-8")
    top, _, rest = page.partition('<table class="summary">')
    assert "attach(…, <code>target_kl_share=&#34;auto&#34;</code>)" in top
    assert re.findall(r"<h2[^>]*>(.*?)</h2>", top)[-2:] == ["Reward", "Token entropy"]
    assert [svg.count("<path") for svg in re.findall(r"<svg.*?</svg>", top)] == [4, 2]  # dots and means, and functions
    assert rest.partition("</table>")[0].count("<tr>") <= 10


def test_the_first_screen_links_the_page_that_it_names_and_marks_no_text_of_a_response_as_a_setting(
    tmp_path: Path,
) -> None:
    losing = {"entropy": noisy(lambda step: 0.5 * 0.97**step, 0.01, 1), "reward": noisy(lambda step: 0.5, 0.03, 2)}
    detail = {"text": "x", "example": "a=5[x]b", "share_of_tokens": 0.1, "whole": -8e-3, "whole_stderr": 1e-3,
              "measured_steps": 3}  # fmt: skip
    top = Estimate(-2e-3, 1e-4, 8, detail=detail)
    page = write_report(log_run(tmp_path, estimates={"top_token/1/mean_delta_h": lambda step: top}, **losing))
    text = page.read_text(encoding="utf-8")
    name = "docs/how_to/keep_entropy_up.md"
    assert f'PositiveOnly(GRPOTrainer) of <a class="see" href="{REPOSITORY}/blob/main/{name}">{name}</a>.' in text
    assert "as in a=5[x]b" in text


def test_a_preview_has_a_curve_where_the_chart_will_draw_it(tmp_path: Path) -> None:
    """Of 640 × 220 pixels: entropy .5 lies at 1/1.05 of its axis from 0, from the left end to the right."""
    (chart,) = (chart for chart in draw_figures(read_run(log_run(tmp_path, 3))) if chart.name == "token_entropy")
    assert re.findall(r"M([\d.]+) ([\d.]+)h0", preview(chart)) == [
        ("0.0", "10.5"),
        ("320.0", "10.5"),
        ("640.0", "10.5"),
    ]


def test_the_change_of_entropy_names_the_two_batches_that_it_compares(tmp_path: Path) -> None:
    """The level is 5 at step 1 and 2 at step 4, each ± 0.1 T_7. Only their difference is the change of −3."""
    rows = summary(record_run(tmp_path, range(1, 5)))
    assert rows["measured ΔH"] == ("-3.00 ± 0.47", "nats per token, batch of step 4 minus that of step 1; ± 95 %")


def test_an_entropy_change_over_a_gap_is_not_drawn_as_one_step(tmp_path: Path) -> None:
    records = Records(tmp_path / "logs")
    for step in (1, 2, 3, 4, 8):
        records.write_metrics(step, {"reward": 0.5})
        estimates = {"entropy/token": Estimate(1 / step, 0.1, 8), "delta_h/forward": Estimate(-0.1 * step, 0.1, 8)}
        records.write_estimates(step, 1, "simple", estimates | {"covariance/token": Estimate(0.2)})
    drawn = _predictors(read_run(tmp_path))
    assert [len(series.x) for series in drawn.series if series.label.startswith("forward")] == [3]


def test_a_prediction_that_is_the_same_at_every_step_has_no_correlation_and_says_so(tmp_path: Path) -> None:
    """As in a run whose rewards are all equal: covariance and prediction are 0, and the entropy of batches scatters."""
    level = noisy(lambda step: 0.5, 0.01)
    zero = dict.fromkeys(("covariance/token", "delta_h/forward"), lambda step: Estimate(0.0, 0.0, 8))
    run = read_run(log_run(tmp_path, 6, {**zero, "entropy/token": lambda step: Estimate(level(step), 0.01, 8)}))
    with np.errstate(all="raise"):
        drawn = _predictors(run)
    assert not drawn.series
    names = ("forward", "−Cov(log π, A), scaled")
    assert drawn.missing == [f"{name} – the same at every step" for name in names]


def test_the_report_warns_where_prediction_and_measurement_disagree(tmp_path: Path) -> None:
    records = Records(record_run(tmp_path, [1]) / "logs")
    records.write_metrics(2, {"reward": 0.5})
    sums = {"measured": -1.0, "predicted": -2.0}
    records.write_estimates(2, 1, "simple", {f"delta_h/cumulative_{k}": Estimate(v, 0.1, 8) for k, v in sums.items()})
    assert opening(read_run(tmp_path)).further[-1].startswith("The predictions do not hold here")


def test_the_report_has_the_calibration_and_the_origin_of_the_run(
    tmp_path: Path,
) -> None:
    records = Records(record_run(tmp_path, range(1, 5)) / "logs")
    records.write_estimates(3, 1, "simple", {"delta_h/true": Estimate(-0.8, 0.01, 512)})
    (tmp_path / "config.yaml").write_text("provenance: {commit: abc123, host: here}\n")
    page = Page(write_report(tmp_path).read_text(encoding="utf-8"))
    assert "Predictions against the truth" in page.text
    assert "abc123" in page.text.split("Where this comes from")[-1]


def test_a_reason_with_special_characters_stays_one_table_cell(tmp_path: Path) -> None:
    records = Records(tmp_path / "logs")
    records.write_metrics(1, {"reward": 0.5})
    why = "no ¦ scale ¶ here\n  {{ 1 }}"
    records.write_estimates(1, 1, "gns", {"gns/noise_scale_prompts": Estimate.missing(why)})
    assert summary(tmp_path)["noise scale"] == (MISSING, "no ¦ scale ¶ here {{ 1 }}")


def test_calibration_slope_and_coverage_need_eight_recorded_pairs(tmp_path: Path) -> None:
    """Truths are half of the predictions 1 … 9, which have error 1: slope Σ ½p² / Σ (p² − 1) = 142.5 / 276.

    Of the 9 differences ½p, those of 1 … 4 are within q √(1 + 0.1²) = 2.37. Step 10 has no truth, 11 no prediction.
    """
    records = Records(tmp_path / "logs")
    for step in range(1, 12):
        records.write_metrics(step, {"reward": 0.5})
        prediction, truth = Estimate(float(step), 1.0, 8), Estimate(0.5 * step, 0.1, 512)
        missing = Estimate.missing("not measured")
        pair = {
            "delta_h/forward": missing if step == 11 else prediction,
            "delta_h/true": missing if step == 10 else truth,
        }
        records.write_estimates(step, 1, "simple", pair)
    (chart,) = (chart for chart in draw_figures(read_run(tmp_path)) if chart.name == "calibration")
    slope, covered = re.findall(r": ([\d.]+) ±", chart.caption)
    assert slope == "0.516"
    assert covered == "0.44"
    (early,) = (chart for chart in draw_figures(read_run(tmp_path).until(7)) if chart.name == "calibration")
    assert "slope" not in early.caption


def test_a_part_that_is_always_0_is_not_drawn_and_missing_error_bars_are_named(tmp_path: Path) -> None:
    records = Records(record_run(tmp_path, [1]) / "logs")
    for step in (2, 3):
        parts = {"momentum": Estimate(-0.5, reason="too few folds"), "gradient": Estimate(-0.4, 0.1, 8)}
        parts["decay"] = Estimate(0.0, 0.0, 8)
        records.write_estimates(step, 1, "simple", {f"delta_h/part/{name}": e for name, e in parts.items()})
    text = Page(write_report(tmp_path).read_text(encoding="utf-8")).text
    assert "The part of decay is 0 at every step, and not drawn." in text
    assert "Missing: error bars of momentum, steps 2–3 – too few folds" in text


def test_page_and_terminal_show_the_measured_and_predicted_effect_of_a_step(tmp_path, capsys) -> None:
    """Two steps are measured together, −.004 ± .0002 nats. The mean of ten has error .0001 √10 / 10 per step."""
    records = Records(tmp_path / "logs")
    for step in range(1, 11):
        records.write_metrics(step, {"reward": 0.5, "completions/clipped_ratio": 0.25})
        told = {"measured/delta_h": Estimate(-0.004, 2e-4, 8), "measured/steps": Estimate(2.0)}
        told |= {"measured/delta_length": Estimate(1.0, 0.2, 8), "delta_h/forward": Estimate(-0.003, 1e-4, 8)}
        records.write_estimates(step, 1, "measured", told)
    half = 1e3 * T_7 * 1e-4 / math.sqrt(10)
    headings, *rows = step_numbers(read_run(tmp_path))
    assert headings == ["by one step, mean of steps 1–10", "measured", "predicted"]
    assert rows == [
        ["entropy, 1e-3 nats per token", f"-2.000 ± {half:.3f}", f"-3.000 ± {half:.3f}"],
        ["length, tokens (25% of the responses are cut off)", "+0.500 ± 0.075", MISSING],
    ]
    text = Page(write_report(tmp_path).read_text(encoding="utf-8")).text
    print_summary(tmp_path)
    for said in (text, capsys.readouterr().out):
        assert f"-2.000 ± {half:.3f}" in said
    assert "What a step does" in text


def test_measured_and_predicted_effects_of_a_step_are_means_over_the_same_steps(tmp_path: Path) -> None:
    """Measured at step s is the update of s − 1, up to 19; predicted is that of s, up to 20."""
    records = Records(tmp_path / "logs")
    for step in range(1, 21):
        records.write_metrics(step, {"reward": 0.5})
        told = {"delta_h/forward": Estimate(1e-3 * step, 1e-4, 8, about_step=step)}
        for name in ("delta_h", "delta_length", "delta_reward"):
            told[f"measured/{name}"] = Estimate(1e-3 * (step - 1), 1e-4, 8, about_step=step - 1)
        told["measured/steps"] = Estimate(1.0)
        if step == 20:
            told["delta_reward/forward"] = Estimate(1e-3, 1e-4, 8, about_step=step)
        records.write_estimates(step, 1, "measured", told)
    (heading, *_), entropy, reward, length = step_numbers(read_run(tmp_path))
    assert heading == "by one step, mean"
    assert entropy == ["entropy, 1e-3 nats per token, steps 10–19", "+14.500 ± 0.075", "+14.500 ± 0.075"]
    assert reward[0] == "reward, 1e-3, steps 10–19 and step 20"
    assert length[0] == "length, tokens, steps 10–19"


def test_effects_without_the_number_of_steps_that_they_are_about_have_no_mean(tmp_path: Path) -> None:
    """As in records that were cut off, or written by a probe of one's own."""
    names = ("measured/delta_h", "delta_h/forward", "measured/delta_length", "delta_length/forward")
    log_run(tmp_path, 10, dict.fromkeys(names, lambda step: Estimate(0.02, 0.001, 8)))
    _, entropy, length = step_numbers(read_run(tmp_path))
    assert "+20.0" in entropy[2]
    assert entropy[1] == f"{MISSING} (known of 0 of 10 steps: how many steps each value spans is not recorded)"
    assert length[1] == f"{MISSING} (known of 0 of 10 steps)"


@pytest.mark.parametrize(("known", "window"), [(9, "9 of 10 steps, steps 1–9"), (3, "steps 1–10")])
def test_effects_of_steps_of_which_many_are_not_known_have_no_mean_and_sums_say_of_how_many_they_are(
    tmp_path: Path, known: int, window: str
) -> None:
    """The steps that moved too far to be measured are the last ones, here without prediction of length."""
    records = Records(tmp_path / "logs")
    far = Estimate.missing(Unavailable("far", "the sample is too small", fix="take smaller steps"))
    remark = Unavailable(SOME_STEPS.code, f"over {known} of 10 steps", "far")
    for step in range(1, 11):
        records.write_metrics(step, {"reward": 0.5, "rewards/a/mean": 0.5, "rewards/b/mean": 0.5})
        told = {f"measured/{name}": Estimate(0.01, 0.001, 8) if step <= known else far
                for name in ("delta_h", "delta_length")}  # fmt: skip
        told |= {"measured/steps": Estimate(1.0), "delta_h/forward": Estimate(0.02, 0.001, 8)}
        told["measured/cumulative_reward/a"] = Estimate(0.01 * known, 0.001, 8, remark)
        records.write_estimates(step, 1, "measured", told)
    run = read_run(tmp_path)
    (heading, *_), entropy, length = step_numbers(run)
    notes = {row.label: row.note for row in summarize(run)}
    assert f"the measured effects over {known} of 10 steps add up to" in notes["reward a"]
    if known == 9:
        assert heading == f"by one step, mean of {window}"
        assert entropy[1].startswith("+10.0")
    else:
        assert entropy[:2] == [f"entropy, 1e-3 nats per token, {window}",
                               f"{MISSING} (known of 3 of 10 steps: the sample is too small)"]  # fmt: skip
        assert length == ["length, tokens", f"{MISSING} (known of 3 of 10 steps)", MISSING]


@pytest.mark.parametrize(
    ("kl", "words"), [(0.0, "every ratio is 1"), (1e-4, "for responses up to 3,500 tokens"), (1e-3, "up to 350 tokens")]
)
def test_the_sampler_kl_gives_the_longest_usable_response(tmp_path: Path, kl: float, words: str) -> None:
    """ESS/N ≈ exp(−2 KL T) reaches one half at KL·T = .35."""
    records = Records(record_run(tmp_path, [1]) / "logs")
    below = Unavailable(TRUNCATED_SAMPLER.code, "below 1", "top-p")
    told = {"sampler/kl": Estimate(kl, 1e-5, 8), "sampler/mean_ratio": Estimate(0.9, 0.003, 8, below)}
    records.write_estimates(1, 1, "sampler", told)
    text = Page(write_report(tmp_path).read_text(encoding="utf-8")).text
    assert words in text.split("Sampler and trainer")[-1]
    assert ("The mean ratio is 0.9000 ± 0.0071, below 1: top-p." in text) is (kl > 0)


def test_reasons_are_compared_by_their_codes_whatever_their_words(tmp_path: Path) -> None:
    """A sum over some steps, a missing error bar and a sampler that leaves tokens out, each in other words."""
    records, told = Records(tmp_path / "logs"), "as before, in other words"
    for step in (1, 2):
        records.write_metrics(step, {"reward": 0.5, "rewards/a/mean": 0.5, "rewards/b/mean": 0.5})
        records.write_estimates(step, 1, "simple", {
            "delta_h/forward": Estimate(-1e-3, num_samples=2, reason=Unavailable(FEW_FOLDS.code, "no bar", told)),
            "measured/cumulative_reward/a": Estimate(0.1, 0.01, 8, Unavailable(SOME_STEPS.code, "over one", told)),
            "sampler/kl": Estimate(0.1, 0.01, 8),
            "sampler/mean_ratio": Estimate(0.5, 0.01, 8, Unavailable(TRUNCATED_SAMPLER.code, told)),
        })  # fmt: skip
    run = read_run(tmp_path)
    assert run.last("delta_h/forward").code == FEW_FOLDS.code
    assert why_no_predictions(run) == f"No prediction has an error bar: {told}."
    notes = {row.label: row.note for row in summarize(run)}
    assert "the measured effects over one add up to" in notes["reward a"]
    assert f"The mean ratio is 0.500 ± 0.024, {told}." in sampler_and_trainer(run)


def test_values_at_rounding_level_are_shown_as_zero() -> None:
    """For example the KL of a step that moved nothing, which its error bar would call significant."""
    noise = Estimate(9.3e-9, stderr=1.7e-9, num_samples=8)
    assert format_estimate(noise, signed=True) == "0, to within 1e-6"
    assert milli(noise) == normal_milli(9.3e-9, 1.7e-9) == "0, to within 0.001"
    assert format_estimate(Estimate(9.3e-6, stderr=1.7e-6, num_samples=8)) == "0.0000093 ± 0.0000040"
    assert format_estimate(Estimate(9.3e-9, stderr=1.7e-2, num_samples=8)) == "0.000 ± 0.040"
    assert normal_milli(9.3e-9, 1.7e-2) == "+0 ± 33"
    assert format_estimate(Estimate(0.0), signed=True) == "+0"


def test_an_interval_without_ends_is_shown() -> None:
    """The difference of two noise scales without an upper end, which has no end at all."""
    unknown = Estimate(50.0, interval=(-math.inf, math.inf))
    assert format_estimate(unknown, signed=True) == "+50 (-∞ … +∞)"
    assert size_and_side(unknown, "more", "less") == "50 (-∞ … ∞) more"


def test_a_number_that_rounds_to_zero_has_no_minus() -> None:
    assert format_estimate(Estimate(-1e-3, 0.1, 1000)) == "0.00 ± 0.20"
    assert format_estimate(Estimate(-1e-3, interval=(-0.2, -1e-4)), signed=True) == "+0.00 (-0.20 … +0.00)"
    assert percent(-0.001) == "0%"


def test_a_reward_function_called_reward_has_a_row_beside_that_of_the_paid_reward(tmp_path: Path) -> None:
    """Rewards of .2 rising to .8 and of .9: their sum is 1.1 rising to 1.7."""
    rising, form = noisy(lambda step: 0.2 + 0.015 * step, 0.01, 1), noisy(lambda step: 0.9, 0.01, 2)
    folder = log_run(tmp_path, reward=lambda step: rising(step) + form(step), rewards__reward__mean=rising,
                     rewards__form__mean=form)  # fmt: skip
    rows, headline = summary(folder), opening(read_run(folder)).evidence
    assert rows["reward"][0].startswith("1.")
    assert rows["reward"][0] in headline
    assert rows["reward reward"][0].startswith("0.")


def test_an_evaluation_replaces_no_records_whatever_its_name(tmp_path: Path) -> None:
    """Folders are called as a file of logs/ is, and as the trainer's own evaluation is shown."""
    folder = log_run(tmp_path, estimates={"delta_h/forward": lambda step: Estimate(-0.01, 0.001, 8)})
    Records(folder / "logs").write_evaluation(10, {"eval_reward": 0.25})
    for name in ("probes.jsonl", "metrics.jsonl", "in training"):
        numbers = {"delta_h/forward": Estimate(9.0, 0.1, 8), "reward": Estimate(0.75, 0.1, 8)}
        write_step(folder / "evaluations" / name, 10, {}, numbers, [])
    run = read_run(folder)
    assert run.values("delta_h/forward")[10] == -0.01
    assert run.logged("reward")[10] == 0.5
    rewards = {label: rows["value"].tolist() for label, rows in held_out_rewards(run).items()}
    assert rewards == {"evaluation in training": [0.25], "evaluation evaluations/in training": [0.75],
                       "evaluation metrics.jsonl": [0.75], "evaluation probes.jsonl": [0.75]}  # fmt: skip
    assert "Evaluation evaluations/in training: all numbers" in write_report(run).read_text(encoding="utf-8")
