"""The report's section on interventions, as their probe measured them: effect, price, and commands to train with them.

Values are the probe's running means at its last measured step, `intervention/NAME/mean_…`, with that step's own beside.
"""

from __future__ import annotations

import json
import math
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from rl_training.mathematics.estimate import Estimate
from rl_training.records.folder import checkpoints_of
from rl_training.records.report.charts import BLUE, GREY, TEXT, Chart, Section, Series, draw
from rl_training.records.report.findings import present_rate
from rl_training.records.report.series import Run, last_of, to_rows
from rl_training.records.report.words import MILLI, sentences, table

NAMES = re.compile(r"^intervention/(.+)/mean_delta_h$")
# Of an intervention, in the order of the fields of Effect.
QUANTITIES = ("mean_delta_h", "mean_delta_reward", "mean_price", "delta_h", "mean_delta_h_kept", "kept_halves_at")
PLAIN_NAME = re.compile(r"[\w./:-]+")  # needs no quotes
NO_FALL = "entropy does not fall significantly now"
MOST = 4  # branches that are proposed
BRANCH_STEPS = 40  # of each
PRICES = (1.0, 3.0, 10.0)  # of the lines, in points of reward per thousandth of a nat


@dataclass(frozen=True)
class Effect:
    """What an intervention changes, compared with the step as it is: the probe's running means at its last step."""

    name: str
    delta_h: Estimate  # nats per token
    delta_reward: Estimate
    price: Estimate
    at_last_step: Estimate  # its change of entropy at that step alone
    kept: Estimate  # its change of entropy when it is kept
    halves_at: Estimate  # the strength that halves the fall, when it is kept
    steps: int  # measured ones

    @property
    def bare_name(self) -> str:
        """Its name without a strength."""
        return self.name.partition(":")[0]


def interventions_of_run(run: Run) -> Section | None:
    """Returns what is said of the interventions that were measured; None where none was."""
    effects = effects_of(run)
    if not effects:
        return None
    said = sentences(
        "interventions",
        effects=effects,
        falls=is_falling(run),
        fall=run.last("intervention/plain_mean_delta_h"),
        gain=run.last("intervention/plain_mean_delta_reward"),
        latest=run.last("intervention/plain_delta_h"),
        at=max(run.known("intervention/plain_delta_h").index, default=0),
        needed=lambda effect: _needed(run, effect),
        order=certain_order,
    )
    shown = table("intervention_table", effects=effects)
    return Section("interventions", said, shown, [plane(effects)], branch_commands(run))


def effects_of(run: Run) -> list[Effect]:
    """Returns the interventions at the last step at which they were measured, the cheapest first."""
    effects, falls = [], is_falling(run)
    for name in (match[1] for match in map(NAMES.match, run.names()) if match):
        metrics = [f"intervention/{name}/{quantity}" for quantity in QUANTITIES]
        delta_h, delta_reward, price, at_last_step, kept, halves_at = (
            last_of(run.measured(metric)) or Estimate.missing("it was not recorded") for metric in metrics
        )
        if math.isfinite(halves_at.value) and not falls:
            halves_at = Estimate.missing(NO_FALL)
        steps = run.measured_steps(metrics[0])
        effects.append(Effect(name, delta_h, delta_reward, price, at_last_step, kept, halves_at, steps))
    return sorted(effects, key=lambda effect: (math.isnan(effect.price.value), effect.price.value))


def is_falling(run: Run) -> bool:
    """Returns whether entropy falls significantly now, by `forward`; where that was not measured, by the mean step."""
    fall = present_rate(run) or run.last("intervention/plain_mean_delta_h")
    return fall is not None and fall.ends()[1] < 0


def certain_order(effects: Sequence[Effect], name: str) -> str:
    """Returns the sentence that says how certain the order of their prices is; "" of fewer than two known ones.

    Two whose 95 % intervals do not overlap differ. What they share of the noise makes that a cautious answer.
    """
    ends = {getattr(effect, name): effect.price.ends() for effect in effects if math.isfinite(effect.price.value)}
    if len(ends) < 2:
        return ""
    dearer = {name: [other for other in ends if ends[other][0] > ends[name][1]] for name in ends}
    pairs = "; ".join(f"{name} costs less than {', '.join(others)}" for name, others in dearer.items() if others)
    is_whole = 2 * sum(map(len, dearer.values())) == len(ends) * (len(ends) - 1)
    return sentences("order", pairs=pairs, is_whole=is_whole)[0]


