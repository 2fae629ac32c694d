"""The picture of one checkpoint analysis: what was predicted and measured, and what the prediction is made of."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from rl_training.records.report.drawing import BLACK, BLUE, GREEN, GREY, ORANGE, Picture, picture
from rl_training.records.report.summary import MILLI

WHOLE = {  # of a result, and how it is drawn
    "deltaH1": ("predicted", BLUE, "o"),
    "deltaH_true": ("measured", BLACK, "D"),
    "deltaH_odd": ("measured, odd", GREEN, "s"),
    "paired_error": ("predicted − measured", ORANGE, "^"),
    "paired_error_odd": ("predicted − odd", ORANGE, "v"),
}
SPLITS = {"part": "cause", "kind": "kind", "layer": "layer"}
INCHES_PER_ROW = 0.3
MOST_ROWS = 40  # of a split; a deep model's layers are in the table of results


def one_analysis(content: Mapping[str, Any], name: str) -> Picture:
    """Returns the picture of a result.json: a row for each number with its 95 % interval, per token."""
    results = content["results"]
    rows = [(key, *style) for key, style in WHOLE.items() if _is_there(results, key)]
    begins: list[int] = []  # of a split
    for split, words in SPLITS.items():
        parts = [key for key in results if key.startswith(f"deltaH1/{split}/") and "_se" not in key]
        parts = [key for key in parts if _is_there(results, key)]
        if 1 < len(parts) <= MOST_ROWS:
            begins.append(len(rows))
            rows += [(key, f"{words}: {key.rpartition('/')[2]}", BLUE, ".") for key in parts]

    def draw(axes: Axes) -> None:
        axes.axvline(0, color=GREY, lw=1)
        for place in begins:
            axes.axhline(place - 0.5, color=GREY, lw=1)
        for place, (key, _, color, marker) in enumerate(rows):
            half = 1.96 * MILLI * results.get(f"{key}_se", 0.0)
            axes.errorbar(MILLI * results[key], place, xerr=half, fmt=marker, color=color, ms=6, lw=1.6)
        axes.set_yticks(np.arange(len(rows)), [label for _, label, _, _ in rows])
        axes.set_ylim(len(rows) - 0.5, -0.5)
        axes.set_xlabel("change of token entropy, 1e-3 nats")

    return picture(
        f"offline_{name}_step.png", f"Offline {name}: step {content['step'] + 1}", _caption(content),
        [] if rows else ["neither prediction nor truth is a finite number"], draw if rows else None,
        height=1.0 + INCHES_PER_ROW * len(rows), over_steps=False,
    )  # fmt: skip


def _is_there(results: Mapping[str, Any], key: str) -> bool:
    return math.isfinite(results.get(key, math.nan)) and not key.endswith("_sequence")


def _caption(content: Mapping[str, Any]) -> str:
    results = content["results"]
    return (
        f"The step after checkpoint {content['step']}, 95 % intervals, from {results['B_E']:.0f} evaluation sequences "
        f"and {results['B_U']:.0f} × {results['G']:.0f} update sequences, sampled independently. The prediction's "
        "interval has the noise of both. Prediction and truth share E, so their difference is known more precisely. "
        "Odd is half the difference of a step and a step back: the second order cancels. Causes, kinds of module and "
        "layers each add up to the prediction."
    )
