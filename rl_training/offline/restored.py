"""A trainer restored at a checkpoint: weights, optimizer and scheduler as the step after it would find them.

Weights and optimizer are loaded by transformers' own code, which knows in which order an optimizer numbers its
parameters (those that decay first, then biases and norms: not the order of the model). What can still go wrong is
checked before anything is sampled, in this order, each with an error of one line:

    G1  the trainable parameters are the tensors of the checkpoint, by name and shape
    G2  a forward of four tokens, through the very function that will score, has a gradient
    G3  it reaches every trainable parameter

Then: the optimizer has a state of the right shape for each of them, and a learning rate that is not 0. Without these
checks most mistakes show after minutes of sampling ("element 0 of tensors does not require grad"), or never.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from rl_training.errors import UserError
from rl_training.hosts.trl.batches import DR_GRPO, loss_settings
from rl_training.hosts.trl.policy import TrainerPolicy, sampling_limit
from rl_training.hosts.trl.sharding import replicated
from rl_training.hosts.trl.trainer import DrGRPOTrainer, GRPOTrainer
from rl_training.offline.checkpoint_files import format_sample, load_shards, refuse_other_weights
from rl_training.optim.state import OptimizerView, view_optimizer
from rl_training.policy.rollout import Rollout
from rl_training.records.checkpoints import state_folder, steps_taken, what_is_wrong_with_weights
from rl_training.records.files.pickles import UnpicklingError, load_tensors

T = TypeVar("T")
# Losses that are sums over sequences, beside Dr-GRPO's: means over the tokens of each, or over all tokens of U.
BY_TOKENS_OR_SEQUENCES = ("grpo", "dapo")
# Of a loss that needs more than scores and advantages (update.py): the tokens of all of U, a reference, a state.
NOT_READ = {"loss_type", "beta", "use_adaptive_entropy"}


@dataclass(frozen=True)
class RestoredTrainer:
    """A trainer restored at a checkpoint. Nothing here changes its parameters, optimizer or random streams."""

    trainer: GRPOTrainer
    checkpoint: Path
    step: int  # optimizer steps behind it
    parameters: Mapping[str, nn.Parameter]  # trainable only
    optimizer: OptimizerView  # before the next step
    policy: TrainerPolicy

    @property
    def rank(self) -> int:
        return self.trainer.accelerator.process_index

    @property
    def num_ranks(self) -> int:
        return self.trainer.accelerator.num_processes

    @property
    def device(self) -> torch.device:
        return self.trainer.accelerator.device

    @property
    def learning_rate(self) -> float:
        """The learning rate of the next step; nan where parameter groups have different ones."""
        rates = {state.lr for state in (self.optimizer.states or {}).values()}
        return rates.pop() if len(rates) == 1 else float("nan")

    def reduce(self, tensor: Tensor) -> Tensor:
        """Sum a tensor over the ranks. A collective."""
        return tensor if self.num_ranks == 1 else self.trainer.accelerator.reduce(tensor, reduction="sum")

    def gather(self, values: Sequence[T]) -> list[T]:
        """Concatenate the ranks' values, and return them on every rank. A collective."""
        parts = [values] * self.num_ranks
        if self.num_ranks > 1:
            torch.distributed.all_gather_object(parts, values)
        return [value for part in parts for value in part]


def restore(trainer: GRPOTrainer, checkpoint: Path, learning_rate: float | None = None) -> RestoredTrainer:
    """Return the trainer, restored at the checkpoint.

    Args:
        trainer: of the same model, adapter and optimizer; it must not have trained.
        learning_rate: of the step to be analysed, instead of what the checkpoint's scheduler says.

    Raises ValueError, saying what is wrong and the fix, when checkpoint and trainer do not fit: see the guards.
    """
    _refuse_other_analyses(trainer)
    _refuse_damaged(checkpoint)
    model = trainer.model
    refuse_other_weights(model, checkpoint)  # G1
    trainer._load_from_checkpoint(str(checkpoint))
    parameters = {name: param for name, param in model.named_parameters() if param.requires_grad}
    trainer.accelerator.prepare_model(model, evaluation_mode=True)  # its autocast; no DDP, whose reducer would be idle
    if trainer.args.activation_checkpointing:  # as Trainer.train would switch it on
        model.activation_checkpointing_enable(
            activation_checkpointing_kwargs=trainer.args.activation_checkpointing_kwargs or None
        )
    trainer.create_optimizer_and_scheduler(max(trainer.args.max_steps, 1))
    trainer.current_gradient_accumulation_steps = 1  # as Trainer.train would set it
    if (checkpoint / "latest").is_file():
        load_shards(trainer.optimizer, parameters, checkpoint)
    else:
        _load_optimizer(trainer, checkpoint)
    if learning_rate is not None:
        for group in trainer.optimizer.param_groups:
            group["lr"] = learning_rate
    policy = TrainerPolicy(trainer)
    model.train()
    refuse_without_gradients(policy, parameters, trainer.accelerator.device)  # G2 and G3
    optimizer = view_optimizer(replicated(trainer))
    _refuse_other_moments(parameters, optimizer, checkpoint)
    return RestoredTrainer(trainer, checkpoint, steps_taken(checkpoint), parameters, optimizer, policy)


