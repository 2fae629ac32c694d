"""Claims on comparing runs: which runs are pooled, at which step, with which error, and what the page shows.

The runs are written through Records, so their numbers can be checked by hand.
"""

from __future__ import annotations

import math
import os
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from trainers import trainer_maker
from trl import GRPOTrainer

from rl_training import attach
from rl_training.errors import UserError
from rl_training.records.compare.final import (
    TOKEN_ENTROPY,
    Column,
    compare_groups,
    figures_of,
    final_figures,
    last_common_step,
)
from rl_training.records.compare.groups import differences, read_groups
from rl_training.records.compare.lineage import branching_steps, common_steps, trunks_of
from rl_training.records.compare.overlays import draw_overlays, pool
from rl_training.records.compare.page import write_comparison
from rl_training.records.compare.since_branching import MEASURED, PREDICTED, since_branching
from rl_training.records.evaluated import write_step
from rl_training.records.jsonl import METRICS_FILE
from rl_training.records.pages.drawing import axis_limits
from rl_training.records.pages.writing import format_estimate
from rl_training.records.report.summary import summarize
from rl_training.records.report_command import main
from rl_training.records.table.estimates import to_rows
from rl_training.records.table.reading import read_run
from rl_training.records.table.series import Source
from rl_training.records.writer import Records
from rl_training.statistics.estimate import Estimate
from rl_training.statistics.welch import difference, is_significant

HOSTILE = "<script>alert('$\\frac{')</script> {{ 7 * 7 }}"
T_2 = 4.302653  # 97.5 % quantile of Student's t with 2 degrees of freedom, from a printed table


TRAINER = {"learning_rate": 0.1, "lr_scheduler_type": "constant"}


def record(
    folder: Path, seed: int = 0, rate: float = 0.1, reward: float = 0.5, steps: int = 12, first: int = 1, **more: Any
) -> Path:
    """Write a run with a constant reward and an entropy that falls from 1 nat, and return its folder."""
    records = Records(folder / "logs")
    for step in range(first, steps + 1):
        records.write_metrics(step, {"reward": reward, "entropy": 1.0 / step})
        total = {f"delta_h/cumulative_{kind}": Estimate(-0.1 * step, 0.01, 8) for kind in ("measured", "predicted")}
        records.write_estimates(step, 1, "simple", total)
    config = {
        "seed": seed,
        "run_dir": str(folder),
        "trainer": {
            "seed": seed, "learning_rate": rate, "max_steps": 12, "lr_scheduler_type": "constant",
            "output_dir": str(folder / "state"),
        },
        "provenance": {"host": folder.name},
        **more,
    }  # fmt: skip
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    return folder


def evaluate(run: Path, step_values: dict[int, tuple[float, float]], name: str = "sums") -> None:
    """Write an evaluation with the (entropy, reward) of each checkpoint."""
    for step, (entropy, reward) in step_values.items():
        numbers = {"entropy/token": Estimate(entropy, 0.01, 64), "reward": Estimate(reward, 0.02, 64)}
        write_step(run / "evaluations" / name, step, {}, numbers, [])


def test_runs_that_differ_only_by_seed_form_a_group_and_only_differences_are_listed(tmp_path: Path) -> None:
    for seed in (0, 1):
        record(tmp_path / f"slow{seed}", seed, adapter={})
        record(tmp_path / f"fast{seed}", seed, rate=0.2, adapter={"r": 16})
    groups = read_groups([tmp_path])
    assert [[m.run.name for m in g.members] for g in groups] == [["fast0", "fast1"], ["slow0", "slow1"]]
    assert differences(groups) == {"trainer.learning_rate": ["0.2", "0.1"], "adapter.r": ["16", "–"]}
    assert [group.name for group in groups] == ["A: r=16, learning_rate=0.2", "B: learning_rate=0.1"]


def test_runs_that_differ_in_what_is_reported_or_written_are_one_group(tmp_path: Path) -> None:
    """As a job records it, whose config.yaml holds all settings; an attached run's leaves out what is reported."""
    fields = {"log_completions": True, "hub_model_id": "a/b", "vllm_gpu_memory_utilization": 0.5, "save_steps": 3}
    runs = [record(tmp_path / "plain", seed=1), record(tmp_path / "reported", seed=2, trainer={**TRAINER, **fields})]
    assert [len(group.members) for group in read_groups(runs)] == [2]
    assert len(read_groups([*runs, record(tmp_path / "other", seed=3, trainer={**TRAINER, "beta": 0.1})])) == 2


