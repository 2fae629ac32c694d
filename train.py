"""The main job: Dr-GRPO training with probes.

accelerate launch train.py probe=simple
python train.py --help
"""

import logging
import os
import sys
import warnings

import hydra
from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

# TRL still uses names that transformers has deprecated; a user can do nothing about it.
warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")
# Where it is installed, bitsandbytes misses a kernel for evaluation on some CPUs, in runs without 4-bit weights too.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)


@hydra.main(version_base="1.3", config_path="conf", config_name="train")
def main(cfg: DictConfig) -> None:
    from rl_training.job.build import build_run  # seconds of imports that --help need not wait for

    run = build_run(cfg)
    run.train()
    run.report()


if __name__ == "__main__":
    # Any field of DrGRPOConfig can be set, listed in conf/trainer or not: Hydra would ask for a + before the unlisted.
    # A mistyped name is refused in build_run.
    sys.argv[1:] = [f"++{arg}" if arg.startswith("trainer.") else arg for arg in sys.argv[1:]]
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # Hydra hands its errors on, instead of printing them
    try:
        main()
    except (HydraException, OmegaConfBaseException) as error:
        from rl_training.job.command_line import explain

        sys.exit(f"error: {explain(error)}")
