"""The charts of a run's report: one function each."""

from __future__ import annotations

import altair as alt
import numpy as np
import pandas as pd

from rl_training.records.evaluated import largest_pass_at
from rl_training.records.report.charts import BLUE, GREEN, GREY, ORANGE, STEP, TEXT, Axis, Chart, Series, draw
from rl_training.records.report.curves import OFFSET, dots, line, lines, points, running_window, what_is_missing
from rl_training.records.report.heatmap import heatmap
from rl_training.records.report.predictions import draw_calibration, draw_forecast, draw_predictors
from rl_training.records.report.series import (
    NO_LATER_BATCH,
    Measurements,
    Run,
    curve,
    held_out_rewards,
    naive_of,
    origins,
)

LOOKS = ((BLUE, "circle", ()), (ORANGE, "triangle", ()), (GREEN, "square", ()), (TEXT, "diamond", ()))
HELD_OUT = ((ORANGE, "square"), (GREEN, "diamond"), (TEXT, "triangle"))
SHARE = (0.0, 1.0)


def draw_figures(run: Run) -> list[Chart]:
    """Returns the charts of this run. Of what cannot be drawn there is only why."""
    charts = [_reward(run), _entropy(run), *draw_forecast(run), _delta_h(run), *draw_calibration(run)]
    if run.measured("delta_h/part/momentum"):
        charts += [_causes(run), _layers(run)]
    if run.measured("gns/noise_scale_prompts"):
        charts.append(_noise_scale(run))
    if run.measured("covariance/token"):
        charts.append(draw_predictors(run))
    if run.measured("ess/advantage"):
        charts.append(_effective_sample_size(run))
    return charts + [drawn for name in run.checkpoint_evaluations for drawn in _evaluated(run, name)]


def _reward(run: Run) -> Chart:
    reward = run.logged("reward")
    window = running_window(len(reward))
    held_out = {label: curve(rewards) for label, rewards in held_out_rewards(run).items()}
    missing = [] if reward else ["reward – no finite value was logged"]
    cloud = dots(list(reward), list(reward.values()), BLUE, "circle", "one step", f"mean of {window} steps")
    looks = (HELD_OUT[number % len(HELD_OUT)] for number in range(len(held_out)))
    further = [
        line(f"held out: {label}", drawn, *look) for (label, drawn), look in zip(held_out.items(), looks, strict=True)
    ]
    values = [*reward.values(), *(value for drawn in held_out.values() for value in drawn.values)]
    room = 0.05 * (max(values) - min(values)) or 0.05 if values else 0.0
    ends = (min(values) - room, max(values) + room) if values else None  # the band of a few prompts is wide
    caption = (
        "Each dot is the mean reward of one step's responses. "
        f"In longer runs the line is a running mean over {window} logged steps."
        f"{' Held out: prompts that training never sees.' if held_out else ''}"
    )
    y = Axis("mean reward of a step's responses", ends=ends)
    return draw("reward", "Reward", caption, missing, [*cloud, *further] if reward else [], y)


def _entropy(run: Run) -> Chart:
    sums: dict[str, Measurements] = {
        "measured": run.measured("delta_h/cumulative_measured"),
        "predicted": run.measured("delta_h/cumulative_predicted"),
    }
    naive = naive_of(run)
    missing = what_is_missing({**sums, "naive product": naive}, bands=False) + what_is_missing(sums, values=False)
    looks = {
        "measured": (TEXT, "circle", ()), "predicted": (BLUE, "square", ()),
        "naive product (biased)": (ORANGE, "triangle", (5, 3)),
    }  # fmt: skip
    quantities = {**sums, "naive product (biased)": naive}
    # The 0 of a start says nothing.
    drawn = {label: curve(measured) for label, measured in quantities.items() if len(curve(measured).steps) > 1}
    starts = origins(run)
    at_start = run.known("entropy/token").get(starts[0]) if len(starts) == 1 else None
    unit = "change of token entropy since the first step (nats per token)"
    second = _level(at_start.value) if at_start and drawn else None
    caption = (
        "Blue (the sum of predictions) should follow the measured curve (token entropy of each step's batch minus the "
        "first's) within the shaded 95 % intervals (Student-t, at each step). The dashed curve takes entropy gradient "
        "and update from the same batch: their shared noise makes it drift away. "
        "The scale on the right is the token entropy itself: at 0 none is left."
    )
    series = [line(label, found, *looks[label]) for label, found in drawn.items()]
    missing = missing or [NO_LATER_BATCH] * (not drawn)
    title = "Entropy: predicted against measured"
    return draw("entropy", title, caption, missing, series, Axis(unit), rules={"y": [0]}, second=second)


