"""python -m rl_training.hosts.verl: verl's own command, with probes and with all of verl's settings.

    python -m rl_training.hosts.verl probe=simple algorithm.adv_estimator=grpo ...

The default is probe=all. The choices are the files in conf/probe. Their options are set like probes.simple.every=4.
"""

from __future__ import annotations

import sys

import hydra
from omegaconf import DictConfig
from verl.trainer.main_ppo import run_ppo
from verl.trainer.ppo.utils import need_critic, need_reference_policy
from verl.utils.config import validate_config
from verl.utils.device import auto_set_device

from rl_training.errors import UserError
from rl_training.hosts.verl.trainer import Runner, with_probes
from rl_training.job.configuration.probe_group import add_probe_group

add_probe_group()


def with_probe_choice(arguments: list[str]) -> list[str]:
    """Return Hydra's arguments with a choice from conf/probe: the given one, else probe=all."""
    chosen = [f"+{argument}" if argument.startswith("probe=") else argument for argument in arguments]
    default = [] if any(argument.startswith("+probe=") for argument in chosen) else ["+probe=all"]
    settings = (i for i, argument in enumerate(chosen) if "=" in argument and not argument.startswith("-"))
    place = next(settings, len(chosen))  # next to the other settings: Hydra rejects settings on both sides of a flag
    return [*chosen[:place], *default, *chosen[place:]]


@hydra.main(config_path="pkg://verl.trainer.config", config_name="ppo_trainer", version_base=None)
def run(config: DictConfig) -> None:
    """Check the settings, then start verl's trainer. What cannot be measured ends the command with one line."""
    auto_set_device(config)
    validate_config(config=config, use_reference_policy=need_reference_policy(config), use_critic=need_critic(config))
    try:
        config = with_probes(config)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)  # like the other commands of this package; Hydra would print a traceback
    run_ppo(config, task_runner_class=Runner)


if __name__ == "__main__":
    sys.argv[1:] = with_probe_choice(sys.argv[1:])
    run()
