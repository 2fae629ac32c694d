"""Claims on "What stands out": which records give which line, with which evidence, and which similar records give none.

LOGGED is a healthy step of 16 prompts × 8 responses. Each case changes what its fault would change.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from logged_runs import Curve, log_run, noisy

from rl_training import Estimate
from rl_training.records.report import print_summary, write_report
from rl_training.records.report.opening import opening
from rl_training.records.report.set_up import SetUp, set_up_of
from rl_training.records.report.standing_out import shown, standing_out
from rl_training.records.report.standing_out.finding import Finding
from rl_training.records.report.summary import summarize
from rl_training.records.report.wording import wording_of
from rl_training.records.report.wording.job import JobWording
from rl_training.records.report.wording.verl import VerlWording
from rl_training.records.table.reading import read_run
from rl_training.records.table.trends import share_of
from rl_training.records.writer import Records
from rl_training.step.residual import NOT_DRAWN


def findings(folder: Path, **logged: Any) -> dict[str, Finding]:
    return {finding.name: finding for finding in standing_out(read_run(log_run(folder, **logged)))}


def constant(value: float, error: float = 0.0, about: int = 0) -> Callable[[int], Estimate]:
    return lambda step: Estimate(value, error or 0.01 * abs(value), 20, about_step=step - about)


def rising(step: int) -> float:
    return 0.3 + 0.01 * step


def early(step: int) -> float:
    """Rise by .3, most of it in the first ten steps."""
    return 0.6 - 0.3 * math.exp(-step / 3)


EQUAL = {"reward": 0.0, "reward_std": 0.0, "frac_reward_zero_std": 1.0}
SMALL_KL = {"measured/kl": constant(1e-10, about=1), "measured/delta_reward": constant(0.0, 0.01, about=1)}
SCALE = {f"gns/batch_ratio{end}": constant(value) for end, value in (("", 0.05), ("_low", 0.02), ("_high", 0.1))}
STALE = {"sampler/kl": constant(0.05), "sampler/ess": constant(0.4), "sampler/mean_ratio": constant(1.0)}
CUT = {"sampler/kl": constant(0.05), "sampler/ess": constant(0.95), "sampler/mean_ratio": constant(0.8)}
# Noticed from step 9 on.
NOT_ITS_OWN = {
    "sampler/residual": lambda step: Estimate(-0.05, 0.02, 800, NOT_DRAWN if step >= 9 else ""),
    "sampler/residual_run": lambda step: Estimate(-0.5 * step, reason=NOT_DRAWN if step >= 9 else "no error bar"),
}
# Step 19 breaks the policy: afterwards no response earns a reward, and all are equal.
BROKEN: dict[str, Any] = {
    "reward": lambda step: 0.83 if step < 20 else 0.0,
    "reward_std": lambda step: 0.4 * (step < 20),
    "frac_reward_zero_std": lambda step: 0.1 if step < 20 else 1.0,
    "entropy": lambda step: 0.5 if step < 20 else 2.0,
    "estimates": {
        "measured/kl": lambda step: Estimate(
            1.7 if step == 20 else 1e-4, 0.9 if step == 20 else 1e-5, 8, about_step=step - 1
        ),
        "measured/ess": lambda step: Estimate(0.11 if step == 20 else 0.99, about_step=step - 1),
    },
}
HEAVY: dict[str, Any] = {"settings": {"weight_decay": 300.0}}
DECAY = {
    f"delta_h/part/{part}": constant(value)
    for part, value in (("decay", -0.02), ("momentum", 1e-3), ("gradient", 1e-3))
}
FAR = {"measured/kl": constant(0.1, about=1), "measured/ess": constant(0.6, about=1)}
# What the steps are measured to have done: to the paid reward, and to one that is only watched.
PAID = {"measured/cumulative_reward": lambda step: Estimate(0.01 * step, 0.01, 20)}
HACK = {**PAID, "measured/cumulative_reward/gold": lambda step: Estimate(-0.005 * step, 0.02, 20)}
PLANTED: dict[str, tuple[str, dict[str, Any], str]] = {
    "equal rewards": ("equal", EQUAL, "Every response earns the same reward, 0: all advantages are 0."),
    "equal rewards, and most cut off": (
        "equal", {**EQUAL, "completions__clipped_ratio": 0.9}, "of the responses are cut off at the maximum length.",
    ),
    "all learned, and some cut off": (
        "equal",
        {
            "reward": lambda step: min(1.0, 0.4 + 0.02 * step), "reward_std": lambda step: 0.5 if step < 30 else 0.0,
            "frac_reward_zero_std": lambda step: 0.0 if step < 30 else 1.0, "completions__clipped_ratio": 0.3,
        },
        "No step had a higher one: nothing is left to learn here.",
    ),
    "few mixed prompts": (
        "unmixed", {"frac_reward_zero_std": 0.96875}, "Only 3.1% (1% … 7.1%) of the prompts have",
    ),
    "most cut off": ("cut_off", {"completions__clipped_ratio": noisy(lambda step: 0.7, 0.05)}, "cut off at 64 tokens"),
    "no end": ("endless", {"completions__clipped_ratio": 1.0}, "0% (0% … 0.29%) of them end by themselves"),
    "a sampler's own temperature": (
        "sampler", {"settings": {"generation_kwargs": {"temperature": 0.5}}}, "sampled at temperature 0.5",
    ),
    "a cut distribution": ("sampler", {"settings": {"top_p": 0.9}}, "sampled with top_p=0.9"),
    "a cut distribution that nobody has set": ("sampler", {"estimates": CUT}, "The sampler leaves tokens out"),
    "old weights": ("sampler", {"estimates": STALE}, "Importance weights leave 0.4 "),
    "forced tokens": ("sampler", {"estimates": NOT_ITS_OWN}, "is -0.050 ± 0.039 nats at step 40, and its sum over the"),
    "no KL": ("no_step", {"estimates": SMALL_KL}, "The learning rate is 0.0001"),
    "rounding": ("no_step", {"estimates": {"update/surviving_share": constant(0.03)}}, "leaves 0.03 of a step"),
    "no rate": ("no_step", {"learning_rate": 0.0}, "The learning rate is 0 (steps 31–40)"),
    "one far step that broke the policy": (
        "large_step", BROKEN, "step 19 moved the policy by 1.7 nats per token (KL, with an entropy of 0.5), and reward",
    ),
    "decay": ("decay", {**HEAVY, "estimates": DECAY}, "has taken 70% of the weights, and moves entropy by -20 "),
    "decay that no probe has measured": ("decay", HEAVY, "has taken 70% of the weights."),
    "rewards that are no numbers": (
        "nan", {**EQUAL, "rewards__right__mean": float("nan")}, "The reward function `right` is nan, not a number",
    ),
    "a reward that is watched falls": (
        "loophole", {"rewards__gold__std": 0.5, "estimates": HACK}, "lower `gold`, by 0.200 ± 0.042 (measured up to",
    ),
    "far steps": ("large_step", {"estimates": FAR}, "of them moved the policy by more than 0.1 of its entropy"),
    "noise": ("noise", {"estimates": SCALE, "reward": noisy(lambda step: 0.5, 0.03)}, "0.02 to 0.1 of the gradient's"),
    "beta": ("reference", {"settings": {"beta": 5.0}}, "with beta=5 reward can gain some 0.1 in all"),
    "bonus": (
        "bonus", {"settings": {"entropy_coef": 0.5}, "entropy": noisy(rising, 0.01)}, "with entropy_coef=0.5",
    ),
}  # fmt: skip


@pytest.mark.parametrize("planted", PLANTED)
def test_a_planted_anomaly_gives_its_line_and_no_other(tmp_path: Path, planted: str) -> None:
    name, logged, evidence = PLANTED[planted]
    by_rule = findings(tmp_path, **logged)
    assert [*by_rule] == [name]
    assert evidence in by_rule[name].evidence


@pytest.mark.parametrize(
    ("weights", "then"),
    [([1.0, 0.0], "Then pay for it, or stop."), ([1.0, 0.2], "Then correct what pays"), (None, "Then correct what")],
)
def test_only_a_reward_that_is_known_to_be_unpaid_is_advised_to_be_paid(
    tmp_path: Path, weights: list[float] | None, then: str
) -> None:
    logged = {"rewards__right__mean": 0.5, "rewards__right__std": 0.5, "rewards__gold__mean": 0.5,
              "rewards__gold__std": 0.5}  # fmt: skip
    by_rule = findings(tmp_path, settings={"reward_weights": weights}, estimates=HACK, **logged)
    assert then in by_rule["loophole"].advice.text


NEAR: dict[str, dict[str, Any]] = {
    "a watched reward that rises": {
        "estimates": {**PAID, "measured/cumulative_reward/gold": lambda step: Estimate(0.005 * step, 0.02, 20)}
    },
    "a watched reward that falls by less than matters": {
        "rewards__gold__std": 0.5,
        "estimates": {**PAID, "measured/cumulative_reward/gold": lambda step: Estimate(-0.029, 0.001, 20)},
    },
    "a watched reward that falls by less than its error": {
        "rewards__gold__std": 0.5,
        "estimates": {**PAID, "measured/cumulative_reward/gold": lambda step: Estimate(-0.1, 0.05, 20)},
    },
    "a watched reward that falls together with the paid one": {
        "rewards__gold__std": 0.5,
        "estimates": {**HACK, "measured/cumulative_reward": lambda step: Estimate(-0.01 * step, 0.01, 20)},
    },
    "a watched reward that falls while the paid one may not have risen": {
        "rewards__gold__std": 0.5, "estimates": {
            **HACK, "measured/cumulative_reward": lambda step: Estimate(0.06, 0.1, 8)},
    },
    "a penalty that is incurred more": {
        "rewards__gold__mean": -0.76, "rewards__gold__std": 0.11, "estimates": HACK,
    },
    "two steps of equal rewards": {"reward_std": lambda step: 0.0 if step > 38 else 0.5},
    "a tenth of mixed prompts": {"frac_reward_zero_std": 0.85},
    "half cut off": {"completions__clipped_ratio": noisy(lambda step: 0.5, 0.05)},
    "a temperature that both have": {"settings": {"temperature": 0.5, "generation_kwargs": {"temperature": 0.5}}},
    "a sampler a rollout behind": {"estimates": {**STALE, "sampler/ess": constant(0.95)}},
    "tokens that the policy drew": {"estimates": {"sampler/residual": constant(-0.05, 0.02)}},
    "small steps that learn": {"estimates": {"measured/kl": constant(1e-4, about=1)}},
    "a small batch that learns": {"estimates": SCALE, "reward": noisy(rising, 0.03)},
    "an ordinary weight decay": {"settings": {"weight_decay": 0.1}, "estimates": {
        name: constant(0.1 * estimate(1).value) for name, estimate in DECAY.items()}},
    "a small beta": {"settings": {"beta": 0.04}},
    "a bonus beside rising reward": {
        "settings": {"entropy_coef": 0.5}, "entropy": noisy(rising, 0.01), "reward": noisy(rising, 0.03, 1),
    },
    "a bonus beside a reward that rose early": {
        "settings": {"entropy_coef": 0.01}, "entropy": noisy(lambda step: 0.5 + 0.006 * step, 0.02, 50),
        "reward": noisy(early, 0.03, 5),
    },
    "length and reward that rise apart": {
        "reward": noisy(rising, 0.03), "completions__mean_length": noisy(lambda step: 20 + step, 1.0, 1),
    },
    "a jump that the step has made": {
        "reward": lambda step: 0.2 if step < 20 else 0.8,
        "estimates": {"measured/delta_reward": lambda step: Estimate(0.6 if step == 20 else 0.0, 0.02, 8)},
    },
}  # fmt: skip


@pytest.mark.parametrize("near", NEAR)
def test_values_near_an_anomaly_give_no_line(tmp_path: Path, near: str) -> None:
    assert not findings(tmp_path, **NEAR[near])


@pytest.mark.parametrize(("rate", "names"), [(1e-5, []), (0.0, ["no_step"])])
def test_the_learning_rate_that_a_loop_logs_is_no_fault_unless_it_is_0(tmp_path, rate, names) -> None:
    """A loop, or verl, does not record the rate that was asked for."""
    folder = log_run(tmp_path, learning_rate=rate)
    settings = {"sequences_per_step": 128, "responses_per_prompt": 8}
    (folder / "logs" / "settings.json").write_text(json.dumps(settings))
    run = read_run(folder)
    assert set_up_of(run).kind == "loop"
    assert [finding.name for finding in standing_out(run)] == names


def test_a_warm_up_that_goes_on_is_named_with_a_shorter_one(tmp_path: Path) -> None:
    """Of 400 steps: a warm-up of 10⁶, or of nine tenths; one of a tenth ends soon. Also where the rate is next to 0."""
    still = {"estimates": SMALL_KL, "learning_rate": lambda step: 1e-9 * step}
    for warm_up, advised in (
        ({"warmup_steps": 1_000_000}, "Setting: GRPOConfig(warmup_steps=40)."),
        ({"warmup_steps": 0.9}, "Setting: GRPOConfig(warmup_steps=40)."),
        ({"warmup_ratio": 0.9}, "Setting: GRPOConfig(warmup_steps=40)."),
        ({"warmup_steps": 41}, "Wait until step 41, where the warm-up ends."),
    ):
        settings = {"max_steps": 410 if warm_up.get("warmup_steps") == 41 else 400, **warm_up}
        (finding,) = findings(tmp_path / str(warm_up), settings=settings, **still).values()
        assert (finding.name, finding.advice.text) == ("no_step", advised)
        assert "The warm-up takes " in finding.evidence
        assert finding.proposal.target == "warmup_steps"
    never = {"settings": {"warmup_steps": 10**9, "max_steps": 400}, "learning_rate": 1e-13}
    assert findings(tmp_path / "never", **never)["no_step"].proposal.text == "GRPOConfig(warmup_steps=40)"


def test_a_sampler_that_drifts_away_is_not_said_to_leave_tokens_out(tmp_path: Path) -> None:
    """Its mean ratio falls below 1, as that of a truncated sampler is, but was 1 at first; and KL grows."""
    drift = {
        "sampler/kl": lambda step: Estimate(1e-3 * step, 1e-4, 20),
        "sampler/ess": lambda step: Estimate(max(1 - 0.03 * step, 0.1), 0.05, 20),
        "sampler/mean_ratio": lambda step: Estimate(1.0 if step < 10 else 0.7, 0.05, 20),
    }
    finding = findings(tmp_path / "drift", estimates=drift)["sampler"]
    assert finding.evidence.startswith("The sampler drifts away from the policy that is trained: 0.0355 ± ")
    assert "steps 31–40, from 0.001 at first." in finding.evidence
    assert finding.proposal.text == "weights copied to the sampler more often"
    again = findings(tmp_path / "again", estimates=drift, settings={"num_iterations": 4})["sampler"]
    assert again.proposal.text == "GRPOConfig(num_iterations=1)"
    cut = {**drift, "sampler/mean_ratio": constant(0.7)}
    assert "leaves tokens out" in findings(tmp_path / "cut", estimates=cut)["sampler"].evidence


def test_a_samplers_own_setting_is_corrected_where_it_was_set(tmp_path: Path) -> None:
    """As the reason for missing predictions says; other fields of generation_kwargs stay."""
    own = {"settings": {"generation_kwargs": {"temperature": 0.5, "repetition_penalty": 1.1}}}
    told = findings(tmp_path / "temperature", **own)["sampler"].proposal.text
    assert told == "GRPOConfig(generation_kwargs={'temperature': 1.0, 'repetition_penalty': 1.1})"
    both = {"settings": {"top_k": 5, "generation_kwargs": {"top_p": 0.7}}}
    told = findings(tmp_path / "both", **both)["sampler"].proposal.text
    assert told == "GRPOConfig(top_k=0, generation_kwargs={'top_p': 1.0})"
    job = JobWording(SetUp("job", {"trainer": {"generation_kwargs": {"top_p": 0.7}}}))
    assert job.sample_with(top_p=1.0, top_k=0).text == "trainer.top_k=0 trainer.generation_kwargs.top_p=1.0"


def test_a_rate_of_0_or_nan_rewards_from_the_start_are_the_verdict(tmp_path: Path) -> None:
    still = opening(read_run(log_run(tmp_path / "rate", 5, learning_rate=0.0)))
    assert (still.headline, still.findings) == ("Nothing is trained", [])
    assert "nothing to do" not in still.advice.text
    missing = opening(read_run(log_run(tmp_path / "nan", 5, **EQUAL, rewards__right__mean=float("nan"))))
    assert missing.headline == "Nothing has been learned from rewards"
    assert missing.advice.text == "Correct what right returns."


def test_a_reward_jump_not_caused_by_a_step_is_dated(tmp_path: Path) -> None:
    measured = {"measured/delta_reward": constant(0.001, 0.02, about=1)}
    by_rule = findings(tmp_path, estimates=measured, reward=lambda step: 0.8 if step < 20 else 0.2)
    assert by_rule["jump"].since == 20
    assert by_rule["jump"].evidence.startswith(
        "Reward jumped from 0.800 (steps 16–19) to 0.200 (steps 20–22): 0.600 ± "
    )
    assert "was measured to change it by +0.001 ± 0.042." in by_rule["jump"].evidence


def test_a_jump_is_looked_for_in_a_long_run_without_a_second_for_each_thousand_steps(tmp_path: Path) -> None:
    scatter = np.random.default_rng(0).normal(0.5, 0.05, 5000).tolist()
    run = log_run(tmp_path, 1)
    lines = [json.dumps({"step": step, "reward": reward, "reward_std": 0.5}) for step, reward in enumerate(scatter, 1)]
    (run / "logs" / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    read = read_run(run)
    began = time.process_time()
    assert not standing_out(read)
    assert time.process_time() - began < 1.5


def test_a_reward_that_differs_across_a_gap_in_the_records_has_not_jumped(tmp_path: Path) -> None:
    """What twenty steps did that nobody has seen is not known by the last of them."""
    measured = {"measured/delta_reward": constant(0.001, 0.02, about=1)}
    run = log_run(tmp_path, estimates=measured, reward=lambda step: 0.8 if step < 20 else 0.2)
    log = run / "logs" / "metrics.jsonl"
    lines = log.read_text().splitlines(keepends=True)
    log.write_text("".join(lines[:14] + lines[24:]))
    assert "jump" not in {finding.name for finding in standing_out(read_run(run))}


def test_steps_whose_rewards_are_all_the_same_do_not_make_those_of_others_less_noisy(tmp_path: Path) -> None:
    """Before a service goes down at step 60, each is the mean of 16 prompts × 8 responses, drawn once."""
    drawn = [24, 34, 38, 41, 23, 29, 30, 16, 36, 26, 29, 31, 39, 16, 46, 20, 27, 31, 42, 31, 17, 42, 32, 45, 47, 20, 36,
             54, 25, 41, 51, 52, 45, 52, 19, 30, 38, 34, 38, 41, 29, 30, 28, 43, 42, 39, 40, 27, 30, 41, 31, 38, 41, 26,
             35, 57, 27, 44, 28]  # fmt: skip
    by_rule = findings(
        tmp_path, steps=100, estimates={"measured/delta_reward": constant(0.001, 0.001, about=1)},
        reward=lambda step: drawn[step - 1] / 100 if step < 60 else 0.0, reward_std=lambda step: 0.25 * (step < 60),
        frac_reward_zero_std=lambda step: 0.25 if step < 60 else 1.0,
    )  # fmt: skip
    assert by_rule["equal"].proposal.text.startswith("look at responses")  # and not for easier prompts
    assert {finding.since for finding in by_rule.values()} == {60}


@pytest.mark.parametrize("since", [1, 21])
def test_an_infinite_reward_is_no_number_either(tmp_path: Path, since: int) -> None:
    """As the log of 0 gives, whose advantages are nan."""
    infinite = lambda step: -math.inf if step >= since else 0.5  # noqa: E731
    finding = findings(tmp_path, reward=infinite, rewards__right__mean=infinite)["nan"]
    assert finding.since == since
    assert finding.evidence.startswith("The reward function `right` is nan or infinite")


def test_a_too_large_step_is_dated_by_the_step_that_made_it(tmp_path: Path) -> None:
    """The KL measured at step 8 is that of step 7."""
    far = {"measured/kl": lambda step: Estimate(2.0 if step == 8 else 1e-4, 1e-5, 8, about_step=step - 1)}
    finding = findings(tmp_path, estimates=far)["large_step"]
    assert finding.since == 7
    assert finding.evidence.startswith("A step is too large: step 7 moved the policy by 2.000")


@pytest.mark.parametrize("curve", [rising, early])
def test_a_length_that_moves_with_the_reward_is_reported(tmp_path: Path, curve: Curve) -> None:
    """Whether both rise all the time or level off after ten steps; the length by 40 tokens for a reward of 1."""
    together = noisy(curve, 0.03, 3)
    by_rule = findings(tmp_path, reward=together, completions__mean_length=lambda step: 10 + 40 * together(step))
    assert [*by_rule] == ["length"]
    assert "correlation 1.0" in by_rule["length"].evidence


def test_of_two_far_steps_the_one_that_moved_the_policy_far_more_is_named(tmp_path: Path) -> None:
    """Reward falls after the other one, step 19: by chance, or by what came before."""
    moved = {20: 0.08, 10: 2.0}
    estimates = {
        "measured/kl": lambda step: Estimate(moved.get(step, 1e-4), 1e-5, 8, about_step=step - 1),
        "measured/ess": constant(0.6, about=1),
    }
    told = findings(tmp_path / "two", **{**BROKEN, "entropy": 0.5, "estimates": estimates})
    assert told["large_step"].since == 9
    del moved[10]
    assert findings(tmp_path / "one", **{**BROKEN, "entropy": 0.5, "estimates": estimates})["large_step"].since == 19


def test_a_lost_reward_with_changed_entropy_is_a_large_step_where_no_kl_is_recorded(tmp_path: Path) -> None:
    gone = {"reward": noisy(lambda step: 0.5 if step < 5 else 0.05, 0.01)}
    by_rule = findings(tmp_path / "both", entropy=lambda step: 0.2 if step < 5 else 0.9, **gone)
    assert (by_rule["large_step"].since, [*findings(tmp_path / "reward alone", **gone)]) == (4, [])


def test_steps_that_are_lost_are_advised_on_before_a_sampler_that_is_off(tmp_path: Path) -> None:
    """Though the sampler's line is shown first: whatever draws the responses, nothing is learned from them."""
    lost = {"update/surviving_share": constant(0.03)}
    run = read_run(
        log_run(tmp_path, settings={"top_p": 0.7}, estimates=lost, reward=noisy(lambda step: 0.5, 0.02),
                entropy=noisy(lambda step: 0.5, 0.01, 2))
    )  # fmt: skip
    assert [finding.name for finding in standing_out(run)] == ["sampler", "no_step"]
    first = opening(run)
    assert first.kind == "flat"
    assert first.advice.text.startswith("To change first: weights in float32")


