"""The report's section on interventions, as their probe measured them: effect, price, and commands to try them.

All values are the probe's running means at its last measured step, `intervention/NAME/mean_…`, with their errors.
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace

from rl_training.mathematics.estimate import Estimate
from rl_training.mathematics.welch import is_significant
from rl_training.records.checkpoints import checkpoints_of
from rl_training.records.report.plane import MILLI, Cross, Interventions, certain_order, plane
from rl_training.records.report.series import Run
from rl_training.records.report.summary import MISSING, in_words, plus_minus

NAMES = re.compile(r"^intervention/(.+)/mean_delta_h$")
PLAIN = "intervention/plain_mean_"
CAPTION = (
    "How each intervention would change the step, relative to the step as it is (the square): left gives up reward, "
    "up keeps entropy. All points on a dotted line have the same price; flatter lines are dearer. Running means over "
    "the measured steps, 95 % intervals, for one step; an intervention kept for many steps does more, see the table."
)
HEADINGS = [
    "intervention",
    "entropy, one step",
    "entropy, when kept",
    "reward, one step",
    "price",
    "halves the fall, when kept",
    "note",
]
MOST_LINES = 3
ONE_STEP = (
    "All of this is predicted from single steps, and extrapolated linearly for “when kept”. Ten real steps agreed "
    "with the order in part, and not with the sizes; an effect that grows with distance (KL) is missed. "
    "Try one, and compare."
)


@dataclass(frozen=True)
class _Measured:
    """An intervention at the last step at which it was measured."""

    name: str
    delta_h: Estimate
    delta_reward: Estimate
    price: Estimate
    halves_at: Estimate  # when it is kept
    kept: float  # times of one step's effect
    steps: int  # measured ones

    @property
    def keeps(self) -> bool:
        return is_significant(self.delta_h) and self.delta_h.value > 0


def interventions_of_run(run: Run) -> Interventions | None:
    """Returns what is said of the interventions that were measured; None where none was."""
    names = [match.group(1) for match in map(NAMES.match, run.estimates) if match]
    if not names:
        return None
    found = [_measured(run, name) for name in names]
    crosses = [_cross(of) for of in found]
    drawn = plane("interventions.png", "What would change entropy, and at what price", CAPTION, crosses, [])
    return Interventions(drawn.title, _sentences(run, found), HEADINGS, [_row(of) for of in found], drawn,
                         _lines(run, found))  # fmt: skip


def _measured(run: Run, name: str) -> _Measured:
    def last(quantity: str) -> Estimate:
        by_step = run.measured(f"intervention/{name}/{quantity}")
        return by_step[max(by_step)] if by_step else Estimate.missing("it was not recorded")

    once, kept, delta_h = last("delta_h"), last("delta_h_kept"), last("mean_delta_h")
    number = re.search(r"measured steps: (\d+)", delta_h.reason)
    return _Measured(
        name,
        delta_h,
        last("mean_delta_reward"),
        last("mean_price"),
        last("kept_halves_at"),
        kept.value / once.value if once.value else math.nan,
        int(number.group(1)) if number else 0,
    )


def _cross(of: _Measured) -> Cross:
    return Cross(
        of.name, of.delta_reward.value, of.delta_reward.half_width(), of.delta_h.value, of.delta_h.half_width()
    )


def _sentences(run: Run, found: Sequence[_Measured]) -> list[str]:
    said = [_fall(run)]
    halving = sorted((of for of in found if math.isfinite(of.halves_at.value)), key=lambda of: _by_price(of))
    if halving:
        told = "; ".join(f"{_name(of)} {of.halves_at.value:.2g}{_at_price(of)}" for of in halving)
        how_certain = certain_order({_name(of): of.price for of in halving})
        said.append(f"What would halve the fall when it is kept, in order of price: {told}.{how_certain}")
    groups = (
        ("Keeps entropy significantly (95 %) as set, per step, in order of price", [of for of in found if of.keeps]),
        ("Spends significantly more entropy", [of for of in found if is_significant(of.delta_h) and not of.keeps]),
    )
    for words, some in groups:
        if some:
            some = sorted(some, key=_by_price)
            told = "; ".join(f"{of.name} {_milli(of.delta_h)}{_at_price(of)}" for of in some)
            how_certain = certain_order({of.name: of.price for of in some if of.keeps})
            said.append(f"{words}, in thousandths of a nat: {told}.{how_certain}")
    untold = [of for of in found if math.isfinite(of.delta_h.half_width()) and of.delta_h.half_width() > 0]
    untold = [of for of in untold if not is_significant(of.delta_h)]
    if untold:
        said.append(f"No significant effect on entropy: {'; '.join(_needed(run, of) for of in untold)}.")
    return [*said, ONE_STEP]


def _fall(run: Run) -> str:
    fall, gain = ([*run.measured(f"{PLAIN}{name}").values()][-1:] for name in ("delta_h", "delta_reward"))
    if not fall or math.isnan(fall[0].value):
        return "How fast entropy falls is not known here."
    told = f"{_milli(fall[0])} thousandths of a nat of entropy"
    told += f" and {_milli(gain[0])} thousandths of reward" if gain and math.isfinite(gain[0].value) else ""
    sure = is_significant(fall[0]) and fall[0].value < 0
    return f"A step changes {told}.{'' if sure else ' Entropy does not fall significantly: there is nothing to halve.'}"


def _needed(run: Run, of: _Measured) -> str:
    """Returns the name, and how many more measured steps would make its present value significant."""
    probe = (run.settings.get("probes") or {}).get("interventions") or {}
    decay = probe.get("decay", 0.9)
    most = (1 + decay) / (1 - decay) if decay < 1 else math.inf  # effective number of steps in the mean, at most
    times = (of.delta_h.half_width() / of.delta_h.value) ** 2 if of.delta_h.value else math.inf
    needed = max(of.steps, 1) * times
    if needed > most:
        return f"{of.name} (too small an effect for a mean that remembers {most:.0f} measured steps)"
    return f"{of.name} (needs about {max(1, math.ceil(needed - of.steps))} more measured steps)"


def _lines(run: Run, found: Sequence[_Measured]) -> list[str]:
    """Returns commands: a branch for each of the cheapest that halve the fall or keep entropy, and a comparison."""
    steps = sorted((int(path.name.rpartition("-")[2]), path) for path in checkpoints_of(run.folder))
    chosen = [of for of in found if math.isfinite(of.halves_at.value) or of.keeps]
    chosen = sorted(chosen, key=_by_price)[:MOST_LINES]
    if not steps or not chosen:
        return []
    start = ["rl-training", "train", f"branch={steps[-1][1]}", "additional_steps=20"]
    folders = [f"{run.folder}_plain"]  # to compare with: the run itself, as far as the others go
    lines = [shlex.join([*start, f"run_dir={folders[0]}"])]
    for of in chosen:
        halving = math.isfinite(of.halves_at.value)
        text = (
            f"{_asked(run, of).partition(of.name)[0]}{_name(of)}:{of.halves_at.value:.2g}"
            if halving
            else _asked(run, of)
        )
        given = run.settings.get("intervention") or []
        several = [*([given] if isinstance(given, str) else given), text]
        folder = f"{run.folder}_{re.sub(r'[^A-Za-z0-9.]+', '_', text.rpartition('/')[2])}"
        folders.append(folder)
        setting = f"intervention={text}" if len(several) == 1 else f"intervention=[{','.join(several)}]"
        lines.append(shlex.join([*start, f"run_dir={folder}", setting]))
    return [*lines, shlex.join(["rl-training", "report", *folders])]


def _asked(run: Run, of: _Measured) -> str:
    """Returns the text that selected it; a custom function's includes its file."""
    asked = ((run.settings.get("probes") or {}).get("interventions") or {}).get("which") or []
    return next((str(text) for text in asked if str(text).endswith(f":{of.name}")), of.name)


def _row(of: _Measured) -> list[str]:
    kept = replace(of.delta_h, value=of.kept * of.delta_h.value, stderr=of.kept * of.delta_h.stderr)
    halves = f"{of.halves_at.value:.2g}" if math.isfinite(of.halves_at.value) else f"{MISSING} {of.halves_at.reason}"
    changes = map(_milli, (of.delta_h, kept, of.delta_reward))
    return [of.name, *changes, in_words(of.price), halves, of.delta_h.reason]


def _name(of: _Measured) -> str:
    """Returns its name without a strength."""
    return of.name.partition(":")[0]


def _by_price(of: _Measured) -> float:
    return of.price.value if math.isfinite(of.price.value) else math.inf


def _at_price(of: _Measured) -> str:
    return f" (price {in_words(of.price)})" if math.isfinite(of.price.value) else ""


def _milli(estimate: Estimate) -> str:
    if math.isnan(estimate.value):
        return MISSING
    return plus_minus(MILLI * estimate.value, MILLI * estimate.half_width(), "+")