def test_a_label_says_once_what_differs(tmp_path: Path) -> None:
    runs = [record(tmp_path / "plain", intervention=None), record(tmp_path / "kept", intervention="psr")]
    assert [group.name for group in read_groups(runs)] == ["A: no intervention", "B: intervention=psr"]
    page = write_comparison(runs, tmp_path / "page.html")[0].read_text()
    assert "<td><code>intervention</code></td><td>none</td><td>psr</td>" in page
    assert "vertical line" not in page  # there is no branch
    long = [record(tmp_path / "one", adapter={"name": "a" * 40}), record(tmp_path / "two")]
    assert [group.label for group in read_groups(long)] == ["one", "two"]


def attach_settings(run: Path, size: int, whole: bool) -> Path:
    """Give a run the settings that an attached trainer records for its rate and its batch size."""
    config = yaml.safe_load((run / "config.yaml").read_text())
    rate = config["trainer"]["learning_rate"]
    config["trainer"] |= {"per_device_train_batch_size": size, "generation_batch_size": 2 * size}
    more = {"batch": {"sequences_per_step": 2 * size}, "optimizer": {"lr": rate}, "attached": {"whole_prompts": whole}}
    (run / "config.yaml").write_text(yaml.safe_dump(config | more))
    return run


@pytest.mark.parametrize("out", ["pages/", "pages"])
def test_a_path_without_an_ending_is_a_folder_for_the_page(tmp_path: Path, monkeypatch, out: str) -> None:
    monkeypatch.chdir(tmp_path)
    for name in "ab":
        Records(tmp_path / name / "logs").write_metrics(1, {"reward": 0.5})
    page, _ = write_comparison([tmp_path], out)
    assert page == Path("pages/comparison.html")
    assert page.is_file()


def test_a_label_repeats_no_setting_that_is_recorded_twice_or_that_nobody_set(tmp_path: Path) -> None:
    slow = attach_settings(record(tmp_path / "slow"), 2, whole=True)
    fast = attach_settings(record(tmp_path / "fast", rate=0.2), 4, whole=False)
    groups = read_groups([slow, fast])
    assert "attached.whole_prompts" not in differences(groups)
    assert [group.label for group in groups] == [
        "sequences_per_step=4, learning_rate=0.1", "sequences_per_step=8, learning_rate=0.2"
    ]  # fmt: skip


def branches_of(run: Path, step: int, *rates: float) -> list[Path]:
    checkpoint = f"{run}/training_state/checkpoint-{step}"
    seed = int(run.name[-1])
    return [record(run.parent / f"{run.name}_{r}", seed, r, first=step + 1, branch=checkpoint) for r in rates]


def test_branches_differ_from_their_run_by_their_step_and_are_pooled_over_seeds(tmp_path: Path) -> None:
    runs = [record(tmp_path / f"plain{seed}", seed) for seed in (0, 1)]
    branches = [branch for run in runs for branch in branches_of(run, 5, 0.1, 0.2)]
    groups = read_groups([*runs, *branches])
    assert [len(group.members) for group in groups] == [2, 2, 2]
    assert differences(groups) == {"branch at step": ["–", "5", "5"], "trainer.learning_rate": ["0.1", "0.1", "0.2"]}
    assert branching_steps(groups) == [5]
    assert not trunks_of(groups)  # the runs they branch off from are compared themselves


def test_the_shared_past_of_branches_is_drawn_once_unless_it_is_compared(tmp_path: Path) -> None:
    plain = record(tmp_path / "plain0")
    first = branches_of(plain, 5, 0.2)[0]
    again = branches_of(plain, 5, 0.3)[0]
    later = record(tmp_path / "later", rate=0.4, first=9, branch=f"{first}/training_state/checkpoint-8")
    evaluate(plain, {4: (1.0, 0.5), 6: (0.9, 0.5)})
    groups = read_groups([again, later])
    trunk, branch = trunks_of(groups)
    assert [(run.name, run.steps[-1]) for run in (trunk, branch)] == [("plain0", 5), ("plain0_0.2", 8)]
    assert trunk.rows("reward", Source("", "sums")).index.tolist() == [4]
    assert trunk.rows("delta_h/cumulative_measured").index.max() == 5
    assert branching_steps(groups) == [5, 8]
    drawn = {chart.name: chart for chart in draw_overlays(groups)}
    assert [*drawn] == ["reward", "entropy", "change"]
    before = [series for series in drawn["change"].series if series.label == "before they branch off"]
    assert [list(series.x) for series in before] == [[1, 2, 3, 4, 5], [6, 7, 8]]


F_6, V_6, V_7 = 1e-4, 10e-4, 2e-4  # variances of ½F of batch 6, of ½(F + B) of all batches up to 6, and of batch 7
ENDS = {7: 4e-4, 8: 9e-4}  # by batch, the variance of ½B


