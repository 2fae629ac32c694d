"""Which checkpoints offline.py analyses, and where the results go: checked before anything is loaded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from rl_training.job.analysis_settings import check_analysis, name_of
from rl_training.offline.interventions import InterventionSettings
from rl_training.offline.logs import LogSettings
from rl_training.offline.settings import KernelSettings, Settings
from rl_training.offline.sweep import SweepSettings, refuse_sweep
from rl_training.records.analyses import OFFLINE, RESULT_FILE
from rl_training.records.checkpoints import checkpoints_named
from rl_training.records.folder import CONFIG_FILE


@dataclass(frozen=True)
class Plan:
    """Checkpoints, what is asked of each, and everything that conf/offline.yaml has."""

    values: Mapping[str, Any]  # of conf/offline.yaml, as given
    results: Mapping[Path, Path]  # by checkpoint, the file that its numbers go to
    analysis: Settings
    kernel: KernelSettings | None
    sweep: SweepSettings
    interventions: InterventionSettings
    log: LogSettings


def read_plan(cfg: DictConfig) -> Plan:
    """Returns the plan that the configuration describes. Raises ValueError for whatever the user got wrong in it."""
    analysis = check_analysis(cfg)
    values: dict[str, Any] = OmegaConf.to_container(cfg, resolve=True)  # type: ignore[assignment]
    sweep, log = SweepSettings(**values["sweep"]), LogSettings(**values["log"])
    interventions = InterventionSettings(**values["interventions"])
    refuse_sweep(sweep, analysis)
    named = values["checkpoint"]
    found = checkpoints_named(named if isinstance(named, str) else list(named), Path(values["runs_dir"]))
    name = name_of(str(values["name"]))
    results = {checkpoint: _folder(checkpoint, values["output"]) / name / checkpoint.name for checkpoint in found}
    folder, times = Counter(results.values()).most_common(1)[0]
    if times > 1:
        raise ValueError(f"{times} checkpoints would write their results to {folder}: analyse each run separately")
    files = {checkpoint: folder / RESULT_FILE for checkpoint, folder in results.items()}
    return Plan(values, files, analysis, _kernel_settings(values), sweep, interventions, log)


def run_of(checkpoint: Path) -> Path | None:
    """Returns the run that a checkpoint lies in, None where it lies in none."""
    run = checkpoint.resolve().parents[1]
    return run if (run / CONFIG_FILE).is_file() else None


def _folder(checkpoint: Path, output: str | None) -> Path:
    """Returns where results go: RUN/offline, or `offline` beside a checkpoint that lies in no run."""
    return Path(output or (run_of(checkpoint) or checkpoint.resolve().parent) / OFFLINE)


def _kernel_settings(values: Mapping[str, Any]) -> KernelSettings | None:
    settings = dict(values["kernel"])
    return KernelSettings(**settings) if settings.pop("enabled") else None
