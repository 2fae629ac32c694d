"""Analysis of a checkpoint of the user's own trainer, with the same results and pages as `rl-training analyze`.

from rl_training import analyze

trainer = GRPOTrainer(...)              # as the script makes it; it has not trained
results = analyze(trainer, "state/checkpoint-20", "runs/my_run")
results["deltaH1"], results["deltaH_true"]
"""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path

from rl_training.errors import UserError
from rl_training.hosts.trl.settings.recorded import settings_of_trainer
from rl_training.hosts.trl.trainer import GRPOTrainer
from rl_training.hosts.trl.trainer_kind import refuse_other_trainers
from rl_training.offline.analyze_and_write import analyze_and_write, write_pages
from rl_training.offline.restored import restore
from rl_training.offline.settings import Settings, check_name
from rl_training.options import check_positive
from rl_training.records.analyses import RESULT_FILE
from rl_training.records.files.links import refuse_links_out
from rl_training.records.folder import OFFLINE, checkpoint_name
from rl_training.records.json_values import plain_settings


def analyze(
    trainer: GRPOTrainer,
    checkpoint: str | Path,
    folder: str | Path,
    *,
    settings: Settings | None = None,
    name: str = "default",
    learning_rate: float | None = None,
) -> dict[str, float]:
    """Predict and measure how the next step from a checkpoint changes entropy. Nothing is trained. Collective.

    Args:
        trainer: A trainer made as for training, with the same model, adapter, optimizer, data and reward. It must not
            have trained. It is left with the checkpoint's weights.
        checkpoint: A folder checkpoint-N that the trainer has written.
        folder: The run's folder, as given to `attach`. Results go to FOLDER/offline/NAME and into the run's report.
        settings: What to sample and measure. None uses the defaults of `rl-training analyze`.
        name: NAME, the name of the analysis.
        learning_rate: Learning rate of the step. None takes it from the checkpoint's schedule.

    Returns:
        The results by name, in nats. A result that is not available is nan, with the reason in result.json.

    Raises:
        UserError: Checkpoint and trainer do not fit. The message says how to fix it.
    """
    refuse_other_trainers(trainer)
    check_name(name)
    if learning_rate is not None:
        check_positive("learning_rate", learning_rate, ", or None for the checkpoint's")
    start = time.perf_counter()
    analysis_settings = settings or Settings()
    checkpoint = Path(checkpoint)
    if not checkpoint.is_dir():
        raise UserError(f"{checkpoint} is not a folder: give a checkpoint-N of the trainer's output_dir")
    refuse_links_out(Path(folder), OFFLINE)
    path = Path(folder) / OFFLINE / name / checkpoint_name(checkpoint) / RESULT_FILE
    restored = restore(trainer, checkpoint, learning_rate)
    offline_settings = dataclasses.asdict(analysis_settings) | {"name": name}
    values = plain_settings({"offline": offline_settings, "run": settings_of_trainer(trainer, {})})
    analysis = analyze_and_write(restored, path, analysis_settings, values, start)
    if restored.rank == 0:
        write_pages(path.parents[1], Path(folder))
    restored.trainer.accelerator.wait_for_everyone()
    return dict(analysis.results)
