"""Runs a checkpoint analysis from Python with a configuration file: one call returns one dictionary.

    from rl_training import OfflineEntropyProbe

    results = OfflineEntropyProbe.from_config_file("probe_configs/quick_test.yaml").run_mixed_probe(CHECKPOINT)
    results["deltaH1"], results["deltaH_true"], results["diagnostics"]["ESS"]

The format of the configuration and of the result is the one that the project's first users asked for. Their files and
scripts use it, so its names stay, even where those of the command differ (B_E, `pdis`, `probe_rework`). An option of
the command needs no key here: `overrides` takes any of its settings.

probe_configs/full_example.yaml has every key of a configuration, with its meaning. The configuration is translated to
settings of `rl-training analyze` and runs as that command does. Defaults come from conf/offline.yaml or the run.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from omegaconf import OmegaConf

from rl_training.errors import UserError
from rl_training.job.configuration.nested import flatten, load_plain
from rl_training.job.configuration.overrides import is_of_run
from rl_training.job.configuration.prepare import prepare_analysis
from rl_training.job.configuration.shipped import CONF, PROBE_CONFIGS
from rl_training.job.configuration.stored import load_settings, refuse_code_in
from rl_training.job.configuration.values import check_kind
from rl_training.options import did_you_mean
from rl_training.records.files.limited import read_text
from rl_training.records.folder import ADAPTER_CONFIG_FILE, run_of
from rl_training.records.hydra_text import quote_list, quote_value

# Keys of a configuration, with the corresponding settings of `rl-training analyze`.
SETTINGS = {
    "checkpoint.backbone": "model", "checkpoint.dtype": "model.dtype", "batch_config.dataset_name": "data",
    "batch_config.split": "evaluation.source", "batch_config.B_E": "evaluation.prompts",
    "batch_config.B_U": "update.prompts", "batch_config.G": "trainer.num_generations",
    "probe_rework.compute_delta_h1": "first_order.enabled", "importance.enabled": "truth.enabled",
    "memory_config.microbatch_size": "memory.microbatch_size", "detailed_logging.level": "log.level",
    "detailed_logging.log_sequences": "log.sequences", "detailed_logging.log_tokens": "log.tokens",
    "detailed_logging.log_raw_tensors": "log.raw_tensors", "detailed_logging.output_directory": "log.directory",
    "detailed_logging.compress": "log.compress",
}  # fmt: skip
# By key: its allowed values, each with the value of the corresponding setting.
CHOICES = {
    "checkpoint.backbone": {path.stem: path.stem for path in (CONF / "model").glob("*.yaml")}
    | {"qwen2_5_15": "qwen2_5_1_5b"},
    "checkpoint.dtype": {name: name for name in ("float32", "bfloat16", "auto")},
    "batch_config.dataset_name": {path.stem: path.stem for path in (CONF / "data").glob("*.yaml")}
    | {"gsm8k_r1_template": "gsm8k"},
    "batch_config.split": {"train": "train", "test": "eval"},
    "importance.is_mode": {"pdis": "true", "snis": "snis"},  # selects the result returned as deltaH_true
    "detailed_logging.level": {name: name for name in ("minimal", "standard", "detailed", "debug")},
}
# Results go to RUN/offline/mixed_probe. Reports and dashboards are off by default, since a script may call it often.
FIXED_OVERRIDES = ("name=mixed_probe", "report=false", "dashboards=false")
SIZE_KEYS = ("B_E", "B_U", "G")
MODULE_PATTERN = r"[\w.\-*+?|()\[\]^\\]+\$?"  # names or patterns of modules, without ${…}, which Hydra would replace
MEAN_KEYS = ("avg_generation_length", "avg_reward")


class OfflineEntropyProbe:
    """Measures what a checkpoint's next step does to entropy, configured by nested dictionaries.

    Args:
        config: Configuration with the keys of probe_configs/full_example.yaml.

    Raises:
        UserError: For an unknown key or an invalid value.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.config = dict(config)
        self._given = _checked_values(config)

    @classmethod
    def from_config_file(cls, path: str | Path) -> OfflineEntropyProbe:
        """Return the probe that a YAML file describes.

        Raises:
            UserError: If the file does not exist or cannot be read.
        """
        if not Path(path).is_file():
            raise UserError(f"{path}: there is no such file; two examples are in {PROBE_CONFIGS}")
        probe = cls(OmegaConf.to_container(load_settings(Path(path)), resolve=True))  # type: ignore[arg-type]
        refuse_code_in(probe._given.get("overrides", []), Path(path))
        return probe

    def overrides(self, checkpoint_path: str | Path | None = None) -> list[str]:
        """Return the corresponding overrides for the command line of `rl-training analyze`.

        Raises:
            UserError: If no checkpoint is given.
        """
        path = checkpoint_path or self._given.get("checkpoint.checkpoint_path")
        if path is None:
            raise UserError("checkpoint.checkpoint_path is not set: set it, or give run_mixed_probe a path")
        path = os.path.expanduser(path)  # here, because the adapter is read from it
        overrides = [f"checkpoint={quote_value(path)}", *FIXED_OVERRIDES]
        for key, setting in SETTINGS.items():
            if key in self._given:
                value = self._given[key]
                text = quote_value(value) if isinstance(value, str) else str(value).lower()
                overrides.append(f"{setting}={CHOICES[key][value] if key in CHOICES else text}")
        overrides += _adapter_overrides(Path(path))
        if self._given.get("detailed_logging.enabled") is False:
            overrides.append("log.level=none")
        return [*overrides, *self._given.get("overrides", [])]

    def run_mixed_probe(self, checkpoint_path: str | Path | None = None) -> dict[str, Any]:
        """Analyze one checkpoint, and return the results in nats (per token, or per sequence if so configured).

        Args:
            checkpoint_path: Replaces the configuration's: a checkpoint, a run (for its newest checkpoint), or a folder
                `model/` with optimizer.pt in the parent folder.

        Returns:
            A dictionary with these keys.

            - `deltaH1`, `bars_dot`, `learning_rate`: Predicted. Absent with probe_rework.compute_delta_h1=false.
            - `deltaH_true`, `H_orig`, `H_upd`: Measured. Absent with importance.enabled=false.
            - `B_E`, `B_U`, `G`: Prompts of E, prompts of U, and responses to each prompt of U.
            - `avg_generation_length`, `avg_reward`: Tokens per response, mean over E, and reward, mean over U.
            - `timing`: Seconds by phase.
            - `diagnostics`: ESS, w_max, w_min and all other results, with standard errors `…_se`.
            - `log`: Path of the log, or "" if there is none.

        Raises:
            UserError: If checkpoint and configuration do not match; before anything is sampled.
        """
        from rl_training.job.run.analysis import analyze_checkpoints  # seconds of imports
        from rl_training.records.analyses import read_analysis

        with _composing_from_conf():
            overrides = self.overrides(checkpoint_path)
            cfg = compose("offline", overrides=[word for word in overrides if not is_of_run(word)])
            cfg.run = [word for word in overrides if is_of_run(word)]
            paths = analyze_checkpoints(prepare_analysis(cfg))
        if len(paths) > 1:
            raise UserError(f"{cfg.checkpoint} holds {len(paths)} checkpoints: name one, or use rl-training analyze")
        return self._to_probe_result(read_analysis(paths[0]))

    def _to_probe_result(self, result: Mapping[str, Any]) -> dict[str, Any]:
        numbers: dict[str, float] = result["results"]
        suffix = "" if self._given.get("importance.report_per_token", True) else "_sequence"
        probe_result: dict[str, Any] = {}
        if self._given.get("probe_rework.compute_delta_h1", True):
            predicted = numbers[f"deltaH1{suffix}"]
            learning_rate = numbers["learning_rate"]
            probe_result |= {
                "deltaH1": predicted,
                "bars_dot": predicted / learning_rate,
                "learning_rate": learning_rate,
            }
        if self._given.get("importance.enabled", True):
            estimator = CHOICES["importance.is_mode"][self._given.get("importance.is_mode", "pdis")]
            change = numbers[f"deltaH_{estimator}{suffix}"]
            before = numbers[f"H_orig{suffix}"]
            probe_result |= {"deltaH_true": change, "H_orig": before, "H_upd": before + change}
        probe_result |= {key: int(numbers[key]) for key in SIZE_KEYS} | {key: numbers[key] for key in MEAN_KEYS}
        return probe_result | {"timing": result["timing"], "diagnostics": numbers, "log": result["log"]}


