"""The log of one checkpoint analysis: files in DIRECTORY/YYYY-MM-DD/entropy_probe_HH-MM-SS_CHECKPOINT…, all or none.

    .json.gz            everything that the level asks for
    _config.yaml        the settings of the analysis and of the run
    _summary.json       the core numbers; moved last: if it exists, all do
    _tensors.safetensors    at level debug: δθ, the gradient of U, X̄, slopes of tokens

What levels have and keys mean: docs/reference/analysis_logs.md; rl_training.records.read_probe_log gives DataFrames.
"""

from __future__ import annotations

import gzip
import itertools
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch
import yaml
from safetensors.torch import save
from torch import Tensor

from rl_training.engine.batch import Rollout
from rl_training.mathematics.importance import sequence_totals
from rl_training.offline.buffers import text_of
from rl_training.offline.probe import Analysis
from rl_training.offline.restored import RestoredTrainer
from rl_training.records.atomic_write import write_atomically
from rl_training.records.jsonl import to_json
from rl_training.version import VERSION

Level = Literal["none", "minimal", "standard", "detailed", "debug"]
LEVELS = get_args(Level)
CORE = (
    "deltaH1", "deltaH_true", "deltaH_snis", "deltaH_odd", "paired_error", "H_orig", "H_upd", "bars_dot",
    "learning_rate", "ESS", "w_max", "w_min", "B_E", "B_U", "G", "avg_generation_length", "avg_reward",
)  # fmt: skip
QUANTILES = {"min": 0.0, "q25": 0.25, "median": 0.5, "q75": 0.75, "max": 1.0}


@dataclass(frozen=True)
class LogSettings:
    """What an analysis writes down beside its results."""

    level: Level = "standard"
    sequences: bool = True  # texts, from detailed on
    tokens: bool = True  # at debug
    raw_tensors: bool = True  # at debug
    compress: bool = True
    directory: str | None = None  # instead of the folder of the results

    def __post_init__(self) -> None:
        if self.level not in LEVELS:
            raise ValueError(f"log.level={self.level}: choose from {', '.join(LEVELS)}")

    def reaches(self, level: Level) -> bool:
        return LEVELS.index(self.level) >= LEVELS.index(level)


def write_log(
    folder: Path, restored: RestoredTrainer, analysis: Analysis, log: LogSettings, settings: Mapping[str, Any]
) -> Path | None:
    """Returns the path of the log that the main process wrote, the same on every process; None at level none.

    folder  of which a folder for the day is made
    """
    if log.level == "none":
        return None
    content = log_content(restored, analysis, log)  # all processes: each has a part of the sequences
    own, ending = restored.checkpoint.resolve(), f".json{'.gz' * log.compress}"
    place = Path(log.directory or folder) / time.strftime("%Y-%m-%d")
    stem = f"entropy_probe_{time.strftime('%H-%M-%S')}_{own.parent.name if own.name == 'model' else own.name}"
    if restored.rank == 0:
        stem = _not_taken(place, stem)
        text, summary = json.dumps(to_json(content), ensure_ascii=False), _summary(restored, analysis, log)
        files = {"_tensors.safetensors": save(_tensors(analysis))} if log.reaches("debug") and log.raw_tensors else {}
        files |= {
            ending: gzip.compress(text.encode(), mtime=0) if log.compress else text.encode(),
            "_config.yaml": yaml.safe_dump(dict(settings), sort_keys=False).encode(),
            "_summary.json": json.dumps(to_json(summary), indent=1).encode(),
        }
        write_atomically({place / f"{stem}{end}": data for end, data in files.items()})
    return place / f"{restored.gather(stem)[0]}{ending}"


def log_content(restored: RestoredTrainer, analysis: Analysis, log: LogSettings) -> dict[str, Any]:
    """Returns the content of a log of this level. Call it on all processes."""
    content = _summary(restored, analysis, log)
    if log.reaches("standard"):
        content |= {"results": analysis.results, "reasons": analysis.reasons, "tables": analysis.tables}
        content["statistics"] = _statistics(restored, analysis)
    if log.reaches("detailed"):
        content["evaluation"] = _evaluation_rows(restored, analysis, log)
        content["update"] = _update_rows(restored, analysis, log)
    if log.reaches("debug") and log.tokens:
        content["tokens"] = _token_rows(analysis)
    return content


def _summary(restored: RestoredTrainer, analysis: Analysis, log: LogSettings) -> dict[str, Any]:
    core = {key: value for key, value in analysis.results.items() if key.split("_se")[0] in CORE}
    return {
        "version": VERSION,
        "level": log.level,
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "checkpoint": str(restored.checkpoint),
        "step": restored.step,
        "world_size": restored.num_ranks,
        "core": core,
        "reasons": {key: reason for key, reason in analysis.reasons.items() if key in core},
        "timing": {name: round(seconds, 3) for name, seconds in analysis.seconds.items()},
    }


