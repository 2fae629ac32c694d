"""Tell TRL's GRPOTrainer and its subclasses from other trainers, and say why others are not measured."""

from __future__ import annotations

from trl import RLOOTrainer
from trl.trainer import grpo_trainer

from rl_training.errors import UserError
from rl_training.hosts.trl.members import FORWARD_PASS, METHODS

NAME = "GRPOTrainer"
UNSLOTH = (
    "its forward pass returns None for log-probabilities and entropies while it trains, and hidden states for logits, "
    "and its gradient checkpointing is reentrant. Train with TRL's, in a script that does not import unsloth"
)
OTHER_COPY = (
    f"nothing says that its {FORWARD_PASS} returns the log-probabilities and entropies that its loss uses. Use TRL's "
    "or a subclass of it"
)


def is_grpo_trainer(trainer: object) -> bool:
    """Return whether this is TRL's GRPOTrainer or a subclass, whatever trl.GRPOTrainer has been replaced by."""
    return any(base.__module__ == grpo_trainer.__name__ and base.__name__ == NAME for base in type(trainer).__mro__)


def refuse_other_trainers(trainer: object) -> None:
    """Raise UserError, with what to use, for an object that is no GRPOTrainer, such as TRL's RLOOTrainer or a copy."""
    if not is_grpo_trainer(trainer):
        raise UserError(_what_to_use(trainer))


def _what_to_use(trainer: object) -> str:
    """Return the refusal of an object that is no GRPOTrainer: the reason, and what to use instead."""
    kind = type(trainer)
    refusal = f"probes are attached to a trl.GRPOTrainer, and this is {kind.__name__}"
    if isinstance(trainer, RLOOTrainer):
        return (
            f"{refusal}. GRPOTrainer has RLOO's gradients, up to a constant factor and the KL term, with "
            "loss_type='dr_grpo', scale_rewards='none', beta=0.0"
        )
    missing = [name for name in METHODS if not hasattr(trainer, name)]
    if not missing and any(base.__name__.endswith(NAME) for base in kind.__mro__):
        is_unsloth = "unsloth" in f"{kind.__module__}.{kind.__name__}".lower()
        return f"{refusal}, a copy of it and no subclass: {UNSLOTH if is_unsloth else OTHER_COPY}"
    lacking = f", which lacks {', '.join(missing)}" if missing else ""
    return (
        f"{refusal}{lacking}. Use GRPOTrainer, with use_vllm=True for another sampler, or write the loop with "
        "measured_loop"
    )
