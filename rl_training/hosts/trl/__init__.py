"""TRL's trainer: the only package that uses internals of TRL, transformers, accelerate and DeepSpeed.

Read in this order. What `attach` does:

    attachment.py        what is put on a trainer and removed again, by wrapping.py: the objects and their lives
    measured_trainer.py  the trainer as probes see it: its policy, its rollouts, its loss
    options.py           the options of `attach`, of its command and of DrGRPOTrainer
    training_callback.py begins and ends each training, a Training of training.py; announcements.py has its words
    guard.py             what an error of the measuring ends, and what not

What is measured of a step, each a call to the engine's driver:

    hooks/               around the methods of a trainer: from generation to the optimizer's step, and checkpoints
    rollouts/            what is known of a rollout and its rows, which TRL passes on in batches without it
    loop_spec.py         describes the loop to the driver

What is read from a trainer:

    trainer_kind.py, compatibility.py, refusals.py
                         what cannot be attached to: other trainers, other versions of TRL, impossible settings
    versions.py, members.py
                         how versions of TRL differ, and all that is read
    settings/            what its settings say of the loss, of sampling and of rollouts
    policy.py            scores as the trainer would, and samples with generation.py
    sharding.py          which entries of weights, gradients and optimizer states a rank holds: DDP, FSDP2, ZeRO

Where it goes:

    output/              nowhere, to records, or to the folder of a run
    trainer_log.py       the trainer's log; alerts.py sends what stands out

Two more ways to train:

    launcher.py          attaches the trainers of a script, which run_script.py runs: python -m rl_training.attach
    trainer.py           DrGRPOTrainer, this package's trainer, with config.py; resuming.py continues it
    buffer.py            chooses its prompts, with fill_rollout.py and attempt_metrics.py
    trained_loss.py      adds interventions to its loss
    reward_functions.py  adds notes to the errors of rewards, for every trainer
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from rl_training.errors import UserError
from rl_training.options import named_arguments

if TYPE_CHECKING:
    from pathlib import Path

    from trl import GRPOTrainer

    from rl_training.engine.probe import Probe
    from rl_training.hosts.trl.attachment import Attachment
    from rl_training.records.writer import Records


@named_arguments
def attach(
    trainer: GRPOTrainer,
    folder: str | Path | Records | None = None,
    probes: Sequence[Probe | str] | Probe | str = ("simple", "ess"),
    *,
    metrics: Literal["core", "all"] = "core",
    whole_prompts: bool | None = None,
    target_kl_share: float | str | None = None,
    strict: bool | None = None,
    alerts: bool = False,
) -> Attachment:
    """Attach probes to a TRL trainer, and write records, config.yaml and a report of its training.

        with attach(trainer, "runs/my_run"):
            trainer.train()

    The report is written when the block ends: after success, an exception or Ctrl-C. Without `with`, it is written
    when `trainer.train()` ends. After SIGTERM the step is finished and the report written, and then the process ends as
    usual; a second one ends it at once. If it is killed before, `rl-training report FOLDER` makes the report of the
    records. A signal handler of your own runs instead. With several processes, rank 0 writes.

    Args:
        trainer: A `trl.GRPOTrainer` or a subclass of it, before `train()`.
        folder: Folder for logs/, config.yaml and report/. If it already holds another training, it stays unchanged and
            this training goes to the next free number, my_run-2. A resumed training continues in its own folder.
            `Records(FOLDER)` writes the records alone, without config.yaml and report. None writes nothing.
        probes: What to measure: names, as on the command line, or objects such as `SimpleEntropyProbe(every=5)`.
        metrics: Which numbers to add to the trainer's log, and thus to dashboards: "core", at most 15, or "all". The
            records always hold all of them.
        whole_prompts: Whether to keep all responses to a prompt in consecutive rows, instead of shuffling them. False
            leaves training bitwise identical to the trainer's own. True makes training with probes bitwise identical
            to `attach(trainer, probes=(), whole_prompts=True)`. It may change the trainer's own training: which
            responses a step learns from, if a step is not a whole number of generations, and what the loss averages
            within a microbatch (`loss_type="bnpo"`, say). None does it only if nothing changes but the order in which
            a step's microbatches are summed (a rounding difference) and, with dropout, which mask a response gets.
            On a GPU, bitwise identical means with deterministic kernels.
        target_kl_share: The KL divergence of each step as a share of the policy's entropy: "auto", which is 1e-2, or a
            number. The learning rate of each step is set so that its measured KL meets this target, which changes
            training. None keeps the trainer's learning rate.
        strict: Whether an error in a probe, or in what runs it, ends training. If False, it ends only the measuring:
            training continues bitwise unchanged, later estimates are nan with the reason, and the traceback is in
            logs/probe_error.txt. None means True if the environment has RL_TRAINING_STRICT=1, else False. With several
            processes, or with `target_kl_share`, an error always ends training.
        alerts: Whether to send what stands out, in the report's words, while training runs: as an alert of W&B and of
            trackio if the trainer logs there, else as a log line. Each is sent once. Needs a folder and the extra
            `report`.

    Returns:
        A handle with `latest`, the latest estimates, and `remove()`, which removes the probes.

    Raises:
        UserError: With what to change, if the trainer already has probes, if measuring would harm training, or if
            nothing could be measured. An estimate that a single probe cannot make is nan with the reason instead.
    """
    from pathlib import Path

    # Imported here, so that importing `attach` stays fast.
    from rl_training.hosts.probes import as_probes
    from rl_training.hosts.trl.attachment import Attachment
    from rl_training.hosts.trl.options import Options
    from rl_training.hosts.trl.output.attached_run import AttachedRun
    from rl_training.hosts.trl.output.destination import destination_of
    from rl_training.hosts.trl.trainer_kind import is_grpo_trainer, refuse_other_trainers
    from rl_training.records.writer import Records

    if is_grpo_trainer(folder):
        raise UserError(f"the trainer comes first, then the folder: attach(trainer, {str(trainer)!r})")
    if not (is_grpo_trainer(trainer) or hasattr(trainer, "train")):
        kind = type(trainer).__name__
        raise UserError(f"probes are attached to a trl.GRPOTrainer, and this is {kind}: attach(trainer, FOLDER)")
    refuse_other_trainers(trainer)
    if not isinstance(folder, str | Path | Records | None):
        raise UserError(
            f"folder={folder!r}: give a folder, such as 'runs/my_run', or Records(FOLDER); probes go by name, "
            "attach(trainer, FOLDER, probes=...)"
        )
    options = Options(
        metrics=metrics, target_kl_share=target_kl_share, whole_prompts=whole_prompts, strict=strict, alerts=alerts
    )
    destination = AttachedRun(folder) if isinstance(folder, str | Path) else destination_of(folder)
    return Attachment(trainer, as_probes(probes), destination, options)
