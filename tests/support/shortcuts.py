"""Shortcuts around setup that every short training would repeat, and that takes as long as its steps."""

import copy
import ctypes
import dataclasses
import functools
import gc
import importlib.metadata
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import yaml
from drawing import start_drawing


def spare_trainings() -> None:
    """Call this once after the imports to halve the time of later trainings.

    - Garbage collection runs on Python's own schedule and skips the imports' objects. accelerate no longer forces it at
      the start and end of each training.
    - torch no longer keeps a traceback each time it is asked to seed GPUs that do not exist.
    - Installed libraries and their versions, which accelerate and `attach` look up repeatedly, are cached.
    - The default task, whose rows no training changes, is made once for this process and its forks. Its model is read
      once and copied.
    - git is asked only once for the commit of a folder.
    - W&B does not import its launcher of jobs, a second per process, to see whether one has staged settings.
    - One process draws all pictures. If it fails, the picture is drawn again in a new process. Page templates are
      compiled once.
    - libyaml reads the settings, and a command composes them once. Hydra would first compose them to see whether they
      ask for a sweep, which no file in conf/ does. The files of conf/ for a choice of groups are joined once, and
      values are set in a copy.
    - The process keeps the memory that tensors free, so the system does not reclaim it and return it zeroed.
    """
    _keep_freed_memory()
    if page := sys.modules.get("rl_training.records.pages.page"):
        ask, run = start_drawing(), page._run
        page._run = lambda program, text="": ask(program, page.VEGA_LITE, text) or run(program, text)
        for name in page.PAGES.list_templates(["html"]):  # for the forks
            page.PAGES.get_template(name)
    if origin := sys.modules.get("rl_training.records.provenance"):
        origin._commit = functools.cache(origin._commit)
        for folder in (Path(origin.__file__).parent, Path.cwd()):  # for the forks
            origin._commit(folder)
    if wandb_run := sys.modules.get("wandb.sdk.wandb_run"):
        wandb_run.Run._detect_and_apply_job_inputs = lambda self: None
    if task := sys.modules.get("rl_training.tasks.arithmetic"):
        task.arithmetic = functools.cache(task.arithmetic)
        task.arithmetic()
    if models := sys.modules.get("rl_training.models.load"):
        _read_tiny_once(models)
    yaml.SafeLoader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    if hydra := sys.modules.get("hydra._internal.hydra"):
        ask_mode = hydra.Hydra.get_mode
        hydra.Hydra.get_mode = lambda self, config_name, overrides: (
            ask_mode(self, config_name, overrides) if "hydra.mode" in str(overrides) else None
        )
    if loader := sys.modules.get("hydra._internal.config_loader_impl"):
        _join_files_once(loader)
        if configs := sys.modules.get("configs"):
            for groups in ([], ["logger=none"], ["logger=none", "probe=none"]):
                configs.composed("train", *groups)  # for the forks
    gc.freeze()
    if memory := sys.modules.get("accelerate.utils.memory"):
        memory.gc = SimpleNamespace(collect=int)
    for name in ("torch.cuda", "torch.xpu"):
        if device := sys.modules.get(name):
            device.traceback = SimpleNamespace(format_stack=list)
    importlib.metadata.metadata = functools.cache(importlib.metadata.metadata)
    importlib.metadata.version = functools.cache(importlib.metadata.version)


def _keep_freed_memory() -> None:
    """Set glibc's M_TRIM_THRESHOLD, M_TOP_PAD and M_MMAP_THRESHOLD: page faults take a tenth of a training's time."""
    if mallopt := getattr(ctypes.CDLL(None), "mallopt", None):
        for setting, num_bytes in ((-1, 2**31 - 1), (-2, 2**26), (-3, 2**25)):
            mallopt(setting, num_bytes)


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


def _join_files_once(loader: ModuleType) -> None:
    """Cache, for each choice of groups, which files of conf/ Hydra joins and the result."""
    from rl_training.job.configuration.shipped import CONF

    create, join = loader.create_defaults_list, loader.ConfigLoaderImpl._compose_config_from_defaults_list
    lists: dict[Any, Any] = {}
    joined: dict[int, Any] = {}  # by the identity of a list of files, which `lists` keeps

    def create_once(repo: Any, config_name: Any, overrides_list: Any, **options: Any) -> Any:
        sources = [source for source in repo.get_sources() if source.scheme() == "file"]
        if any(Path(source.path).resolve() != CONF for source in sources):
            return create(repo, config_name, overrides_list, **options)  # a test's own files, which may change
        kinds = sys.modules["hydra._internal.defaults_list"]
        values = kinds.Overrides(repo=repo, overrides_list=overrides_list).config_overrides
        groups = [override for override in overrides_list if override not in values]
        key = (config_name, str(options), *(override.input_line for override in groups))
        if key not in lists:
            lists[key] = create(repo, config_name, groups, **options)
        return dataclasses.replace(lists[key], config_overrides=values)

    def join_once(self: Any, defaults: Any, repo: Any) -> Any:
        if not any(defaults is known.defaults for known in lists.values()):
            return join(self, defaults, repo)
        if id(defaults) not in joined:
            joined[id(defaults)] = join(self, defaults, repo)
        return copy.deepcopy(joined[id(defaults)])

    loader.create_defaults_list = create_once
    loader.ConfigLoaderImpl._compose_config_from_defaults_list = join_once