def test_at_most_three_lines_are_shown_with_explanatory_ones_first(tmp_path: Path) -> None:
    everything = {**FAR, **SCALE, **STALE}
    by_rule = findings(tmp_path, estimates=everything, completions__clipped_ratio=1.0, settings={"beta": 9.0}, **EQUAL)
    assert len(by_rule) > 3
    assert [finding.name for finding in shown([*by_rule.values()])] == ["large_step", "equal", "endless"]


def test_the_first_cause_is_advised_on_shown_and_known_to_the_table_whatever_else_stands_out(tmp_path: Path) -> None:
    """Though three lines come before the one that weights lose the steps."""
    scale = {"batch_ratio": 1.0, "batch_ratio_low": 0.8, "batch_ratio_high": 1.2, "noise_scale_prompts": 16.0,
             "noise_scale_prompts_low": 13.0, "noise_scale_prompts_high": 20.0}  # fmt: skip
    estimates = {"update/surviving_share": constant(0.03)}
    estimates |= {f"gns/{name}": constant(value) for name, value in scale.items()}
    run = read_run(
        log_run(tmp_path, settings={"top_p": 0.7}, estimates=estimates, completions__clipped_ratio=0.9,
                frac_reward_zero_std=0.96875, reward=noisy(lambda step: 0.5, 0.02),
                entropy=noisy(lambda step: 0.5, 0.01, 2))
    )  # fmt: skip
    assert [finding.name for finding in standing_out(run)] == ["cut_off", "unmixed", "sampler", "no_step"]
    first = opening(run)
    assert first.kind == "flat"
    assert first.advice.text.startswith("To change first: weights in float32")
    assert [finding.name for finding in first.findings] == ["cut_off", "unmixed", "no_step"]
    (note,) = [row.note for row in summarize(run) if row.label == "noise scale"]
    assert note.endswith("what the first lines say comes before the size of the batch")


