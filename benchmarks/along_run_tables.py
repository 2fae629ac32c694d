"""The tables of along_run.py: coverage and noise of single steps, and sums over runs, from the runs that were kept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from scipy.special import stdtrit
from torch import Tensor

from rl_training.mathematics.calibration import interval_covers
from rl_training.mathematics.estimate import MIN_FOLDS_FOR_STDERR

PARTS = ("part/momentum", "part/gradient", "part/decay")
OF_STEP = ("forward", "backward", "trapezoid", *PARTS, "own_prompts")
QUANTITIES = (*OF_STEP, "cumulative_predicted")
# The last step's δθ, this one's, the mean δθ_(−k), and what momentum, gradient and decay have in this one.
DIRECTIONS = ("backward", "forward", "without a fold", *PARTS)
ROUNDING = 1e-8  # of an error bar
UNITS = {"token": "", "sequence": "_sequence"}


def truth_of(record: Mapping[str, Any], quantity: str, unit: int) -> tuple[Tensor, Tensor]:
    """Returns the truth that a quantity speaks of at each step, and its variance, (steps,) each; nan without one."""
    blocks = record["truth"][..., unit]  # (steps, blocks, directions and own_prompts)
    values = {name: _sum_over_blocks(blocks[..., i]) for i, name in enumerate((*DIRECTIONS, "own_prompts"))}
    if quantity != "trapezoid":
        return values[quantity]
    nan = torch.full((1,), torch.nan, dtype=blocks.dtype)
    before, before_variance = (torch.cat([nan, part[:-1]]) for part in values["forward"])
    return 0.5 * (before + values["backward"][0]), 0.25 * (before_variance + values["backward"][1])


def _sum_over_blocks(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the sums and their variances, the latter the mean of three steps', since blocks are few."""
    variance = blocks.shape[1] * blocks.var(dim=1)
    around = torch.stack([variance, variance.roll(1), variance.roll(-1)])
    around[1, 0] = around[2, -1] = torch.nan
    return blocks.sum(dim=1), around.nanmean(dim=0).masked_fill(variance.isnan(), torch.nan)


def coverage_rows(records: Sequence[Mapping[str, Any]], choice: str) -> list[str]:
    """Returns a row for each quantity, per token and per sequence."""
    lines = []
    for unit, unit_name in enumerate(UNITS):
        for number, quantity in enumerate(OF_STEP):
            parts = []
            for record in records:
                said = record["said"][choice][:, :, unit]  # (steps, quantities, 4)
                raw = said[:, number, 3].clone()
                if quantity == "trapezoid":  # has no bar of one batch: those of its two
                    raw[1:] = 0.5 * torch.hypot(said[:-1, 0, 3], said[1:, 1, 3])  # of forward, then backward
                truth, variance = truth_of(record, quantity, unit)
                columns = [said[:, number, 0] - truth, said[:, number, 1], said[:, number, 2], raw, variance.sqrt()]
                parts.append(torch.stack(columns, dim=1))
            rows = torch.cat(parts)
            rows = rows[rows.isfinite().all(dim=1) & (rows[:, 1] > ROUNDING)]  # a part may be nothing at all
            if len(rows) == 0:
                continue
            error, stderr, samples, raw, noise = rows.unbind(dim=1)
            one_batch = torch.full_like(samples, MIN_FOLDS_FOR_STDERR)
            held, held_alone = (
                sum(interval_covers(*row) for row in torch.stack(columns, dim=1).tolist()) / len(rows)
                for columns in ([error, stderr, samples.round(), noise], [error, raw, one_batch, noise])
            )
            wide = (quantile(samples) * stderr).mean() / (quantile(one_batch) * raw).mean()
            rms = float((error.square() - noise.square()).mean().clamp(min=0).sqrt())
            cells = [unit_name, f"`{quantity}`", str(len(rows)), f"{rms:.5f}"]
            lines.append(f"| {' | '.join([*cells, f'{held:.3f}', f'{held_alone:.3f}', f'{float(wide):.2f}'])} |")
    return lines


def quantile(samples: Tensor) -> Tensor:
    return torch.from_numpy(stdtrit((samples - 1).numpy(), 0.975))


def sum_cells(record: Mapping[str, Any], choice: str) -> list[str]:
    """Returns, per token and per sequence, the predicted sum, the change on unseen and on seen prompts, and whether the
    interval of the sum holds the first; and what share of forward is left with steps without a fold."""
    cells = []
    for unit in range(len(UNITS)):
        value, stderr, samples, _ = record["said"][choice][-1, QUANTITIES.index("cumulative_predicted"), unit].tolist()
        unseen, seen = (record["ends"][name][unit].tolist() for name in ("unseen", "seen"))
        held = interval_covers(value - unseen[0], stderr, round(samples), unseen[1])
        cells += [f"{a:+.4f} ± {b:.4f}" for a, b in ((value, stderr), unseen, seen)] + ["yes" if held else "no"]
    forward, without = record["truth"][..., 1:3, 0].sum(dim=(0, 1)).tolist()
    return [*cells, f"{without / forward:.3f}"]


def print_tables(records: Sequence[Mapping[str, Any]]) -> None:
    for condition in dict.fromkeys(record["condition"] for record in records):
        group = [record for record in records if record["condition"] == condition]
        for choice in group[0]["said"]:
            if all(choice in record["said"] for record in group):
                print(f"\n{condition}, X from {choice}, {len(group)} runs")
                print("\n| per | estimate | steps | noise | coverage | batch alone | width |\n|" + "---|" * 7)
                print("\n".join(coverage_rows(group, choice)))
    titles = [f"{name}, per {unit}" for unit in UNITS for name in ("predicted", "unseen", "seen", "held")]
    print(f"\n| condition | seed | {' | '.join(titles)} | δθ_(−k) / δθ |\n|{'---|' * (len(titles) + 3)}")
    for record in records:
        cells = sum_cells(record, next(iter(record["said"])))
        print(f"| {' | '.join([record['condition'], str(record['seed']), *cells])} |")
