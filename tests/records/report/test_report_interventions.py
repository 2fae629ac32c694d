"""What a run's report says about interventions and token classes, from records whose numbers can be checked by hand."""

from __future__ import annotations

import math
import re
import shlex
from pathlib import Path

import pytest
import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from logged_runs import Curve, log_run, noisy

from rl_training.records.pages.charts import Section
from rl_training.records.report import write_report
from rl_training.records.report.interventions.branches import branch_commands
from rl_training.records.report.interventions.plane import plane
from rl_training.records.report.interventions.section import interventions_of_run
from rl_training.records.report.opening import opening
from rl_training.records.report.summary import summarize
from rl_training.records.report.verdict import judge
from rl_training.records.report.wording.trl import PSR_PAGE
from rl_training.records.table.effects import Effect
from rl_training.records.table.reading import read_run
from rl_training.records.writer import Records
from rl_training.statistics.estimate import Estimate

ROOT = Path(__file__).parents[3]

T_7 = 2.364624  # 97.5 % quantile of Student's t with 7 degrees of freedom, from a printed table
NONE = Estimate.missing("it has no strength")


def estimates(delta_h: float, error: float, price: float, halves: Estimate, kept: float = 10.0) -> dict[str, Estimate]:
    priced = Estimate(price, 0.1, 8, interval=(price - 1, price + 1)) if price else Estimate.missing("includes 0")
    return {
        "delta_h": Estimate(delta_h, error, 8),
        "delta_h_kept": Estimate(kept * delta_h, kept * error, 8),
        "mean_delta_h": Estimate(delta_h, error, 8, detail={"measured_steps": 3}),
        "mean_delta_h_kept": Estimate(kept * delta_h, kept * error, 8),
        "mean_delta_reward": Estimate(-price * delta_h, error, 8),
        "mean_price": priced,
        "kept_halves_at": halves,
    }


MEASURED = {
    "lr": estimates(1e-3, 1e-4, 4.0, Estimate(0.5), kept=1.0),
    "bonus:0.02": estimates(2e-4, 1e-5, 5.0, Estimate(0.0314)),
    "softer:0.5": estimates(3e-4, 1e-5, 3.0, NONE),
    "psr": estimates(1e-4, 1e-4, 0.0, NONE),  # needs (2.36)² times its three measured steps
    "nsr": estimates(1e-5, 1e-4, 0.0, NONE),  # needs a hundred times that
    "lr:2": estimates(-1e-3, 1e-4, 4.0, Estimate(0.5), kept=1.0) | {"kept_halves_at": NONE},
    "kl_cov": estimates(0.0, 0.0, 0.0, NONE),
}


def measured_effects(fall: float | None, which: dict[str, dict[str, Estimate]]) -> dict[str, Estimate]:
    """Return the estimates of a step: the plain step's, and those of the interventions."""
    measured = {f"intervention/{name}/{q}": e for name, quantities in which.items() for q, e in quantities.items()}
    falls = Estimate.missing("fewer than 8 folds") if fall is None else Estimate(fall, 1e-4, 8)
    plain = {"mean_delta_h": falls, "mean_delta_reward": Estimate(3e-3, 1e-4, 8), "delta_h": Estimate(-5e-5, 1e-4, 8)}
    return measured | {f"intervention/plain_{name}": estimate for name, estimate in plain.items()}


def record(
    folder: Path,
    fall: float | None = -2e-3,
    which: dict[str, dict[str, Estimate]] = MEASURED,
    now: Estimate | None = None,
    **config: object,
) -> Path:
    records, measured = Records(folder / "logs"), measured_effects(fall, which)
    forward = now or measured["intervention/plain_mean_delta_h"]
    records.write_metrics(11, {"reward": 0.5, "entropy": 0.5})
    records.write_estimates(11, 1, "interventions", measured | {"delta_h/forward": forward})
    texts = ["lr", "bonus:0.02", "my.py:softer:0.5", "psr"]
    config = {"made_by": "job", "probes": {"interventions": {"which": texts, "decay": 0.99, "every": 10}}, **config}
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    for step in (9, 20, 100):
        (folder / "training_state" / f"checkpoint-{step}").mkdir(parents=True)
    return folder


