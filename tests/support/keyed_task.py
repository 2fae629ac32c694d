"""The default task, but accepting settings of any name and able to end its run with SIGTERM."""

from __future__ import annotations

import dataclasses
import os
import signal
from typing import Any

from rl_training.tasks.arithmetic import arithmetic
from rl_training.tasks.task import Task


def keyed(ends_its_run: bool = False, **settings: Any) -> Task:
    task = arithmetic(num_train=64, num_eval=8)

    def reward(**columns: Any) -> list[float]:
        if ends_its_run:
            os.kill(os.getpid(), signal.SIGTERM)
        return task.reward(**columns)

    return dataclasses.replace(task, reward=reward)
