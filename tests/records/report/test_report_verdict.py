"""Claims on the first lines of a report: when entropy is spent, lost, steady or unknown, and the advice for each case.

The runs are curves with known noise: its standard deviation per step is .01 nats for entropy and .03 for reward.
"""

from __future__ import annotations

import math
import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from logged_runs import Curve, log_run, noisy

from rl_training import Estimate
from rl_training.records.pages.writing import plus_minus
from rl_training.records.report.advice import ACTIONS
from rl_training.records.report.opening import opening
from rl_training.records.report.story import Story
from rl_training.records.report.story.curves import Reward
from rl_training.records.report.story.reward_functions import highest_reward
from rl_training.records.report.verdict import STATES, Verdict, judge
from rl_training.records.report.verdict.kinds import (
    ERUPTS,
    FALLEN,
    FLAT,
    FLAT_FALLING,
    GONE,
    HELD_OUT,
    LEARNED,
    LOST,
    PART,
    RISES,
    SOLVED,
    SPENT,
    STEADY,
    UNKNOWN,
    Kind,
)
from rl_training.records.table.rates import entropy_now, forward_and_backward, is_falling
from rl_training.records.table.reading import read_run
from rl_training.records.table.trends import MIN_STEPS, line_through
from rl_training.records.writer import Records
from rl_training.statistics.line import slope_with_error
from rl_training.statistics.welch import is_significant


def verdict(folder: Path, entropy: Curve, reward: Curve, steps: int = 40, **curves: Curve) -> Verdict:
    """Return the verdict on these curves with noise of 3 % and of .03."""
    noise = noisy(lambda step: 1.0, 0.03, 1)
    rewards = noisy(reward, 0.03, 2)
    run = log_run(
        folder, steps, entropy=lambda step: entropy(step) * noise(step),
        reward=lambda step: min(max(rewards(step), 0.0), 1.0), **curves,
    )  # fmt: skip
    return judge(read_run(run))


def falling(step: int) -> float:
    return 0.5 * 0.97**step


def rising(step: int) -> float:
    return 0.3 + 0.01 * step


def level(step: int) -> float:
    return 0.5


def after(first: int, before: float, later: float) -> Curve:
    return lambda step: later if step >= first else before


def in_teeth(middle: float, height: float) -> Curve:
    return lambda step: middle + height * ((step % 10) / 10 - 0.5)


