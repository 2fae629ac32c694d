"""offline.py: from its configuration to looks at checkpoints, one after another, and what they leave behind."""

from __future__ import annotations

import gc
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from accelerate import PartialState
from omegaconf import DictConfig, OmegaConf

from rl_training.job.build import build_standing
from rl_training.job.run_settings import run_settings
from rl_training.offline import probe
from rl_training.offline.kernel import KernelSettings
from rl_training.offline.kernel_report import add_kernel
from rl_training.offline.results import print_table, write_result
from rl_training.records.checkpoints import checkpoints_named


def look_at_checkpoints(cfg: DictConfig) -> list[Path]:
    """Looks at each checkpoint that `cfg` names, prints a table of each, and returns the files with the results.

    Raises ValueError for whatever the user got wrong; where the checkpoints can tell, before anything is sampled.
    """
    own: dict[str, Any] = OmegaConf.to_container(cfg, resolve=True)  # type: ignore[assignment]
    settings, kernel = settings_from(own), kernel_settings_from(own)
    asked = own["checkpoint"]
    found = checkpoints_named(asked if isinstance(asked, str) else list(asked), Path(cfg.runs_dir))
    written = []
    for checkpoint in found:
        start = time.perf_counter()
        run = run_settings(checkpoint, list(cfg.run))
        standing = build_standing(run, checkpoint, cfg.learning_rate)
        seconds = {"load": time.perf_counter() - start}
        look = probe.look(standing, settings)
        path = _folder(cfg, checkpoint) / "result.json"
        if kernel is not None:
            look.results.update(
                add_kernel(standing, look, kernel, path.parent / "kernel", settings.first_order.estimator)
            )
        look.seconds.update(seconds | {"all": time.perf_counter() - start})
        if standing.rank == 0:
            asked_for = {"offline": own, "run": OmegaConf.to_container(run, resolve=True)}
            write_result(path, standing, look, asked_for)
            print_table(look, standing, path)
        written.append(path)
        del standing, look
        gc.collect()
    PartialState().wait_for_everyone()
    return written


def settings_from(own: Mapping[str, Any]) -> probe.Settings:
    """Returns the settings of a look, from the values of conf/offline.yaml."""
    return probe.Settings(
        evaluation=probe.Evaluation(**own["evaluation"]),
        update=probe.Updating(**own["update"]),
        first_order=probe.FirstOrderSettings(**own["first_order"]),
        truth=probe.TruthSettings(**own["truth"]),
        conditioning=own["conditioning"],
        memory=probe.Memory(**own["memory"]),
    )


def kernel_settings_from(own: Mapping[str, Any]) -> KernelSettings | None:
    """Returns the settings of the kernel, None where it is not asked for."""
    settings = dict(own["kernel"])
    return KernelSettings(**settings) if settings.pop("enabled") else None


def _folder(cfg: DictConfig, checkpoint: Path) -> Path:
    """Returns where the results go: RUN/offline/NAME/checkpoint-N, or beside a checkpoint that lies in no run."""
    parents = checkpoint.resolve().parents
    run = parents[1] if (parents[1] / "config.yaml").is_file() else parents[0]
    return Path(cfg.output or run / "offline") / str(cfg.name) / checkpoint.name
