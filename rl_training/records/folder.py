"""What lies in the folder of a run, by name; the files in `logs` have theirs beside what reads and writes them."""

from __future__ import annotations

from pathlib import Path

from rl_training.errors import UserError

CONFIG_FILE = "config.yaml"  # every setting, and where the run comes from
LOGS_FOLDER = "logs"  # metrics.jsonl, probes.jsonl and what dashboards keep on the disk
REPORT_FOLDER = "report"
PAGE_FILE = "report.html"  # in it: of one run
OFFLINE = "offline"  # analyses of checkpoints
EVALUATIONS = "evaluations"
# Prefixes of settings that do not affect training: where it writes, how far it goes, what watches it.
NOT_OF_TRAINING = ("run_dir", "resume", "probes.", "trainer.output_dir", "trainer.max_steps", "trainer.save_",
                   "trainer.logging_", "trainer.report_to", "trainer.disable_tqdm", "trainer.run_name",
                   "trainer.project", "trainer.ddp_timeout", "trainer.eval_", "trainer.dataloader_", "provenance.",
                   "rollouts.", "logger.", "additional_steps")  # fmt: skip
COMPARISON_FILE = "comparison.html"  # of several runs: in the folder where the command was given
TRAINING_STATE = "training_state"  # the checkpoint-N folders
WRITTEN = (CONFIG_FILE, LOGS_FOLDER, REPORT_FOLDER, OFFLINE, EVALUATIONS, TRAINING_STATE)  # what commands write


def checkpoints_of(run: Path) -> list[Path]:
    """Return the checkpoint-N folders of a run, whole or not, by their steps."""
    return checkpoints_in(run / TRAINING_STATE)


def checkpoints_in(folder: Path) -> list[Path]:
    return sorted((path for path in folder.glob("checkpoint-*") if path.name.split("-")[1].isdecimal()), key=step_of)


def refuse_a_file(path: Path) -> None:
    """Raise UserError where a file lies in the place of a folder that is to be made."""
    if path.exists() and not path.is_dir():
        raise UserError(f"{path} is a file, and a folder of this name is to be made: move it away")


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.split("-")[1])
