"""The report's pictures, as PNG bytes: one function each."""

from __future__ import annotations

import math
from functools import partial
from itertools import cycle

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from rl_training.records.evaluated import largest_pass_at
from rl_training.records.report.drawing import (
    BLACK,
    BLUE,
    GREEN,
    GREY,
    OFFSET,
    ORANGE,
    Picture,
    dots,
    frame_shares,
    legend,
    line,
    picture,
    picture_of_lines,
    points,
    running_window,
    what_is_missing,
)
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

HELD_OUT_STYLES = ((ORANGE, "s-"), (GREEN, "D-"), (BLACK, "^-"))
EVALUATION_STYLES = ((BLUE, "o-"), (ORANGE, "^-"), (GREEN, "s-"), (BLACK, "d-"))


def draw_figures(run: Run) -> list[Picture]:
    """Returns the pictures of this run. Of what cannot be drawn there is only why."""
    pictures = [_reward(run), _entropy(run), *draw_forecast(run), _delta_h(run), *draw_calibration(run)]
    if run.measured("delta_h/part/momentum"):
        pictures += [_causes(run), _layers(run)]
    if run.measured("gns/noise_scale_prompts"):
        pictures.append(_noise_scale(run))
    if run.measured("covariance/token"):
        pictures.append(draw_predictors(run))
    if run.measured("ess/advantage"):
        pictures.append(_effective_sample_size(run))
    return pictures + [drawn for name in run.checkpoint_evaluations for drawn in _evaluated(run, name)]


def _reward(run: Run) -> Picture:
    reward = run.logged("reward")
    window = running_window(len(reward))
    held_out = {label: curve(rewards) for label, rewards in held_out_rewards(run).items()}
    missing = [] if reward else ["reward – no finite value was logged"]

    def draw(axes: Axes) -> None:
        dots(axes, list(reward), list(reward.values()), BLUE, "o", "one step", f"mean of {window} steps")
        if held_out:
            dots_alone = axes.get_ylim()
            for (label, drawn), (color, style) in zip(held_out.items(), cycle(HELD_OUT_STYLES), strict=False):
                line(axes, drawn, color, style, f"held out: {label}")
            values = [value for drawn in held_out.values() for value in drawn.values]
            axes.set_ylim(min(*dots_alone, *values), max(*dots_alone, *values))  # the band of a few prompts is wide
        axes.set_ylabel("mean reward of a step's responses")
        legend(axes)

    caption = (
        "Each dot is the mean reward of one step's responses. "
        f"In longer runs the line is a running mean over {window} logged steps."
        f"{' Held out: prompts that training never sees.' if held_out else ''}"
    )
    return picture("reward.png", "Reward", caption, missing, draw if reward else None)


def _entropy(run: Run) -> Picture:
    sums: dict[str, Measurements] = {
        "measured": run.measured("delta_h/cumulative_measured"),
        "predicted": run.measured("delta_h/cumulative_predicted"),
    }
    naive = naive_of(run)
    missing = what_is_missing({**sums, "naive product": naive}, bands=False) + what_is_missing(sums, values=False)
    styles = {"measured": (BLACK, "o-"), "predicted": (BLUE, "s-"), "naive product (biased)": (ORANGE, "^--")}
    quantities = {**sums, "naive product (biased)": naive}
    drawn = {label: of for label, of in quantities.items() if len(curve(of).steps) > 1}  # the 0 of a start says nothing
    starts = origins(run)
    at_start = run.known("entropy/token").get(starts[0]) if len(starts) == 1 else None

    def around(axes: Axes) -> None:
        axes.axhline(0, color=GREY, lw=1, zorder=1)
        axes.fill_between([], [], color=GREY, alpha=0.4, lw=0, label="95 % interval")
        if at_start:
            level = at_start.value  # of the first batch, the origin of the black curve
            scale = axes.secondary_yaxis("right", functions=(partial(np.add, level), partial(np.add, -level)))
            scale.set_ylabel("token entropy (nats)")

    caption = (
        "Blue (the sum of predictions) should follow black (token entropy of each step's batch minus the first's) "
        "within the shaded 95 % intervals (Student-t, at each step). The dashed curve takes entropy gradient and "
        "update from the same batch: their shared noise makes it drift away. "
        "The scale on the right is the token entropy itself: at 0 none is left."
    )
    title, unit = (
        "Entropy: predicted against measured",
        "change of token entropy\nsince the first step (nats per token)",
    )
    missing = missing or [NO_LATER_BATCH] * (not drawn)
    chosen = [styles[label] for label in drawn]
    return picture_of_lines("entropy.png", title, caption, unit, drawn, chosen, around, missing)


