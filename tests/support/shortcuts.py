"""What every training of a few steps would do again, and which takes it as long as the steps themselves."""

import copy
import functools
import gc
import importlib.metadata
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import yaml
from drawing import start_drawing


def spare_trainings() -> None:
    """Called once after the imports: from then on trainings are spared half of their time.

    Garbage is collected when Python sees fit, without the objects of the imports, and not by accelerate at both ends of
    each training; and torch, which cannot seed the GPUs that are not there, does not keep a traceback of each time that
    it was asked to. accelerate and `attach`, which ask again and again which libraries are installed and in which
    versions, are answered from memory. The rows of the default task, which no training changes, are drawn once for this
    process and its forks, and its model is read once and copied. Pictures are drawn by one process: what fails there,
    again in one of its own; the templates of pages are compiled once. Settings are read by libyaml, and a command
    composes them once: Hydra does so before, to see whether they ask for a sweep, which no file of conf/ does.
    """
    if page := sys.modules.get("rl_training.records.report.page"):
        ask, run = start_drawing(), page._run
        page._run = lambda program, text="": ask(program, page.VEGA_LITE, text) or run(program, text)
        for name in page.PAGES.list_templates(["html"]):  # for the forks
            page.PAGES.get_template(name)
    if task := sys.modules.get("rl_training.tasks.arithmetic"):
        task.arithmetic = functools.cache(task.arithmetic)
        task.arithmetic()
    if models := sys.modules.get("rl_training.tasks.models"):
        _read_tiny_once(models)
    yaml.SafeLoader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    if hydra := sys.modules.get("hydra._internal.hydra"):
        ask_mode = hydra.Hydra.get_mode
        hydra.Hydra.get_mode = lambda self, config_name, overrides: (
            ask_mode(self, config_name, overrides) if "hydra.mode" in str(overrides) else None
        )
    gc.freeze()
    if memory := sys.modules.get("accelerate.utils.memory"):
        memory.gc = SimpleNamespace(collect=int)
    for name in ("torch.cuda", "torch.xpu"):
        if device := sys.modules.get(name):
            device.traceback = SimpleNamespace(format_stack=list)
    importlib.metadata.metadata = functools.cache(importlib.metadata.metadata)
    importlib.metadata.version = functools.cache(importlib.metadata.version)


def _read_tiny_once(models: ModuleType) -> None:
    read = models.load_causal_lm
    once = functools.cache(read)

    @functools.wraps(read)
    def load(name: Any, *args: Any, **kwargs: Any) -> Any:
        if name == models.TINY_PATH and args[1:] == (None,):  # as load_tiny asks for it, not in 4 bits
            return copy.deepcopy(once(name, *args))
        return read(name, *args, **kwargs)

    models.load_causal_lm = load
    models.load_tiny()  # for the forks