def record_change(
    run: Path, levels: dict[int, float], sums: dict[int, float], error: float, anew: bool = False
) -> Path:
    """Add the estimates of a probe with 9 folds at steps 6 to 8. With `anew` its sums start at step 6."""
    before = F_6 if anew else V_6
    variances = {6: 0.0 if anew else V_6, 7: before + ENDS[7], 8: before + V_7 + ENDS[8]}
    for step, level in levels.items():
        told = {
            "entropy/token": Estimate(level, error, 9),
            "delta_h/cumulative_predicted": Estimate(sums[step], math.sqrt(variances[step]), 99),
            "delta_h/forward": Estimate(-0.04, 2 * math.sqrt(F_6), 9),
            "delta_h/backward": Estimate(-0.04, 2 * math.sqrt(ENDS.get(step, V_6)), 9),
        }
        Records(run / "logs").write_estimates(step, 1, "simple", told)
    return run


@pytest.mark.parametrize("anew", [False, True])
def test_the_entropy_change_of_a_branch_is_compared_from_the_branching_point(tmp_path: Path, anew: bool) -> None:
    """The measured change is .58 ± .04 against .50 ± .03, with 8 degrees of freedom each.

    Predicted since step 6: -.04 against -.09, each with variance 1e-4 + 2e-4 + 9e-4. This corresponds to 144/86
    batches, or 13 degrees of freedom.
    """
    plain = record(tmp_path / "plain0", steps=8)
    record_change(plain, {6: 0.6, 7: 0.55, 8: 0.50}, {6: -0.10, 7: -0.15, 8: -0.19}, 0.03)
    branch = record(tmp_path / "branch", rate=0.2, first=6, steps=8, branch=f"{plain}/training_state/checkpoint-5")
    sums = {6: 0.0, 7: -0.02, 8: -0.04} if anew else {6: -0.10, 7: -0.12, 8: -0.14}
    record_change(branch, {6: 0.6, 7: 0.59, 8: 0.58}, sums, 0.04, anew)
    (pair,) = compare_groups(read_groups([plain, branch]))
    measured, predicted = pair.figures["measured ΔH"], pair.figures["predicted ΔH"]
    assert (measured.value, measured.stderr, measured.num_samples) == (pytest.approx(0.08), pytest.approx(0.05), 15)
    assert predicted.value == pytest.approx(0.05)
    assert predicted.stderr == pytest.approx(math.sqrt(24e-4))
    assert predicted.num_samples == 27  # 576 / (2 · 144/13) = 26 degrees of freedom


def test_branches_are_compared_in_pairs_of_seeds_and_equal_at_the_branching_point(
    tmp_path: Path,
) -> None:
    """Two branches of one run, from steps 5 and 7, share 5 steps. Pairs that differ by .1 and .3 give .2 ± .1."""
    plains = [record(tmp_path / f"plain{seed}", seed, steps=8) for seed in (0, 1)]
    changes, branches = {6: -0.10, 7: -0.15, 8: -0.19}, []
    for plain, level in zip(plains, (0.5, 0.4), strict=True):
        record_change(plain, {6: 0.6, 7: 0.55, 8: level}, changes, 0.03)
    for plain, level in zip(plains, (0.6, 0.7), strict=True):
        branch = branches_of(plain, 5, 0.2)[0]
        branches.append(record_change(branch, {6: 0.6, 7: 0.55, 8: level}, changes, 0.03))
    later = record(tmp_path / "later", rate=0.4, first=8, branch=f"{plains[0]}/training_state/checkpoint-7")
    groups = read_groups([*plains, *branches, later])
    plain, branch = (group.members for group in groups[:2])
    assert common_steps(branch[0], groups[2].members[0]) == 5
    assert common_steps(plain[0], branch[1]) == 0
    alone = since_branching(plain[:1], branch[:1], 6)
    assert {(e.value, e.stderr) for e in alone.values()} == {(0.0, 0.0)}
    paired = since_branching(plain, branch, 8)["measured ΔH"]
    assert (paired.value, paired.stderr, paired.num_samples) == (pytest.approx(0.2), pytest.approx(0.1), 2)
    assert since_branching(plain, branch[:1], 8) == {}


def test_a_run_that_ended_where_its_branch_begins_cannot_be_compared(tmp_path: Path) -> None:
    plain = record(tmp_path / "plain0", steps=5)
    (branch,) = branches_of(plain, 5, 0.2)
    (said,) = write_comparison([plain, branch], tmp_path / "page.html")[1]
    assert said.endswith(": no step is recorded in both, and there is nothing to compare.")