CASES: dict[str, tuple[Kind, Curve, Curve]] = {
    "reward falls slowly": (FALLEN, level, lambda step: 0.6 - 0.01 * step),
    "reward falls, and entropy with it": (FALLEN, falling, lambda step: 0.6 - 0.01 * step),
    "reward falls, and entropy rises": (FALLEN, lambda step: 0.3 + 0.02 * step, lambda step: 0.6 - 0.01 * step),
    "reward breaks down late": (FALLEN, level, after(35, 0.6, 0.2)),
    "reward comes back to where it was": (FALLEN, level, lambda step: 0.3 + 0.02 * min(step, 40 - step)),
    "entropy is gone and reward has fallen": (FALLEN, after(20, 1.0, 0.01), after(20, 0.6, 0.0)),
    "entropy is gone and has bought nothing": (GONE, after(10, 1.0, 0.02), level),
    "entropy was gone in the first steps": (GONE, after(4, 1.0, 0.02), level),
    "entropy is nearly gone, reward is at its ceiling": (
        LEARNED, lambda step: 0.4 * 0.85**step + 0.001, lambda step: 0.98 - 0.5 * 0.85**step,
    ),
    "reward is at its ceiling": (LEARNED, lambda step: 0.1 + 0.2 * 0.9**step, lambda step: 0.9 - 0.4 * 0.85**step),
    "entropy falls, reward rises": (SPENT, falling, rising),
    "entropy falls, reward stands": (LOST, falling, level),
    "entropy falls, reward rose and stands": (LOST, falling, lambda step: 0.3 + 0.02 * min(step, 10)),
    "two thirds are lost, and no more": (LOST, after(10, 1.0, 0.3), level),
    "entropy stands, reward rises": (STEADY, level, rising),
    "entropy stands, reward rose and stands": (STEADY, level, lambda step: 0.3 + 0.02 * min(step, 10)),
    "both stand": (FLAT, level, level),
    "entropy in teeth, reward stands": (FLAT, in_teeth(0.5, 0.1), level),
    "reward in teeth": (FLAT, level, lambda step: in_teeth(0.4, 0.15)(step + 5)),
    "both rise": (RISES, lambda step: 0.3 + 0.005 * step, rising),
    "entropy rises, reward rose and stands": (
        RISES, lambda step: 0.3 + 0.005 * step, lambda step: 0.3 + 0.02 * min(step, 10),
    ),
    "entropy rises, reward stands": (FLAT, lambda step: 0.3 + 0.005 * step, level),
    "reward is at its ceiling from the first step": (SOLVED, level, lambda step: 0.95),
    "entropy trebles, reward stands": (ERUPTS, lambda step: 0.3 + 0.015 * step, level),
    "entropy trebles, reward rose and stands": (
        ERUPTS, lambda step: 0.3 + 0.015 * step, lambda step: 0.3 + 0.02 * min(step, 10),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("steps", [40, 400])
def test_the_verdict_follows_the_entropy_and_reward_curves(tmp_path: Path, case: str, steps: int) -> None:
    """The same curves over ten times as many steps have the same verdict: what counts as now grows with the run."""
    kind, entropy, reward = CASES[case]
    scaled = steps // 40
    judged = verdict(tmp_path, lambda step: entropy(step // scaled), lambda step: reward(step // scaled), steps)
    assert judged.kind == kind, judged.sentence
    assert ("reward has not" in judged.headline) is ("trebles, reward stands" in case)


def test_a_rise_that_bought_nothing_does_not_excuse_an_entropy_that_is_gone_or_falls(tmp_path: Path) -> None:
    """Reward comes back to where it was, or gains a tenth of its standard deviation while 3 % of entropy are left."""
    dip = lambda step: 0.5 - 0.005 * min(step, 20) + 0.005 * max(step - 20, 0)  # noqa: E731
    quiet = {"reward": noisy(dip, 0.005, 2), "entropy": noisy(falling, 0.002, 1)}
    back = judge(read_run(log_run(tmp_path / "back", reward_std=0.5, **quiet)))
    assert story_of(back).rises
    assert back.kind not in (SPENT, STEADY), back.headline
    if back.kind == UNKNOWN:  # beside "now it rises"
        assert "whether that buys reward is not certain yet" in back.evidence
    slight = {"reward": noisy(lambda step: 0.45 + 0.0045 * max(step - 28, 0), 0.002, 2), "entropy": after(6, 1.0, 0.03)}
    gone = judge(read_run(log_run(tmp_path / "gone", reward_std=0.5, **slight)))
    assert story_of(gone).rises
    assert gone.kind == GONE, gone.headline
    assert "it bought next to nothing: reward 0.45 → 0.50" in gone.evidence
    assert gone.evidence.endswith("now it rises.")


def story_of(judged: Verdict) -> Reward:
    assert judged.story.reward is not None
    return judged.story.reward


def test_the_step_since_which_a_verdict_holds_is_that_of_the_change(tmp_path: Path) -> None:
    fallen = verdict(tmp_path / "fallen", level, after(25, 0.6, 0.2))
    gone = verdict(tmp_path / "gone", after(10, 1.0, 0.02), level)
    lost = verdict(tmp_path / "lost", lambda step: 0.5 * 0.98**step, lambda step: 0.1 + 0.02 * min(step, 30), steps=80)
    assert abs(fallen.since - 25) <= 1
    assert abs(gone.since - 10) <= 1
    assert 25 <= lost.since <= 33
    rose_first = verdict(tmp_path / "rose_first", lambda step: 0.2 + 0.02 * min(step, 12) if step < 14 else 0.08, level)
    assert (rose_first.kind, abs(rose_first.since - 12) <= 2) == (LOST, True)
    assert f"Entropy has been lost since step {lost.since}" in lost.sentence


@pytest.mark.parametrize(
    ("kind", "curves"),
    [
        (HELD_OUT, {"eval_reward": noisy(lambda step: 0.6 - 0.01 * step, 0.03, 3)}),
        (PART, {"rewards__right__mean": noisy(lambda step: 0.4 - 0.008 * step, 0.03, 3),
                "rewards__form__mean": noisy(lambda step: 0.1 + 0.02 * step, 0.03, 4)}),
        (SPENT, {"eval_reward": noisy(lambda step: 0.3 + 0.003 * step, 0.03, 3)}),
        (SPENT, {"rewards__right__mean": noisy(lambda step: 0.4 + 0.004 * step, 0.03, 3),
                 "rewards__form__mean": noisy(lambda step: 0.1 + 0.02 * step, 0.03, 4)}),
    ],
)  # fmt: skip
def test_a_fall_of_held_out_reward_or_of_one_reward_function_counts_under_a_rising_mean(
    tmp_path: Path, kind: Kind, curves: dict[str, Curve]
) -> None:
    judged = verdict(tmp_path, falling, rising, **curves)
    assert judged.kind == kind
    if kind == PART:
        assert judged.headline == "The reward function right has fallen"
        assert "form rose" in judged.evidence


@pytest.mark.parametrize(("weights", "kind"), [([1.0, -0.5], SPENT), ([1.0, 0.0], PART), ([1.0, 0.5], PART)])
@pytest.mark.parametrize("recorded", [True, False])
def test_a_penalty_that_falls_is_no_fall_and_a_watched_reward_that_falls_is_one(
    tmp_path: Path, weights: list[float], kind: Kind, recorded: bool
) -> None:
    """Whether the run records the names of its functions, as an attached trainer does, or only logs them."""
    names = {"data": {"rewards": ["right", "long"]}} if recorded else {}
    folder = log_run(
        tmp_path, settings={"reward_weights": weights}, others=names,
        entropy=noisy(falling, 0.005, 1), reward=noisy(rising, 0.03, 2),
        rewards__right__mean=noisy(rising, 0.03, 3), rewards__long__mean=noisy(lambda step: 0.6 - 0.01 * step, 0.03, 4),
    )  # fmt: skip
    judged = judge(read_run(folder))
    assert judged.kind == kind, judged.headline
    if kind == PART:
        assert judged.headline == "The reward function long has fallen"


def test_a_function_without_a_positive_value_is_a_penalty_and_one_of_minus_one_and_one_is_not(tmp_path: Path) -> None:
    """A brevity penalty of −.76 ± .11, as −length/40 has, and the right answer as ±1, while the paid sum rises."""
    found = {}
    for name, start, spread in (("short", -0.76, 0.11), ("seldom", -0.2, 0.4), ("right", -0.2, 0.97)):
        folder = log_run(
            tmp_path / name, entropy=noisy(falling, 0.005, 1), reward=noisy(rising, 0.03, 2),
            settings={"reward_weights": [1.0, 0.5]},
            rewards__exact__mean=noisy(rising, 0.03, 3), rewards__exact__std=0.5, **{
                f"rewards__{name}__mean": noisy(lambda step, start=start: start - 0.01 * step, 0.002, 4),
                f"rewards__{name}__std": spread},
        )  # fmt: skip
        found[name] = judge(read_run(folder)).kind
    assert found == {"short": SPENT, "seldom": SPENT, "right": PART}


@pytest.mark.parametrize(("weight", "kind"), [(0.05, SPENT), (0.5, PART), (0.0, PART)])
def test_a_paid_function_whose_fall_costs_next_to_nothing_of_a_rising_sum_is_no_verdict(
    tmp_path: Path, weight: float, kind: Kind
) -> None:
    folder = log_run(
        tmp_path, settings={"reward_weights": [1.0, weight]}, entropy=noisy(falling, 0.005, 1),
        reward=noisy(rising, 0.03, 2), rewards__right__mean=noisy(rising, 0.03, 3),
        rewards__brief__mean=noisy(lambda step: 0.8 - 0.005 * step, 0.01, 4), rewards__brief__std=0.2,
    )  # fmt: skip
    assert judge(read_run(folder)).kind == kind


def test_a_steady_entropy_says_first_how_much_of_it_is_left(tmp_path: Path) -> None:
    """Of .5 nats a third, since a tenth of the run; never "steady" beside "is left"."""
    fallen = lambda step: 0.5 if step < 5 else 0.165  # noqa: E731
    judged = verdict(tmp_path / "rises", fallen, rising)
    assert judged.headline == "Reward rises, and entropy is steady now"
    assert re.match(r"at 3[234]% of its start: reward 0\.", judged.evidence)
    assert "is left" not in judged.evidence
    assert judged.evidence.endswith(" nats.")
    rose = lambda step: 0.3 + 0.02 * min(step, 10)  # noqa: E731
    whole = verdict(tmp_path / "whole", lambda step: 0.5 if step < 5 else 0.7, rose)
    assert whole.headline == "Entropy is steady now"
    assert re.match(r"at 1[34]\d% of its start: reward 0\.", whole.evidence)


# A run of 16 steps whose reward levels off: it lies between .81 and .93 from step 11 on.
LEVELLED = (
    0.25, 0.33, 0.39, 0.57, 0.56, 0.54, 0.65, 0.66, 0.75, 0.69, 0.82, 0.90, 0.84, 0.81, 0.93, 0.82,
)  # fmt: skip


def test_what_reward_does_now_is_said_of_the_last_quarter_or_the_steps_of_the_line_are_named(tmp_path: Path) -> None:
    """A line through all steps says nothing about now: in noise of .1, a quarter of 40 steps does not show the rise."""
    run = log_run(tmp_path / "levelled", 16, entropy=noisy(level, 0.01, 1), reward=lambda step: LEVELLED[step - 1])
    assert "now it rises" not in judge(read_run(run)).evidence
    steep = verdict(tmp_path / "steep", falling, lambda step: 0.2 + 0.015 * step)
    assert "now it rises" in steep.evidence
    wide = {"entropy": noisy(falling, 0.002, 1), "reward": noisy(lambda step: 0.3 + 0.008 * step, 0.1, 2)}
    assert "it rises over steps 1–40 as a whole" in judge(read_run(log_run(tmp_path / "wide", **wide))).evidence


def test_little_entropy_is_left_and_one_reward_cannot_show_a_hack_of_itself(tmp_path: Path) -> None:
    """Said of a run that has learned and of one that learns; not with a second function, and not with a third left."""
    solved = lambda step: 0.98 - 0.5 * 0.85**step  # noqa: E731
    gone, third = (lambda left: lambda step: 0.4 * (left + (1 - left) * 0.8**step))(0.08), lambda step: 0.4 * 0.97**step
    two = {f"rewards__{name}__mean": noisy(solved, 0.002, seed) for seed, name in enumerate(("right", "form"), 3)}
    said = "a hack of the only reward function would look the same"
    for name, entropy, others, expected in (
        ("one", gone, {}, True), ("two", gone, two, False), ("third", third, {}, False),
    ):  # fmt: skip
        run = log_run(tmp_path / name, entropy=noisy(entropy, 0.0005, 1), reward=noisy(solved, 0.002, 2), **others)
        first = opening(read_run(run))
        assert first.kind in (LEARNED.name, STEADY.name)
        assert first.advice.text.startswith("There is nothing to do: ")
        assert (said in first.advice.text) is expected, name
    learning = log_run(tmp_path / "learning", entropy=noisy(gone, 0.0005, 1), reward=noisy(rising, 0.002, 2))
    assert opening(read_run(learning)).kind == STEADY.name
    assert said in opening(read_run(learning)).advice.text


def test_a_run_that_is_learned_or_spent_has_nothing_to_do_and_every_bad_verdict_has_an_action(tmp_path: Path) -> None:
    idle = {LEARNED, SPENT, RISES, STEADY, UNKNOWN}
    kinds = {state.kind for state in STATES}
    assert idle == {kind for kind in kinds if kind.nothing_to_do} == kinds - {*ACTIONS}
    for name, (kind, entropy, reward) in CASES.items():
        folder = log_run(tmp_path / name, entropy=noisy(entropy, 0.002, 1), reward=noisy(reward, 0.01, 2))
        first = opening(read_run(folder))
        assert first.advice.text.startswith("There is nothing to do") == (kind not in ACTIONS), (name, first)
        if kind not in ACTIONS:
            assert judge(read_run(folder)).nothing_to_do in first.advice.text


def test_a_task_that_was_solved_from_the_first_step_is_not_called_learned(tmp_path: Path) -> None:
    """Whether every reward is 1, or a few are not; and equal rewards are then a consequence."""
    same = {"reward": 1.0, "reward_std": 0.0, "frac_reward_zero_std": 1.0}
    nearly = {"reward": noisy(lambda step: 0.99, 0.002, 2), "frac_reward_zero_std": 0.97}
    for name, curves in (("same", same), ("nearly", nearly)):
        first = opening(read_run(log_run(tmp_path / name, entropy=noisy(level, 0.01, 1), **curves)))
        assert first.headline == "Solved from the first step, if the reward is right"
        assert "prompts nearer to a reward of one half" in first.advice.text
        assert [finding.follows_from_verdict for finding in first.findings] == [True]
    assert "reward 1.00 → 1.00, now it is flat" in opening(read_run(tmp_path / "same")).evidence


def test_reward_of_two_scales_has_the_verdict_of_the_first_one(tmp_path: Path) -> None:
    """Another grader pays 1 from step 21 on; no step did that. Where reward only falls, that stays the verdict."""
    measured = {"measured/delta_reward": lambda step: Estimate(0.005, 0.01, 20, about_step=step - 1)}
    rise = noisy(lambda step: 0.3 + 0.01 * step if step < 21 else 0.97, 0.005, 2)
    first = opening(
        read_run(log_run(tmp_path / "up", estimates=measured, entropy=noisy(falling, 0.01, 1), reward=rise))
    )
    assert (first.kind, first.since, first.findings) == ("jump", 21, [])
    assert first.headline == "Reward cannot be compared across step 21"
    assert "Up to step 20: entropy is being spent on reward: reward 0.3" in first.evidence
    assert first.advice.text == "Find what changed at step 21: the reward function, its service or the data."
    down = opening(read_run(log_run(tmp_path / "down", estimates=measured, reward=after(21, 0.6, 0.1))))
    assert down.headline == "Reward has fallen"
    assert down.advice.text.startswith("To do first: find what changed at step 21")


@pytest.mark.parametrize(
    ("curves", "effect", "told"),
    [
        ({"reward": noisy(lambda step: 0.01, 0.002)}, None, "hardly any response earns a reward"),
        ({"frac_reward_zero_std": 0.8}, None, "only 20% of the prompts have responses with unequal rewards"),
        ({}, None, 'what a step does to reward. To measure it: probes=["simple", "measured"].'),
        ({}, 0.001, "add up to +0.0400 ± 0.0098. To change: GRPOConfig(learning_rate=0.0003)."),
        ({}, 0.0001, "add up to +0.0040 ± 0.0098. To change: GRPOConfig(gradient_accumulation_steps=16)."),
    ],
)  # fmt: skip
def test_a_reward_that_has_not_risen_names_what_to_look_at_first(
    tmp_path: Path, curves: dict[str, Curve | float], effect: float | None, told: str
) -> None:
    """From 20 steps on, and unless a line stands out, whose setting comes first."""
    flat = {"entropy": noisy(level, 0.01, 1), "reward": noisy(level, 0.03, 2), **curves}
    sums = {"measured/cumulative_reward": lambda step: Estimate((effect or 0) * step, 0.005, 1000)}
    run = read_run(log_run(tmp_path / "long", estimates=sums if effect else None, **flat))
    assert opening(run).headline == "Reward has hardly risen"
    assert opening(run).evidence.startswith("in 40 steps: 0.")
    assert told in opening(run).advice.text
    assert judge(run.until(19)).kind != FLAT
    cut = read_run(log_run(tmp_path / "cut", settings={"top_p": 0.7}, **flat))
    assert opening(cut).advice.text == "To change first: GRPOConfig(top_p=1.0)."


def test_a_long_run_has_a_verdict_whatever_its_noise_may_hide(tmp_path: Path) -> None:
    """Entropy scatters by half of its level, each step's with that of the step before. Reward has risen, or has not."""
    draw, deviations = np.random.default_rng(0), [0.0]
    for _ in range(400):
        deviations.append(0.6 * deviations[-1] + 0.8 * float(draw.normal()))
    wild = lambda step: 0.5 * float(np.exp(0.5 * deviations[step]))  # noqa: E731
    rose = noisy(lambda step: 0.3 + 0.002 * min(step, 100), 0.03, 2)
    steady = judge(read_run(log_run(tmp_path / "rose", 400, entropy=wild, reward=rose)))
    assert (steady.kind, "(noise could hide a change by" in steady.evidence) == (STEADY, True)
    assert steady.story.entropy.reach > 0.5
    assert judge(read_run(log_run(tmp_path / "stood", 400, entropy=wild, reward=noisy(level, 0.03, 2)))).kind == FLAT


def test_a_little_entropy_lost_while_reward_stands_is_told_once_the_run_is_long(tmp_path: Path) -> None:
    """8 %, in the second half: less than is called lost. After 40 steps it is not certain yet if that buys reward."""
    for steps, kind in ((40, UNKNOWN), (400, FLAT_FALLING)):
        slow = noisy(lambda step, steps=steps: 0.5 - 0.04 * max(2 * step / steps - 1, 0), 0.001, 1)
        run = log_run(tmp_path / str(steps), steps, entropy=slow, reward=noisy(level, 0.03, 2))
        assert judge(read_run(run)).kind == kind


def test_reward_that_fell_is_advised_to_go_back_before_the_fall_with_a_bounded_step(tmp_path: Path) -> None:
    folder = log_run(tmp_path, reward=noisy(after(25, 0.6, 0.2), 0.03, 2))
    for step in (10, 20, 30):
        (folder / "training_state" / f"checkpoint-{step}").mkdir(parents=True)
    assert opening(read_run(folder)).advice.text == (
        'To change: go back to checkpoint-20, and train on with attach(…, target_kl_share="auto").'
    )


def test_reward_that_fell_while_the_steps_raised_it_is_not_advised_to_go_back(tmp_path: Path) -> None:
    """As with prompts that grow harder; unless a line stands out, or some steps were not measured."""
    sums = {"measured/cumulative_reward": lambda step: Estimate(0.005 * step, 0.001 * step**0.5, 1000)}
    slow = noisy(lambda step: 0.7 - 0.01 * step, 0.03, 2)
    first = opening(read_run(log_run(tmp_path / "harder", estimates=sums, reward=slow)))
    assert first.headline == "Reward has fallen"
    assert first.advice.text == (
        f"To do first: find what has changed from about step {first.since} on: the data, the reward function or its "
        f"service. The steps since then were measured to raise reward, by {0.005 * (40 - first.since):.3f} ± 0.012."
    )
    lowering = {"measured/cumulative_reward": lambda step: Estimate(-0.005 * step, 0.001 * step**0.5, 1000)}
    some = {"measured/cumulative_reward": lambda step: Estimate(0.005 * step, 0.001 * step**0.5, 1000, "of some")}
    cut = {"settings": {"top_p": 0.7}, "estimates": sums}
    for name, others in (("lower", {"estimates": lowering}), ("some", {"estimates": some}), ("cut", cut)):
        told = opening(read_run(log_run(tmp_path / name, reward=slow, **others))).advice.text
        assert told.startswith("To change: go back to")


@pytest.mark.parametrize(
    ("estimates", "told"),
    [
        ({"kl": 0.05, "ess": 0.4, "mean_ratio": 1.0}, "weights copied to the sampler more often"),
        ({"kl": 0.05, "ess": 0.95, "mean_ratio": 0.8}, "an engine with top_p=1 and temperature 1, without top_k"),
    ],
)
def test_what_to_train_on_with_is_no_command_in_the_middle_of_a_sentence(tmp_path: Path, estimates, told: str) -> None:
    measured = {
        f"sampler/{name}": lambda step, value=value: Estimate(value, 0.01 * value, 20)
        for name, value in estimates.items()
    }
    run = read_run(log_run(tmp_path, estimates=measured, reward=noisy(after(25, 0.6, 0.2), 0.03, 2)))
    assert opening(run).advice.text == f"To change: go back to the start, and train on with {told}."


def test_a_policy_that_its_first_step_broke_has_lost_reward_and_is_advised_to_start_again(tmp_path: Path) -> None:
    folder = log_run(tmp_path, 60, entropy=noisy(after(2, 0.2, 0.15), 0.01), reward=noisy(after(2, 0.5, 0.08), 0.03, 2))
    (folder / "training_state" / "checkpoint-20").mkdir(parents=True)
    first = opening(read_run(folder))
    assert first.headline == "Reward has fallen"
    assert "since step 2: from 0.48 at its best" in first.evidence
    assert "go back to the start (no checkpoint before step 2 was kept)" in first.advice.text


def test_equal_rewards_follow_from_a_fall_eight_steps_later_and_from_a_loss_once_half_is_lost(tmp_path: Path) -> None:
    fallen = verdict(tmp_path / "fallen", level, after(25, 0.6, 0.2))
    assert fallen.kind == FALLEN
    assert fallen.kind.equal_rewards_from(fallen.story) == fallen.since + MIN_STEPS + 1
    lost = verdict(tmp_path / "lost", falling, level)
    assert lost.kind == LOST
    assert lost.kind.equal_rewards_from(lost.story) == pytest.approx(23, abs=4)


def test_gone_entropy_is_advised_to_go_back_to_where_half_of_it_was_left_and_train_on_with_psr(tmp_path: Path) -> None:
    """Prompts whose responses earn the same are then its effect, not its cause; before that they are the cause."""
    entropy = noisy(lambda step: max(1.0 * 0.93**step, 0.02), 0.002)  # half at step 10, a tenth at step 32
    for since, told in ((40, "checkpoint-5, and train on positive advantages only (PSR)"), (3, "prompts")):
        folder = log_run(tmp_path / str(since), 60, entropy=entropy, reward=noisy(level, 0.03, 2),
                         frac_reward_zero_std=after(since, 0.3, 0.99))  # fmt: skip
        for step in (5, 15, 30):
            (folder / "training_state" / f"checkpoint-{step}").mkdir(parents=True)
        first = opening(read_run(folder))
        assert told in first.advice.text
        is_effect = [finding.follows_from_verdict for finding in first.findings]
        assert is_effect == [since == 40]


@pytest.mark.parametrize(
    ("effect", "error", "remark", "kind"),
    [
        (0.008, 0.06, "", UNKNOWN), (0.008, 0.2, "", LOST), (0.0005, 0.005, "", LOST),
        (0.008, 0.06, "over 20 of 40 steps: the others could not be measured", LOST),
    ],
)  # fmt: skip
def test_entropy_is_not_lost_where_the_steps_were_measured_to_raise_reward_by_what_it_should_buy(
    tmp_path: Path, effect: float, error: float, remark: str, kind: Kind
) -> None:
    """.32 ± .12 of reward in all, by steps whose batches scatter; not if that is uncertain, tiny, or of some steps."""
    sums = {"measured/cumulative_reward": lambda step: Estimate(effect * step, error * (step / 40) ** 0.5, 100, remark)}
    folder = log_run(tmp_path, estimates=sums, entropy=noisy(falling, 0.002, 1), reward=noisy(level, 0.01, 2))
    assert judge(read_run(folder)).kind == kind


@pytest.mark.parametrize("recorded", [True, False])
@pytest.mark.parametrize(
    ("raised", "advised"),
    [
        (1.0, "attach(…, target_kl_share=0.0033)."),
        (600.0, "a schedule that never exceeds its first rate (this one made of target_kl_share targets of up to 6 "
                "times the entropy)."),
    ],
)  # fmt: skip
def test_bounded_steps_that_lose_reward_are_not_advised_the_bound_that_they_have(
    tmp_path: Path, recorded: bool, raised: float, advised: str
) -> None:
    """Whether the share is recorded, as an attached trainer does, or only the targets are; also under a schedule."""
    others = {"attached": {"target_kl_share": 0.01}} if recorded else {}
    targets = {
        "bound/target_kl": lambda step: Estimate(0.005 * (raised if step > 20 else 1.0), reason="describes the step"),
        "bound/kl": lambda step: Estimate(0.005, reason="describes the step"),
        "bound/tries": lambda step: Estimate(0.0), "bound/learning_rate": lambda step: Estimate(1e-4),
    }  # fmt: skip
    folder = log_run(tmp_path, estimates=targets, others=others, reward=noisy(after(25, 0.6, 0.2), 0.03, 2))
    assert opening(read_run(folder)).advice.text.endswith(f"and train on with {advised}")


def test_the_largest_share_is_not_taken_for_a_schedule_where_the_trainer_logs_a_lower_entropy(tmp_path: Path) -> None:
    """The bound's entropy is a mean over all tokens, TRL's one over microbatches."""
    targets = {
        "bound/target_kl": lambda step: Estimate(0.051, reason="describes the step"),
        "bound/kl": lambda step: Estimate(0.05, reason="describes the step"),
        "bound/tries": lambda step: Estimate(0.0),
        "bound/learning_rate": lambda step: Estimate(1e-4),
    }
    folder = log_run(tmp_path, estimates=targets, others={"attached": {"target_kl_share": 0.1}},
                     reward=noisy(after(25, 0.6, 0.2), 0.03, 2))  # fmt: skip
    assert opening(read_run(folder)).advice.text.endswith("and train on with attach(…, target_kl_share=0.033).")


def test_no_level_is_shown_beyond_the_values_that_a_line_runs_past(tmp_path: Path) -> None:
    """Rewards of 0 and 1 that reach an end only in the last step: a line through them ends at 1.02, or at −.02."""
    for name, reward in (
        ("up", lambda step: min(0.2 + 0.07 * step, 1.0)),
        ("down", lambda step: max(0.8 - 0.08 * step, 0.0)),
    ):
        run = read_run(log_run(tmp_path / name, 12, reward=reward, entropy=noisy(level, 0.01, 1)))
        judged, levels = judge(run), Story.of(run).reward_levels
        assert abs(Story.of(run).reward.now - 0.5) > 0.5
        assert levels.now == (1.0 if name == "up" else 0.0)
        assert f"{plus_minus(levels.now, 2 * levels.error)}" in judged.sentence


@pytest.mark.parametrize("seed", range(5))
def test_noise_alone_is_not_reported_as_a_fall(tmp_path: Path, seed: int) -> None:
    noise, reward = noisy(level, 0.05, seed), noisy(lambda step: 0.0, 0.0)
    judged = judge(read_run(log_run(tmp_path, entropy=noise, reward=reward, reward_std=0.0)))
    assert judged.kind == FLAT
    assert "fall" not in judged.sentence


def test_seven_steps_are_reported_as_too_few_for_a_verdict(tmp_path: Path) -> None:
    judged = verdict(tmp_path, falling, rising, steps=7)
    assert judged.kind == UNKNOWN
    assert judged.evidence.startswith("7 steps are logged, and a verdict needs 8. So far: reward 0.29 → 0.340 ± ")


def test_the_current_change_uses_the_most_precise_source(tmp_path: Path) -> None:
    """A line through levels that scatter by .05 gives a step to about .004 nats, a mean of 20 predictions to .0005."""
    said = {"delta_h/forward": lambda step: Estimate(-3e-3, 1e-3, 8)}
    run = read_run(log_run(tmp_path, estimates=said, entropy=noisy(lambda step: 0.5 - 3e-3 * step, 0.05)))
    now, since, source = entropy_now(run)
    assert (now.value, since, source) == (pytest.approx(-3e-3), 21, "mean of the predictions")


@pytest.mark.parametrize("every", [5, 10])
def test_the_current_change_is_of_the_last_half_of_the_run_however_seldom_a_probe_measures(
    tmp_path: Path, every: int
) -> None:
    """Entropy falls by 10 thousandths a step until step 50, and then stands."""

    def forward(step: int) -> Estimate | None:
        return Estimate(-1e-2 if step <= 50 else 0.0, 5e-4, 16) if step % every == 1 else None

    entropy = noisy(lambda step: 1.0 - 1e-2 * min(step, 50), 0.03)
    run = read_run(log_run(tmp_path, 100, {"delta_h/forward": forward}, entropy=entropy))
    now, since, source = entropy_now(run)
    assert (now.value, since, source) == (pytest.approx(0.0), 51, "mean of the predictions")
    assert not is_falling(run)


def test_the_current_change_ignores_predictions_where_forward_and_backward_disagree(tmp_path: Path) -> None:
    """Forward is −3, backward +1, in thousandths. Half of their difference is 2 of 3, far above its error."""
    said = {
        "delta_h/forward": lambda step: Estimate(-3e-3, 1e-4, 8),
        "delta_h/backward": lambda step: Estimate(1e-3, 1e-4, 8, about_step=step - 1),
    }
    run = read_run(log_run(tmp_path, estimates=said, entropy=noisy(lambda step: 0.5 - 1e-3 * step, 0.01)))
    assert entropy_now(run)[2] == "line through the logged steps"
    first = opening(run)
    (finding, *_) = first.findings
    assert finding.evidence.startswith("Steps are too large for first order: half of forward − backward is -2.0")
    assert first.advice.text == 'To change first: attach(…, target_kl_share="auto").'


def test_half_a_difference_has_half_its_error(tmp_path: Path) -> None:
    said = {
        "delta_h/forward": lambda step: Estimate(-3e-3, 1e-4, 8),
        "delta_h/backward": lambda step: Estimate(1e-3, 1e-12, 8, about_step=step - 1),
    }
    ahead, half = forward_and_backward(read_run(log_run(tmp_path, estimates=said)))
    assert half.value == pytest.approx(-2e-3)
    assert ahead.stderr > 0
    assert half.stderr == pytest.approx(0.5 * ahead.stderr)


def test_a_lines_slope_and_error_are_those_of_least_squares() -> None:
    """Compared with scipy, for alternating residuals, which have no positive correlation."""
    from scipy import stats

    steps = np.arange(1, 21)
    values = pd.Series(0.3 * steps + np.where(steps % 2, 0.5, -0.5), index=steps)
    fit, line = stats.linregress(steps, values), line_through(values)
    assert (line.value, line.stderr) == (pytest.approx(fit.slope), pytest.approx(fit.stderr))
    assert line.half_width() == pytest.approx(stats.t.ppf(0.975, 18) * fit.stderr)


@pytest.mark.parametrize(
    ("count", "correlation", "most"),
    [(8, 0.0, 0.05), (8, 0.3, 0.085), (8, 0.5, 0.15), (12, 0.3, 0.085), (20, 0.5, 0.11), (40, 0.6, 0.09)],
)
def test_the_interval_of_a_line_covers_under_autocorrelated_noise(count: int, correlation: float, most: float) -> None:
    """At most this share of 1,000 series without a trend (seed 0) seems to have one: 3, 7, 13, 7, 8 and 7 %.

    With the residuals' own correlation and n − 2 degrees of freedom it is 4, 10, 18, 10, 13 and 11 %; with plain least
    squares a third of the last.
    """
    draw = np.random.default_rng(0)
    noise = draw.normal(size=(1000, count))
    for step in range(1, count):
        noise[:, step] = correlation * noise[:, step - 1] + math.sqrt(1 - correlation**2) * noise[:, step]
    lines = [slope_with_error(np.arange(count), row) for row in noise]
    assert sum(map(is_significant, lines)) <= most * len(lines)


LOSING = {"entropy": noisy(falling, 0.01, 1), "reward": noisy(lambda step: 0.5, 0.03, 2)}


PSR_FIRST = (
    "To change: in a branch, train on positive advantages only (PSR): {how}. In our tests it kept pass@8 up, not the "
    "mean reward."
)


def test_the_advice_for_lost_entropy_is_psr_in_a_branch_and_then_the_cheapest_intervention(tmp_path: Path) -> None:
    """As the documentation's one test of this choice has it; the class is one that its page has."""
    folder = log_run(tmp_path, **LOSING)
    first = PSR_FIRST.format(how="PositiveOnly(GRPOTrainer) of docs/how_to/keep_entropy_up.md")
    page = (Path(__file__).parents[3] / "docs" / "how_to" / "keep_entropy_up.md").read_text(encoding="utf-8")
    assert "class PositiveOnly(GRPOTrainer):" in page
    assert opening(read_run(folder)).advice.text == f'{first} To measure others: probes=["simple", "interventions"].'
    effect, plain = Estimate(1e-3, 1e-4, 8, detail={"measured_steps": 3}), Estimate(-9e-3, 1e-4, 8)
    priced = {
        name: {"mean_delta_h": effect, "mean_delta_h_kept": effect, "mean_price": Estimate(price, 0.1, 8),
               "kept_halves_at": Estimate(strength)}
        for name, price, strength in (("lr", 4.0, 0.5), ("bonus:0.02", 2.0, 0.014))
    }  # fmt: skip
    told = {f"intervention/{name}/{what}": e for name, quantities in priced.items() for what, e in quantities.items()}
    Records(folder / "logs").write_estimates(40, 1, "interventions", {**told, "intervention/plain_mean_delta_h": plain})
    assert opening(read_run(folder)).advice.text == (
        f"{first} Second try: GRPOConfig(entropy_coef=0.014), the cheapest measured intervention, which in "
        "our tests was hardly better than no change."
    )


def test_a_run_that_trains_with_psr_is_not_advised_psr(tmp_path: Path) -> None:
    """Neither in a run of the job, nor with the class that the advice names, nor if its entropy is gone."""
    gone = {"entropy": noisy(after(10, 1.0, 0.02), 0.001), "reward": noisy(level, 0.03, 2)}
    for name, curves in {"lost": LOSING, "gone": gone}.items():
        for kind, recorded in {
            "job": {"others": {"intervention": ["psr"]}},
            "class": {"settings": {"class": "PositiveOnly"}},
        }.items():
            told = opening(read_run(log_run(tmp_path / name / kind, **curves, **recorded))).advice.text
            assert told.startswith("To change: ")
            assert "(PSR)" not in told


def test_entropy_that_was_0_from_the_first_step_is_said_to_be_0(tmp_path: Path) -> None:
    folder = log_run(tmp_path, entropy=0.0, reward=noisy(level, 0.03, 2))
    assert "Entropy was 0 from the first step" in opening(read_run(folder)).evidence


def test_one_lucky_response_at_the_first_step_is_no_fallen_reward(tmp_path: Path) -> None:
    """Of 16 in a run where none earns a reward afterwards."""
    folder = log_run(tmp_path, reward=after(2, 1 / 16, 0.0), reward_std=after(2, 0.25, 0.0), entropy=noisy(level, 0.01))
    assert opening(read_run(folder)).kind != FALLEN.name


def test_lost_entropy_whose_predictions_do_not_hold_is_advised_a_setting_and_no_further_predictions(
    tmp_path: Path,
) -> None:
    sums = {"predicted": 0.3, "measured": -0.1}
    told = {f"delta_h/cumulative_{kind}": lambda step, size=size: Estimate(size * step / 40, 0.02, 20)
            for kind, size in sums.items()}  # fmt: skip
    first = opening(read_run(log_run(tmp_path, estimates=told, **LOSING)))
    assert first.advice.text == PSR_FIRST.format(how="PositiveOnly(GRPOTrainer) of docs/how_to/keep_entropy_up.md")
    assert [sentence.partition(":")[0] for sentence in first.further] == ["The predictions do not hold here"]


def test_entropy_that_is_lost_from_the_start_on_has_one_share(tmp_path: Path) -> None:
    """What is left of the start; what there was at a later step is said of that one."""
    judged = judge(read_run(log_run(tmp_path / "start", **LOSING)))
    assert judged.evidence.startswith("since step 1, while reward is flat at 0.5")
    assert judged.evidence.count("%") == 1
    late = verdict(tmp_path / "late", falling, lambda step: 0.3 + 0.02 * min(step, 10))
    assert re.match(r"since step \d+: \d+% of what there was then, while reward is flat", late.evidence)


def test_an_anomaly_is_advised_on_before_a_change_of_the_loss(tmp_path: Path) -> None:
    scale = {"gns/batch_ratio": 0.05, "gns/batch_ratio_low": 0.02, "gns/batch_ratio_high": 0.1}
    told = {name: lambda step, value=value: Estimate(value, 0.01, 20) for name, value in scale.items()}
    first = opening(read_run(log_run(tmp_path, estimates=told, **LOSING)))
    assert first.headline == "Entropy has been lost"
    assert first.advice.text == "To change first: GRPOConfig(gradient_accumulation_steps=40), or a lower learning_rate."


def test_where_entropy_needs_nothing_the_advice_is_to_fix_the_anomaly(tmp_path: Path) -> None:
    """Both if responses are sampled with top-p, and if after seven steps nothing is known about entropy."""
    for steps, nothing in ((40, "nothing to do."), (7, "nothing to do yet.")):
        folder = log_run(tmp_path / str(steps), steps, entropy=noisy(lambda step: 0.5, 0.01, 1),
                         reward=noisy(rising, 0.03, 2), settings={"top_p": 0.7})  # fmt: skip
        told = f"About entropy there is {nothing} To change because of what stands out: GRPOConfig(top_p=1.0)."
        assert opening(read_run(folder)).advice.text == told


def test_the_page_on_falling_entropy_has_a_row_for_each_verdict() -> None:
    """In the order of the table of states, with nothing to do where the report has no action."""
    page = (Path(__file__).parents[3] / "docs" / "how_to" / "entropy_is_falling.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| \*\*(.+?)\*\* \|.*\| (.*) \|$", page, re.MULTILINE)
    assert [words for words, _ in rows] == [state.headline.format(part="NAME") for state in STATES]
    for state, (_, do) in zip(STATES, rows, strict=True):
        assert do.startswith("nothing") == (state.kind not in ACTIONS)


def test_runs_of_the_job_are_advised_with_overrides(tmp_path: Path) -> None:
    log_run(tmp_path, **LOSING)
    (tmp_path / "config.yaml").write_text(
        "made_by: job\ntrainer: {learning_rate: 0.0001}\nbatch: {sequences_per_step: 128}\n"
    )
    first = PSR_FIRST.format(how="intervention=psr")
    assert opening(read_run(tmp_path)).advice.text == f"{first} To measure others: 'probe=[simple,interventions]'."


def test_the_highest_reward_is_the_sum_of_the_weights_also_of_a_single_function() -> None:
    right, paid = pd.Series([0.2, 0.6, 1.0]), pd.Series([0.1, 0.3, 0.5])
    assert highest_reward(paid, {"right": right}, {"right": 0.5}) == 0.5
    assert highest_reward(right, {"right": right}, {}) == 1.0
    assert highest_reward(paid, {"right": right, "form": paid}, {"right": 0.5, "form": -1.0}) == 0.5
    assert math.isnan(highest_reward(paid, {"right": 2 * right}, {"right": 0.5}))
