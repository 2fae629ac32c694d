"""TRL's trainer: the only package that uses internals of TRL, transformers, accelerate and DeepSpeed.

Read in this order:

    attachment.py    what `attach` puts on a trainer and takes off again; compatibility.py says what it refuses
    step_hooks.py    the moments of a step, each a call of the engine's driver; loop.py is what the engine sees
    rollouts.py      what the trainer knows of a batch, until its step; batches.py and generated.py read its rows
    policy.py        scores and samples as the trainer would; scoring_calls.py finds the scores that training made
    sharding.py      which entries of weights, gradients and states a process has under DDP, FSDP2 and ZeRO
    trainer_log.py, run_folder.py, checkpoint_hooks.py       what is logged, written and saved; attached_run.py: where,
                                                             described.py: of which settings
    guard.py, termination.py, spoken.py                      how measuring ends, and what is said of it
    trainer.py       DrGRPOTrainer, with buffer.py, trained_loss.py and reward_functions.py: a trainer of our own
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from rl_training.errors import UserError

if TYPE_CHECKING:
    from pathlib import Path

    from trl import GRPOTrainer

    from rl_training.engine.probe import Probe
    from rl_training.hosts.trl.attachment import Attachment
    from rl_training.records.jsonl import Records


def attach(
    trainer: GRPOTrainer,
    folder: str | Path | Records | None = None,
    probes: Sequence[Probe | str] | Probe | str = ("simple", "ess"),
    *,
    metrics: Literal["core", "all"] = "core",
    whole_prompts: bool | None = None,
    target_kl_share: float | None = None,
    strict: bool | None = None,
) -> Attachment:
    """Measure a trainer's training, and leave records, config.yaml and a report in a folder.

        with attach(trainer, "runs/my_run"):
            trainer.train()

    The report is written when the block ends: after success, an exception and Ctrl-C. Without `with`, it is written
    when `trainer.train()` ends. SIGTERM writes it too, and then ends the process as it would have, once the call
    into torch that it is in has returned: in a collective that waits for the other processes. Of several processes
    the first one writes.

    Args:
        folder: Where logs/, config.yaml and report/ go. A folder that holds another training stays as it is: this one
            goes to the next free number, my_run-2. A training that resumes goes on in its own. None: nothing is
            written. Records(FOLDER): only these, no config.yaml and no report.
        probes: Names, as on the command line, or objects, such as SimpleEntropyProbe(every=5).
        metrics: What is added to the trainer's log, and with it to dashboards: "core", at most 15 numbers, or "all".
            The records always have all.
        whole_prompts: Keep the responses of a prompt side by side. None: where that only changes the order in which
            the microbatches of a step are summed, which differs by rounding, and with dropout which response meets
            which mask. False: training is bitwise that of the
            trainer alone. True: training with probes is bitwise that of attach(trainer, probes=(), whole_prompts=True).
        target_kl_share: The learning rate of each step follows from its measured KL, so that it is this share of the
            policy's entropy (2e-3, say); None: the trainer's rate. This one setting changes training.
        strict: An error in a probe ends training. Otherwise it ends measuring: training goes on bitwise, what would
            have been measured is nan with the reason, and the traceback is in logs/probe_error.txt. None: as
            RL_TRAINING_STRICT=1 in the environment says. With several processes, or where a step follows from what is
            measured (target_kl_share), such an error always ends training.

    Returns:
        A handle with `latest`, the latest estimates, and `remove()`.

    Raises:
        UserError: saying what to change, where the trainer already has probes, where measuring would harm training,
            or where nothing could be measured. What one probe cannot measure is nan with the reason.
    """
    from pathlib import Path

    from trl import GRPOTrainer  # here, as all of these: importing `attach` is fast

    from rl_training.hosts.loop_refusals import probes_in
    from rl_training.hosts.trl.attached_run import AttachedRun
    from rl_training.hosts.trl.attachment import Attachment, Options
    from rl_training.hosts.trl.compatibility import another_trainer
    from rl_training.records.jsonl import Records

    if not isinstance(trainer, GRPOTrainer):
        raise UserError(another_trainer(trainer))
    if not isinstance(folder, str | Path | Records | None):
        raise UserError(
            f"folder={folder!r}: give a folder, such as 'runs/my_run', or Records(FOLDER); probes go by name, "
            "attach(trainer, FOLDER, probes=...)"
        )
    if metrics not in ("core", "all"):
        raise UserError(f"metrics={metrics!r}: give 'core', at most 15 numbers, or 'all'")
    place = AttachedRun(folder) if isinstance(folder, str | Path) else folder
    options = Options(whole_prompts, metrics, target_kl_share, strict=strict)
    return Attachment(trainer, probes_in(probes), place, options)
