"""The output of a checkpoint analysis: result.json, a log, and a table in the terminal.

The log consists of files DIRECTORY/YYYY-MM-DD/entropy_probe_HH-MM-SS_CHECKPOINT…, written all or none:

    .json.gz              everything that the log level asks for
    _config.yaml          the settings of the analysis and of the run
    _summary.json         the core numbers; moved into place last: if it exists, all files do
    _tensors.safetensors  at level debug: δθ, the gradient of U, X̄, slopes of tokens

docs/reference/run_folder.md explains levels and keys. records/analyses.py reads all files.
"""

from __future__ import annotations

import gzip
import itertools
import json
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import torch
import yaml
from rich.console import Console
from rich.table import Table
from safetensors.torch import save
from torch import Tensor

from rl_training.offline.analysis import Analysis
from rl_training.offline.buffers import text_of
from rl_training.offline.restored import RestoredTrainer
from rl_training.offline.settings import LogSettings
from rl_training.policy.rollout import Rollout
from rl_training.probes.importance import sequence_totals
from rl_training.records.files.atomic_write import write_atomically
from rl_training.records.first_order import first_order_verdict
from rl_training.records.folder import checkpoint_name
from rl_training.records.json_values import to_json
from rl_training.records.pages.writing import MILLI, normal_milli
from rl_training.version import VERSION

ROWS = {
    "deltaH1": "predicted, first order",
    "deltaH_true": "measured (PDIS)",
    "paired_error": "predicted − measured, same E",
    "deltaH_odd": "measured without second order",
    "paired_error_odd": "predicted − that, same E",
    "deltaH_snis": "measured (SNIS)",
    "deltaH1/part/momentum": "predicted: momentum",
    "deltaH1/part/gradient": "predicted: this gradient",
    "deltaH1/part/decay": "predicted: weight decay",
}
DRAWN_AFRESH = {
    "deltaH_true": "measured (fresh samples)",
    "paired_error": "predicted − measured, same prompts",
    "paired_error_odd": "predicted − that, same prompts",
}
CORE = (
    "deltaH1", "deltaH_true", "deltaH_snis", "deltaH_odd", "paired_error", "H_orig", "H_upd", "bars_dot",
    "learning_rate", "ESS", "w_max", "w_min", "B_E", "N_E", "B_U", "G", "avg_generation_length", "avg_reward",
)  # fmt: skip


def write_result(
    path: Path, restored: RestoredTrainer, analysis: Analysis, settings: Mapping[str, Any], log: Path | None = None
) -> None:
    """Write the results of an analysis as JSON, atomically: a killed process leaves the old file or the whole new one.

    Args:
        settings: The settings to record, without secrets.
        log: Path of the log, if there is one.
    """
    content = {
        **_origin(restored),
        "results": analysis.results,
        "reasons": analysis.reasons,
        "tables": analysis.tables,
        "timing": analysis.seconds,
        "log": str(log or ""),
        "settings": settings,
    }
    text = json.dumps(to_json(content), indent=1, ensure_ascii=False)
    write_atomically({path: text.encode(errors="backslashreplace")})  # a lone surrogate as \udXXX


def _origin(restored: RestoredTrainer) -> dict[str, Any]:
    return {
        "version": VERSION, "checkpoint": str(restored.checkpoint), "step": restored.step,
        "world_size": restored.num_ranks,
    }  # fmt: skip