def told(folder: Path) -> Section:
    run = read_run(folder)
    section = interventions_of_run(run, branch_commands(run))
    assert section is not None
    return section


def test_the_sentences_name_the_fall_what_halves_it_and_insignificant_effects(tmp_path: Path) -> None:
    section = told(record(tmp_path / "run"))
    needed, plain, halving, keeping, yardstick, spending, untold, caveat, to_try = section.sentences
    half = T_7 * 0.1
    assert plain == (
        f"The step as it is changes entropy by -2.00 ± {half:.2f} thousandths of a nat and reward by +3.00 ± "
        f"{half:.2f} thousandths: the mean over the measured steps up to step 11 (3), of which the latest count most. "
        "Effects are differences from it."
    )
    assert section.table[1][:6] == ["the step as it is", "–", "–", f"-2.00 ± {half:.2f}", "–", f"-0.05 ± {half:.2f}"]
    assert needed == "Whether one is needed cannot be told yet: more steps are needed to tell."  # in a run of one step
    assert to_try == "Try them, and compare:"
    assert halving == (
        "By one step, extrapolated, these strengths would halve entropy's fall once the momentum has adapted, in order "
        "of price: lr 0.5 (price 4.0 (3.0 … 5.0)); bonus 0.031 (price 5.0 (4.0 … 6.0)). The intervals of these prices "
        "all overlap: their order is not certain."
    )
    assert [keeping.index(name) for name in ("softer:0.5", "lr", "bonus:0.02")] == sorted(
        keeping.index(name) for name in ("softer:0.5", "lr", "bonus:0.02")
    )
    assert yardstick.startswith("The yardstick: plain steps earn 1.5 of reward per nat that they spend.")  # 3e-3 / 2e-3
    assert "lr:2 -1.00" in spending
    assert untold == (
        "No significant effect on entropy: psr (needs about 14 more measured steps); "
        "nsr (too small an effect for a mean that remembers 20 measured steps)."
    )
    assert "Ten real steps agreed with the order in part, and not with the sizes" in caveat


def settings_of(line: str) -> dict[str, object]:
    """Return the settings that Hydra reads from a printed command."""
    words = OverridesParser.create().parse_overrides(shlex.split(line)[2:])
    return {word.key_or_group: word.value() for word in words}


def test_the_commands_branch_without_a_change_then_with_psr_and_then_with_the_cheapest_interventions(
    tmp_path: Path,
) -> None:
    """PSR only once: not in a run that trains with it already."""
    lines = told(record(tmp_path / "plain")).commands
    assert [settings_of(line).get("intervention") for line in lines[:-1]] == [
        None, ["psr"], ["my.py:softer:0.5"], ["lr:0.5"], ["bonus:0.031"],
    ]  # fmt: skip
    run = record(tmp_path / "my runs" / "run", intervention="psr")  # this run already trains with an intervention
    *trainings, compare = told(run).commands
    shared = {"branch": str(run / "training_state" / "checkpoint-100"), "additional_steps": 40}
    folders = [f"{run}_{name}" for name in ("plain", "my.py_softer_0.5", "lr_0.5", "bonus_0.031")]
    assert [settings_of(line) for line in trainings] == [
        shared | {"run_dir": folders[0]},
        shared | {"run_dir": folders[1], "intervention": ["psr", "my.py:softer:0.5"]},
        shared | {"run_dir": folders[2], "intervention": ["psr", "lr:0.5"]},
        shared | {"run_dir": folders[3], "intervention": ["psr", "bonus:0.031"]},
    ]
    assert shlex.split(compare) == ["rl-training", "report", *folders]


def test_the_table_has_one_step_and_kept_effects_and_reasons_for_missing_strengths(tmp_path: Path) -> None:
    rows = {row[0]: row for row in told(record(tmp_path / "run")).table}
    assert rows["bonus:0.02"][1:5] == ["0.031", "5.0 (4.0 … 6.0)", "+0.200 ± 0.024", "+2.00 ± 0.24"]  # with t = 2.36
    assert rows["lr"][4] == "+1.00 ± 0.24"
    assert (rows["psr"][1], rows["psr"][7]) == ("–", "it has no strength")


