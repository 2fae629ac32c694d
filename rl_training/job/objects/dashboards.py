"""Dashboards: send the numbers of metrics.jsonl, under the same names, to W&B, TensorBoard and trackio.

transformers' callbacks prefix every name with `train/`. Dashboards group metrics by the first segment of the name, so
everything would end up in one section. These three loggers each replace the callback of the same dashboard. W&B and
TensorBoard also get the report's pictures. A resumed training continues the same run of each dashboard. Only the main
process logs. The x-axis is the optimizer step.
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
from rl_training.hosts.trl.config import DrGRPOConfig
from rl_training.hosts.trl.trainer import DrGRPOTrainer
from rl_training.records.files.limited import read_text
from rl_training.records.files.masking import without_secrets
from rl_training.records.folder import LOGS_FOLDER, TENSORBOARD_FOLDER, WANDB_FOLDER, refuse_a_file

logger = logging.get_logger(__name__)

WANDB_RUN_ID = "wandb_run_id"  # file in logs/ with the id of the W&B run, which a resumed training continues


class MetricsLogger(TrainerCallback):
    """Base class of the three dashboards: `start` before training, `log` at each step, `finish` after the report.

    Args:
        run_dir: Run folder.
        config: Resolved configuration of the whole run. Its secrets are masked here.
        metrics: Names of the metrics to send; None sends all. The records always contain all of them.
    """

    library: str  # its entry in `report_to`, and the module that it imports
    replaces: type[TrainerCallback]  # the transformers callback for the same entry

    def __init__(self, run_dir: Path, config: Mapping[str, Any], metrics: Collection[str] | None = None) -> None:
        self.run_dir = run_dir
        self.config = without_secrets(config)
        self.metrics = metrics
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
    """Weights & Biases. Without an account the run stays offline; `wandb sync` uploads it later."""

    library = "wandb"
    replaces = WandbCallback

    def start(self, after_step: int) -> None:
        import wandb

        refuse_a_file(self.run_dir / WANDB_FOLDER)
        run_id = self.run_dir / LOGS_FOLDER / WANDB_RUN_ID
        stored_id = _stored_id(run_id)
        self._run = wandb.init(
            project=self.project,
            name=self.name,
            id=stored_id,
            resume="allow",
            dir=self.run_dir / LOGS_FOLDER,
            config=self.config,
            allow_val_change=True,  # a resumed run may have a larger trainer.max_steps
            # Without an account wandb would ask for one, or exit. WANDB_MODE, if set, takes precedence.
            mode=None if "WANDB_MODE" in os.environ or wandb.login(prompt=False) else "offline",
        )
        run_id.write_text(self._run.id, encoding="utf-8")
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, metrics: dict[str, float]) -> None:
        # The step is not passed as log(step=): TRL logs its timings to the same run, and each call advances W&B's step.
        self._run.log({"step": step, **metrics})

    def finish(self, pictures: Sequence[Path]) -> None:
        import wandb

        self._run.log({f"report/{picture.stem}": wandb.Image(str(picture)) for picture in pictures})
        self._run.finish()


def _stored_id(file: Path) -> str | None:
    """Return the W&B run id stored in a file, or None if the file does not exist.

    Raises:
        UserError: If the content is not a W&B run id.
    """
    if not file.exists():
        return None
    run_id = read_text(file)
    if not re.fullmatch(r"[^\s/\\#?%:\N{REPLACEMENT CHARACTER}]{1,128}", run_id):
        raise UserError(f"{file} names no run of W&B: delete it, and a new one is made")
    return run_id


class TensorBoardLogger(MetricsLogger):
    """TensorBoard, in logs/tensorboard."""

    library = "tensorboard"
    replaces = TensorBoardCallback
    _step: int  # the last step that was logged

    def start(self, after_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # A killed run repeats the steps after its checkpoint; purging them avoids showing them twice.
        folder = self.run_dir / TENSORBOARD_FOLDER
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
        from PIL import Image  # a dependency of TensorBoard

        for picture in pictures:
            self._writer.add_image(
                f"report/{picture.stem}", np.asarray(Image.open(picture)), self._step, dataformats="HWC"
            )
        self._writer.close()


class TrackioLogger(MetricsLogger):
    """trackio, which writes to TRACKIO_DIR or to its folder in the Hugging Face cache. `trackio show` displays it."""

    library = "trackio"
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
    """Return the dashboards of a finished run, to add to them; warn about those that are not installed here."""
    chosen = config.get("trainer", {}).get("report_to") or []
    loggers = []
    for kind in LOGGERS:
        if kind.library not in chosen:
            continue
        if find_spec(kind.library):
            loggers.append(kind(run, config))
        else:
            logger.warning(f"{kind.library} is not installed here: nothing is sent to its dashboard")
    return loggers


def install_loggers(
    trainer: DrGRPOTrainer, run_dir: Path, config: Mapping[str, Any], metrics: Collection[str] | None
) -> list[MetricsLogger]:
    """Replace the transformers callbacks that `report_to` selects by this package's loggers, and return these.

    The list is empty on processes other than the main one.
    """
    kinds = [kind for kind in LOGGERS if trainer.pop_callback(kind.replaces)]
    loggers = [kind(run_dir, config, metrics) for kind in kinds] if trainer.accelerator.is_main_process else []
    for dashboard in loggers:
        trainer.add_callback(dashboard)
    return loggers
