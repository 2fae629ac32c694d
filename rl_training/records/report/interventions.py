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
from rl_training.records.report.plane import Effect, Interventions, certain_order, in_order_of_price, plane
from rl_training.records.report.series import Run
from rl_training.records.report.summary import MISSING, in_words, milli

NAMES = re.compile(r"^intervention/(.+)/mean_delta_h$")
PLAIN = "intervention/plain_mean_"
CAPTION = (
    "How each intervention would change the step, relative to the step as it is (the square): left gives up reward, "
    "up keeps entropy. All points on a dotted line have the same price; flatter lines are dearer. Running means over "
    "the measured steps, 95 % intervals, for one step; an intervention kept for many steps does more, see the table."
)
HEADINGS = ["intervention", "entropy, one step", "entropy, when kept", "reward, one step", "price",
            "halves the fall, when kept", "note"]  # fmt: skip
MOST_LINES = 3
ONE_STEP = (
    "All of this is predicted from single steps, and extrapolated linearly for “when kept”. Ten real steps agreed "
    "with the order in part, and not with the sizes; an effect that grows with distance (KL) is missed. "
    "Try one, and compare."
)


@dataclass(frozen=True)
class _Measured(Effect):
    """An intervention at the last step at which it was measured."""

    halves_at: Estimate  # when it is kept
    kept: float  # times of one step's effect
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
    names = [match.group(1) for match in map(NAMES.match, run.estimates) if match]
    if not names:
        return None
    found = [_measured(run, name) for name in names]
    drawn = plane("interventions.png", "What would change entropy, and at what price", CAPTION, found)
    rows = [_row(of) for of in found]
    return Interventions(_sentences(run, found), HEADINGS, rows, drawn, _lines(run, found))


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
        halves_at=last("kept_halves_at"),
        kept=kept.value / once.value if once.value else math.nan,
        steps=int(number.group(1)) if number else 0,
    )


def _sentences(run: Run, found: Sequence[_Measured]) -> list[str]:
    ordered = in_order_of_price(found)
    halving = [of for of in ordered if of.halves]
    keeping, spending = [of for of in ordered if of.keeps], [of for of in ordered if of.spends]
    said = [_fall(run)]
    if halving:
        told = "; ".join(f"{of.bare_name} {of.halves_at.value:.2g}{of.at_price}" for of in halving)
        how_certain = certain_order({of.bare_name: of.price for of in halving})
        said.append(f"What would halve the fall when it is kept, in order of price: {told}.{how_certain}")
    for words, some in (
        ("Keeps entropy significantly (95 %) as set, per step, in order of price", keeping),
        ("Spends significantly more entropy", spending),
    ):
        if some:
            told = "; ".join(f"{of.name} {milli(of.delta_h)}{of.at_price}" for of in some)
            how_certain = certain_order({of.name: of.price for of in some}) if some is keeping else ""
            said.append(f"{words}, in thousandths of a nat: {told}.{how_certain}")
    untold = [of for of in found if of.delta_h.half_width() > 0 and not is_significant(of.delta_h)]
    if untold:
        said.append(f"No significant effect on entropy: {'; '.join(_needed(run, of) for of in untold)}.")
    return [*said, ONE_STEP]


def _fall(run: Run) -> str:
    fall, gain = ([*run.measured(f"{PLAIN}{name}").values()][-1:] for name in ("delta_h", "delta_reward"))
    if not fall or math.isnan(fall[0].value):
        return "How fast entropy falls is not known here."
    told = f"{milli(fall[0])} thousandths of a nat of entropy"
    told += f" and {milli(gain[0])} thousandths of reward" if gain and math.isfinite(gain[0].value) else ""
    sure = is_significant(fall[0]) and fall[0].value < 0
    return f"A step changes {told}.{'' if sure else ' Entropy does not fall significantly: there is nothing to halve.'}"


def _needed(run: Run, of: _Measured) -> str:
    """Returns the name, and how many more measured steps would make its present value significant."""
    decay = run.probe("interventions").get("decay", 0.9)
    most = (1 + decay) / (1 - decay) if decay < 1 else math.inf  # effective number of steps in the mean, at most
    times = (of.delta_h.half_width() / of.delta_h.value) ** 2 if of.delta_h.value else math.inf
    needed = max(of.steps, 1) * times
    if needed > most:
        return f"{of.name} (too small an effect for a mean that remembers {most:.0f} measured steps)"
    return f"{of.name} (needs about {max(1, math.ceil(needed - of.steps))} more measured steps)"


def _lines(run: Run, found: Sequence[_Measured]) -> list[str]:
    """Returns commands: a branch for each of the cheapest that halve the fall or keep entropy, and a comparison."""
    checkpoints = checkpoints_of(run.folder)
    chosen = in_order_of_price([of for of in found if of.halves or of.keeps])[:MOST_LINES]
    if not checkpoints or not chosen:
        return []
    start = ["rl-training", "train", f"branch={checkpoints[-1]}", "additional_steps=20"]
    folders = [f"{run.folder}_plain"]  # to compare with: the run itself, as far as the others go
    lines = [shlex.join([*start, f"run_dir={folders[0]}"])]
    given = run.settings.get("intervention") or []
    for of in chosen:
        # A custom function was selected by its file too.
        text = next(
            (
                asked
                for asked in map(str, run.probe("interventions").get("which") or [])
                if asked.endswith(f":{of.name}")
            ),
            of.name,
        )
        if of.halves:
            text = f"{text.removesuffix(of.name)}{of.bare_name}:{of.halves_at.value:.2g}"
        several = [*([given] if isinstance(given, str) else given), text]
        folder = f"{run.folder}_{re.sub(r'[^A-Za-z0-9.]+', '_', text.rpartition('/')[2])}"
        folders.append(folder)
        setting = f"intervention={text}" if len(several) == 1 else f"intervention=[{','.join(several)}]"
        lines.append(shlex.join([*start, f"run_dir={folder}", setting]))
    return [*lines, shlex.join(["rl-training", "report", *folders])]


def _row(of: _Measured) -> list[str]:
    kept = replace(of.delta_h, value=of.kept * of.delta_h.value, stderr=of.kept * of.delta_h.stderr)
    halves = f"{of.halves_at.value:.2g}" if of.halves else f"{MISSING} {of.halves_at.reason}"
    changes = map(milli, (of.delta_h, kept, of.delta_reward))
    return [of.name, *changes, in_words(of.price), halves, of.delta_h.reason]