def test_a_run_and_its_late_branch_are_averaged_over_the_same_steps(
    tmp_path: Path,
) -> None:
    """Entropy is 1/step. The branch has steps 6 to 9, of which the last half, 8 and 9, is averaged."""
    plain = record(tmp_path / "plain0")
    branch = record(tmp_path / "branch", rate=0.2, first=6, steps=9, branch=f"{plain}/training_state/checkpoint-5")
    groups = read_groups([plain, branch])
    (pair,) = compare_groups(groups)
    assert pair.figures["token entropy"].value == 0
    assert final_figures(Column(groups[0], 9, since=6))["token entropy"].value == pytest.approx((1 / 8 + 1 / 9) / 2)
    text = write_comparison([plain, branch], tmp_path / "page.html")[0].read_text(encoding="utf-8")
    assert "compared from the branching point on" in text.replace("\n", " ")
    assert re.findall(r"<th>([AB][^<]*)</th>", text[text.rindex("Final figures") :])[:3] == [
        groups[0].name, groups[1].name, "A, later",
    ]  # fmt: skip
    assert re.findall(r"<td>(\d+; 1)</td>", text) == ["9; 1", "9; 1", "12; 1"]


def test_repeated_runs_and_repeated_seeds_count_once(tmp_path: Path) -> None:
    short, long = record(tmp_path / "a", steps=3), record(tmp_path / "b")
    (group,) = read_groups([short, long, tmp_path, short])
    assert [m.run.name for m in group.members] == ["b"]
    assert [m.run.name for m in group.repeats] == ["a"]


@pytest.mark.parametrize(("section", "name"), [("data", "seed"), ("trainer", "data_seed"), ("buffer", "seed")])
def test_runs_with_other_seeds_of_their_data_are_no_repeats(tmp_path: Path, section: str, name: str) -> None:
    """A seed that is not set follows `seed`, so that setting it to the same value changes nothing."""
    settings = {None: {}, 0: {name: 0}, 1: {name: 1}, 2: {name: 2}}
    for value, of_data in settings.items():
        base = TRAINER if section == "trainer" else {}
        record(tmp_path / f"data_{value}", **{section: {**base, "kind": "x", **of_data}})
    (group,) = read_groups([tmp_path])
    assert [member.seed for member in group.members] == [f"0 with {section}.{name}={value}" for value in (0, 1, 2)]
    assert [member.run.name for member in group.repeats] == ["data_None"]
    _, [sentence] = write_comparison([tmp_path], tmp_path / "page.html")
    assert sentence.endswith(f"only the seeds differ ({', '.join(member.seed for member in group.members)}).")


def test_seeds_that_follow_the_seed_are_not_repeated_beside_it(tmp_path: Path) -> None:
    for seed in (0, 1):
        record(tmp_path / str(seed), seed, data={"seed": seed}, buffer={"seed": 7})
    assert [member.seed for group in read_groups([tmp_path]) for member in group.members] == ["0", "1"]


def test_settings_that_do_not_affect_training_do_not_separate_runs(tmp_path: Path) -> None:
    record(tmp_path / "plain")
    watched = {"probes": {"simple": {"every": 5}}, "rollouts": {"every": 2}}
    record(tmp_path / "watched", seed=1, **watched, logger={"metrics": "core"})
    longer = record(tmp_path / "longer", seed=2)
    (longer / "config.yaml").write_text((longer / "config.yaml").read_text().replace("max_steps: 12", "max_steps: 80"))
    record(tmp_path / "filtered", seed=3, buffer={"_target_": "Filtered"})
    groups = read_groups([tmp_path])
    assert [{m.run.name for m in g.members} for g in groups] == [{"filtered"}, {"plain", "watched", "longer"}]
    assert {m.run.name: m.planned_steps for m in groups[1].members}["longer"] == "80"


def test_max_steps_separates_runs_where_the_learning_rate_depends_on_it(tmp_path: Path) -> None:
    for name, steps in (("short", 12), ("long", 80)):
        config = record(tmp_path / name, seed=steps) / "config.yaml"
        text = config.read_text().replace("constant", "cosine").replace("max_steps: 12", f"max_steps: {steps}")
        config.write_text(text)
    assert differences(read_groups([tmp_path])) == {"trainer.max_steps": ["80", "12"]}


def noise_scale_of(folder: Path, value: float, low: float, high: float) -> None:
    said = {"": value, "_low": low, "_high": high}
    told = {f"gns/noise_scale_prompts{end}": Estimate(number, 79.0, 19) for end, number in said.items()}
    Records(folder / "logs").write_estimates(12, 1, "gns", told)


