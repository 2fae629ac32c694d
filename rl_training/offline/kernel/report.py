"""The report of a finished kernel: tables as CSV, a picture, and a page whose matrix shows each pair on hover.

Also the evolution over the kernels of several checkpoints: how gradients, cosines and spectrum change over training.
Only kernels with the same texts as E (kernel.source=fixed) are strictly comparable. Their sketches are of √M W with
each step's own M, and use the same hashes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from rl_training.offline.kernel.clusters import average_linkage
from rl_training.offline.kernel.structure import (
    CLASSES,
    OTHER_PROMPT,
    Distinct,
    Row,
    Structure,
    cosine_table,
    distinct_texts,
    pair_table,
    predictions,
    single_predictions,
    sketched_cosines,
    top_pairs,
)
from rl_training.records.files.atomic_write import write_atomically
from rl_training.records.files.spreadsheet import as_csv
from rl_training.records.json_values import to_json
from rl_training.records.pages.charts import BLUE, Chart, Series
from rl_training.records.pages.drawing import diagonal, draw, heatmap
from rl_training.records.pages.page import pictures as draw_pictures
from rl_training.records.pages.page import write_page

PAGE = "kernel.html"
EVOLUTION = "evolution.html"
MAX_CELLS = 64  # per side of a drawn matrix; larger matrices are averaged over blocks of cells
MIN_SHARE = 1e-5
NUM_CLUSTERS = 8
BINS = 40
SHOWN = ("row", "reward", "advantage", "tokens", "logp", "prompt", "response")  # a sequence's fields on the page
DRAWN = {
    "kernel/share_coupling": "share of the gradient part from pairs of different texts",
    "kernel/cosine_same_prompt_other_text": "cosine, same prompt other text",
    "kernel/cosine_other_prompt": "cosine, other prompt",
    "cosine_within_E_sd": "sd of cosines within E, other prompt",
    "cosine_correlation": "cosines within E: correlation with the first checkpoint's",
    "participation_ratio_E": "participation ratio within E",
    "median_norm": "median |√M W| within E",
    "kernel/logp_slope": "slope of measured on predicted changes of log π",
}


def write_report(folder: Path) -> Path:
    """Write tables, picture and page of the finished kernel in this folder, and return the page's path."""
    s = Structure.read(folder)
    distinct = distinct_texts(s)
    clusters, dendrogram = average_linkage(distinct.cosines, NUM_CLUSTERS)
    tables = {
        "pairs": pair_table(s), "cosines": cosine_table(s), "top_pairs": top_pairs(s),
        "clusters": _members(distinct, clusters), "log_probabilities": predictions(s),
    }  # fmt: skip
    for name, rows in tables.items():
        write_atomically({folder / f"{name}.csv": as_csv(pd.DataFrame(rows))})
    place = {distinct.rows[n]["hash"]: position for position, n in enumerate(dendrogram.tolist())}
    buffers = {"evaluation": s.evaluation, "update": s.update}
    keys: dict[str, Callable[[Row], Any]] = {
        "prompt": lambda row: (row["prompt"], row["response"]),
        "cluster": lambda row: place.get(row["hash"], len(place)),
    }
    data = {
        **{buffer: [{key: row[key] for key in SHOWN} for row in rows] for buffer, rows in buffers.items()},
        "cosine": s.cosines.tolist(),
        "contribution": s.contributions.tolist(),
        "kind": torch.stack(list(s.classes.values())).long().argmax(dim=0).tolist(),
        "kinds": CLASSES,
        "order": {name: {buffer: _order(rows, key) for buffer, rows in buffers.items()} for name, key in keys.items()},
        "histograms": {name: torch.histc(_within_bins(s, name), BINS, -1, 1).long().tolist() for name in CLASSES},
    }
    rounded = json.loads(json.dumps(to_json(data)), parse_float=lambda text: float(f"{float(text):.3g}"))
    picture = draw_pictures([_log_probabilities(s)], "png")  # a file, as the page shows only its matrix
    facts = {"about": _describe(s, distinct), "tables": tables, "data": rounded}
    return write_page(folder / PAGE, "kernel.html", picture, script="kernel.js", **facts)


def _describe(s: Structure, distinct: Distinct) -> str:
    metadata = s.kernel.metadata
    parts = {key: float(metadata[f"delta_h/part/{key}"]) for key in ("gradient", "momentum", "decay")}
    said = (
        f"The pairs add up to the gradient part of the predicted entropy change, {parts['gradient']:+.3g} of "
        f"{sum(parts.values()):+.3g} nats per token; momentum is {parts['momentum']:+.3g}, decay {parts['decay']:+.3g}."
    )
    if not s.on_policy:
        said = (
            f"E's texts are of step {metadata['texts_of_step']}: cosines and changes of log π are valid, contributions "
            "to the entropy change are not."
        )
    return (
        f"{metadata.get('checkpoint', '')}, step {metadata.get('step', '?')}. {said} {len(distinct.rows)} distinct "
        f"texts, participation ratio {distinct.participation_ratio:.3g}."
    )


def _members(distinct: Distinct, clusters: Tensor) -> list[Row]:
    """Return one row per distinct text, sorted by cluster."""
    rows = pd.DataFrame(distinct.rows).assign(
        cluster=clusters.numpy(), text=lambda table: table["prompt"] + table["response"]
    )
    columns = ["cluster", "text", "times", "reward", "logp", "tokens", "buffer", "prompt_hash"]
    return rows.sort_values("cluster", kind="stable")[columns].to_dict("records")  # type: ignore[return-value]  # column names are strings