def _level(start: float) -> alt.Chart:
    """Returns the layer whose axis, on the right, adds the entropy of the first batch."""
    axis = alt.Axis(
        orient="right", labelExpr=f"format(datum.value + {start:.6g}, '.3~f')", title="token entropy (nats)", grid=False
    )
    marks = alt.Chart(alt.NamedData("rows")).transform_filter("isValid(datum.y)").mark_point(opacity=0)
    return marks.encode(x=Axis(STEP).encoding(alt.X, "x"), y=alt.Y("y:Q", axis=axis))


def _delta_h(run: Run) -> Chart:
    quantities = {"forward": run.measured("delta_h/forward"), "backward": run.measured("delta_h/backward")}
    forward, backward = (curve(measurements, at_about_step=True) for measurements in quantities.values())
    series = [
        *points("forward, from this step's batch", forward, BLUE, "circle", -OFFSET),
        *points("backward, from the next step's batch", backward, GREEN, "square", OFFSET),
        *points("true, on a separate buffer", curve(run.measured("delta_h/true")), TEXT, "diamond"),
    ]
    caption = (
        "Two estimates of the same update, drawn at the step that makes it, with 95 % intervals (running means in a "
        "long run): forward from the batch that made it, backward from the first batch sampled after it. The predicted "
        "curve sums their mean, the trapezoid. Where the two stay apart, do not trust forward alone."
    )
    y = Axis("predicted change of token entropy by this step's update (nats per token)")
    shown = series if forward.steps or backward.steps else []
    missing = what_is_missing(quantities)
    return draw("delta_h", "Each update's effect on entropy", caption, missing, shown, y, rules={"y": [0]})


def _causes(run: Run) -> Chart:
    looks = {"momentum": (BLUE, "circle", ()), "gradient": (ORANGE, "circle", ()), "decay": (GREEN, "circle", ())}
    parts = {cause: run.measured(f"delta_h/part/{cause}") for cause in looks}
    values = {cause: curve(part).values for cause, part in parts.items()}
    nothing = [cause for cause in parts if values[cause] and not any(values[cause])]
    drawn = {cause: part for cause, part in parts.items() if cause not in nothing}
    total = curve(run.measured("delta_h/forward"))
    caption = (
        "What moves the entropy in each update: the momentum of earlier gradients, this step's own gradient, weight "
        "decay. They add up to forward. The 95 % bands ignore how a fold changes the others' updates."
        + "".join(f" The part of {cause} is 0 at every step, and not drawn." for cause in nothing)
    )
    chosen = [looks[cause] for cause in drawn]
    title, unit = "Causes: momentum, gradient, decay", "part of forward (nats per token)"
    whole = Series("forward, their sum", TEXT, total.steps, total.values)
    missing = what_is_missing(parts)
    return lines("causes", title, caption, unit, drawn, chosen, missing, [whole], zero=True)


def _layers(run: Run) -> Chart:
    prefix = "delta_h/layer/"
    parts = {
        name.removeprefix(prefix): run.values(name)
        for name in run.estimates
        if name.startswith(prefix) and not name.endswith("_sequence")
    }
    labels = sorted(parts, key=lambda label: (not label.isdigit(), int(label) if label.isdigit() else 0, label))
    caption = (
        "Which layer pushes the entropy up (purple) or down (orange) at each step. The rows add up to forward. "
        "The colours saturate at the 90 % quantile of the sizes."
    )
    missing = what_is_missing({"layers": run.measured("delta_h/forward")}, bands=False)
    title = "Causes: layer by layer"
    table = pd.DataFrame(parts).sort_index().T.reindex(labels)  # a row per layer, a column per step
    if table.empty:
        return Chart("layers", title, "", missing)
    # A quantile, not the largest: the first steps of Adam would take the colour from all others.
    sizes = table.abs().to_numpy()
    largest = float(np.nanquantile(sizes, 0.9)) or float(np.nanmax(sizes)) or 1.0
    return heatmap(
        "layers", title, caption, missing, table, Axis(STEP), "layer", "part of forward (nats per token)", largest
    )


