"""Advice in the trainer's own settings: what to set to make more of a training measurable."""

from __future__ import annotations

from rl_training.hosts.trl.members import FORWARD_PASS
from rl_training.hosts.trl.settings.loss import DR_GRPO
from rl_training.hosts.trl.settings.spelling import Spelling
from rl_training.step.batch import LossSettings
from rl_training.step.reasons import Fixes


def fixes_of(settings: LossSettings, spelling: Spelling) -> Fixes:
    """Return the advice that makes more of a training with these loss settings measurable.

    Args:
        settings: The settings of the loss.
        spelling: Names the trainer's settings.
    """
    changes = {name: value for name, value in DR_GRPO.items() if name in settings.differs}
    changes |= {"mask_truncated_completions": False} if settings.hides_truncated else {}
    changes |= {"vllm_importance_sampling_correction": False} if settings.correction is not None else {}
    to_change = [spelling.setting(name, value) for name, value in changes.items()]
    to_change += [spelling.no_intervention] * ("intervention" in settings.differs)
    return Fixes(
        dr_grpo=f"set {spelling.separator.join(to_change)}" if to_change else "",
        batch_setting=spelling.batch_setting,
        steps_setting=spelling.steps_setting,
        num_folds_setting=spelling.num_folds_setting,
        own_forward_pass=f"build on super().compute_loss, or take log-probabilities from self.{FORWARD_PASS}",
    )
