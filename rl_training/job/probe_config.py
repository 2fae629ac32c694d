"""The file that configures an OfflineEntropyProbe, in the words of conf/offline.yaml and train.py.

    checkpoint: {checkpoint_path, backbone, dtype}             checkpoint=…, model=…, model.dtype=…
    batch_config: {dataset_name, split, B_E, B_U, G}           data=…, evaluation.source, evaluation.prompts,
                                                               update.prompts, trainer.num_generations
    probe_rework: {compute_delta_h1}                           first_order.enabled
    importance: {enabled, is_mode, report_per_token}           truth.enabled; which number is called deltaH_true, and
                                                               whether per token or per sequence
    memory_config: {microbatch_size}                           memory.microbatch_size
    detailed_logging: {enabled, level, log_sequences, log_tokens, log_raw_tensors, output_directory, compress}    log.…
    overrides: [learning_rate=1e-6, model.name=FOLDER, …]      anything else, as on offline.py's command line

Everything but the checkpoint is optional; defaults are those of conf/offline.yaml or the checkpoint's run.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl_training.job.explain import did_you_mean
from rl_training.job.shipped import CONF

KEYS: dict[str, dict[str, type | tuple[str, ...]]] = {
    "checkpoint": {"checkpoint_path": str, "backbone": str, "dtype": ("float32", "bfloat16", "auto")},
    "batch_config": {"dataset_name": str, "split": ("train", "test"), "B_E": int, "B_U": int, "G": int},
    "probe_rework": {"compute_delta_h1": bool},
    "importance": {"enabled": bool, "is_mode": ("pdis", "snis"), "report_per_token": bool},
    "memory_config": {"microbatch_size": int},
    "detailed_logging": {
        "enabled": bool, "level": ("minimal", "standard", "detailed", "debug"), "log_sequences": bool,
        "log_tokens": bool, "log_raw_tensors": bool, "output_directory": str, "compress": bool,
    },
}  # fmt: skip
SETTINGS = {  # of conf/offline.yaml
    ("batch_config", "B_E"): "evaluation.prompts",
    ("batch_config", "B_U"): "update.prompts",
    ("probe_rework", "compute_delta_h1"): "first_order.enabled",
    ("importance", "enabled"): "truth.enabled",
    ("memory_config", "microbatch_size"): "memory.microbatch_size",
    ("detailed_logging", "level"): "log.level",
    ("detailed_logging", "log_sequences"): "log.sequences",
    ("detailed_logging", "log_tokens"): "log.tokens",
    ("detailed_logging", "log_raw_tensors"): "log.raw_tensors",
    ("detailed_logging", "output_directory"): "log.directory",
    ("detailed_logging", "compress"): "log.compress",
}
OLD_NAMES = {"qwen2_5_15": "qwen2_5_1_5b", "gsm8k_r1_template": "gsm8k"}  # of files in conf/model and conf/data
QUIETLY = ("report=false", "dashboards=false")  # a script may call it often; `overrides` can ask for both
NAME = "mixed_probe"  # results go to RUN/offline/mixed_probe


@dataclass(frozen=True)
class ProbeConfig:
    """A configuration, read: words for offline.py's command line, and what its results are to be called."""

    words: tuple[str, ...]
    predicts: bool
    measures: bool
    is_mode: str  # pdis | snis
    per_token: bool