def test_noise_scales_have_the_interval_of_the_report_and_pooled_ones_are_not_negative(tmp_path) -> None:
    """For 100 and 300, 1/B is 0.01 and 0.00333: mean 0.00667, se 0.00333, t with one degree of freedom 12.7062."""
    for seed, value in enumerate((100.0, 300.0)):
        noise_scale_of(record(tmp_path / str(seed), seed), value, 69.0, 1345.0)
    (single,), (both,) = read_groups([tmp_path / "0"]), read_groups([tmp_path])
    alone = final_figures(Column(single, 12))["noise scale (prompts)"]
    assert (alone.value, alone.interval) == (100.0, (69.0, 1345.0))
    assert format_estimate(alone) == "100 (69 … 1345)"
    pooled = final_figures(Column(both, 12))["noise scale (prompts)"]
    assert pooled.value == pytest.approx(150)
    assert pooled.interval == (pytest.approx(1 / (1 / 150 + 12.7062 / 300), rel=1e-5), math.inf)
    assert format_estimate(pooled) == "150 (20 … ∞)"


def test_the_difference_of_asymmetric_intervals_has_newcombes_interval() -> None:
    """Shares from Newcombe 1998, 56 of 70 and 48 of 80: difference .2, Wilson's .6918 … .8769 and .4902 … .6999."""
    estimate = Estimate(56 / 70, 0.048, 70, interval=(0.6918, 0.8769))
    other = Estimate(48 / 80, 0.055, 80, interval=(0.4902, 0.6999))
    gap = difference(estimate, other)
    assert gap.interval == (pytest.approx(0.0529, abs=5e-4), pytest.approx(0.3339, abs=5e-4))
    assert is_significant(gap)
    assert not is_significant(difference(Estimate(1.0, 0.0, 20, interval=(0.839, 1.0)), Estimate(0.97, 0.02, 20)))


@pytest.mark.parametrize(
    ("means", "share", "floor", "frame"),
    [
        # Two seeds, .6 and .9, with 12.7 standard errors on either side: the frame ends at 1 and not at 2
        ([Estimate(0.6, 0.1, 2), Estimate(0.9, 0.1, 2)], True, 0.0, (0.3, 1.02)),
        # A reward beyond 1 is shown
        ([Estimate(0.6, 0.1, 2), Estimate(1.9, 0.1, 2)], True, 0.0, (-0.02, 1.92)),
        # A difference of .01 with an error of .4: the frame extends two standard errors on either side
        ([Estimate(12.0, 0.4, 100), Estimate(12.01, 0.4, 100)], False, 0.0, (11.206, 12.804)),
        # A difference much larger than its error: the frame extends by a tenth of the range
        ([Estimate(12.0, 0.1, 100), Estimate(20.0, 0.1, 100)], False, 0.0, (11.2, 20.8)),
        # A share of 1 at every step, without an error but with an interval down to .87: the frame does not reach 0
        ([Estimate(1.0, 0.0, 20, interval=(0.87, 1.0))] * 2, True, 0.0, (0.87, 1.02)),
        # Lengths that differ by less than a tenth: the frame extends by a tenth of their height on either side
        ([Estimate(12.0, 0.01, 100), Estimate(12.1, 0.01, 100)], False, 0.1, (10.795, 13.305)),
    ],
)
def test_axis_limits_fit_the_curves_without_impossible_values_or_pure_noise(
    means: list[Estimate], share: bool, floor: float, frame: tuple[float, float]
) -> None:
    assert axis_limits(to_rows(dict(enumerate(means))), share, floor) == pytest.approx(frame, abs=0.01)


