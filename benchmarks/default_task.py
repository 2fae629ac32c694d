"""The trainer that the benchmarks measure: the shipped model and task as `train.py` composes them, or another task."""

from __future__ import annotations

import multiprocessing
import os
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm
from transformers import PrinterCallback, TrainerCallback, set_seed

from rl_training import DrGRPOConfig, DrGRPOTrainer, Probe
from rl_training.models.load import TINY_PATH, load_causal_lm
from rl_training.records.writer import Records
from rl_training.tasks.arithmetic import arithmetic
from rl_training.tasks.task import Task


def default_trainer(
    folder: str | Path,
    probes: Sequence[Probe],
    max_steps: int,
    learning_rate: float = 3e-4,
    seed: int = 0,
    records: Records | None = None,
    peft_config: Any = None,
    task: Task | None = None,
    model_folder: Path = TINY_PATH,
    rollout_func: Any = None,
    **settings: Any,
) -> DrGRPOTrainer:
    """Return a trainer for the default task and model, or for `task` and the model in `model_folder`.

    A step has 32 prompts x 8 responses in 8 microbatches unless `settings` override it.
    """
    set_seed(seed)
    model, tokenizer = load_causal_lm(model_folder)
    task = task or arithmetic()
    defaults: dict[str, Any] = {
        "per_device_train_batch_size": 32, "gradient_accumulation_steps": 8, "num_generations": 8,
        "max_completion_length": 36, "adam_beta2": 0.99, "lr_scheduler_type": "constant", "report_to": [],
        "save_strategy": "no", "disable_tqdm": True,
    }  # fmt: skip
    args = DrGRPOConfig(str(folder), max_steps=max_steps, learning_rate=learning_rate, seed=seed, **defaults | settings)
    trainer = DrGRPOTrainer(
        model, task.reward, args, train_dataset=task.train_dataset, processing_class=tokenizer, peft_config=peft_config,
        probes=probes, records=records, rollout_func=rollout_func,
    )  # fmt: skip
    trainer.remove_callback(PrinterCallback)  # it prints a log line per step
    return trainer


def in_a_fork(folder: Path, work: Callable[[], None]) -> None:
    """Run `work` in a fork of this process, which has imported everything. Its output and error go to `folder`/log."""

    def logged() -> None:
        with open(folder / "log", "wb") as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
            try:
                work()
            except BaseException:  # the caller sees that the result is missing
                traceback.print_exc()

    folder.mkdir(parents=True, exist_ok=True)
    process = multiprocessing.get_context("fork").Process(target=logged)
    process.start()
    process.join()


class Progress(TrainerCallback):
    """Advances a progress bar over the steps of all runs."""

    def __init__(self, bar: tqdm) -> None:
        self.bar = bar

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.bar.update()