def _refuse_other_analyses(trainer: GRPOTrainer) -> None:
    if trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled:
        raise UserError(
            "a checkpoint is analysed in one process or under DDP: use launch/cpu.yaml, launch/ddp.yaml or no launch "
            "file; checkpoints that DeepSpeed wrote are read there too"
        )
    otherwise = sampling_limit(trainer)
    if otherwise:
        raise UserError(otherwise)
    if trainer.mask_truncated_completions:
        raise UserError("the step is analysed with all its responses: set mask_truncated_completions=false")
    is_own_trainer = isinstance(trainer, DrGRPOTrainer)
    trained_with = trainer.attachment.loss_settings.differs if is_own_trainer else loss_settings(trainer).differs
    if "loss_type" in trained_with and trainer.loss_type in BY_TOKENS_OR_SEQUENCES:
        trained_with -= {"loss_type"}
    if not is_own_trainer and trained_with & NOT_READ:
        neutral = ", ".join(f"{name}={DR_GRPO[name]!r}" for name in sorted(trained_with & NOT_READ))
        raise UserError(
            "the step that this loss makes cannot be analysed: to analyse the one that another would make from there, "
            f"make the trainer with {neutral}"
        )
    if trained_with & NOT_READ or trained_with - loss_settings(trainer).differs:
        neutral = " ".join(f"trainer.{name}={DR_GRPO[name]}" for name in sorted(NOT_READ)).replace("None", "null")
        raise UserError(
            f"a step is analysed with Dr-GRPO's loss, and this one differs in {', '.join(sorted(trained_with))}: give "
            f"{neutral} intervention=null to analyse the step that it would make from there"
        )


def _refuse_damaged(checkpoint: Path) -> None:
    flaw = what_is_wrong_with_weights(checkpoint)
    if flaw:
        raise UserError(f"{checkpoint}: {flaw}")
    if (state_folder(checkpoint) / "optimizer.bin").is_file():
        raise UserError(
            f"{checkpoint} was written under FSDP, whose optimizer is not read here: choose a checkpoint of a run in "
            "one process, or under DDP, ZeRO-1 or ZeRO-2"
        )


def _load_optimizer(trainer: GRPOTrainer, checkpoint: Path) -> None:
    folder = state_folder(checkpoint)
    if not (folder / "optimizer.pt").is_file():
        raise UserError(
            f"{folder} has no optimizer.pt, which the next step needs: choose a checkpoint written with "
            "save_only_model=false"
        )
    try:
        if (folder / "scheduler.pt").is_file():
            trainer._load_optimizer_and_scheduler(str(folder))
        else:  # optimizer.pt holds the learning rate of the next step too
            trainer.optimizer.load_state_dict(_with_empty_groups(trainer.optimizer, folder / "optimizer.pt"))
    except UnpicklingError:
        for name in ("optimizer.pt", "scheduler.pt"):
            load_tensors(folder / name, "meta")  # says which of them holds what
        raise
    except (ValueError, RuntimeError) as error:
        raise UserError(
            f"{checkpoint}/optimizer.pt is not of this model's optimizer ({error}): adapter, trainer.optim and "
            "trainer.weight_decay must be those of the run"
        ) from error


def _with_empty_groups(optimizer: torch.optim.Optimizer, file: Path) -> dict[str, Any]:
    """Return a saved state with as many parameter groups as this optimizer, whose additional groups are empty."""
    saved: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=True)
    groups = optimizer.state_dict()["param_groups"][len(saved["param_groups"]) :]
    empty = [group for group in groups if not group["params"]]
    return {**saved, "param_groups": [*saved["param_groups"], *empty]}


# --- the guards -------------------------------------------------------------------------------------------------------


def refuse_without_gradients(
    policy: TrainerPolicy, parameters: Mapping[str, nn.Parameter], device: torch.device
) -> None:
    """Raise a UserError when the scores give no gradient (G2), or none to some trainable parameter (G3)."""
    try:
        scores = policy.score(_four_tokens(device), torch.tensor([0], device=device))
        gradients = torch.autograd.grad(
            scores.logps.sum() + scores.entropies.sum(), list(parameters.values()), allow_unused=True
        )
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise UserError(
            f"G2: the scores have no gradient ({error}): use non-reentrant checkpointing or none, "
            'trainer.gradient_checkpointing_kwargs={"use_reentrant": false}, and neither torch.no_grad() nor '
            "torch.inference_mode() around this call"
        ) from error
    unreached = [name for name, gradient in zip(parameters, gradients, strict=True) if gradient is None]
    if unreached:
        raise UserError(
            f"G3: {format_sample(unreached)} is trainable and gets no gradient from the scores: freeze what the loss "
            "does not reach"
        )


def _refuse_other_moments(parameters: Mapping[str, nn.Parameter], optimizer: OptimizerView, checkpoint: Path) -> None:
    if optimizer.states is None:
        raise UserError(f"the step after {checkpoint} has no formula: {optimizer.limit}")
    if optimizer.rounded:
        raise UserError(f"{optimizer.rounded}, whose rounding changes the step: analyze with model.dtype=float32")
    for name, state in optimizer.states.items():
        moments = [moment for moment in vars(state).values() if isinstance(moment, Tensor)]
        if state.is_fresh or any(len(moment) != parameters[name].numel() for moment in moments):
            raise UserError(
                f"the optimizer's moments of {name} are missing or have the shape of another parameter: {checkpoint} "
                "orders its parameters differently (set trainer.optim and trainer.weight_decay as in the run)"
            )
    if all(state.lr == 0.0 for state in optimizer.states.values()):
        raise UserError(
            f"the learning rate at {checkpoint} is 0 because its schedule has ended, so the step would be 0: set "
            "learning_rate=1e-6, or choose an earlier checkpoint"
        )


def _four_tokens(device: torch.device) -> Rollout:
    ids = torch.tensor([[0, 1]], device=device)
    mask = torch.ones(1, 2, dtype=torch.long, device=device)
    unknown = torch.full((1,), torch.nan, device=device)
    return Rollout(ids, mask, ids, mask, unknown, None, torch.zeros(1, dtype=torch.long, device=device), None, True)