def _needed(run: Run, effect: Effect) -> tuple[int | None, float]:
    """Returns how many more measured steps would make its present value significant, and the most that count.

    None where more would be needed than the mean remembers.
    """
    settings = run.probe("interventions")
    decay = settings.get("decay", 0.9) ** settings.get("every", 1)  # from a measured step to the next
    most = (1 + decay) / (1 - decay) if decay < 1 else math.inf  # effective number of steps in the mean, at most
    times = (effect.delta_h.half_width() / effect.delta_h.value) ** 2 if effect.delta_h.value else math.inf
    needed = max(effect.steps, 1) * times
    return (None if needed > most else max(1, math.ceil(needed - effect.steps))), most


def branch_commands(run: Run) -> list[str]:
    """Return the commands that train a branch with each preferred intervention and one without, and compare them.

    None where nothing is preferred, or where there is no checkpoint to branch from.
    """
    checkpoints, names = checkpoints_of(run.folder), preferred(run)
    if not checkpoints or not names:
        return []
    already = run.settings.get("intervention") or []
    already = [already] if isinstance(already, str) else list(already)
    branches = {Path(f"{run.folder}_plain"): ""}
    for name in names:
        folder = Path(f"{run.folder}_{re.sub(r'[^A-Za-z0-9_.]+', '_', name)}")
        branches[folder] = f"intervention={as_list([*already, name])}"
    start = ["rl-training", "train", f"branch={as_value(str(checkpoints[-1]))}", f"additional_steps={BRANCH_STEPS}"]
    trainings = [
        [*start, f"run_dir={as_value(str(folder))}", *([setting] if setting else [])]
        for folder, setting in branches.items()
    ]
    return [shlex.join(words) for words in [*trainings, ["rl-training", "report", *map(str, branches)]]]


def preferred(run: Run) -> list[str]:
    """Returns what `intervention` can be to halve the fall or keep entropy, the cheapest MOST; none without a fall."""
    which = [str(name) for name in run.probe("interventions").get("which") or []]
    chosen = []
    for effect in effects_of(run) if is_falling(run) else ():
        # With its file or module.
        text = next((name for name in which if name.endswith(f":{effect.name}")), effect.name)
        if math.isfinite(effect.halves_at.value):
            chosen.append(f"{text.removesuffix(effect.name)}{effect.bare_name}:{effect.halves_at.value:.2g}")
        elif effect.delta_h.ends()[0] > 0:
            chosen.append(text)
    return list(dict.fromkeys(chosen))[:MOST]


def as_list(names: Sequence[str]) -> str:
    """Return names as Hydra reads a list.

    >>> as_list(["lr:0.5", "mis:0.5,2"])
    '[lr:0.5,"mis:0.5,2"]'
    """
    return f"[{','.join(map(as_value, names))}]"


def as_value(text: str) -> str:
    """Return a text as Hydra reads it, in quotes where its grammar needs them."""
    return text if PLAIN_NAME.fullmatch(text) else json.dumps(text, ensure_ascii=False)


def plane(effects: Sequence[Effect]) -> Chart:
    """Returns the chart: each intervention is a cross of two bars, with its name; the step as it is lies at 0, 0.

    Unknown and exactly zero changes are not drawn.
    """
    ordered = sorted(effects, key=lambda effect: -effect.delta_h.value)
    rewards, entropies = (
        to_rows({effect.name: getattr(effect, field) for effect in ordered}) for field in ("delta_reward", "delta_h")
    )
    changes = rewards["value"].abs() + entropies["value"].abs()
    rewards, entropies = (rows[np.isfinite(changes) & (changes > 0)] for rows in (rewards, entropies))
    if rewards.empty:
        return draw("interventions", [], ["no intervention has a known effect"])
    reach, heights = (
        MILLI * rows[["value", "low", "high"]].where(np.isfinite).stack() for rows in (rewards, entropies)
    )
    low, high, far = min(heights.min(), 0.0), max(heights.max(), 0.0), reach.abs().max()
    room = 0.03 * (high - low) or 0.5
    series = [
        *(Series(f"price {at:g}", GREY, [-far, far], [far / at, -far / at], dash=(2, 3)) for at in PRICES),
        *(
            Series.cloud(name, BLUE, "circle", rewards.loc[[name]], entropies.loc[[name]], MILLI, text=name)
            for name in rewards.index
        ),
        Series.cloud("the step as it is", TEXT, "square", [0.0], [0.0]),
    ]
    return draw("interventions", series, ends=(low - room, high + room))