def print_table(analysis: Analysis, restored: RestoredTrainer, path: Path) -> None:
    """Print the core numbers in thousandths of a nat, with 95 % intervals."""
    results = analysis.results
    table = Table(title=f"step {restored.step + 1}, from {restored.checkpoint}", title_justify="left")
    table.add_column("change of entropy, 1e-3 nats, ± 95 %")
    for heading in ("per token", "per sequence"):
        table.add_column(heading, justify="right")
    rows = ROWS | (DRAWN_AFRESH if results.get("resampled") else {})
    for key, label in rows.items():
        if not math.isnan(results.get(key, math.nan)):
            table.add_row(label, _with_error(results, key), _with_error(results, f"{key}_sequence"))
    console = Console(soft_wrap=True, markup=False, emoji=False)  # prints paths unchanged
    console.print(table)
    sizes = f"E {results['N_E']:.0f} sequences, U {results['B_U']:.0f} × {results['G']:.0f}"
    zero_advantage = f"{100 * results['zero_advantage']:.0f} % of U has zero advantage"
    rate = f"learning rate {results['learning_rate']:.3g}"
    console.print(f" {sizes}; reward {results['avg_reward']:.3f}, {zero_advantage}; {rate}")
    if analysis.truth is not None:
        how = "fresh samples at the moved weights: effective sample size" if results["resampled"] else "ESS"
        console.print(f" {how} {results['ESS']:.1f} of {results['N_E']:.0f}; H {results['H_orig']:.4f} nats per token")
    if analysis.tables.get("conditioning"):
        shares = ", ".join(f"{row['name']} {MILLI * row['delta_h1']:+.2f}" for row in analysis.tables["conditioning"])
        console.print(f" predicted per token under other preconditioners, same ‖δθ‖: {shares}")
    judged = first_order_verdict(restored.step + 1, results)
    if judged.fails:
        console.print(f" {judged.sentence}", style="bold")
    console.print(" " + ", ".join(f"{name} {seconds:.1f} s" for name, seconds in analysis.seconds.items()))
    console.print(f" {path}")


def _with_error(results: Mapping[str, float], key: str) -> str:
    return normal_milli(results.get(key, math.nan), results.get(f"{key}_se", math.nan))


# --- the log ----------------------------------------------------------------------------------------------------------


def write_log(
    folder: Path, restored: RestoredTrainer, analysis: Analysis, log: LogSettings, settings: Mapping[str, Any]
) -> Path | None:
    """Write the log on the main process, and return its path on every process; None at level none. Collective.

    Args:
        folder: Where to write, in a subfolder for the day, unless log.directory names another folder.
    """
    if log.level == "none":
        return None
    summary, content = _contents(restored, analysis, log)  # on all processes, as each has some of the sequences
    with_tensors = log.reaches("debug") and log.raw_tensors
    tensors = {"_tensors.safetensors": save(_tensors(restored, analysis))} if with_tensors else {}
    ending = f".json{'.gz' * log.compress}"
    place = Path(log.directory or folder) / time.strftime("%Y-%m-%d")
    stem = f"entropy_probe_{time.strftime('%H-%M-%S')}_{checkpoint_name(restored.checkpoint)}"
    if restored.rank == 0:
        stem = _unused_stem(place, stem)
        text = json.dumps(to_json(content), ensure_ascii=False).encode(errors="backslashreplace")
        files = tensors | {
            ending: gzip.compress(text, mtime=0) if log.compress else text,
            "_config.yaml": yaml.safe_dump(dict(settings), sort_keys=False).encode(),
            "_summary.json": json.dumps(to_json(summary), indent=1).encode(),
        }
        write_atomically({place / f"{stem}{end}": data for end, data in files.items()})
    return place / f"{restored.gather([stem])[0]}{ending}"


def _contents(restored: RestoredTrainer, analysis: Analysis, log: LogSettings) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the summary with the core numbers, and everything that the log's level asks for. Collective."""
    core = {
        key: value for key, value in analysis.results.items() if key.split("_se")[0] in CORE
    }  # the split drops _se, _sequence and _se_evaluation
    summary = {
        **_origin(restored),
        "level": log.level,
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "core": core,
        "reasons": {key: reason for key, reason in analysis.reasons.items() if key in core},
        "timing": {name: round(seconds, 3) for name, seconds in analysis.seconds.items()},
    }
    content = dict(summary)
    with_texts = log.reaches("detailed") and log.sequences
    evaluation = _evaluation_rows(restored, analysis, with_texts)
    update = _update_rows(restored, analysis, with_texts)
    if log.reaches("standard"):
        content |= {"results": analysis.results, "reasons": analysis.reasons, "tables": analysis.tables}
        content["statistics"] = statistics_of(evaluation, update)
    if log.reaches("detailed"):
        content |= {"evaluation": evaluation, "update": update}
    if log.reaches("debug") and log.tokens:
        content["tokens"] = _token_rows(analysis)
    return summary, content


