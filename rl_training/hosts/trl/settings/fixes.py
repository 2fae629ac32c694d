"""Advice in the trainer's own settings: what to set to make more of a training measurable."""

from __future__ import annotations

from rl_training.hosts.trl.members import FORWARD_PASS
from rl_training.hosts.trl.settings.loss import DR_GRPO
from rl_training.step.batch import LossSettings
from rl_training.step.reasons import Fixes


def fixes_of(settings: LossSettings, *, is_cli: bool = False) -> Fixes:
    """Return the advice that makes more of a training with these loss settings measurable.

    Args:
        settings: The settings of the loss.
        is_cli: Whether to write settings as on the command line, trainer.NAME=VALUE, instead of as Python.
    """
    own_pass = f"build on super().compute_loss, or take log-probabilities from self.{FORWARD_PASS}"
    changes = {name: value for name, value in DR_GRPO.items() if name in settings.differs}
    changes |= {"mask_truncated_completions": False} if settings.hides_truncated else {}
    changes |= {"vllm_importance_sampling_correction": False} if settings.correction is not None else {}
    if is_cli:
        arguments = [f"trainer.{name}={_as_argument(value)}" for name, value in changes.items()]
        arguments += ["intervention=null"] * ("intervention" in settings.differs)
        return Fixes(
            dr_grpo=f"set {' '.join(arguments)}" if arguments else "",
            batch_setting="batch.microbatch_size={size} batch.sequences_per_step={sequences}",
            steps_setting="batch.sequences_per_step={sequences}",
            num_folds_setting="probes.{name}.num_folds={folds}",
            own_forward_pass=own_pass,
        )
    settings_to_change = [f"{name}={value!r}" for name, value in changes.items()]
    settings_to_change += ["no intervention"] * ("intervention" in settings.differs)
    return Fixes(
        dr_grpo=f"set {', '.join(settings_to_change)}" if settings_to_change else "",
        batch_setting="per_device_train_batch_size={size}, gradient_accumulation_steps={count} in GRPOConfig",
        steps_setting="gradient_accumulation_steps={count} in GRPOConfig",
        num_folds_setting="{probe}(num_folds={folds})",
        own_forward_pass=own_pass,
    )


def _as_argument(value: object) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