def _delta_h(run: Run) -> Picture:
    quantities = {"forward": run.measured("delta_h/forward"), "backward": run.measured("delta_h/backward")}
    forward, backward = (curve(measurements, at_about_step=True) for measurements in quantities.values())

    def draw(axes: Axes) -> None:
        axes.axhline(0, color=GREY, lw=1)
        points(axes, forward, BLUE, "o", -OFFSET, "forward, from this step's batch")
        points(axes, backward, GREEN, "s", OFFSET, "backward, from the next step's batch")
        points(axes, curve(run.measured("delta_h/true")), BLACK, "D", 0, "true, on a separate buffer")
        axes.set_ylabel("predicted change of token entropy\nby this step's update (nats per token)")
        legend(axes)

    caption = (
        "Two estimates of the same update, drawn at the step that makes it, with 95 % intervals (running means in a "
        "long run): forward from the batch that made it, backward from the first batch sampled after it. The predicted "
        "curve sums their mean, the trapezoid. Where the two stay apart, do not trust forward alone."
    )
    drawn = draw if forward.steps or backward.steps else None
    return picture("delta_h.png", "Each update's effect on entropy", caption, what_is_missing(quantities), drawn)


def _causes(run: Run) -> Picture:
    colors = {"momentum": BLUE, "gradient": ORANGE, "decay": GREEN}
    parts = {cause: run.measured(f"delta_h/part/{cause}") for cause in colors}
    values = {cause: curve(part).values for cause, part in parts.items()}
    nothing = [cause for cause in parts if values[cause] and not any(values[cause])]
    drawn = {cause: part for cause, part in parts.items() if cause not in nothing}
    total = curve(run.measured("delta_h/forward"))

    def around(axes: Axes) -> None:
        axes.axhline(0, color=GREY, lw=1, zorder=1)
        axes.plot(total.steps, total.values, "-", color=BLACK, lw=1.5, label="forward, their sum", zorder=1.5)

    caption = (
        "What moves the entropy in each update: the momentum of earlier gradients, this step's own gradient, weight "
        "decay. They add up to forward. The 95 % bands ignore how a fold changes the others' updates."
        + "".join(f" The part of {cause} is 0 at every step, and not drawn." for cause in nothing)
    )
    styles = [(colors[cause], "o-") for cause in drawn]
    title, unit = "Causes: momentum, gradient, decay", "part of forward\n(nats per token)"
    return picture_of_lines("causes.png", title, caption, unit, drawn, styles, around, what_is_missing(parts))


def _layers(run: Run) -> Picture:
    prefix = "delta_h/layer/"
    parts = {
        name.removeprefix(prefix): run.values(name)
        for name in run.estimates
        if name.startswith(prefix) and not name.endswith("_sequence")
    }
    labels = sorted(parts, key=lambda label: (not label.isdigit(), int(label) if label.isdigit() else 0, label))
    table = pd.DataFrame(parts).sort_index().T.reindex(labels)  # a row per layer, a column per step

    def draw(axes: Axes) -> None:
        # A quantile, not the largest: the first steps of Adam would take the colour from all others.
        sizes = table.abs().to_numpy()
        largest = float(np.nanquantile(sizes, 0.9)) or float(np.nanmax(sizes)) or 1.0
        edges = (table.columns[0] - 0.5, table.columns[-1] + 0.5, len(labels) - 0.5, -0.5)
        image = axes.imshow(
            table, cmap="PuOr", vmin=-largest, vmax=largest, aspect="auto", extent=edges, interpolation="nearest"
        )
        axes.set_yticks(range(len(labels)), labels)
        axes.grid(False)
        axes.set_ylabel("layer")
        axes.figure.colorbar(image, ax=axes, label="part of forward (nats per token)", extend="both")

    caption = (
        "Which layer pushes the entropy up (purple) or down (orange) at each step. The rows add up to forward. "
        "The colours saturate at the 90 % quantile of the sizes."
    )
    missing = what_is_missing({"layers": run.measured("delta_h/forward")}, bands=False)
    return picture("layers.png", "Causes: layer by layer", caption, missing, None if table.empty else draw)


