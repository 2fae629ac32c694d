"""What a checkpoint's next step does to entropy, predicted and measured.

accelerate launch offline.py checkpoint=RUN
python offline.py --help
"""

import sys

import hydra
from omegaconf import DictConfig

from rl_training.job.command_line import importing, past_hydra, run_command
from rl_training.job.run_settings import gather_run_settings, name_each_job


@hydra.main(version_base="1.3", config_path="conf", config_name="offline")
@past_hydra
def main(cfg: DictConfig) -> None:
    from rl_training.job.analysis_settings import check_analysis

    check_analysis(cfg)  # again by its plan; here it waits for no import
    with importing():
        from rl_training.job.analysis import analyse_checkpoints

    analyse_checkpoints(cfg)


if __name__ == "__main__":
    sys.argv[1:] = name_each_job(gather_run_settings(sys.argv[1:]))
    run_command(main)
