"""Dashboards: every number of metrics.jsonl, under the same name, in W&B, TensorBoard and trackio.

transformers' own callbacks put `train/` in front of every name. Dashboards make a section of each name's first segment,
so everything would lie in one. These three replace them one for one; W&B and TensorBoard get the report's pictures too.
A resumed training goes on in the same run of each. Only the main process logs. The x-axis is the optimizer step.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from transformers import TrainerCallback
from transformers.integrations import TensorBoardCallback, TrackioCallback, WandbCallback
from transformers.utils import logging

from rl_training.errors import UserError
from rl_training.hosts.trl.trainer import DrGRPOConfig, DrGRPOTrainer
from rl_training.records.files.masking import without_secrets
from rl_training.records.files.stored_yaml import read_text
from rl_training.records.folder import LOGS_FOLDER, refuse_a_file

logger = logging.get_logger(__name__)

WANDB_RUN_ID = "wandb_run_id"  # file in logs/: the run that a resumed training goes on writing to


class MetricsLogger(TrainerCallback):
    """What the three have in common: `start` before training, `log` at each step, `finish` after the report.

    config   of the whole run, resolved; its secrets are masked here
    metrics  that are shown; None: all. The records have all of them, whatever is shown
    """

    replaces: type[TrainerCallback]  # what transformers makes for the same entry of `report_to`

    def __init__(self, run_dir: Path, config: Mapping[str, Any], metrics: Collection[str] | None = None) -> None:
        self.run_dir, self.config, self.metrics = run_dir, without_secrets(config), metrics
        trainer = config.get("trainer", {})
        self.project = trainer.get("project", DrGRPOConfig.project)
        self.name = trainer.get("run_name") or run_dir.resolve().name

    def start(self, after_step: int) -> None:
        """Open the dashboard's run; `after_step` > 0 when training is resumed."""
        raise NotImplementedError

    def log(self, step: int, metrics: dict[str, float]) -> None:
        raise NotImplementedError

    def finish(self, pictures: Sequence[Path]) -> None:
        """Close the dashboard's run, with the report's pictures where it can show them."""
        raise NotImplementedError

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **kwargs: Any) -> None:
        if "train_runtime" not in logs:  # not the summary at the end of training
            numbers = {key: value for key, value in logs.items() if isinstance(value, int | float)}
            if self.metrics is not None:
                numbers = {key: value for key, value in numbers.items() if key in self.metrics}
            self.log(state.global_step, numbers)


class WandbLogger(MetricsLogger):
    """Weights & Biases; offline where there is no account, to be uploaded later by `wandb sync`."""

    replaces = WandbCallback

    def start(self, after_step: int) -> None:
        import wandb

        refuse_a_file(self.run_dir / LOGS_FOLDER / "wandb")
        run_id = self.run_dir / LOGS_FOLDER / WANDB_RUN_ID
        stored_id = _known_id(run_id)
        self._run = wandb.init(
            project=self.project,
            name=self.name,
            id=stored_id,
            resume="allow",
            dir=self.run_dir / LOGS_FOLDER,
            config=self.config,
            allow_val_change=True,  # a resumed run may have a larger trainer.max_steps
            # Without an account wandb would ask for one, or end here. WANDB_MODE, when set, says what is wanted.
            mode=None if "WANDB_MODE" in os.environ or wandb.login(prompt=False) else "offline",
        )
        run_id.write_text(self._run.id, encoding="utf-8")
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, metrics: dict[str, float]) -> None:
        # Not as log(step=): TRL logs timings of its own to the same run, and each counts W&B's own step on.
        self._run.log({"step": step, **metrics})

    def finish(self, pictures: Sequence[Path]) -> None:
        import wandb

        self._run.log({f"report/{picture.stem}": wandb.Image(str(picture)) for picture in pictures})
        self._run.finish()


def _known_id(file: Path) -> str | None:
    """Read which run of W&B a file names; None without a file.

    Raises:
        UserError: naming the file, where it holds no name of such a run.
    """
    if not file.exists():
        return None
    run_id = read_text(file)
    if not re.fullmatch(r"[^\s/\\#?%:\N{REPLACEMENT CHARACTER}]{1,128}", run_id):
        raise UserError(f"{file} names no run of W&B: delete it, and a new one is made")
    return run_id


class TensorBoardLogger(MetricsLogger):
    """TensorBoard, in logs/tensorboard."""

    replaces = TensorBoardCallback
    _step: int  # of what was logged last

    def start(self, after_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # The steps that a killed run logged after its checkpoint are taken again: not shown twice.
        folder = self.run_dir / LOGS_FOLDER / "tensorboard"
        refuse_a_file(folder)
        self._writer = SummaryWriter(str(folder), purge_step=after_step + 1 if after_step else None)
        self._step = after_step
        self._writer.add_text("config", f"```\n{json.dumps(self.config, indent=2)}\n```")

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self._step = step
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def finish(self, pictures: Sequence[Path]) -> None:
        import numpy as np
        from PIL import Image  # TensorBoard has it

        for picture in pictures:
            self._writer.add_image(
                f"report/{picture.stem}", np.asarray(Image.open(picture)), self._step, dataformats="HWC"
            )
        self._writer.close()


class TrackioLogger(MetricsLogger):
    """trackio, in its folder: TRACKIO_DIR, or one in the Hugging Face cache. `trackio show` displays it."""

    replaces = TrackioCallback

    def start(self, after_step: int) -> None:
        import trackio

        self._trackio = trackio
        trackio.init(project=self.project, name=self.name, config=self.config, resume="allow", embed=False)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self._trackio.log(metrics, step=step)

    def finish(self, pictures: Sequence[Path]) -> None:
        self._trackio.finish()


LOGGERS: tuple[type[MetricsLogger], ...] = (WandbLogger, TensorBoardLogger, TrackioLogger)


def loggers_of(run: Path, config: Mapping[str, Any]) -> list[MetricsLogger]:
    """Return the dashboards of a run that has ended, to add to, and warn of one that is not installed here."""
    chosen = config.get("trainer", {}).get("report_to") or []
    libraries = {kind: kind.__name__.removesuffix("Logger").lower() for kind in LOGGERS}
    for library in (name for name in libraries.values() if name in chosen and find_spec(name) is None):
        logger.warning(f"{library} is not installed here: nothing is sent to its dashboard")
    return [kind(run, config) for kind, library in libraries.items() if library in chosen and find_spec(library)]


def put_loggers(
    trainer: DrGRPOTrainer, run_dir: Path, config: Mapping[str, Any], metrics: Collection[str] | None
) -> list[MetricsLogger]:
    """Return this package's loggers, in place of the transformers callbacks that `report_to` selects.

    None on other processes than the main one.
    """
    kinds = [kind for kind in LOGGERS if trainer.pop_callback(kind.replaces)]
    loggers = [kind(run_dir, config, metrics) for kind in kinds] if trainer.accelerator.is_main_process else []
    for dashboard in loggers:
        trainer.add_callback(dashboard)
    return loggers