def _noise_scale(run: Run) -> Picture:
    scale, ratio = run.measured("gns/noise_scale_prompts"), run.measured("gns/batch_ratio")
    drawn = curve(scale)
    batch = {step: scale[step].value * ratio[step].value for step in drawn.steps}
    ends = [run.measured(f"gns/noise_scale_prompts_{end}") for end in ("low", "high")]
    known = [step for step in ends[0] if not math.isnan(ends[0][step].value)]

    def draw(axes: Axes) -> None:
        axes.plot(drawn.steps, drawn.values, "o-", color=BLUE, lw=2, ms=4, label="noise scale, running average")
        axes.plot(list(batch), list(batch.values()), "--", color=BLACK, lw=1.5, label="batch in use")
        top = 1.5 * max(*drawn.values[len(drawn.values) // 4 :], *batch.values())
        low, high = ([min(end[step].value, 2 * top) for step in known] for end in ends)
        axes.fill_between(known, low, high, color=BLUE, alpha=0.16, lw=0, label="95 % interval")
        axes.set_ylabel("prompts")
        axes.set_ylim(0, top)
        legend(axes)

    caption = (
        "The batch size, in prompts, at which the gradient's noise equals its signal. Well below it, a larger batch "
        "gains nearly in proportion to its size; well above it, more prompts are mostly redundant. Where the band "
        "reaches the top, the noise scale has no known upper bound: the gradient itself may be 0."
    )
    missing = what_is_missing({"noise scale": scale}, bands=not known)
    return picture("noise_scale.png", "Gradient noise scale", caption, missing, draw if drawn.steps else None)


def _effective_sample_size(run: Run) -> Picture:
    names = {"advantage": "weights |A|", "token_weight": "weights |A|·T", "importance": "importance ratios"}
    sizes = {label: run.measured(f"ess/{name}") for name, label in names.items()}
    caption = (
        "The number of equally weighted sequences that each step's weights amount to (Kish). Prompts whose responses "
        "all have the same reward have zero weight."
    )
    title, unit, styles = (
        "Effective sample size",
        "effective number of sequences",
        ((BLUE, "o-"), (GREEN, "s-"), (GREY, "--")),
    )
    return picture_of_lines(
        "ess.png", title, caption, unit, sizes, styles, lambda axes: axes.set_ylim(bottom=0), what_is_missing(sizes)
    )


def _evaluated(run: Run, name: str) -> list[Picture]:
    """Returns the pictures of an evaluation of checkpoints: what is solved; entropy and distance."""
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

    def frame(axes: Axes) -> None:
        frame_shares(axes, [value for of in shares.values() for value in curve(of).values])

    caption = (
        "At each checkpoint: mean reward of the sampled responses; share of prompts solved by the greedy response, by "
        "at least one sampled response, and by the most frequent answer. Shaded: 95 % intervals over prompts."
    )
    file, title, unit = (
        f"evaluation_{name}_solved.png",
        f"Evaluation {name}: what is solved",
        "share of prompts; reward",
    )
    first = picture_of_lines(file, title, caption, unit, shares, EVALUATION_STYLES, frame)
    caption = (
        "Exact next-token entropies and divergences, averaged over the tokens of the sampled responses; shaded: 95 % "
        "intervals over prompts."
    )
    file, title = f"evaluation_{name}_entropy.png", f"Evaluation {name}: entropy and distance"
    return [first, picture_of_lines(file, title, caption, "nats per token", nats, EVALUATION_STYLES)]
