"""What every training of a few steps would do again, and which takes it as long as the steps themselves."""

import functools
import gc
import importlib.metadata
import sys


def spare_trainings() -> None:
    """Called once after the imports: from then on trainings are spared half of their time.

    The garbage collector, which each calls, no longer walks over the objects of the imports, half a second; and
    accelerate and `attach`, which ask again and again which libraries are installed and in which versions, are answered
    from memory. The rows of the default task, which no training changes, are drawn once for this process and its forks.
    """
    if task := sys.modules.get("rl_training.tasks.arithmetic"):
        task.arithmetic = functools.cache(task.arithmetic)
        task.arithmetic()
    gc.freeze()
    importlib.metadata.metadata = functools.cache(importlib.metadata.metadata)
    importlib.metadata.version = functools.cache(importlib.metadata.version)
