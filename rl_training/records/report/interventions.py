"""The report's section on interventions, as their probe measured them: effect, price, and commands to try them.

Values are the probe's running means at its last measured step, `intervention/NAME/mean_…`, with that step's own beside.
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from rl_training.mathematics.estimate import Estimate
from rl_training.mathematics.welch import is_significant
from rl_training.records.checkpoints import checkpoints_of
from rl_training.records.report.plane import Effect, Interventions, certain_order, in_order_of_price, plane
from rl_training.records.report.series import Run, present_rate
from rl_training.records.report.words import MISSING, in_words, milli

NAMES = re.compile(r"^intervention/(.+)/mean_delta_h$")
CAPTION = (
    "How each intervention would change the step, relative to the step as it is (the square): left gives up reward, "
    "up keeps entropy. All points on a dotted line have the same price; flatter lines are dearer. Running means over "
    "the measured steps, 95 % intervals, for one step; an intervention kept for many steps does more, see the table."
)
HEADINGS = ["intervention", "entropy, one step", "entropy, last step alone", "entropy, when kept", "reward, one step",
            "price", "halves the fall, when kept", "note"]  # fmt: skip
NO_FALL = "entropy does not fall significantly now"
NOTHING_TO_HALVE = " Entropy does not fall significantly now: there is nothing to halve."
MOST = 4  # that are tried
ONE_STEP = (
    "All of this is predicted from single steps, and extrapolated linearly for “when kept”. Ten real steps agreed "
    "with the order in part, and not with the sizes; an effect that grows with distance (KL) is missed. "
    "Try them, and compare."
)


@dataclass(frozen=True)
class _Measured(Effect):
    """An intervention at the last step at which it was measured: the probe's running means."""

    at_last_step: Estimate  # its change of entropy at that step alone
    kept: Estimate  # its change of entropy when it is kept
    halves_at: Estimate  # when it is kept
    steps: int  # measured ones

    @property
    def bare_name(self) -> str:
        """Its name without a strength."""
        return self.name.partition(":")[0]

    @property
    def halves(self) -> bool:
        return math.isfinite(self.halves_at.value)

    @property
    def at_price(self) -> str:
        return f" (price {in_words(self.price)})" if math.isfinite(self.price.value) else ""


def interventions_of_run(run: Run) -> Interventions | None:
    """Returns what is said of the interventions that were measured; None where none was."""
    found = _measured(run)
    if not found:
        return None
    drawn = plane("interventions", "What would change entropy, and at what price", CAPTION, found)
    rows = [_row(effect) for effect in found]
    return Interventions(_sentences(run, found), HEADINGS, rows, drawn, _lines(run))


def verdict_of_run(run: Run) -> tuple[str, str]:
    """Returns what the interventions come to, and what this says, for the summary; "" where there are none."""
    found = _measured(run)
    halving, keeping = _halving(found), in_order_of_price([effect for effect in found if effect.keeps])
    if halving:
        return _strengths(halving), "would halve the fall of entropy when kept, in order of price"
    if not is_falling(run) and found:
        return "none needed", NO_FALL
    if keeping:
        return ", ".join(effect.name for effect in keeping), "would keep entropy, at one step; in order of price"
    return ("none", "no measured intervention keeps entropy significantly") if found else ("", "")


def _measured(run: Run) -> list[_Measured]:
    names = [match.group(1) for match in map(NAMES.match, run.estimates) if match]
    falls = is_falling(run)
    return [_at_last_step(run, name, falls) for name in names]


def _at_last_step(run: Run, name: str, falls: bool) -> _Measured:
    def last(quantity: str) -> Estimate:
        by_step = run.measured(f"intervention/{name}/{quantity}")
        return by_step[max(by_step)] if by_step else Estimate.missing("it was not recorded")

    halves_at = last("kept_halves_at")
    if math.isfinite(halves_at.value) and not falls:
        halves_at = Estimate.missing(NO_FALL)
    return _Measured(
        name,
        last("mean_delta_h"),
        last("mean_delta_reward"),
        last("mean_price"),
        at_last_step=last("delta_h"),
        kept=last("mean_delta_h_kept"),
        halves_at=halves_at,
        steps=run.measured_steps(f"intervention/{name}/mean_delta_h"),
    )


def is_falling(run: Run) -> bool:
    """Returns whether entropy falls significantly now, by `forward`; where that was not measured, by the mean step."""
    fall = present_rate(run) or _last(run, "plain_mean_delta_h")
    return fall is not None and is_significant(fall) and fall.value < 0


def _last(run: Run, quantity: str) -> Estimate | None:
    return next(reversed(run.known(f"intervention/{quantity}").values()), None)