def _statistics(restored: RestoredTrainer, analysis: Analysis) -> dict[str, dict[str, float]]:
    """Returns mean, standard deviation and quantiles over the sequences of all processes."""
    rollout = analysis.update_buffer.rollout
    assert rollout.rewards is not None
    lengths = rollout.completion_mask.sum(dim=1)
    own = torch.stack([rollout.rewards.double(), rollout.advantages.double(), lengths.double()], dim=1).cpu()
    rows = torch.cat([torch.as_tensor(part) for part in restored.gather(own)])
    columns = {
        "generation_length": analysis.evaluation.scores.mask.sum(dim=1),
        "sequence_entropy": sequence_totals(analysis.evaluation.scores)[:, 1],
        "reward": rows[:, 0],
        "advantage": rows[:, 1],
        "update_length": rows[:, 2],
    }
    if analysis.truth is not None:
        columns["importance_weight"] = analysis.truth.whole_step.ahead.log_ratios.exp()
    return {name: _describe(values.double().cpu()) for name, values in columns.items()}


def _describe(values: Tensor) -> dict[str, float]:
    spread = {name: float(values.quantile(q)) for name, q in QUANTILES.items()}
    return {"mean": float(values.mean()), "sd": float(values.std()), **spread}


def _evaluation_rows(restored: RestoredTrainer, analysis: Analysis, log: LogSettings) -> list[dict[str, Any]]:
    e = analysis.evaluation
    logps, entropies, lengths = sequence_totals(e.scores).unbind(dim=1)
    columns = {"length": lengths.long(), "logp": logps, "entropy": entropies}
    if analysis.truth is not None:
        change = analysis.truth.whole_step.ahead
        after = sequence_totals(change.after)
        columns |= {"logp_after": after[:, 0], "entropy_after": after[:, 1], "weight": change.log_ratios.exp()}
    own = dict(zip(e.number.tolist(), _texts(restored, e.rollout, log), strict=True))
    texts = {number: text for part in restored.gather(own) for number, text in part.items()}
    numbers = [dict(zip(columns, row, strict=True)) for row in zip(*map(Tensor.tolist, columns.values()), strict=True)]
    return [{"sequence": i, **texts[i], **row} for i, row in enumerate(numbers)]


def _update_rows(restored: RestoredTrainer, analysis: Analysis, log: LogSettings) -> list[dict[str, Any]]:
    rollout = analysis.update_buffer.rollout
    assert rollout.rewards is not None
    columns = zip(
        rollout.prompt_index.tolist(), _texts(restored, rollout, log), rollout.completion_mask.sum(dim=1).tolist(),
        rollout.rewards.tolist(), rollout.advantages.tolist(), strict=True,
    )  # fmt: skip
    own = [
        {"prompt_index": index, **text, "length": length, "reward": reward, "advantage": advantage}
        for index, text, length, reward, advantage in columns
    ]
    return sorted((row for part in restored.gather(own) for row in part), key=lambda row: row["prompt_index"])


def _texts(restored: RestoredTrainer, rollout: Rollout, log: LogSettings) -> list[dict[str, str]]:
    return [text_of(restored, rollout, row) if log.sequences else {} for row in range(rollout.num_sequences)]


def _token_rows(analysis: Analysis) -> list[dict[str, Any]]:
    """Returns the numbers of each token of E: a row per sequence, a list per quantity."""
    scores = analysis.evaluation.scores
    tables = {"logp": scores.logps, "entropy": scores.entropies}
    if analysis.truth is not None:
        change = analysis.truth.whole_step.ahead
        tables |= {"logp_after": change.after.logps, "entropy_after": change.after.entropies}
        tables |= dict(zip(("logp_slope", "entropy_slope"), analysis.truth.slopes, strict=True))
    return [
        {"sequence": i, **{name: table[i, : int(mask.sum())].tolist() for name, table in tables.items()}}
        for i, mask in enumerate(scores.mask)
    ]


def _tensors(analysis: Analysis) -> dict[str, Tensor]:
    update, mask = analysis.update, analysis.evaluation.scores.mask
    tensors = {"delta": update.delta, "gradient": update.gradient, "mask": mask}
    if analysis.first_order is not None:
        tensors["direction"] = analysis.first_order.direction
    if analysis.truth is not None:
        tensors |= dict(zip(("logp_slopes", "entropy_slopes"), analysis.truth.slopes, strict=True))
    return {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}


def _not_taken(folder: Path, stem: str) -> str:
    """Returns the name, with a number appended if another analysis of the same second took it."""
    names = (stem if number == 1 else f"{stem}_{number}" for number in itertools.count(1))
    return next(name for name in names if not (folder / f"{name}_summary.json").exists())