def _order(rows: Sequence[Row], key: Callable[[Row], Any]) -> list[int]:
    return sorted(range(len(rows)), key=lambda number: key(rows[number]))


def _within_bins(s: Structure, name: str) -> Tensor:
    """Return the finite cosines of a class of pairs, clamped to ±1, which rounding can exceed."""
    values = s.cosines[s.classes[name]]
    return values[values.isfinite()].float().clamp(-1, 1)


def _log_probabilities(s: Structure) -> Chart:
    """Return the chart of the measured against the predicted change of log π of E's sequences."""
    rows = predictions(s)
    slope, correlation = single_predictions(s)
    predicted, measured = ([float(row[kind]) for row in rows] for kind in ("predicted", "measured"))
    cloud = Series.cloud("a sequence", BLUE, "circle", predicted, measured)
    return draw("log_probabilities", [diagonal([cloud], "y = x"), cloud], slope=slope, correlation=correlation)


# --- over training ----------------------------------------------------------------------------------------------------


def write_evolution(structures: Sequence[Structure], columns: Sequence[Row], folder: Path, pictures: str = "") -> None:
    """Write evolution.csv, and evolution.html with its charts.

    Args:
        columns: Headline numbers of each structure's kernel, with its `step`.
        pictures: "png" or "svg" to write the charts as such files too, next to the page.
    """
    folder.mkdir(parents=True, exist_ok=True)
    kernels = sorted(zip(columns, structures, strict=True), key=lambda kernel: kernel[0]["step"])
    texts = [[row["hash"] for row in s.evaluation] for _, s in kernels]
    first: Tensor | None = None  # E's cosines at the first checkpoint
    rows = []
    within = []
    for (numbers, s), set_texts in zip(kernels, texts, strict=True):
        sketches = s.kernel.tensors["sketches"]
        norms = s.kernel.tensors["sq_norms"]
        cosines, ratio = sketched_cosines(sketches[norms > 0], norms[norms > 0])  # drop zero gradients
        first = cosines if first is None else first
        alike = set_texts == texts[0] and cosines.shape == first.shape
        pairs = torch.ones_like(cosines, dtype=torch.bool).triu(1)
        correlation = float(torch.corrcoef(torch.stack([cosines[pairs], first[pairs]]))[0, 1]) if alike else math.nan
        other = next(row for row in cosine_table(s) if row["within"] == "E" and row["pairs"] == OTHER_PROMPT)
        within.append(cosines)
        rows.append({
            **numbers,
            "cosine_within_E_mean": other["cosine_mean"],
            "cosine_within_E_sd": other["cosine_sd"],
            "cosine_correlation": correlation,
            "median_norm": float(norms.sqrt().median()),
            "participation_ratio_E": ratio,
        })  # fmt: skip
    write_atomically({folder / "evolution.csv": as_csv(pd.DataFrame(rows))})
    same_texts = all(set_texts == texts[0] for set_texts in texts)
    charts = [*_numbers_charts(rows), *_cosines_charts(rows, within, same_texts), _spectrum(rows, within)]
    steps = [row["step"] for row in rows]
    write_page(folder / EVOLUTION, "evolution.html", draw_pictures(charts, pictures), steps=steps, charts=charts)


def _numbers_charts(rows: Sequence[Mapping[str, float]]) -> list[Chart]:
    """Return a chart over steps for each quantity in DRAWN."""
    charts = []
    for key, title in DRAWN.items():
        points = [(row["step"], row[key]) for row in rows if math.isfinite(row[key])]
        steps, values = zip(*points, strict=True) if points else ((), ())
        missing = [] if points else ["only if E is sampled from the policy itself"]
        series = [Series(title, BLUE, steps, values, mark="circle")]
        charts.append(draw("evolution", series, missing, quantity=key.rpartition("/")[2], title=title))
    return charts


def _cosines_charts(rows: Sequence[Row], within: Sequence[Tensor], same_texts: bool) -> list[Chart]:
    """Return heatmaps of E's cosines. If E has the same texts everywhere, all use the first checkpoint's clusters."""
    order = average_linkage(within[0], 1)[1]
    ordered = "in the first checkpoint's clusters" if same_texts else "in its own clusters"
    charts = []
    for row, cosines in zip(rows, within, strict=True):
        places = order if same_texts and len(cosines) == len(order) else average_linkage(cosines, 1)[1]
        size = min(len(cosines), MAX_CELLS)
        cells = torch.nn.functional.adaptive_avg_pool2d(cosines[places][:, places].float().unsqueeze(0), size)[0]
        # Signed roots make small values visible: the few pairs near 1 dominate a linear scale.
        table = pd.DataFrame((cells.sign() * cells.abs().sqrt()).tolist())
        charts.append(heatmap("cosines", table, 1.0, step=row["step"], ordered=ordered))
    return charts


def _spectrum(rows: Sequence[Row], within: Sequence[Tensor]) -> Chart:
    """Return the chart of the eigenvalues of E's cosine matrices, as shares of their sum."""
    series = []
    for number, (row, cosines) in enumerate(zip(rows, within, strict=True)):
        values = (torch.linalg.eigvalsh((cosines + cosines.T) / 2).flip(0) / len(cosines)).tolist()
        points = [(place, value) for place, value in enumerate(values, 1) if value > MIN_SHARE]  # the rest is noise
        places, shares = zip(*points, strict=True)
        red = round(255 * (0.15 + 0.7 * number / max(len(rows) - 1, 1)))
        series.append(Series(f"step {row['step']}", f"rgb({red}, 77, {255 - red})", places, shares))
    return draw("spectrum", series)
