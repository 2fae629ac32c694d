"""What to change, as text: settings in the words of whichever trainer made the run, ready to paste.

base.py   what can be said, in words for a loop of one's own
trl.py    arguments of GRPOConfig and `attach`, and of DrGRPOTrainer
job.py    overrides of `rl-training train`
verl.py   overrides of verl
"""

from __future__ import annotations

from rl_training.records.made_by import JOB, TRL, VERL
from rl_training.records.report.set_up import set_up_of
from rl_training.records.report.wording.base import Wording
from rl_training.records.report.wording.job import JobWording
from rl_training.records.report.wording.trl import DrGrpoWording, TrlWording
from rl_training.records.report.wording.verl import VerlWording
from rl_training.records.table.series import Run, once_per_run


@once_per_run
def wording_of(run: Run) -> Wording:
    """Return how settings of a run are written."""
    set_up = set_up_of(run)
    if set_up.kind == JOB:
        return JobWording(set_up)
    if set_up.kind == VERL:
        return VerlWording(set_up)
    if set_up.kind == TRL:
        return DrGrpoWording(set_up) if "DrGRPO" in set_up.trainer_class else TrlWording(set_up)
    return Wording(set_up)