def test_an_intervention_that_spends_entropy_is_never_ranked_first(tmp_path: Path) -> None:
    spends = estimates(-1e-3, 1e-4, -9.0, NONE)
    rows = told(record(tmp_path / "run", which={"spender": spends, **MEASURED})).table[1:]
    assert [row[0] for row in rows[:4]] == ["the step as it is", "softer:0.5", "lr", "bonus:0.02"]
    assert [row[0] for row in rows[-2:]] == ["spender", "lr:2"]


@pytest.mark.parametrize(
    ("fall", "now"),
    [(-2e-4, None), (2e-3, None), (-2e-3, Estimate(-5e-5, 1e-4, 8)), (-2e-3, Estimate(2e-3, 1e-4, 8))],
    ids=["within noise", "a rise", "within noise by now", "a rise by now"],
)
def test_where_entropy_does_not_fall_now_nothing_is_advised(tmp_path: Path, fall: float, now: Estimate | None) -> None:
    section = told(record(tmp_path / "run", fall=fall, now=now))
    assert "there is nothing to halve" in section.sentences[1]
    assert not any("would halve" in sentence for sentence in section.sentences)
    assert not section.commands
    row = {row[0]: row for row in section.table}["lr"]
    assert (row[1], row[7]) == ("–", "entropy does not fall significantly now")


def test_equal_strengths_of_one_intervention_give_one_command(tmp_path: Path) -> None:
    first, second = (estimates(1e-4, 1e-5, price, Estimate(at)) for price, at in ((5.0, 0.11), (6.0, 0.112)))
    section = told(record(tmp_path / "run", which={"bonus": first, "bonus:0.1": second}))
    assert "in order of price: bonus 0.11 (price 5.0 (4.0 … 6.0))." in section.sentences[2]
    assert [settings_of(line).get("intervention") for line in section.commands[:-1]] == [None, ["psr"], ["bonus:0.11"]]


def test_no_strength_is_given_to_an_intervention_without_a_significant_effect(tmp_path: Path) -> None:
    """Its kept effect may have been recorded as significant, with another mean over steps."""
    unsure = MEASURED["bonus:0.02"] | {"mean_delta_h": Estimate(2e-4, 1e-4, 8, detail={"measured_steps": 3})}
    section = told(record(tmp_path / "run", which={"lr": MEASURED["lr"], "bonus:0.02": unsure}))
    assert "price: lr 0.5 (price 4.0 (3.0 … 5.0))." in section.sentences[2]
    assert any(sentence.startswith("No significant effect on entropy: bonus:0.02 ") for sentence in section.sentences)
    row = {row[0]: row for row in section.table}["bonus:0.02"]
    assert (row[1], row[7]) == ("–", "the interval of its effect in one step includes 0")
    assert [settings_of(line).get("intervention") for line in section.commands[:-1]] == [None, ["psr"], ["lr:0.5"]]


def test_a_flat_curve_and_single_steps_that_lower_entropy_are_both_said(tmp_path: Path) -> None:
    """Entropy scatters by .02 around .5 and each step is predicted to lower it by .5 ± .1 thousandths."""
    forward = {"delta_h/forward": lambda step: Estimate(-5e-4, 2e-4, 20)}
    level = {"entropy": noisy(lambda step: 0.5, 0.02, 1), "reward": noisy(lambda step: 0.5, 0.03, 2)}
    folder = log_run(tmp_path / "run", estimates=forward, **level)
    Records(folder / "logs").write_estimates(40, 1, "interventions", measured_effects(-2e-3, MEASURED))
    assert opening(read_run(folder)).kind == "flat"
    said = "the curve of entropy does not fall in the last quarter of the run, but single steps lower it"
    assert told(folder).sentences[0] == f"Whether one is needed is not certain: {said}. More steps will tell."
    rows = {row.label: row for row in summarize(read_run(folder))}
    assert (rows["interventions"].value, rows["interventions"].note) == ("not certain", f"{said}: more steps will tell")


