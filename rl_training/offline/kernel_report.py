"""The report of a finished kernel: tables as CSV, pictures, and a page whose cells show their pair on hover."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

import torch
from matplotlib.figure import Figure
from torch import Tensor

from rl_training.mathematics.clusters import average_linkage
from rl_training.offline.kernel_at_checkpoint import TEXTS_FILE, kernel_of_analysis
from rl_training.offline.probe import Analysis
from rl_training.offline.restored import RestoredTrainer
from rl_training.offline.settings import KernelSettings
from rl_training.offline.structure import (
    CLASSES,
    Distinct,
    Row,
    Structure,
    cosine_table,
    distinct_texts,
    headline,
    pair_table,
    predictions,
    single_predictions,
    top_pairs,
)
from rl_training.records.atomic_write import write_atomically
from rl_training.records.json_values import to_json

PAGE = "kernel.html"
NUM_CLUSTERS = 8
BINS = 40
SHOWN = ("row", "reward", "advantage", "tokens", "logp", "prompt", "response")  # of a sequence


def add_kernel(
    restored: RestoredTrainer, analysis: Analysis, settings: KernelSettings, folder: Path
) -> dict[str, float]:
    """Returns the headline numbers of an analysis's kernel, which this calculates, stores and draws in `folder`."""
    kernel_of_analysis(restored, analysis, settings, folder, texts=folder.parents[1] / TEXTS_FILE)
    if restored.rank == 0:
        write_report(folder)
        print(f"kernel: {folder / PAGE}")
    restored.trainer.accelerator.wait_for_everyone()
    return headline(Structure.read(folder))


def write_report(folder: Path) -> Path:
    """Writes tables, pictures and the page of the finished kernel in this folder, and returns the page."""
    s = Structure.read(folder)
    distinct = distinct_texts(s)
    clusters, dendrogram = average_linkage(distinct.cosines, NUM_CLUSTERS)
    tables = {
        "pairs": pair_table(s), "cosines": cosine_table(s), "top_pairs": top_pairs(s),
        "clusters": _members(distinct, clusters), "log_probabilities": predictions(s),
    }  # fmt: skip
    for name, rows in tables.items():
        write_csv(folder / f"{name}.csv", rows)
    place = {distinct.rows[n]["hash"]: position for position, n in enumerate(dendrogram.tolist())}
    buffers = {"evaluation": s.evaluation, "update": s.update}
    orders = {
        "prompt": {of: _order([(row["prompt"], row["response"]) for row in rows]) for of, rows in buffers.items()},
        "cluster": {of: _order([place.get(row["hash"], len(place)) for row in rows]) for of, rows in buffers.items()},
    }
    _draw(s, orders, folder)
    data = {
        "about": _about(s, distinct),
        **{of: [{key: row[key] for key in SHOWN} for row in rows] for of, rows in buffers.items()},
        "cosine": s.cosines.tolist(),
        "contribution": s.contributions.tolist(),
        "kind": torch.stack(list(s.classes.values())).long().argmax(dim=0).tolist(),
        "kinds": CLASSES,
        "order": orders,
        "pairs": tables["pairs"],
        "within": tables["cosines"],
        "top": tables["top_pairs"],
        "clusters": tables["clusters"],
        "histograms": {name: torch.histc(_within_bins(s, name), BINS, -1, 1).long().tolist() for name in CLASSES},
    }
    rounded = json.loads(json.dumps(data), parse_float=lambda text: float(f"{float(text):.3g}"))
    # The model's text may contain "</script>": escape it.
    filled = json.dumps(to_json(rounded), separators=(",", ":")).replace("<", "\\u003c")
    template = files("rl_training.offline").joinpath(PAGE).read_text(encoding="utf-8")
    write_atomically({folder / PAGE: template.replace("/*DATA*/null", filled).encode()})
    return folder / PAGE