@contextlib.contextmanager
def _composing_from_conf() -> Iterator[None]:
    """Let Hydra compose the files of conf/ meanwhile, also in a script under @hydra.main, which gets its own back."""
    of_script = GlobalHydra.instance().hydra
    GlobalHydra.instance().clear()  # Hydra refuses to be initialized twice
    try:
        with initialize_config_dir(str(CONF), version_base="1.3"):
            yield
    finally:
        GlobalHydra.instance().hydra = of_script


def _checked_values(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a configuration that are not null, by dotted key.

    Raises:
        UserError: For an unknown key or an invalid value.
    """
    standard = load_plain(PROBE_CONFIGS / "full_example.yaml")
    known = standard | flatten(standard)
    given = {key: value for key, value in flatten(config).items() if value is not None}
    for key in [*map(str, config), *given]:
        if key not in known:
            hint = did_you_mean(key.rpartition(".")[2].lower(), {k.rpartition(".")[2].lower(): k for k in known})
            raise UserError(f"{key}: there is no such setting; {PROBE_CONFIGS / 'full_example.yaml'} has all{hint}")
        if key in given and known[key] is not None:
            check_kind(key, given[key], known[key])
    for key, choices in CHOICES.items():
        if key in given and (not isinstance(given[key], str) or given[key] not in choices):
            hint = did_you_mean(str(given[key]), choices.keys())
            raise UserError(f"{key}={given[key]}: choose from {', '.join(sorted(choices))}{hint}")
    if not all(isinstance(word, str) and "=" in word for word in given.get("overrides", [])):
        raise UserError("overrides must be a list of settings, each KEY=VALUE")
    return given


def _adapter_overrides(checkpoint: Path) -> list[str]:
    """Return overrides for the adapter of a checkpoint outside a run, read from its adapter_config.json."""
    file = checkpoint / ADAPTER_CONFIG_FILE
    if not file.is_file() or run_of(checkpoint) is not None:
        return []
    try:
        adapter = json.loads(read_text(file))
        rank = adapter["r"]
        alpha = adapter["lora_alpha"]
        modules = adapter["target_modules"]
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{file} is not the configuration of a LoRA adapter ({error}): repair it") from error
    check_kind(f"{file}: r", rank, 1)
    check_kind(f"{file}: lora_alpha", alpha, 1.0)
    names = [modules] if isinstance(modules, str) else modules
    check_kind(f"{file}: target_modules", names, [])
    if not all(isinstance(name, str) and re.fullmatch(MODULE_PATTERN, name) for name in names):
        raise UserError(f"{file}: target_modules={modules} must be names of modules, or a pattern of them")
    target = quote_value(modules) if isinstance(modules, str) else quote_list(sorted(names))
    return ["adapter=lora", f"adapter.r={rank}", f"adapter.lora_alpha={alpha}", f"adapter.target_modules={target}"]
