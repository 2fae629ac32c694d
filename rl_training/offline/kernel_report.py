"""The report of a finished kernel: tables as CSV, pictures, and a page whose cells show their pair on hover."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor

from rl_training.offline.kernel_at_checkpoint import TEXTS_FILE, kernel_of_analysis
from rl_training.offline.kernel_types import KernelSettings
from rl_training.offline.probe import Analysis
from rl_training.offline.restored import RestoredTrainer
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
    clusters, order = distinct.clusters(NUM_CLUSTERS)
    tables = {
        "pairs": pair_table(s), "cosines": cosine_table(s), "top_pairs": top_pairs(s),
        "clusters": _members(distinct, clusters), "log_probabilities": predictions(s),
    }  # fmt: skip
    for name, rows in tables.items():
        write_csv(folder / f"{name}.csv", rows)
    orders = {"prompt": _by_prompt(s), "cluster": _by_cluster(s, distinct, order)}
    _draw(s, orders, folder)
    data = {
        "about": _about(s, distinct),
        "evaluation": [_shown(row) for row in s.evaluation],
        "update": [_shown(row) for row in s.update],
        "cosine": _json(s.cosines),
        "contribution": _json(s.contributions),
        "kind": _kinds(s),
        "kinds": CLASSES,
        "order": {name: {"evaluation": e, "update": u} for name, (e, u) in orders.items()},
        "pairs": _json(tables["pairs"]),
        "within": _json(tables["cosines"]),
        "top": _json(tables["top_pairs"]),
        "clusters": _json(tables["clusters"]),
        "histograms": {name: _histogram(s.cosines[s.is_of_class(name)]).long().tolist() for name in CLASSES},
    }
    template = files("rl_training.offline").joinpath(PAGE).read_text(encoding="utf-8")
    # The model's text may contain "</script>": escape it.
    filled = template.replace(
        "/*DATA*/null", json.dumps(data, ensure_ascii=True, separators=(",", ":")).replace("<", "\\u003c")
    )
    write_atomically({folder / PAGE: filled.encode()})
    return folder / PAGE


def _about(s: Structure, distinct: Distinct) -> str:
    kernel = s.kernel
    parts = {key: float(kernel.about[f"delta_h/part/{key}"]) for key in ("gradient", "momentum", "decay")}
    whole = sum(parts.values())
    if not s.on_policy:
        return (
            f"{kernel.about.get('checkpoint', '')}, step {kernel.about.get('step', '?')}. E's texts are of step "
            f"{kernel.about['texts_of_step']}: cosines and changes of log π are valid, contributions to the entropy "
            f"change are not. {len(distinct.rows)} distinct texts, participation ratio "
            f"{distinct.participation_ratio:.3g}."
        )
    return (
        f"{kernel.about.get('checkpoint', '')}, step {kernel.about.get('step', '?')}. The pairs add up to the gradient "
        f"part of the predicted entropy change, {parts['gradient']:+.3g} of {whole:+.3g} nats per token; momentum is "
        f"{parts['momentum']:+.3g}, decay {parts['decay']:+.3g}. {len(distinct.rows)} distinct texts, participation "
        f"ratio {distinct.participation_ratio:.3g}."
    )


def _shown(row: Row) -> Row:
    return {key: _json(row[key]) for key in ("row", "reward", "advantage", "tokens", "logp", "prompt", "response")}


def _members(distinct: Distinct, clusters: Tensor) -> list[Row]:
    """Returns a row for each distinct text, cluster by cluster."""
    rows = [
        {"cluster": int(cluster), "text": row["prompt"] + row["response"],
         **{key: row[key] for key in ("times", "reward", "logp", "tokens", "buffer", "prompt_hash")}}
        for row, cluster in zip(distinct.rows, clusters, strict=True)
    ]  # fmt: skip
    return sorted(rows, key=lambda row: row["cluster"])


def _kinds(s: Structure) -> list[str]:
    """Returns a string for each row of E: at each column of U, the digit of the pair's class in CLASSES."""
    kinds = torch.stack([s.is_of_class(name).long() for name in CLASSES]).argmax(dim=0)
    return ["".join(map(str, row)) for row in kinds.tolist()]


def _by_prompt(s: Structure) -> tuple[list[int], list[int]]:
    def order(rows: Sequence[Row]) -> list[int]:
        return sorted(range(len(rows)), key=lambda i: (rows[i]["prompt"], rows[i]["response"]))

    return order(s.evaluation), order(s.update)


def _by_cluster(s: Structure, distinct: Distinct, order: Tensor) -> tuple[list[int], list[int]]:
    """Returns both orders, sorted as the texts are in the dendrogram."""
    place = {distinct.rows[n]["hash"]: position for position, n in enumerate(order.tolist())}

    def sort(rows: Sequence[Row]) -> list[int]:
        return sorted(range(len(rows)), key=lambda i: place.get(rows[i]["hash"], len(place)))

    return sort(s.evaluation), sort(s.update)


def _histogram(values: Tensor) -> Tensor:
    return torch.histc(values[values.isfinite()].float().clamp(-1, 1), BINS, -1, 1)


def _draw(s: Structure, orders: dict[str, tuple[list[int], list[int]]], folder: Path) -> None:
    """Draws cosines.png, the matrix in both orders, distributions.png and log_probabilities.png."""
    figure = Figure(figsize=(13, 6), layout="constrained")
    for axes, (name, (e, u)) in zip(figure.subplots(1, 2), orders.items(), strict=True):
        values = s.cosines[e][:, u]
        image = axes.imshow(signed_root(values), cmap="RdBu_r", vmin=-1, vmax=1, aspect="auto", interpolation="nearest")
        axes.set(title=f"cosine of gradients, by {name}", xlabel="update sequence", ylabel="evaluation sequence")
    ticks = [-1, -0.5, -0.1, 0, 0.1, 0.5, 1]
    bar = figure.colorbar(image, ax=figure.axes, ticks=[math.copysign(math.sqrt(abs(t)), t) for t in ticks])
    bar.set_ticklabels([str(t) for t in ticks])
    figure.savefig(folder / "cosines.png", dpi=120)
    figure = Figure(figsize=(12, 3.2), layout="constrained")
    centres = torch.linspace(-1, 1, BINS + 1)[:-1] + 1 / BINS
    for axes, name in zip(figure.subplots(1, len(CLASSES)), CLASSES, strict=True):
        counts = _histogram(s.cosines[s.is_of_class(name)])
        axes.bar(centres.numpy(), counts.numpy(), width=2 / BINS)
        axes.set(title=f"{name} ({int(counts.sum())})", xlabel="cosine")
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


def _json(value: Any) -> Any:
    """Returns the value with nan as null, which JSON knows, and numbers at three digits."""
    if isinstance(value, Tensor):
        return _json(value.tolist())
    if isinstance(value, list):
        return [_json(part) for part in value]
    if isinstance(value, dict):
        return {key: _json(part) for key, part in value.items()}
    if isinstance(value, float):
        return to_json(float(f"{value:.3g}"))
    return value