def _evaluation_rows(restored: RestoredTrainer, analysis: Analysis, with_texts: bool) -> list[dict[str, Any]]:
    e = analysis.evaluation
    logps, entropies, lengths = sequence_totals(e.scores).unbind(dim=1)
    columns = {"length": lengths.long(), "logp": logps, "entropy": entropies}
    if analysis.truth is not None:
        change = analysis.truth.whole_step.forward
        after = sequence_totals(change.after)
        columns |= {"logp_after": after[:, 0], "entropy_after": after[:, 1], "weight": change.log_ratios.exp()}
    local_rows = [*zip(e.score_rows.tolist(), _texts(restored, e.rollout, with_texts), strict=True)]
    texts = dict(restored.gather(local_rows))
    numbers = zip(*(column.tolist() for column in columns.values()), strict=True)
    return [{"sequence": i, **texts[i], **dict(zip(columns, row, strict=True))} for i, row in enumerate(numbers)]


def _update_rows(restored: RestoredTrainer, analysis: Analysis, with_texts: bool) -> list[dict[str, Any]]:
    rollout = analysis.update_buffer.rollout
    assert rollout.rewards is not None
    columns = {
        "prompt_index": rollout.prompt_index, "length": rollout.completion_mask.sum(dim=1), "reward": rollout.rewards,
        "advantage": rollout.advantages,
    }  # fmt: skip
    numbers = zip(*(column.tolist() for column in columns.values()), strict=True)
    local_rows = [
        {**dict(zip(columns, row, strict=True)), **text}
        for row, text in zip(numbers, _texts(restored, rollout, with_texts), strict=True)
    ]
    return sorted(restored.gather(local_rows), key=lambda row: row["prompt_index"])


def _texts(restored: RestoredTrainer, rollout: Rollout, wanted: bool) -> list[dict[str, str]]:
    return [text_of(restored, rollout, row) if wanted else {} for row in range(rollout.num_sequences)]


def statistics_of(evaluation: Sequence[Any], update: Sequence[Any]) -> dict[Any, Any]:
    """Return mean, standard deviation and quantiles of each quantity over the sequences of all processes."""
    e = pd.DataFrame(evaluation)
    u = pd.DataFrame(update)
    columns = {
        "generation_length": (e, "length"), "sequence_entropy": (e, "entropy"), "reward": (u, "reward"),
        "advantage": (u, "advantage"), "update_length": (u, "length"), "importance_weight": (e, "weight"),
    }  # fmt: skip
    available = {name: rows[key] for name, (rows, key) in columns.items() if key in rows}
    for name, values in available.items():
        if values.isna().any():  # describe() would skip the nan
            available[name] = values * math.nan
    table = pd.DataFrame(available).describe()
    return table.drop("count").rename({"std": "sd", "25%": "q25", "50%": "median", "75%": "q75"}).to_dict()


def _token_rows(analysis: Analysis) -> list[dict[str, Any]]:
    """Return the numbers of each token of E: one row per sequence with a list per quantity."""
    scores = analysis.evaluation.scores
    tables = {"logp": scores.logps, "entropy": scores.entropies}
    if analysis.truth is not None:
        change = analysis.truth.whole_step.forward
        tables |= {"logp_after": change.after.logps, "entropy_after": change.after.entropies}
        tables |= dict(zip(("logp_slope", "entropy_slope"), analysis.truth.slopes, strict=True))
    return [
        {"sequence": i, **{name: table[i, : int(mask.sum())].tolist() for name, table in tables.items()}}
        for i, mask in enumerate(scores.mask)
    ]


def _tensors(restored: RestoredTrainer, analysis: Analysis) -> dict[str, Tensor]:
    """Return the log's tensors, over all trainable parameters or the tokens of E. Collective."""
    update = analysis.update
    tensors = {"delta": restored.whole(update.delta), "gradient": restored.whole(update.gradient)}
    tensors["mask"] = analysis.evaluation.scores.mask
    if analysis.first_order is not None:
        tensors["direction"] = torch.stack([restored.whole(x) for x in analysis.first_order.direction])
    if analysis.truth is not None:
        tensors |= dict(zip(("logp_slopes", "entropy_slopes"), analysis.truth.slopes, strict=True))
    return {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}


def _unused_stem(folder: Path, stem: str) -> str:
    """Return `stem`, with a number appended if another analysis in the same second has taken it."""
    names = (stem if number == 1 else f"{stem}_{number}" for number in itertools.count(1))
    return next(name for name in names if not (folder / f"{name}_summary.json").exists())