def read_probe_config(config: Mapping[str, Any], checkpoint: str | None = None) -> ProbeConfig:
    """Returns what this configuration asks for.

    checkpoint  instead of the configuration's

    Raises ValueError for a key or value that means nothing, naming it and what is close to it.
    """
    _refuse_unknown(config)
    given = {(s, k): v for s, keys in config.items() if s != "overrides" for k, v in (keys or {}).items()}
    given = {at: value for at, value in given.items() if value is not None}
    path = checkpoint or given.get(("checkpoint", "checkpoint_path"))
    if path is None:
        raise ValueError("checkpoint.checkpoint_path is not set: set it in the file, or give --checkpoint PATH")
    words = [_word("checkpoint", path), f"name={NAME}", *QUIETLY]
    for group, at in (("model", ("checkpoint", "backbone")), ("data", ("batch_config", "dataset_name"))):
        if at in given:
            words.append(f"{group}={_file_of(group, at, given[at])}")
    words += _adapter_words(Path(path))
    if ("checkpoint", "dtype") in given:
        words.append(f"model.dtype={given['checkpoint', 'dtype']}")
    if ("batch_config", "split") in given:
        words.append(f"evaluation.source={'eval' if given['batch_config', 'split'] == 'test' else 'train'}")
    if ("batch_config", "G") in given:
        words.append(f"trainer.num_generations={given['batch_config', 'G']}")
    words += [_word(SETTINGS[at], value) for at, value in given.items() if at in SETTINGS]
    if given.get(("detailed_logging", "enabled")) is False:
        words.append("log.level=none")
    return ProbeConfig(
        words=(*words, *(config.get("overrides") or [])),
        predicts=given.get(("probe_rework", "compute_delta_h1"), True),
        measures=given.get(("importance", "enabled"), True),
        is_mode=given.get(("importance", "is_mode"), "pdis"),
        per_token=given.get(("importance", "report_per_token"), True),
    )


def _word(key: str, value: Any) -> str:
    if isinstance(value, str):
        escaped = value.replace("\\", "\\\\").replace('"', '\\"')
        return f'{key}="{escaped}"'
    return f"{key}={str(value).lower() if isinstance(value, bool) else value}"


def _file_of(group: str, at: tuple[str, str], name: str) -> str:
    """Returns the name of the file in conf/GROUP that is meant."""
    known = sorted(path.stem for path in (CONF / group).glob("*.yaml"))
    file = OLD_NAMES.get(name, name)
    if file not in known:
        also = [old for old, new in OLD_NAMES.items() if new in known]
        choices = [*known, *also]
        raise ValueError(f"{'.'.join(at)}: {name}: choose from {', '.join(choices)}{did_you_mean(name, choices)}")
    return file


def _adapter_words(checkpoint: Path) -> list[str]:
    """Returns the settings of an adapter that lies in no run, from its adapter_config.json."""
    file = checkpoint / "adapter_config.json"
    if not file.is_file() or (checkpoint.resolve().parents[1] / "config.yaml").is_file():
        return []
    adapter = json.loads(file.read_text(encoding="utf-8"))
    modules = adapter["target_modules"]
    target = modules if isinstance(modules, str) else f"[{','.join(sorted(modules))}]"
    return [
        "adapter=lora", f"adapter.r={adapter['r']}", f"adapter.lora_alpha={adapter['lora_alpha']}",
        f"adapter.target_modules={target}",
    ]  # fmt: skip


def _refuse_unknown(config: Mapping[str, Any]) -> None:
    sections = [*KEYS, "overrides"]
    for section, keys in config.items():
        if section not in sections:
            raise ValueError(f"{section}: there is no such section; choose from {', '.join(sections)}{_home(section)}")
        if section == "overrides":
            if not all(isinstance(word, str) and "=" in word for word in keys or []):
                raise ValueError("overrides must be a list of settings, each KEY=VALUE")
            continue
        if keys is not None and not isinstance(keys, Mapping):
            raise ValueError(f"{section}={keys} must be a group of settings: {', '.join(KEYS[section])}")
        for key, value in (keys or {}).items():
            if key not in KEYS[section]:
                raise ValueError(f"{section}.{key}: unknown; {section} has {', '.join(KEYS[section])}{_home(key)}")
            _refuse_value(f"{section}.{key}", value, KEYS[section][key])


def _refuse_value(key: str, value: Any, kind: type | tuple[str, ...]) -> None:
    if value is None:
        return
    if isinstance(kind, tuple):
        if value not in kind:
            raise ValueError(f"{key}={value}: choose from {', '.join(kind)}{did_you_mean(str(value), kind)}")
    elif type(value) is not kind:
        wanted = {bool: "true or false", int: "a whole number", str: "text"}[kind]
        raise ValueError(f"{key}={value} must be {wanted}")


def _home(key: str) -> str:
    """Returns a hint at the setting that is close to `key`, with its section."""
    places = {name.lower(): f"{section}.{name}" for section, keys in KEYS.items() for name in keys}
    places |= {section: section for section in KEYS}
    return did_you_mean(str(key).lower(), places)