def test_a_fall_that_the_verdict_sees_is_not_denied_beside_interventions(tmp_path: Path) -> None:
    """Of 150 steps, entropy falls by 8 % in the last 50 while reward stands; each step is measured to lower it."""
    curves = {
        "entropy": noisy(lambda step: 0.5 - 0.0008 * max(step - 100, 0), 0.002, 1),
        "reward": noisy(lambda step: 0.5, 0.03, 2),
    }
    folder = log_run(tmp_path / "run", 150, **curves)
    Records(folder / "logs").write_estimates(150, 1, "interventions", measured_effects(-5e-4, MEASURED))
    first = opening(read_run(folder))
    assert (first.kind, first.headline) == ("flat_falling", "Entropy falls a little, and reward has hardly risen")
    assert first.evidence.endswith("now it falls.")
    section = told(folder)
    (row,) = (row for row in summarize(read_run(folder)) if row.label == "interventions")
    assert "not fall" not in " ".join([*section.sentences, row.value, row.note])
    assert "would halve the fall" in row.note


def test_the_row_on_interventions_has_their_prices_and_agrees_with_the_verdict(tmp_path: Path) -> None:
    """Of a run that loses entropy, of one that spends it on reward, and of one without a useful intervention."""

    def row(name: str, reward: Curve, which: dict[str, dict[str, Estimate]] = MEASURED) -> tuple[str, str]:
        folder = log_run(tmp_path / name, 40, entropy=noisy(lambda step: 0.5 * 0.97**step, 0.005, 1), reward=reward)
        Records(folder / "logs").write_estimates(40, 1, "interventions", measured_effects(-2e-3, which))
        run = read_run(folder)
        (found,) = (row for row in summarize(run) if row.label == "interventions")
        if "none needed" in found.value:
            first = opening(run)
            why = judge(run).nothing_to_do
            assert why in first.advice.text
            assert told(folder).sentences[0] == f"None is needed: {why}. What each would do:"
            assert "Try them, and compare:" not in told(folder).sentences
        assert bool(told(folder).commands) == ("lr" in found.value)
        return found.value, found.note

    level, rising = noisy(lambda step: 0.5, 0.03, 2), noisy(lambda step: 0.3 + 0.01 * step, 0.03, 2)
    assert row("lost", level) == (
        "lr 0.5, bonus 0.031",
        "would halve the fall, extrapolated from one step; reward that a nat kept costs: lr 4.0 (3.0 … 5.0), "
        "bonus 5.0 (4.0 … 6.0) (plain steps earn 1.5 per nat that they spend)",
    )
    value, note = row("spent", rising)
    assert (value, note.partition(";")[0]) == ("none needed", "entropy that falls while reward rises is no fault")
    assert row("useless", level, {"psr": MEASURED["psr"]})[0] == "none"
    unpriced = {"lr": MEASURED["lr"] | {"mean_price": Estimate.missing("includes 0")}}
    assert row("unpriced", level, unpriced)[1].endswith("what they cost in reward is not known yet")


def test_each_interval_in_the_plane_is_drawn_along_its_own_axis(tmp_path: Path) -> None:
    reward, entropy = Estimate(2e-3, 1e-3, 8), Estimate(1e-3, 1e-4, 8)
    drawn = plane([Effect("psr", entropy, reward, NONE, NONE, NONE, NONE, 1)])
    (cross,) = (series for series in drawn.series if series.label == "psr")
    ends = [*cross.left, *cross.right, *cross.low, *cross.high]
    assert ends == pytest.approx([2 - T_7, 2 + T_7, 1 - 0.1 * T_7, 1 + 0.1 * T_7])


def test_the_plane_shows_effects_as_they_act_when_kept_beside_what_plain_steps_earn(tmp_path: Path) -> None:
    """bonus:0.02 moves one step by .2 (entropy) and −1 (reward); its kept effect is ten times that, lr's the same."""
    (drawn,) = told(record(tmp_path / "run")).charts
    places = {series.label: (list(series.x)[-1], list(series.y)[-1]) for series in drawn.series}
    assert places["bonus:0.02"] == pytest.approx((-10.0, 2.0))
    assert places["lr"] == pytest.approx((-4.0, 1.0))
    across, up = places["plain steps earn 1.5 per nat"]
    assert up == pytest.approx(-across / 1.5)
    (unsure,) = told(record(tmp_path / "other", fall=-1e-4)).charts  # no significant fall: no yardstick
    assert not any("per nat" in series.label for series in unsure.series)


