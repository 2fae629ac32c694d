"""Kernels of several checkpoints compared: how gradients, cosines and spectrum change over training.

Only kernels whose E is the same texts (kernel.source=fixed) are strictly comparable. Their sketches are of √P W with
each step's own P, by the same hashes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from matplotlib.figure import Figure
from torch import Tensor

from rl_training.mathematics.clusters import average_linkage
from rl_training.offline.kernel_report import signed_root, write_csv
from rl_training.offline.structure import OTHER_PROMPT, Row, Structure, cosine_table, sketched_cosines

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
    write_csv(folder / "evolution.csv", rows)
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
