"""What a report says of a run in words: how it opens, the lines of its summary, and what a step does."""

from __future__ import annotations

from typing import Any, NamedTuple

import pandas as pd

from rl_training.mathematics.estimate import Estimate
from rl_training.mathematics.welch import difference
from rl_training.records.report import findings
from rl_training.records.report.interventions import NO_FALL, effects_of, is_falling
from rl_training.records.report.series import NO_PROBE, Run, finite, last_of, to_estimates
from rl_training.records.report.words import MILLI, sentences, table

MAX_WINDOW = 5  # logged steps averaged at either end of a run: one batch alone is too noisy to compare
STEP_NUMBERS = {  # what a step does: how it is shown, as it was measured, as it was predicted
    "entropy, 1e-3 nats per token": (MILLI, "measured/delta_h", "delta_h/forward"),
    "reward, 1e-3": (MILLI, "measured/delta_reward", "delta_reward/forward"),
    "length, tokens": (1.0, "measured/delta_length", "delta_length/forward"),
    "KL to the step before, 1e-3 nats per token": (MILLI, "measured/kl", "kl/forward"),
}


class Row(NamedTuple):
    """A line of the summary. `value` is MISSING when it is not available, and `note` then says why."""

    label: str
    value: str
    note: str = ""


def opening(run: Run) -> list[str]:
    """Returns the sentences that open: does it learn, is entropy collapsing, how fast, are the predictions right."""
    both = [run.known(f"delta_h/cumulative_{kind}") for kind in ("measured", "predicted")]
    last = both[0].index.intersection(both[1].index, sort=False)[-1:]
    truth, total = (last_of(rows.loc[last]) for rows in both)
    return sentences(
        "opening",
        run=run,
        levels=[mean for mean, _, _ in ends_of(run.token_entropy())],
        rate=findings.present_rate(run),
        sums=(truth, total, difference(total, truth)) if truth and total and total.stderr != 0 else None,
    )


def ends_of(values: pd.Series[float]) -> list[tuple[float, int, int]]:
    """Returns (mean, first step, last step) of the first few values and of the last few; of one value, one."""
    window = min(MAX_WINDOW, max(len(values) // 2, 1))
    parts = (values.iloc[:window], values.iloc[window:].tail(window))
    return [(part.mean(), part.index[0], part.index[-1]) for part in parts if len(part)]


def step_numbers(run: Run) -> list[list[str]]:
    """Returns the table of STEP_NUMBERS, measured and predicted; nothing where there is only one."""
    rows = [
        (
            label,
            findings.mean_of_last(findings.measured_by_one_step(run, measured)),
            findings.mean_of_last(run.known(predicted)),
            times,
        )
        for label, (times, measured, predicted) in STEP_NUMBERS.items()
    ]
    known = [row for row in rows if any(row[1:3])]
    cut_off = run.logged("completions/clipped_ratio").tolist()[-1:]
    return table("step", rows=known, cut_off=cut_off) if len(known) > 1 else []


def summarize(run: Run) -> list[Row]:
    """Returns the lines of the summary: where reward and entropy went, and predicted against measured change."""
    scale, ratio = (last_of(run.with_interval(f"gns/{name}")) for name in ("noise_scale_prompts", "batch_ratio"))
    held_out = findings.held_out_rewards(run)
    lines = table(
        "summary",
        run=run,
        ends=ends_of,
        held_out={label: to_estimates(rows.iloc[sorted({0, len(rows) - 1})]) for label, rows in held_out.items()},
        **_changes(run),
        scale=scale,
        ratio=ratio,
        effects=effects_of(run),
        falls=is_falling(run),
        no_fall=NO_FALL,
    )
    return [Row(*cells) for cells in lines]


def _changes(run: Run) -> dict[str, Any]:
    """Returns the measured change of entropy at the last step that has it, with the sums of predictions there."""
    sums = [run.measured(f"delta_h/cumulative_{kind}") for kind in ("measured", "predicted")]
    last = max(finite(sums[0]).index, default=max(sums[0].index, default=0))
    first = max((step for step in findings.origins(run) if step <= last), default=None)
    changes = [Estimate.missing(findings.NO_LATER_BATCH)] * 3
    if first != last:
        absent = Estimate.missing(NO_PROBE)
        changes = [to_estimates(rows).get(last, absent) for rows in (*sums, findings.naive_of(run))]
    return {"changes": changes, "since": first, "until": last, "goes_on": findings.goes_on(run)}