def _noise_scale(run: Run) -> Chart:
    scale, ratio = run.measured("gns/noise_scale_prompts"), run.measured("gns/batch_ratio")
    drawn = curve(run.with_interval("gns/noise_scale_prompts"))
    batch = {step: scale[step].value * ratio[step].value for step in drawn.steps}
    caption = (
        "The batch size, in prompts, at which the gradient's noise equals its signal. Well below it, a larger batch "
        "gains nearly in proportion to its size; well above it, more prompts are mostly redundant. Where the band "
        "reaches the top, the noise scale has no known upper bound: the gradient itself may be 0."
    )
    missing = what_is_missing({"noise scale": scale}, bands=not any(low == low for low in drawn.lows))
    if not drawn.steps:
        return Chart("noise_scale", "Gradient noise scale", "", missing)
    top = 1.5 * max(*drawn.values[len(drawn.values) // 4 :], *batch.values())
    highs = [min(high, 2 * top) for high in drawn.highs]
    label = "noise scale, running average"
    shown = Series(
        label, BLUE, drawn.steps, drawn.values, [min(low, 2 * top) for low in drawn.lows], highs, mark="circle"
    )
    used = Series("batch in use", TEXT, list(batch), list(batch.values()), dash=(5, 3))
    y = Axis("prompts", ends=(0.0, top))
    return draw("noise_scale", "Gradient noise scale", caption, missing, [shown, used], y)


def _effective_sample_size(run: Run) -> Chart:
    names = {"advantage": "weights |A|", "token_weight": "weights |A|·T", "importance": "importance ratios"}
    sizes = {label: run.measured(f"ess/{name}") for name, label in names.items()}
    caption = (
        "The number of equally weighted sequences that each step's weights amount to (Kish). Prompts whose responses "
        "all have the same reward have zero weight."
    )
    looks = ((BLUE, "circle", ()), (GREEN, "square", ()), (GREY, "diamond", (5, 3)))
    title, unit = "Effective sample size", "effective number of sequences"
    return lines("ess", title, caption, unit, sizes, looks, what_is_missing(sizes), zero=True)


def _evaluated(run: Run, name: str) -> list[Chart]:
    """Returns the charts of an evaluation of checkpoints: what is solved; entropy and distance."""
    measured = run.evaluations[name]
    pass_at = largest_pass_at(measured)
    solved = {
        "reward": "reward",
        "greedy_accuracy": "greedy",
        pass_at: pass_at.replace("_at_", "@"),
        "majority": "majority",
    }
    certain = {"entropy/token": "entropy", "kl/token": "KL to the first model"}
    shares, nats = (
        {label: measured.get(metric, {}) for metric, label in labels.items()} for labels in (solved, certain)
    )
    caption = (
        "At each checkpoint: mean reward of the sampled responses; share of prompts solved by the greedy response, by "
        "at least one sampled response, and by the most frequent answer. Shaded: 95 % intervals over prompts."
    )
    title = f"Evaluation {name}: what is solved"
    file, unit = f"evaluation_{name}_solved", "share of prompts; reward"
    first = lines(file, title, caption, unit, shares, LOOKS, ends=SHARE)
    caption = (
        "Exact next-token entropies and divergences, averaged over the tokens of the sampled responses; shaded: 95 % "
        "intervals over prompts."
    )
    file, title = f"evaluation_{name}_entropy", f"Evaluation {name}: entropy and distance"
    return [first, lines(file, title, caption, "nats per token", nats, LOOKS)]
