"""Rows on the level of rewards and entropy at both ends of the run, and on whether a reward is hacked."""

from __future__ import annotations

import math
from collections.abc import Collection, Container, Iterator

from rl_training.records.pages.writing import MISSING, format_estimate, percent
from rl_training.records.report.story import Story
from rl_training.records.report.story.broken_line import broken_line
from rl_training.records.report.story.levels import Levels, levels_of
from rl_training.records.report.story.reward_functions import held_out_rewards, reward_functions, reward_weights
from rl_training.records.report.summary.row import Row, how_to
from rl_training.records.report.verdict.holds import MIN_COST_OF_FALL, cost_next_to_nothing
from rl_training.records.table.estimates import to_estimates
from rl_training.records.table.measured import REWARD_SUM, of_steps
from rl_training.records.table.series import Run
from rl_training.records.table.trends import MIN_STEPS

MAX_FUNCTIONS = 6  # reward functions with a row of their own; more only if more have fallen


def level_rows(run: Run, story: Story) -> Iterator[Row]:
    """Yield the rows on steps, rewards, accepted prompts and token entropy."""
    logged = len(run.steps)
    yield Row("steps", str(run.last_step), f"{logged} of them logged" if logged != run.last_step else "")
    accepted = run.logged("buffer/acceptance")
    drawn = "over all generated responses, with prompts drawn by difficulty; " if len(accepted) else ""
    rewards = story.reward_levels
    yield _levels_row("reward", rewards, drawn + rewards.window.text if rewards else "")
    yield from _functions(run, story)
    yield from _hacked(run, story)
    yield from _held_out(run)
    if len(accepted):
        levels = levels_of(accepted, broken_line(accepted))
        yield _levels_row("accepted prompts", levels, f"share of the prompts generated{_other_window(levels, rewards)}")
    entropies = story.entropy_levels
    unit = "nats per token, as TRL logs it" if run.entropy_is_the_trainers else "nats per token"
    yield _levels_row("token entropy", entropies, unit + _other_window(entropies, rewards) if entropies else "")


def _levels_row(label: str, levels: Levels | None, note: str) -> Row:
    return Row(label, levels.text, note) if levels else Row(label, MISSING, "no finite value was logged")


def _other_window(levels: Levels, rewards: Levels | None) -> str:
    """Return the window of a number, "" if it is that of the row on reward, which has said it."""
    return f"; {levels.window.text}" if rewards is None or levels.window != rewards.window else ""


def _held_out(run: Run) -> Iterator[Row]:
    """Yield a row for each evaluation on held-out prompts: its first and its last reward."""
    for label, rows in held_out_rewards(run).items():
        ends = to_estimates(rows.iloc[sorted({0, len(rows) - 1})])
        rewards = " → ".join(map(format_estimate, ends.values()))
        steps = f"step{'s' if len(ends) > 1 else ''} {' and '.join(map(str, ends))}"
        error = "; ± 95 % over prompts" if all(math.isfinite(end.stderr) for end in ends.values()) else ""
        yield Row("held-out reward", rewards, f"{label}, {steps}{error}")


def _functions(run: Run, story: Story) -> Iterator[Row]:
    """Yield a row for each of several reward functions: its mean at both ends, and what the steps did to it."""
    functions = reward_functions(run)
    weights = reward_weights(run)
    is_measured = any(name.startswith("measured/") for name in run.names())
    if len(functions) < 2:
        return
    shown, further = _shown_and_further(functions, {part.name for part in story.parts if part.fall})
    for name in shown:
        total = run.last(f"{REWARD_SUM}/{name}")
        watched = "not paid; " if weights.get(name) == 0 else ""
        if total is None and is_measured:
            note = f"{watched}what the steps do to it was not measured"
        elif total is None:
            note = f"{watched}the probe “measured” would show what the steps do to it"
        else:
            low, high = total.bounds()
            side = "they raise it" if low > 0 else "they lower it" if high < 0 else "0 is within the interval"
            what = f"the measured effects {of_steps(total, 'of all steps')} add up to"
            note = f"{watched}{what} {format_estimate(total, True)}: {side}"
        yield _levels_row(f"reward {name}", story.function_levels.get(name), note)
    if further:
        yield Row("further reward functions", str(len(further)), f"{', '.join(further)}: the chart of reward has them")


def _shown_and_further(names: Collection[str], fallen: Container[str]) -> tuple[list[str], list[str]]:
    """Return the reward functions with a row, among them each that has fallen, and the others, both in given order."""
    by_need = sorted(names, key=lambda name: name not in fallen)
    number = max(MAX_FUNCTIONS, sum(name in fallen for name in by_need))
    chosen = set(by_need[:number])
    return [name for name in names if name in chosen], [name for name in names if name not in chosen]


def _hacked(run: Run, story: Story) -> Iterator[Row]:
    """Yield the row on whether a reward is earned at the cost of another, or what this run lacks to tell."""
    label = "is it hacked?"
    see = how_to("is_it_hacked")
    fallen = [part.name for part in story.parts if part.fall and not cost_next_to_nothing(part, story.reward)]
    cheap = [part.name for part in story.parts if part.fall and part.name not in fallen]
    risen = [part.name for part in story.parts if part.has_risen and not part.fall]
    number = len(reward_functions(run))
    if story.reward_levels is None:
        return
    if number < 2:
        second = "give a second one, with weight 0 if it must not be paid"
        yield Row(label, "not checked", f"one reward function: nothing to compare it with; {second}", see)
    elif story.logged < MIN_STEPS:
        yield Row(label, "not known yet", f"{MIN_STEPS} logged steps are needed to tell", see)
    elif fallen:
        while_others = f" while {' and '.join(risen)} rose" if risen else ""
        yield Row(label, "perhaps", f"{' and '.join(fallen)} fell{while_others}: read responses", see)
    else:
        aside = ", penalties aside," if len(story.parts) < len(story.functions) else ""
        note = f"none of the {number} reward functions{aside} has fallen"
        if cheap:
            note = f"{' and '.join(cheap)} fell, at less than {percent(MIN_COST_OF_FALL)} of what the others gained"
        note += "; what all of them pay for is not seen"
        yield Row(label, "no sign of it", note, see)
