"""The running trainer: the only package that uses internals of TRL, transformers, accelerate and DeepSpeed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from trl import GRPOTrainer

    from rl_training.engine.probe import Probe
    from rl_training.hosts.trl.attachment import Attachment
    from rl_training.records.jsonl import Records


def attach(
    trainer: GRPOTrainer,
    probes: Sequence[Probe] | Probe = (),
    records: Records | str | Path | None = None,
    whole_prompts: bool = False,
    target_kl_share: float | None = None,
) -> Attachment:
    """Returns the attachment of these probes to a trainer: call `.remove()`, or use it as a context manager.

    records          where metrics.jsonl and probes.jsonl are written: Records, or a folder; without it estimates go to
                     the trainer's log only. Ctrl-C within `with attach(...)` says where they are
    whole_prompts    keep the responses of a prompt side by side. It sums the microbatches of a step in another order
                     than TRL does, which differs by rounding; probes beside it change not a bit. Without it training
                     is bitwise TRL's, and what needs folds of whole prompts is nan, with that reason
    target_kl_share  the learning rate of each step follows from its measured KL, so that it is this share of the
                     policy's entropy (2e-3, say); None: the trainer's rate. This one setting changes training

    Raises ValueError, saying what to change, when the trainer already has probes, or when measuring would harm training
    or is impossible. What a single probe cannot measure is nan with the reason.
    """
    from rl_training.hosts.trl.attachment import Attachment  # here: importing `attach` is fast

    return Attachment(trainer, probes, records, whole_prompts, target_kl_share=target_kl_share)