def _about(s: Structure, distinct: Distinct) -> str:
    about = s.kernel.about
    parts = {key: float(about[f"delta_h/part/{key}"]) for key in ("gradient", "momentum", "decay")}
    said = (
        f"The pairs add up to the gradient part of the predicted entropy change, {parts['gradient']:+.3g} of "
        f"{sum(parts.values()):+.3g} nats per token; momentum is {parts['momentum']:+.3g}, decay {parts['decay']:+.3g}."
    )
    if not s.on_policy:
        said = (
            f"E's texts are of step {about['texts_of_step']}: cosines and changes of log π are valid, contributions to "
            "the entropy change are not."
        )
    return (
        f"{about.get('checkpoint', '')}, step {about.get('step', '?')}. {said} {len(distinct.rows)} distinct texts, "
        f"participation ratio {distinct.participation_ratio:.3g}."
    )


def _members(distinct: Distinct, clusters: Tensor) -> list[Row]:
    """Returns a row for each distinct text, cluster by cluster."""
    rows = [
        {"cluster": int(cluster), "text": row["prompt"] + row["response"],
         **{key: row[key] for key in ("times", "reward", "logp", "tokens", "buffer", "prompt_hash")}}
        for row, cluster in zip(distinct.rows, clusters, strict=True)
    ]  # fmt: skip
    return sorted(rows, key=lambda row: row["cluster"])


def _order(keys: Sequence[tuple[str, str]] | Sequence[int]) -> list[int]:
    return sorted(range(len(keys)), key=keys.__getitem__)


def _within_bins(s: Structure, name: str) -> Tensor:
    """Returns the cosines of a class of pairs, those beyond ±1 by rounding put there."""
    values = s.cosines[s.classes[name]]
    return values[values.isfinite()].float().clamp(-1, 1)


def _draw(s: Structure, orders: dict[str, dict[str, list[int]]], folder: Path) -> None:
    """Draws cosines.png, the matrix in both orders, distributions.png and log_probabilities.png."""
    figure = Figure(figsize=(13, 6), layout="constrained")
    for axes, (name, order) in zip(figure.subplots(1, 2), orders.items(), strict=True):
        values = s.cosines[order["evaluation"]][:, order["update"]]
        image = axes.imshow(signed_root(values), cmap="RdBu_r", vmin=-1, vmax=1, aspect="auto", interpolation="nearest")
        axes.set(title=f"cosine of gradients, by {name}", xlabel="update sequence", ylabel="evaluation sequence")
    ticks = [-1, -0.5, -0.1, 0, 0.1, 0.5, 1]
    bar = figure.colorbar(image, ax=figure.axes, ticks=[math.copysign(math.sqrt(abs(t)), t) for t in ticks])
    bar.set_ticklabels([str(t) for t in ticks])
    figure.savefig(folder / "cosines.png", dpi=120)
    figure = Figure(figsize=(12, 3.2), layout="constrained")
    for axes, name in zip(figure.subplots(1, len(CLASSES)), CLASSES, strict=True):
        cosines = _within_bins(s, name)
        axes.hist(cosines, BINS, (-1, 1))
        axes.set(title=f"{name} ({len(cosines)})", xlabel="cosine")
    figure.savefig(folder / "distributions.png", dpi=120)
    figure = Figure(figsize=(5, 4.6), layout="constrained")
    axes, rows = figure.subplots(), predictions(s)
    slope, correlation = single_predictions(s)
    axes.axline((0, 0), slope=1, color="0.6", linewidth=0.8)
    axes.scatter([row["predicted"] for row in rows], [row["measured"] for row in rows], s=9)
    axes.set(title=f"change of log π of E's sequences\nslope {slope:.3f}, correlation {correlation:.4f}",
             xlabel="predicted, W·δθ", ylabel="measured at θ + δθ")  # fmt: skip
    figure.savefig(folder / "log_probabilities.png", dpi=120)


def signed_root(values: Tensor) -> Tensor:
    """Returns √|x| with the sign of x. It makes small values visible: the few pairs near 1 dominate a linear scale."""
    return values.sign() * values.abs().sqrt()


def write_csv(path: Path, rows: Sequence[Row]) -> None:
    """Writes rows with the same keys as a table."""
    with open(path, "w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]) if rows else [])
        writer.writeheader()
        writer.writerows(rows)
