"""offline.py from Python, and from a configuration file: one call, one dictionary.

    from rl_training import OfflineEntropyProbe

    found = OfflineEntropyProbe.from_config_file("probe_configs/quick_test.yaml").run_mixed_probe(CHECKPOINT)
    found["deltaH1"], found["deltaH_true"], found["diagnostics"]["ESS"]

The configuration is translated in probe_config.py, and run as offline.py runs its own.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from rl_training.job.probe_config import ProbeConfig, read_probe_config
from rl_training.job.run_settings import gather_run_settings
from rl_training.job.shipped import CONF, PROBE_CONFIGS

SIZES = ("B_E", "B_U", "G")
LENGTHS = ("avg_generation_length", "avg_reward")


class OfflineEntropyProbe:
    """What a checkpoint's next step does to entropy, by a configuration of nested dictionaries: see probe_config.py."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        """Takes a configuration. Raises ValueError for a key that is not known, and for a value that means nothing."""
        self.config = dict(config)
        read_probe_config(self.config, checkpoint="any")

    @classmethod
    def from_config_file(cls, path: str | Path) -> OfflineEntropyProbe:
        """Returns the probe that a YAML file describes. ValueError where it is not there or cannot be read."""
        if not Path(path).is_file():
            raise ValueError(f"{path}: there is no such file; two examples are in {PROBE_CONFIGS}")
        try:
            config = OmegaConf.to_container(OmegaConf.load(path), resolve=True)
        except (YAMLError, OmegaConfBaseException, OSError) as error:
            raise ValueError(f"{path} cannot be read as YAML: {error}") from error
        if not isinstance(config, dict):
            raise ValueError(f"{path}: it must hold sections with settings; see {PROBE_CONFIGS}")
        return cls(config)  # type: ignore[arg-type]

    def run_mixed_probe(self, checkpoint_path: str | Path | None = None) -> dict[str, Any]:
        """Returns the numbers of one checkpoint, in nats (per token, or per sequence if so configured).

        deltaH1, bars_dot, learning_rate     predicted; not there with probe_rework.compute_delta_h1=false
        deltaH_true, H_orig, H_upd           measured; not there with importance.enabled=false
        B_E, B_U, G, avg_generation_length, avg_reward    prompts of E and of U, responses to each of these
        timing                               seconds by phase
        diagnostics                          ESS, w_max, w_min and every other number, with standard errors `…_se`
        log                                  the path of the log, "" where none was asked for

        checkpoint_path  instead of the configuration's: a checkpoint, a run (its newest), or a folder `model/` beside
                         whose parent's optimizer.pt

        Raises ValueError, before anything is sampled, where checkpoint and configuration do not fit.
        """
        from rl_training.job.analysis import analyse_checkpoints  # seconds of imports
        from rl_training.offline.results import read_result

        asked = read_probe_config(self.config, str(checkpoint_path) if checkpoint_path else None)
        with initialize_config_dir(str(CONF), version_base="1.3"):
            cfg = compose("offline", overrides=gather_run_settings(asked.words))
            paths = analyse_checkpoints(cfg)
        if len(paths) > 1:
            raise ValueError(f"{cfg.checkpoint} holds {len(paths)} checkpoints: name one, or use rl-training analyze")
        return _in_old_words(read_result(paths[0]), asked)


def _in_old_words(result: Mapping[str, Any], asked: ProbeConfig) -> dict[str, Any]:
    found: dict[str, float] = result["results"]
    unit = "" if asked.per_token else "_sequence"
    answer: dict[str, Any] = {}
    if asked.predicts:
        predicted, rate = found[f"deltaH1{unit}"], found["learning_rate"]
        answer |= {"deltaH1": predicted, "bars_dot": predicted / rate, "learning_rate": rate}
    if asked.measures:
        change, before = found[f"deltaH_{'true' if asked.is_mode == 'pdis' else 'snis'}{unit}"], found[f"H_orig{unit}"]
        answer |= {"deltaH_true": change, "H_orig": before, "H_upd": before + change}
    answer |= {size: int(found[size]) for size in SIZES} | {key: found[key] for key in LENGTHS}
    return answer | {"timing": result["timing"], "diagnostics": found, "log": result["log"]}


def main() -> None:
    """Runs the probe of a configuration file, prints its core numbers, and where the log lies."""
    parser = argparse.ArgumentParser(
        prog="python -m rl_training.offline",
        description="Analyze a checkpoint's next step from a configuration file. rl-training analyze needs none.",
    )
    parser.add_argument("--config", required=True, help="a file like those in probe_configs")
    parser.add_argument("--checkpoint", help="a checkpoint or a run, instead of the file's")
    arguments = parser.parse_args()
    found = OfflineEntropyProbe.from_config_file(arguments.config).run_mixed_probe(arguments.checkpoint)
    for key, value in found.items():
        if isinstance(value, float | int):
            print(f" {key} = {value:.6g}")
    print(f" log: {found['log'] or 'none asked for'}")