def test_an_attached_trainer_gets_the_lines_that_try_the_cheapest_intervention_from_a_checkpoint(
    tmp_path: Path,
) -> None:
    trainer = {"output_dir": "out", "learning_rate": 1e-5}
    only_lr = {"lr": MEASURED["lr"]}
    lines = told(record(tmp_path / "run", which=only_lr, made_by="trl", trainer=trainer)).commands
    compile("\n".join(lines[:-1]), "lines", "exec")
    assert lines.count('    trainer.train(resume_from_checkpoint="out/checkpoint-N")') == 3
    assert "PositiveOnly(GRPOTrainer)" in lines[4]
    assert "ScaleLearningRate(0.5)" in lines[7]  # GRPOConfig's rate would not act on a resumed trainer
    assert "class ScaleLearningRate(TrainerCallback)" in (ROOT / PSR_PAGE).read_text(encoding="utf-8")
    unsaved = told(
        record(tmp_path / "unsaved", which=only_lr, made_by="trl", trainer=trainer | {"save_strategy": "no"})
    ).commands
    assert "this run has saved none" in unsaved[0]
    folders = [f"{tmp_path}/run_{name}" for name in ("plain", "psr", "lr_0.5")]
    assert shlex.split(lines[-1]) == ["rl-training", "report", *folders]


def test_a_dr_grpo_trainer_gets_lines_that_make_it_with_interventions_and_records(tmp_path: Path) -> None:
    trainer = {"output_dir": "out", "learning_rate": 1e-5, "class": "DrGRPOTrainer"}
    lines = told(record(tmp_path / "run", which={"lr": MEASURED["lr"]}, made_by="trl", trainer=trainer)).commands
    folders = [f"{tmp_path}/run_{name}" for name in ("plain", "psr", "lr_0.5")]
    given = ["without a change", 'with DrGRPOTrainer(…, interventions=["psr"])']
    given += ['with DrGRPOTrainer(…, interventions=["lr:0.5"])']
    assert lines[1:-2:2] == [
        f'# One {how}, made with records="{folder}/logs":' for how, folder in zip(given, folders, strict=True)
    ]
    assert set(lines[2:-2:2]) == {'trainer.train(resume_from_checkpoint="out/checkpoint-N")'}


def test_an_unbounded_interval_does_not_widen_the_plane() -> None:
    endless, known = Estimate(1e-3, math.inf, 8), Estimate(1e-3, 1e-4, 8)
    drawn = plane([Effect(name, e, e, NONE, NONE, NONE, NONE, 1) for name, e in (("psr", endless), ("nsr", known))])
    top = 1 + 0.1 * T_7
    assert drawn.facts["y"]["scale"]["domain"] == pytest.approx([-0.03 * top, 1.03 * top])


def test_missing_estimates_add_no_sentence_and_raise_no_error(tmp_path: Path) -> None:
    missing = {name: Estimate.missing("fewer than 8 folds") for name in MEASURED["lr"]}
    section = told(record(tmp_path / "run", fall=None, which={"lr": missing}))
    assert section.sentences[1] == "What the step as it is does to entropy is not known here."
    assert len(section.sentences) == 3
    assert not section.commands
    assert section.table[1][-1] == "fewer than 8 folds"


def test_a_run_without_the_probe_has_no_section_on_interventions(tmp_path: Path) -> None:
    assert interventions_of_run(read_run(record(tmp_path / "run", which={}))) is None


def test_a_name_with_a_comma_is_quoted_in_the_printed_command(tmp_path: Path) -> None:
    section = told(record(tmp_path / "run", which={"mis:0.5,2": MEASURED["softer:0.5"], "lr": MEASURED["lr"]}))
    names = [["psr"], ["mis:0.5,2"], ["lr:0.5"]]
    assert [settings_of(line).get("intervention") for line in section.commands[1:-1]] == names


def test_the_page_has_the_picture_the_sentences_and_the_commands(tmp_path: Path) -> None:
    page = write_report(record(tmp_path / "run")).read_text(encoding="utf-8")
    assert "What would change entropy, and at what price" in page
    assert "bonus:0.031]" in page
    assert "psr (needs about 14 more measured steps)" in page


