"""The report of a finished kernel: tables as CSV, pictures, and a page whose cells show their pair on hover.

And the evolution over kernels of several checkpoints: how gradients, cosines and spectrum change over training. Only
kernels whose E is the same texts (kernel.source=fixed) are strictly comparable. Their sketches are of √P W with each
step's own P, by the same hashes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path

import pandas as pd
import torch
from matplotlib.figure import Figure
from torch import Tensor

from rl_training.mathematics.clusters import average_linkage
from rl_training.offline.structure import (
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
from rl_training.records.atomic_write import write_atomically
from rl_training.records.jsonl import to_json

PAGE = "kernel.html"
NUM_CLUSTERS = 8
BINS = 40
SHOWN = ("row", "reward", "advantage", "tokens", "logp", "prompt", "response")  # of a sequence
DRAWN = {
    "kernel/share_coupling": "share of the gradient part\nfrom pairs of other texts",
    "kernel/cosine_same_prompt_other_text": "cosine, same prompt other text",
    "kernel/cosine_other_prompt": "cosine, other prompt",
    "cosine_within_E_sd": "sd of cosines within E,\nother prompt",
    "cosine_correlation": "cosines within E: correlation\nwith the first checkpoint's",
    "participation_ratio_E": "participation ratio within E",
    "median_norm": "median |√M W| within E",
    "kernel/logp_slope": "measured change of log π\non the predicted: slope",
}


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
        pd.DataFrame(rows).to_csv(folder / f"{name}.csv", index=False)
    place = {distinct.rows[n]["hash"]: position for position, n in enumerate(dendrogram.tolist())}
    buffers = {"evaluation": s.evaluation, "update": s.update}
    orders = {
        "prompt": {
            buffer: _order([(row["prompt"], row["response"]) for row in rows]) for buffer, rows in buffers.items()
        },
        "cluster": {
            buffer: _order([place.get(row["hash"], len(place)) for row in rows]) for buffer, rows in buffers.items()
        },
    }
    _draw(s, orders, folder)
    data = {
        "about": _about(s, distinct),
        **{buffer: [{key: row[key] for key in SHOWN} for row in rows] for buffer, rows in buffers.items()},
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
    rows = pd.DataFrame(distinct.rows).assign(cluster=clusters, text=lambda row: row["prompt"] + row["response"])
    columns = ["cluster", "text", "times", "reward", "logp", "tokens", "buffer", "prompt_hash"]
    return rows.sort_values("cluster", kind="stable")[columns].to_dict("records")


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


# --- over training ----------------------------------------------------------------------------------------------------


def write_evolution(structures: Sequence[Structure], columns: Sequence[Row], folder: Path) -> None:
    """Writes evolution.csv, evolution.png, evolution_cosines.png and evolution_spectrum.png.

    columns  a kernel's numbers, with its `step`, for each of the structures
    """
    folder.mkdir(parents=True, exist_ok=True)
    order = sorted(range(len(columns)), key=lambda n: columns[n]["step"])
    ordered = [structures[n] for n in order]
    within, ratios = zip(*(_within(s) for s in ordered), strict=True)
    texts = [[row["hash"] for row in s.evaluation] for s in ordered]
    same_texts = [own == texts[0] for own in texts]
    rows = [
        {**columns[n], **_numbers(s, own, within[0] if alike else None), "participation_ratio_E": ratio}
        for n, s, own, ratio, alike in zip(order, ordered, within, ratios, same_texts, strict=True)
    ]
    pd.DataFrame(rows).to_csv(folder / "evolution.csv", index=False)
    _draw_numbers(rows, folder / "evolution.png")
    _draw_cosines(rows, within, all(same_texts), folder / "evolution_cosines.png")
    _draw_spectrum(rows, within, folder / "evolution_spectrum.png")


def _within(s: Structure) -> tuple[Tensor, float]:
    """Returns the cosines within E and their participation ratio, of the sequences with a gradient that is not 0."""
    sketches, norms = s.kernel.tensors["sketches"], s.kernel.tensors["sq_norms"]
    return sketched_cosines(sketches[norms > 0], norms[norms > 0])


def _numbers(s: Structure, within: Tensor, first: Tensor | None) -> Row:
    """Returns a kernel's further numbers. first: the cosines within the same texts at the first checkpoint."""
    other = next(row for row in cosine_table(s) if row["within"] == "E" and row["pairs"] == OTHER_PROMPT)
    both = torch.full((2, 2), math.nan)
    if first is not None and first.shape == within.shape:
        pairs = torch.ones_like(within, dtype=torch.bool).triu(1)
        both = torch.stack([within[pairs], first[pairs]])
    return {
        "cosine_within_E_mean": other["cosine_mean"],
        "cosine_within_E_sd": other["cosine_sd"],
        "cosine_correlation": float(torch.corrcoef(both)[0, 1]),
        "median_norm": float(s.kernel.tensors["sq_norms"].sqrt().median()),
    }


def _draw_numbers(rows: Sequence[Mapping[str, float]], path: Path) -> None:
    figure = Figure(figsize=(14, 6), layout="constrained")
    steps = [row["step"] for row in rows]
    for axes, (key, title) in zip(figure.subplots(2, 4).flat, DRAWN.items(), strict=True):
        values = [row[key] for row in rows]
        axes.set(title=title, xlabel="optimizer step")
        if sum(math.isfinite(value) for value in values) > 1 or len(values) == 1:
            axes.plot(steps, values, marker="o")
        else:
            axes.text(0.5, 0.5, "only where E is drawn\nfrom the policy itself", ha="center", transform=axes.transAxes)
    figure.savefig(path, dpi=120)


def _draw_cosines(rows: Sequence[Row], within: Sequence[Tensor], same_texts: bool, path: Path) -> None:
    """Draws E's matrices; of the same texts, all in the order of the first one's clusters."""
    figure = Figure(figsize=(3.2 * len(rows) + 1, 3.6), layout="constrained")
    order = average_linkage(within[0], 1)[1]
    for axes, row, own in zip(figure.subplots(1, len(rows), squeeze=False).flat, rows, within, strict=True):
        places = order if same_texts and len(own) == len(order) else average_linkage(own, 1)[1]
        image = axes.imshow(signed_root(own[places][:, places]), cmap="RdBu_r", vmin=-1, vmax=1)
        axes.set(title=f"step {row['step']}", xticks=[], yticks=[])
    bar = figure.colorbar(image, ax=figure.axes, ticks=[-1, -0.5, 0, 0.5, 1])
    bar.set_ticklabels(["−1", "−.25", "0", ".25", "1"])
    figure.suptitle("cosines within E" + (", in the first checkpoint's clusters" if same_texts else ""))
    figure.savefig(path, dpi=120)


def _draw_spectrum(rows: Sequence[Row], within: Sequence[Tensor], path: Path) -> None:
    """Draws the eigenvalues of E's matrices of cosines, as shares of their sum."""
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    for number, (row, own) in enumerate(zip(rows, within, strict=True)):
        values = torch.linalg.eigvalsh((own + own.T) / 2).flip(0) / len(own)
        values[values <= 0.0] = math.nan  # sketches' noise
        colour = 0.15 + 0.7 * number / max(len(rows) - 1, 1)
        axes.semilogy(range(1, len(values) + 1), values.numpy(), color=(colour, 0.3, 1 - colour),
                      label=f"step {row['step']}")  # fmt: skip
    axes.set(xlabel="eigenvalue of the cosines within E", ylabel="share of their sum", ylim=(1e-5, 1))
    axes.legend()
    figure.savefig(path, dpi=120)