def test_anomaly_lines_are_in_the_page_and_the_terminal(tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    run = read_run(log_run(tmp_path, completions__clipped_ratio=1.0))
    (finding,) = standing_out(run)
    page = write_report(run).read_text(encoding="utf-8")
    print_summary(run)
    assert finding.text in capsys.readouterr().out
    assert finding.evidence in page
    assert "What stands out</h2>" in page


def test_a_setting_is_named_in_the_syntax_of_the_trainer_in_use(tmp_path: Path) -> None:
    log_run(tmp_path)
    attached = wording_of(read_run(tmp_path))
    assert attached.fields(beta=0.1).text == "GRPOConfig(beta=0.1)"
    assert attached.larger_batch(4).text == "GRPOConfig(gradient_accumulation_steps=32)"
    assert attached.set_up.prompts == 16
    config = "made_by: trl\ntrainer: {num_generations: 8}\nmodel: {trained_parameters: 48}\n"
    (tmp_path / "config.yaml").write_text(f"batch: {{sequences_per_step: 256}}\n{config}")  # as attach writes it
    in_a_folder = wording_of(read_run(tmp_path))
    assert (in_a_folder.fields(beta=0.1).text, in_a_folder.set_up.trained_parameters) == ("GRPOConfig(beta=0.1)", 48)
    (tmp_path / "config.yaml").write_text(
        "made_by: job\nbatch: {sequences_per_step: 256}\ntrainer: {num_generations: 8}\n"
    )
    verl = VerlWording(SetUp("verl", {"optimizer": {"lr": 1e-5}}))
    assert verl.fields(beta=0.1).text == "actor_rollout_ref.actor.kl_loss_coef=0.1"
    assert verl.bounded_step().text == "actor_rollout_ref.actor.optim.lr=3.3e-06"
    job = wording_of(read_run(tmp_path))
    assert (job.fields(beta=0.1).text, job.larger_batch(4).text) == (
        "trainer.beta=0.1",
        "batch.sequences_per_step=1024",
    )
    assert job.bounded_step().text == "trainer.target_kl_share=auto"
    assert job.set_up.prompts == 32


@pytest.mark.parametrize(("correlation", "named"), [(0.0, True), (0.3, False)])
def test_rewards_that_differ_within_prompts_as_if_by_lot_are_named_before_a_larger_batch(
    tmp_path: Path, correlation: float, named: bool
) -> None:
    """Of 16 prompts × 8 responses at reward ½, .7 % have equal rewards by lot, 9 % if the correlation is .3."""
    draw = np.random.default_rng(0)
    a = 0.5 * (1 / correlation - 1) if correlation else math.inf
    chances = draw.beta(a, a, (41, 16)) if correlation else np.full((41, 16), 0.5)
    right = draw.binomial(8, chances)
    (finding,) = findings(tmp_path, estimates=SCALE, reward=lambda step: right[step].mean() / 8,
                    frac_reward_zero_std=lambda step: np.isin(right[step], (0, 8)).mean()).values()  # fmt: skip
    assert finding.name == "noise"
    assert ("order of the completions" in finding.advice.text) == named


def test_a_share_has_the_interval_of_clopper_and_pearson() -> None:
    """Compared with scipy's binomial test."""
    from scipy.stats import binomtest

    for part, whole in ((0, 10), (3, 10), (160, 160)):
        low, high = binomtest(part, whole).proportion_ci(method="exact")
        assert share_of(part, whole).bounds() == pytest.approx((low, high))


@pytest.mark.parametrize(
    ("steps", "cut_off", "change"),
    [
        (1, 0.8, "To change: GRPOConfig(max_completion_length=128)."),
        (
            40, 0.0, "Read responses: if some are right, correct the reward function, which gives all of them the "
            "same; if none is, give easier prompts, or a reward for a part of the task.",
        ),
    ],
)  # fmt: skip
def test_a_report_of_always_equal_rewards_opens_with_that(
    tmp_path: Path, steps: int, cut_off: float, change: str
) -> None:
    run = read_run(log_run(tmp_path, steps, **EQUAL, completions__clipped_ratio=cut_off))
    first = opening(run)
    assert (first.headline, first.findings) == ("Nothing has been learned from rewards", [])
    assert first.evidence.startswith("Every response earns the same reward, 0: all advantages are 0.")
    assert first.advice.text == change


def test_a_report_of_rewards_that_became_equal_opens_with_entropy(tmp_path: Path) -> None:
    def later(step: int) -> float:
        return float(step > 30)

    logged = {"reward": 0.0, "reward_std": lambda step: 1.0 - later(step), "frac_reward_zero_std": later}
    first = opening(read_run(log_run(tmp_path, **logged)))
    assert first.findings[0].name == "equal"
    assert first.headline == "Reward has hardly risen"


def test_the_change_of_many_steps_is_not_taken_for_that_of_one(tmp_path: Path) -> None:
    """Measured at every fourth step, all four together: a KL of .12 at an entropy of .5 is far for one step alone."""
    together = {
        "measured/kl": lambda step: Estimate(0.12 if step % 4 == 1 else math.nan, 0.005, 8, "not yet", step - 1),
        "measured/ess": lambda step: Estimate(0.8, 0.01, 8, about_step=step - 1),
        "measured/delta_reward": lambda step: Estimate(0.001, 0.02, 8, about_step=step - 1),
    }
    for span, names in ((4, []), (1, ["large_step"])):
        spanned = {**together, "measured/steps": lambda step, span=span: Estimate(span, num_samples=8, reason="exact")}
        by_rule = findings(tmp_path / str(span), estimates=spanned, reward=noisy(lambda step: 0.5, 0.02))
        assert [*by_rule] == names, span
    spanned = {**together, "measured/steps": lambda step: Estimate(4, num_samples=8, reason="exact")}
    jumped = findings(tmp_path / "jump", estimates=spanned, reward=lambda step: 0.8 if step < 20 else 0.2)
    assert "jump" not in jumped


@pytest.mark.parametrize("spread", [0.4, math.nan])
def test_jumps_and_falls_are_told_without_a_logged_spread_of_rewards(tmp_path: Path, spread: float) -> None:
    jumped = noisy(lambda step: 0.2 if step < 20 else 0.9, 0.01)
    assert "jump" in findings(tmp_path / "jump", reward=jumped, reward_std=spread, estimates=SMALL_KL)
    fallen = noisy(lambda step: 0.8 if step < 20 else 0.1, 0.01)
    lost = findings(tmp_path / "fall", reward=fallen, reward_std=spread, entropy=lambda step: 0.5 if step < 20 else 2.0)
    assert "large_step" in lost
    steady = findings(tmp_path / "steady", reward=noisy(lambda step: 0.5, 0.01), reward_std=spread, estimates=SMALL_KL)
    assert not {"jump", "large_step"} & {*steady}


def test_the_share_that_decay_takes_does_not_depend_on_how_often_the_rate_is_logged(tmp_path: Path) -> None:
    """As under `attach`, where each step has a line and TRL logs at every tenth: 1 − exp(−.1 · 400 · .01) is 33%."""
    for every in (1, 10):
        folder = tmp_path / str(every)
        records = Records(folder / "logs")
        records.start(0, {"trainer": {"class": "GRPOTrainer", "weight_decay": 0.1}})
        for step in range(1, 401):
            rate = {"learning_rate": 1e-2} if step % every == 0 else {}
            records.write_metrics(step, {"reward": 0.5, "entropy": 1.0, **rate})
        [finding] = standing_out(read_run(folder))
        assert (finding.name, "has taken 33% of the weights" in finding.evidence) == ("decay", True)
