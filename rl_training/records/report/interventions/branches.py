"""The commands that train a branch without an intervention, one with PSR, and one per recommended intervention.

PSR (positive advantages only) comes first: docs/explanation/how_often_right.md has the test of this choice.
"""

from __future__ import annotations

import math
import re
import shlex
from pathlib import Path

from rl_training.records.folder import checkpoints_of
from rl_training.records.hydra_text import quote_list, quote_value
from rl_training.records.report.set_up import PSR
from rl_training.records.report.wording import wording_of
from rl_training.records.report.wording.trl import TrlWording
from rl_training.records.table.effects import Effect, effects_of
from rl_training.records.table.rates import is_falling
from rl_training.records.table.series import Run

MAX_PROPOSALS = 4
BRANCH_STEPS = 40  # steps of each branch


def branch_commands(run: Run) -> list[str]:
    """Return the commands that train a branch without an intervention and with each one, and compare them.

    There are none if nothing is recommended, or if there is no checkpoint to branch from. For an attached trainer
    they are lines of Python.
    """
    wording = wording_of(run)
    set_up = wording.set_up
    if isinstance(wording, TrlWording):
        return _attached_branches(run, wording)
    checkpoints = checkpoints_of(run.folder)
    names = [name for name, _ in preferred_interventions(run)]
    if not checkpoints or not names:
        return []
    if not set_up.has_sign_intervention:
        names = [PSR, *names]
    names = [name for name in dict.fromkeys(names) if name not in set_up.interventions][:MAX_PROPOSALS]
    if not names:
        return []
    branches = {Path(f"{run.folder}_plain"): ""}
    for name in names:
        branches[_branch_folder(run, name)] = f"intervention={quote_list(set_up.interventions_with(name))}"
    start = ["rl-training", "train", f"branch={quote_value(str(checkpoints[-1]))}", f"additional_steps={BRANCH_STEPS}"]
    trainings = [
        [*start, f"run_dir={quote_value(str(folder))}", *([setting] if setting else [])]
        for folder, setting in branches.items()
    ]
    return [shlex.join(words) for words in [*trainings, ["rl-training", "report", *map(str, branches)]]]


def _branch_folder(run: Run, intervention: str) -> Path:
    """Return the folder, beside the run's, of a branch with this intervention."""
    return Path(f"{run.folder}_{re.sub(r'[^A-Za-z0-9_.]+', '_', intervention)}")


def _attached_branches(run: Run, wording: TrlWording) -> list[str]:
    """Return the lines that continue an attached trainer from a checkpoint: unchanged, with PSR, and with another."""
    preferred = preferred_interventions(run)
    if not preferred:
        return []
    (name, effect) = preferred[0]
    set_up = wording.set_up
    folder = set_up.trainer("output_dir", "OUTPUT_DIR")
    step = run.steps[-1]
    resume = f'trainer.train(resume_from_checkpoint="{folder}/checkpoint-N")'
    saved = "that it has saved"
    if set_up.trainer("save_strategy") == "no":
        saved = "(this run has saved none: train it again with save_strategy='steps' and save_steps)"
    tries = {f"{run.folder}_plain": "without a change"}
    if not set_up.has_sign_intervention:
        tries[f"{run.folder}_{PSR}"] = f"with {wording.positive_only().text}"
    if effect.bare_name != PSR:
        tries[str(_branch_folder(run, name))] = f"with {wording.on_resuming(name, effect)}"
    lines = [f"# Each with a trainer made anew, from a checkpoint {saved}; max_steps above {step}."]
    for folder, how in tries.items():
        lines += wording.recorded_in(folder, how, resume)
    return [*lines, "# Then, in a shell:", shlex.join(["rl-training", "report", *tries])]


def preferred_interventions(run: Run) -> list[tuple[str, Effect]]:
    """Return values of `intervention` that halve the fall or keep entropy, the cheapest MAX_PROPOSALS, with effects.

    There are none if entropy does not fall.
    """
    if not is_falling(run):
        return []
    effects = dict[str, Effect]()
    set_up = wording_of(run).set_up
    for effect in effects_of(run):
        if math.isfinite(effect.halves_at.value) or effect.delta_h.bounds()[0] > 0:
            effects.setdefault(set_up.name_as_configured(effect), effect)
    return [*effects.items()][:MAX_PROPOSALS]
