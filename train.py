"""The main job: Dr-GRPO training with probes.

accelerate launch train.py probe=simple
python train.py --help
"""

import warnings

import hydra
from omegaconf import DictConfig

from rl_training.build import build_run, set_any_trainer_field

# TRL still uses names that transformers has deprecated; a user can do nothing about it.
warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")


@hydra.main(version_base="1.3", config_path="conf", config_name="train")
def main(cfg: DictConfig) -> None:
    run = build_run(cfg)
    run.train()
    run.report()


if __name__ == "__main__":
    set_any_trainer_field()
    main()