@pytest.mark.parametrize("name", ["$x$:2", "<b>"])
def test_hostile_names_are_shown_and_never_executed(tmp_path: Path, name: str) -> None:
    page = write_report(record(tmp_path / "run", which={name: MEASURED["psr"]})).read_text(encoding="utf-8")
    assert "<b>" not in page


def test_the_token_tables_are_sorted_and_mark_intervals_that_contain_0(tmp_path: Path) -> None:
    """A token's −2 of the whole −8 is a quarter. The first recorded token takes less than the second."""
    records, missing = Records(tmp_path / "logs"), Estimate.missing("fewer than 8 folds")
    detail = {"share_of_tokens": 0.125, "whole": -8e-3, "whole_stderr": 1e-3, "measured_steps": 3}
    tokens = {"x": (-1e-6, 1e-4, 0.125), "<i>\n": (-2e-3, 1e-4, 0.125), "J": (0.0, 0.0, 0.0)}
    for step, of_step in ((11, {"text/end": 1e-3, "text/top<b>": -2e-3, "text/word": 0.0}), (21, {})):
        records.write_metrics(step, {"reward": 0.5, "entropy": 0.5})
        estimates = {}
        for name, share in (("text/end", 0.25), ("text/top<b>", 0.75), ("text/word", 0.0)):
            estimate = Estimate(of_step[name], 1e-4, 8, detail={"measured_steps": 2}) if of_step else missing
            estimates |= {f"tokens/{name}/mean_delta_h": estimate, f"tokens/{name}/share_of_tokens": Estimate(share)}
        for place, (text, (value, error, share)) in enumerate(tokens.items(), start=1):
            example = "a[<i>]b" if of_step and place == 2 else ""  # it does not occur in the last step
            said = {**detail, "text": text, "example": example, "share_of_tokens": share}
            estimates[f"top_token/{place}/mean_delta_h"] = Estimate(value, error, 8, detail=said)
        estimates["top_token/4/mean_delta_h"] = Estimate.missing("fewer tokens")
        records.write_estimates(step, 1, "token_classes", estimates)
    page = write_report(tmp_path).read_text(encoding="utf-8")
    section = page.partition("Which tokens change entropy</h2>")[2]
    top, rows = (
        [re.findall(r"<td[^>]*>(.*?)</td>", row) for row in table.split("<tr>")[2:]]
        for table in section.split("</table>")[:2]
    )
    bar = f"{T_7 * 0.1:.2f}"
    assert top == [
        ["&lt;i&gt;⏎", "a[&lt;i&gt;]b", "12.5%", f"-2.00 ± {bar}", "25%", ""],
        ["x", "", "12.5%", f"+0.00 ± {bar}", "0%", "the interval contains 0"],
        ["J", "", "0.0%", "+0", "0%", "not seen in these steps"],
    ]
    assert rows == [
        ["its text", "top&lt;b&gt;", "75.0%", f"-2.00 ± {bar}", ""],
        ["its text", "end", "25.0%", f"+1.00 ± {bar}", ""],
    ]
    words = " ".join(page.split())
    assert "running means over the measured steps (2)" in words
    assert "the steps between (measured steps: 3)" in words
    assert "with momentum" not in page.lower()
    (row,) = (row for row in summarize(read_run(tmp_path)) if row.label == "token that surely takes most")
    assert row.value == "“<i>⏎”"
    assert row.note == f"-2.00 ± {bar} thousandths of a nat per step, 25% of what all tokens take, as in a[<i>]b"
    assert row.see == ("Which tokens change entropy", "#tokens")
    assert '<a class="see" href="#tokens">' in page
    assert '<div id="tokens">' in page


def test_where_every_tokens_interval_contains_0_none_is_named(tmp_path: Path) -> None:
    detail = {"text": "x", "example": "", "share_of_tokens": 0.1, "whole": -8e-3, "whole_stderr": 1e-3,
              "measured_steps": 3}  # fmt: skip
    top = Estimate(-1e-4, 1e-4, 8, detail=detail)
    folder = log_run(tmp_path, 3, {"top_token/1/mean_delta_h": lambda step: top})
    (row,) = (row for row in summarize(read_run(folder)) if row.label == "token that surely takes most")
    assert (row.value, row.note) == ("none stands out", "the interval of every token contains 0 (measured steps: 3)")
