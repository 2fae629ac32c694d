"""python -m rl_training.hosts.verl: verl's own command with probes, and with all of its settings.

    python -m rl_training.hosts.verl probe=simple algorithm.adv_estimator=grpo ...

The default is probe=all. Choices are the files of conf/probe; set their options as probes.simple.every=4.
"""

from __future__ import annotations

import sys

import hydra
from omegaconf import DictConfig
from verl.trainer.main_ppo import run_ppo
from verl.trainer.ppo.utils import need_critic, need_reference_policy
from verl.utils.config import validate_config
from verl.utils.device import auto_set_device

from rl_training.hosts.verl.trainer import Runner, with_probes
from rl_training.job.shipped import CONF


def with_group(words: list[str]) -> list[str]:
    """Returns the settings with conf/probe among the groups, and with a choice from it."""
    chosen = [f"+{word}" if word.startswith("probe=") else word for word in words]
    if not any(word.startswith("+probe=") for word in chosen):
        chosen.append("+probe=all")
    return [*chosen, f"hydra.searchpath=[file://{CONF}]"]


@hydra.main(config_path="pkg://verl.trainer.config", config_name="ppo_trainer", version_base=None)
def run(config: DictConfig) -> None:
    auto_set_device(config)
    validate_config(config=config, use_reference_policy=need_reference_policy(config), use_critic=need_critic(config))
    run_ppo(with_probes(config), task_runner_class=Runner)


if __name__ == "__main__":
    sys.argv[1:] = with_group(sys.argv[1:])
    run()