def test_runs_without_settings_are_not_grouped_or_called_alike(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (record(tmp_path / name) / "config.yaml").unlink()
    assert [group.label for group in read_groups([tmp_path])] == ["a", "b"]
    page = write_comparison([tmp_path], tmp_path / "page.html")[0].read_text()
    assert "how these runs were configured is not known" in page
    assert "Of the settings that affect training" not in page


@pytest.fixture(scope="module")
def attached(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a folder of attached trainers' runs without config.yaml: two seeds with 4 sequences a step, one with 8."""
    folder = tmp_path_factory.mktemp("attached")
    for name, seed, size in (("one/run", 0, 2), ("two/run", 1, 2), ("large/run", 0, 4)):
        trainer = trainer_maker(tmp_path_factory.mktemp("state"))(
            GRPOTrainer, seed=seed, per_device_train_batch_size=size, gradient_accumulation_steps=2, num_generations=2,
            max_completion_length=4,
        )  # fmt: skip
        with attach(trainer, Records(folder / name / "logs"), "ess"):
            trainer.train()
    return folder


def test_attached_runs_are_compared_by_the_settings_in_their_records(attached: Path) -> None:
    groups = read_groups([attached])
    assert [[member.name for member in group.members] for group in groups] == [["large/run"], ["one/run", "two/run"]]
    assert differences(groups) == {
        "batch.sequences_per_step": ["8", "4"], "trainer.per_device_train_batch_size": ["4", "2"],
        "trainer.generation_batch_size": ["8", "4"],
    }  # fmt: skip
    assert [member.seed for member in groups[1].members] == ["0", "1"]
    page = write_comparison([attached], attached / "page.html")[0].read_text()
    assert "Of the settings that affect training" not in page
    assert "not known" not in page


def test_a_run_without_predictions_has_none_in_a_comparison(attached: Path, tmp_path: Path) -> None:
    """The sum starts at 0 at the first batch, whether or not anything is predicted later."""
    run, predicted = record(tmp_path / "a", steps=0), record(tmp_path / "b", seed=1)
    for step in range(1, 13):
        Records(run / "logs").write_metrics(step, {"reward": 0.5, "entropy": 1.0})
        none, zero = Estimate.missing("no formula"), Estimate(0.0, 0.0, 8)
        sums = {"measured": zero if step == 1 else Estimate(-0.1, 0.01, 8), "predicted": zero if step == 1 else none}
        estimates = {f"delta_h/cumulative_{kind}": estimate for kind, estimate in sums.items()}
        Records(run / "logs").write_estimates(step, 1, "simple", estimates)
    assert MEASURED in figures_of(read_run(run), 12)
    assert PREDICTED not in figures_of(read_run(run), 12)
    assert MEASURED not in figures_of(read_run(run), 1)  # nothing has changed yet
    assert PREDICTED in figures_of(read_run(predicted), 12)
    (chart,) = (chart for chart in draw_overlays(read_groups([run])) if chart.name == "change")
    assert not any("predicted" in part["series"] for part in chart.data)


def test_pooled_runs_are_distinguished_by_name(tmp_path: Path) -> None:
    groups = read_groups([record(tmp_path / name / "run", seed=seed) for seed, name in enumerate(("one", "two"))])
    (reward,) = (chart for chart in draw_overlays(groups) if chart.name == "reward")
    assert [part["series"].rpartition(": ")[2] for part in reward.data[1:]] == ["one/run", "two/run"]


def test_the_error_of_a_group_is_the_spread_between_its_seeds(tmp_path: Path) -> None:
    """Rewards 0.4, 0.5, 0.6 have mean 0.5, sd 0.1, se 0.1/√3 and 2 degrees of freedom."""
    for seed, reward in enumerate((0.4, 0.5, 0.6)):
        record(tmp_path / str(seed), seed, reward=reward)
    (group,) = read_groups([tmp_path])
    reward = final_figures(Column(group, 12))["reward"]
    assert reward.value == pytest.approx(0.5)
    assert reward.half_width() == pytest.approx(T_2 * 0.1 / math.sqrt(3), rel=1e-6)
    assert final_figures(Column(group, 12))["token entropy"].value == pytest.approx(
        sum(1 / s for s in range(8, 13)) / 5
    )


def test_the_difference_of_two_groups_has_welchs_interval(tmp_path: Path) -> None:
    """Errors of 1 and 8 with 2 and 4 degrees of freedom give √65, with 65²/(1/2 + 64²/4) = 4.1 degrees."""
    gap = difference(Estimate(5.0, 1.0, 3), Estimate(2.0, 8.0, 5))
    assert (gap.value, gap.stderr, gap.num_samples) == (3.0, pytest.approx(math.sqrt(65)), 5)
    for seed in range(3):
        record(tmp_path / f"a{seed}", seed, reward=0.5 + 0.01 * seed)
        record(tmp_path / f"b{seed}", seed, rate=0.2, reward=0.8 + 0.01 * seed)
    (pair,) = compare_groups(read_groups([tmp_path / "a0", tmp_path / "a1", tmp_path / "a2", tmp_path]))
    assert not pair.single_seed
    assert pair.figures["reward"].value == pytest.approx(0.3)
    assert pair.figures["reward"].stderr == pytest.approx(math.sqrt(2) * 0.01 / math.sqrt(3))
    assert is_significant(pair.figures["reward"])
    assert not is_significant(pair.figures["token entropy"])


def test_finished_running_and_killed_runs_are_compared_at_their_last_common_step(tmp_path: Path) -> None:
    for seed, steps in enumerate((12, 12, 4)):
        record(tmp_path / f"a{seed}", seed, steps=steps, reward=0.5 if steps == 12 else 0.0)
    with open(record(tmp_path / "b", rate=0.2, steps=7) / "logs" / METRICS_FILE, "a") as file:
        file.write('{"step": 8, "rew')
    a, b = read_groups([tmp_path])
    assert (last_common_step(a), last_common_step(b)) == (12, 7)
    assert final_figures(Column(a, 12))["reward"].num_samples == 2
    assert final_figures(Column(a, 12))["reward"].value == 0.5  # without the killed run
    (pair,) = compare_groups([a, b])
    assert (pair.step, pair.single_seed) == (7, True)
    assert pair.figures["measured ΔH"].value == pytest.approx(0)  # both are taken at step 7
    text = write_comparison([tmp_path], tmp_path / "page.html")[0].read_text(encoding="utf-8")
    for claim in (
        "left out of the final figures",
        "4 of 12",
        "7 of 12",
        "In the mean of steps 5–7",
        "This is a single seed",
    ):
        assert claim in text


def test_each_mean_is_said_to_be_of_the_steps_that_it_covers(tmp_path: Path) -> None:
    """Reward is logged at each of 24 steps; entropy is measured at every fifth, and the trainer logs none."""
    for name, rate in (("a", 0.1), ("b", 0.2)):
        folder = record(tmp_path / name, rate=rate, steps=1)
        (folder / "logs" / METRICS_FILE).unlink()
        for step in range(1, 25):
            Records(folder / "logs").write_metrics(step, {"reward": 0.5 + 0.01 * (step % 2)})
            if step % 5 == 1:
                level = {"entropy/token": Estimate(0.5 + 0.001 * step, 0.01, 8)}
                Records(folder / "logs").write_estimates(step, 1, "simple", level)
    (sentence,) = write_comparison([tmp_path], tmp_path / "page.html")[1]
    assert "In the mean of steps 20–24, B's reward does not detectably differ" in sentence
    assert "In the mean of steps 16–21, B's token entropy does not detectably differ" in sentence


def test_pooling_two_perfect_seeds_keeps_the_interval_of_one() -> None:
    right, other = Estimate(1.0, 0.0, 20, interval=(0.839, 1.0)), Estimate(0.9, 0.07, 20, interval=(0.7, 0.97))
    assert pool([{1: right, 2: right}, {1: right, 2: other}]) == {1: right, 2: Estimate(0.95, pytest.approx(0.05), 2)}


def test_curves_are_pooled_at_steps_common_to_all_runs() -> None:
    runs = [{1: Estimate(1.0, 9.0, 8), 2: Estimate(2.0, 9.0, 8)}, {1: Estimate(3.0, 9.0, 8)}]
    pooled = pool(runs)
    assert {step: (e.value, e.stderr) for step, e in pooled.items()} == {1: (2.0, pytest.approx(1.0))}
    assert pool(runs[:1]) == runs[0]


def test_the_page_loads_nothing_and_escapes_hostile_text(tmp_path: Path) -> None:
    evaluate(record(tmp_path / "<i>a", name=HOSTILE), {4: (0.5, 0.5), 8: (0.3, 0.6)})
    record(tmp_path / "b", rate=0.2)
    page, _ = write_comparison([tmp_path], tmp_path, pictures="svg")
    html = page.read_text(encoding="utf-8")
    page_text = re.sub(r"<script>.*?</script>", "", html, flags=re.DOTALL)  # without the scripts that draw the charts
    assert not any(word in page_text for word in ("http://", "https://", "url(", "@import", "<script>alert", "<i>a"))
    assert html.count('<figure class="chart"') == 6  # the paths, reward, entropy, change, two evaluated metrics
    assert len(drawn := list(tmp_path.glob("comparison_*.svg"))) == 6
    assert all(b"<i>a" not in path.read_bytes() for path in drawn)
    assert "The best checkpoint" in html


def test_every_chart_names_the_groups_without_data(tmp_path: Path) -> None:
    record(tmp_path / "a")
    Records(tmp_path / "b" / "logs").write_metrics(1, {"reward": 0.5})
    by_name = {chart.name: chart for chart in draw_overlays(read_groups([tmp_path]))}
    assert by_name["change"].missing == ["B: b – no run of it has recorded this"]
    assert not by_name["reward"].missing
    assert "noise_scale" not in by_name


def test_runs_of_a_group_are_drawn_beside_their_mean(tmp_path: Path) -> None:
    """A single line through the points of several runs would zigzag."""
    groups = read_groups([record(tmp_path / name, seed=seed) for seed, name in enumerate("ab")])
    (reward,) = (chart for chart in draw_overlays(groups) if chart.name == "reward")
    assert [(part["part"], part["opacity"], len(part["x"])) for part in reward.data] == [
        (0, 1.0, 12),
        (1, 0.35, 12),
        (2, 0.35, 12),
    ]
    assert reward.spec["layer"][0]["layer"][-1]["encoding"]["detail"]["field"] == "part"


@pytest.mark.parametrize("config", ["a: [", "no mapping"])
def test_a_broken_config_is_named_or_counts_as_empty(tmp_path: Path, config: str) -> None:
    (record(tmp_path / "a") / "config.yaml").write_text(config)
    record(tmp_path / "b")
    if config == "a: [":
        with pytest.raises(ValueError, match=str(tmp_path / "a" / "config.yaml")):
            read_groups([tmp_path])
    else:
        assert len(read_groups([tmp_path])) == 2


def test_the_command_compares_several_runs_or_a_folder_of_them(tmp_path, capsys) -> None:
    runs = [str(record(tmp_path / "runs" / str(seed), seed)) for seed in range(2)]
    for arguments in (runs, [str(tmp_path / "runs")]):
        out = tmp_path / f"{len(arguments)}.html"
        main([*arguments, "--out", str(out)])
        finding = "One group: of the settings that affect training, only the seeds differ (0, 1)."
        assert capsys.readouterr().out == f"{finding}\nComparison: {out}\n"
        assert finding in out.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["a", "nowhere"], "^nowhere"), (["a", "a"], r"\ba\b"), (["a", "--out", "x"], "^--out "),
        (["a", "--json", "--out", "x"], "^--out "), (["a", "--json", "--pictures", "png"], "^--pictures "),
        (["a", "--json", "--watch", "5"], "^--watch "), (["a", "a", "--watch", "5"], "^--watch "),
    ],
)  # fmt: skip
def test_the_command_reports_mistakes_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    record(Path("a"))
    with pytest.raises(UserError, match=words) as raised:
        main(arguments)
    assert "\n" not in str(raised.value)
    assert os.listdir(tmp_path) == ["a"]


