"""The main job: Dr-GRPO training with probes.

accelerate launch train.py probe=simple
python train.py --help
"""

import sys

import hydra
from omegaconf import DictConfig

from rl_training.job.command_line import importing, past_hydra, run_command


@hydra.main(version_base="1.3", config_path="conf", config_name="train")
@past_hydra
def main(cfg: DictConfig) -> None:
    from rl_training.job.settings import check_run

    check_run(cfg)  # again in build_run; here it waits for no import
    with importing():
        from rl_training.job.build import build_run

    run = build_run(cfg)
    run.train()
    run.report()
    run.end()


if __name__ == "__main__":
    # Any field of DrGRPOConfig can be set, listed in conf/trainer or not: Hydra would ask for a + before the unlisted.
    # A mistyped name is refused in build_run.
    sys.argv[1:] = [f"++{arg}" if arg.startswith("trainer.") else arg for arg in sys.argv[1:]]
    run_command(main)