def _halving(found: Sequence[_Measured]) -> list[_Measured]:
    """Returns those that halve the fall, in order of price; of several strengths of one, the first."""
    by_name: dict[str, _Measured] = {}
    for effect in in_order_of_price([effect for effect in found if effect.halves]):
        by_name.setdefault(effect.bare_name, effect)
    return list(by_name.values())


def _strengths(halving: Sequence[_Measured]) -> str:
    return ", ".join(f"{effect.bare_name} {effect.halves_at.value:.2g}" for effect in halving)


def _sentences(run: Run, found: Sequence[_Measured]) -> list[str]:
    halving, ordered = _halving(found), in_order_of_price(found)
    keeping, spending = [effect for effect in ordered if effect.keeps], [effect for effect in ordered if effect.spends]
    sentences = [_fall(run)]
    if halving:
        listed = "; ".join(f"{_strengths([effect])}{effect.at_price}" for effect in halving)
        how_certain = certain_order({effect.bare_name: effect.price for effect in halving})
        sentences.append(f"What would halve the fall when it is kept, in order of price: {listed}.{how_certain}")
    for words, effects in (
        ("Keeps entropy significantly (95 %) as set, per step, in order of price", keeping),
        ("Spends significantly more entropy", spending),
    ):
        if effects:
            listed = "; ".join(f"{effect.name} {milli(effect.delta_h)}{effect.at_price}" for effect in effects)
            how_certain = certain_order({effect.name: effect.price for effect in keeping}) if effects is keeping else ""
            sentences.append(f"{words}, in thousandths of a nat: {listed}.{how_certain}")
    unclear = [effect for effect in found if effect.delta_h.half_width() > 0 and not is_significant(effect.delta_h)]
    if unclear:
        listed = "; ".join(_needed(run, effect) for effect in unclear)
        sentences.append(f"No significant effect on entropy: {listed}.")
    return [*sentences, ONE_STEP]


def _fall(run: Run) -> str:
    """Returns what a step does: the mean over measured steps, and the last of them, which may have slowed down."""
    fall, gain = _last(run, "plain_mean_delta_h"), _last(run, "plain_mean_delta_reward")
    if fall is None:
        return "How fast entropy falls is not known here."
    changes = f"{milli(fall)} thousandths of a nat of entropy"
    changes += f" and {milli(gain)} thousandths of reward" if gain is not None else ""
    latest = run.known("intervention/plain_delta_h")
    if latest:
        changes += (
            f", the mean over the measured steps; step {max(latest)}, the last of them, {milli(latest[max(latest)])}"
        )
    return f"A step changes {changes}.{'' if is_falling(run) else NOTHING_TO_HALVE}"


def _needed(run: Run, effect: _Measured) -> str:
    """Returns the name, and how many more measured steps would make its present value significant."""
    settings = run.probe("interventions")
    decay = settings.get("decay", 0.9) ** settings.get("every", 1)  # from a measured step to the next
    most = (1 + decay) / (1 - decay) if decay < 1 else math.inf  # effective number of steps in the mean, at most
    times = (effect.delta_h.half_width() / effect.delta_h.value) ** 2 if effect.delta_h.value else math.inf
    needed = max(effect.steps, 1) * times
    if needed > most:
        return f"{effect.name} (too small an effect for a mean that remembers {most:.0f} measured steps)"
    return f"{effect.name} (needs about {max(1, math.ceil(needed - effect.steps))} more measured steps)"


def preferred(run: Run) -> list[str]:
    """Returns what `intervention` can be to halve the fall or keep entropy, the cheapest MOST; none without a fall."""
    ordered = in_order_of_price([effect for effect in _measured(run) if effect.halves or effect.keeps])
    return list(dict.fromkeys(_setting(run, effect) for effect in ordered))[:MOST] if is_falling(run) else []


def _lines(run: Run) -> list[str]:
    """Returns the command that tries what is preferred; none where entropy does not fall now."""
    chosen = preferred(run) if checkpoints_of(run.folder) else []
    words = ["rl-training", "try", str(run.folder), f"interventions=[{','.join(chosen)}]"]
    return [shlex.join(words)] if chosen else []


def _setting(run: Run, effect: _Measured) -> str:
    """Returns what `intervention` must be: the strength that halves the fall, else its own; with its file or module."""
    names = map(str, run.probe("interventions").get("which") or [])
    text = next((name for name in names if name.endswith(f":{effect.name}")), effect.name)
    if effect.halves:
        return f"{text.removesuffix(effect.name)}{_strengths([effect]).replace(' ', ':')}"
    return text


def _row(effect: _Measured) -> list[str]:
    halves = f"{effect.halves_at.value:.2g}" if effect.halves else f"{MISSING} {effect.halves_at.reason}"
    changes = map(milli, (effect.delta_h, effect.at_last_step, effect.kept, effect.delta_reward))
    return [effect.name, *changes, in_words(effect.price), halves, effect.delta_h.reason]
