"""Evaluates the checkpoints of a run.

python evaluate.py run=RUN
python evaluate.py --help
"""

import sys

import hydra
from omegaconf import DictConfig

from rl_training.job.command_line import importing, past_hydra, run_command


@hydra.main(version_base="1.3", config_path="conf", config_name="evaluate")
@past_hydra
def main(cfg: DictConfig) -> None:
    from rl_training.job.evaluation_settings import check_evaluation

    check_evaluation(cfg)  # again by its plan; here it waits for no import
    with importing():
        from rl_training.job.evaluate import evaluate

    sys.exit(evaluate(cfg))


if __name__ == "__main__":
    # Settings of the run's own configuration, and names of metrics, which conf/evaluate.yaml cannot list.
    laid_over = ("data.", "model.", "adapter.", "metrics.")
    sys.argv[1:] = [f"++{arg}" if arg.startswith(laid_over) else arg for arg in sys.argv[1:]]
    run_command(main)