def test_a_run_with_one_measured_step_has_no_change_rather_than_0(tmp_path: Path) -> None:
    for name, steps in (("whole", (1, 2, 3)), ("short", (1,))):
        records = Records(tmp_path / name / "logs")
        for step in steps:
            records.write_metrics(step, {"reward": 0.5, "entropy": 0.5})
            change = Estimate(0.1 - 0.1 * step, 0.0 if step == 1 else 0.01, 8)
            sums = {f"delta_h/cumulative_{kind}": change for kind in ("measured", "predicted")}
            records.write_estimates(step, 1, "simple", sums)
    groups = read_groups([tmp_path / "whole", tmp_path / "short"])
    drawn = {chart.name: chart for chart in draw_overlays(groups)}["change"]
    assert {series.label for series in drawn.series} == {"A: whole", "A: whole, predicted"}
    assert drawn.missing == ["B: short – no run of it has recorded this"]
    page, _ = write_comparison([tmp_path / "whole", tmp_path / "short"], tmp_path / "page.html")
    assert "<th>A: whole</th><th>B: short</th>" in page.read_text(encoding="utf-8")


def test_runs_without_a_recorded_seed_are_no_repeats_of_each_other(tmp_path: Path) -> None:
    """A loop of one's own records none: two runs of it may have any seeds."""
    for name in ("a", "b"):
        config = record(tmp_path / name) / "config.yaml"
        config.write_text("\n".join(line for line in config.read_text().splitlines() if "seed" not in line))
    (group,) = read_groups([tmp_path])
    assert ([member.seed for member in group.members], group.repeats) == (["–", "–"], [])
    page, [told] = write_comparison([tmp_path], tmp_path / "page.html")
    assert told.endswith("Not all of their seeds are recorded.")
    assert "only the seeds differ" not in page.read_text(encoding="utf-8")


def test_summary_chart_and_final_figure_show_the_same_token_entropy(tmp_path: Path) -> None:
    """A probe that measures every sixth step has fewer values than the trainer logs, 1/step, and other ones."""
    folder = record(tmp_path / "a")
    for step in (6, 12):
        Records(folder / "logs").write_estimates(step, 1, "simple", {"entropy/token": Estimate(5.0, 0.01, 8)})
    (group,) = read_groups([folder])
    (row,) = (row for row in summarize(group.members[0].run) if row.label == "token entropy")
    assert "as TRL logs it" in row.note
    assert row.value.startswith("1.00 → ")
    (chart,) = (chart for chart in draw_overlays([group]) if chart.name == "entropy")
    assert chart.series[-1].y.tolist() == pytest.approx([1.0 / step for step in range(1, 13)])
    assert final_figures(Column(group, 12))[TOKEN_ENTROPY].value < 1
