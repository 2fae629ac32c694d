"""A trainer restored at a checkpoint: weights, optimizer and scheduler as the next step would find them.

transformers' own code loads weights and optimizer, because it knows the order in which an optimizer numbers its
parameters: those with weight decay first, then biases and norms, unlike the model. Everything that can still go wrong
is checked before anything is sampled, in this order, and each failure is a one-line error:

    G1  the trainable parameters match the checkpoint's tensors by name and shape
    G2  scoring four tokens, with the function that the analysis uses, gives a gradient
    G3  the gradient reaches every trainable parameter

Finally, the optimizer must have a state of the right shape for each parameter, and a nonzero learning rate. Without
these checks most mistakes show only after minutes of sampling ("element 0 of tensors does not require grad"), or never.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from rl_training.errors import UserError, is_short_of_memory
from rl_training.hosts.trl.policy import TrainerPolicy
from rl_training.hosts.trl.settings.loss import DR_GRPO, loss_settings
from rl_training.hosts.trl.settings.sampling import sampling_reason
from rl_training.hosts.trl.sharding import shard_of
from rl_training.hosts.trl.trainer import DrGRPOTrainer, GRPOTrainer
from rl_training.hosts.trl.versions import enable_checkpointing
from rl_training.offline.checkpoint_files import format_sample, load_shards, refuse_other_weights
from rl_training.optim.state import OptimizerView, view_optimizer
from rl_training.parallel.ranks import all_ranks
from rl_training.parallel.sharding import Shard
from rl_training.parallel.vectors import Layout, Vector
from rl_training.policy.finite import refuse_diverged
from rl_training.policy.rollout import Rollout
from rl_training.records.checkpoint_flaws import find_weights_flaw
from rl_training.records.checkpoints import steps_taken
from rl_training.records.files.pickles import UnpicklingError, load_tensors
from rl_training.records.folder import OPTIMIZER_FILE, SCHEDULER_FILE, state_folder
from rl_training.step.fold_reduction import FoldReduction
from rl_training.step.passes import Passes

T = TypeVar("T")
# Loss types that, like Dr-GRPO's, are sums over sequences: divided by each sequence's tokens, or by all tokens of U.
BY_TOKENS_OR_SEQUENCES = ("grpo", "dapo")
# Settings of losses that need more than update.py has (scores and advantages): all tokens of U, a reference, a state.
NOT_READ = {"loss_type", "beta", "use_adaptive_entropy"}


@dataclass(frozen=True)
class RestoredTrainer:
    """A trainer restored at a checkpoint. Nothing here changes its parameters, optimizer or random streams.

    Each process keeps its own entries of every vector over the trainable parameters, as in training.
    """

    trainer: GRPOTrainer
    checkpoint: Path
    step: int  # optimizer steps taken at the checkpoint
    optimizer: OptimizerView  # as it is before the next step
    policy: TrainerPolicy
    passes: Passes  # sums the gradients of further passes over all processes

    @classmethod
    def of(cls, trainer: GRPOTrainer, checkpoint: Path, step: int, policy: TrainerPolicy) -> RestoredTrainer:
        """Return a trainer that holds a checkpoint's weights and optimizer as an analysis uses it."""
        shard = shard_of(trainer)
        ranks = all_ranks()
        policy.begin(shard, ranks)
        passes = Passes(policy, ranks, FoldReduction(shard))
        return cls(trainer, checkpoint, step, view_optimizer(shard), policy, passes)

    @property
    def parameters(self) -> Mapping[str, nn.Parameter]:
        """The trainable parameters by name."""
        return self.shard.trained

    @property
    def shard(self) -> Shard:
        return self.passes.reduction.shard

    @property
    def layout(self) -> Layout:
        """The arrangement of this process's entries in vectors."""
        return self.passes.layout

    @property
    def rank(self) -> int:
        return self.passes.ranks.number

    @property
    def num_ranks(self) -> int:
        return self.passes.ranks.count

    @property
    def device(self) -> torch.device:
        return self.trainer.accelerator.device

    @property
    def learning_rate(self) -> float:
        """The learning rate of the next step; nan if parameter groups have different ones."""
        rates = {state.lr for state in (self.optimizer.states or {}).values()}
        return rates.pop() if len(rates) == 1 else float("nan")

    def reduce(self, tensor: Tensor) -> Tensor:
        """Sum a tensor over the ranks. Collective."""
        return self.passes.ranks.reduce(tensor)

    def gather(self, values: Sequence[T]) -> list[T]:
        """Concatenate the ranks' values, and return them on every rank. Collective."""
        parts = [values] * self.num_ranks
        if self.num_ranks > 1:
            torch.distributed.all_gather_object(parts, values)
        return [value for part in parts for value in part]

    def whole(self, vector: Vector) -> Tensor:
        """Return a vector's entries of all processes, parameter after parameter, (P,). Collective."""
        shard = self.shard
        parts = []
        for name, entries in self.layout.by_name(vector).items():
            start, stop = shard.entry_ranges[name][shard.rank]
            parts.append(entries.new_zeros(shard.numel(name)))
            parts[-1][start:stop] = entries
        return self.reduce(torch.cat(parts))

    @contextmanager
    def stepped(self, delta: Vector, eta: float = 1.0) -> Iterator[None]:
        """Add η δθ to the parameters inside the context, then restore them bitwise. Collective."""
        weights = self.shard.copy_local_weights()
        for name, entries in self.layout.by_name(delta).items():
            weights[name] += (eta * entries).to(weights[name].dtype)
        with self.policy.with_weights(weights):
            yield


def restore(trainer: GRPOTrainer, checkpoint: Path, learning_rate: float | None = None) -> RestoredTrainer:
    """Restore a trainer at a checkpoint.

    Args:
        trainer: A trainer with the checkpoint's model, adapter and optimizer. It must not have trained.
        learning_rate: Learning rate of the step to analyze. None takes it from the checkpoint's schedule.

    Raises:
        UserError: Checkpoint and trainer do not fit: see the module docstring. The message says how to fix it.
    """
    _refuse_unsupported_trainer(trainer)
    _refuse_damaged(checkpoint)
    model = trainer.model
    refuse_other_weights(model, checkpoint)  # G1
    trainer._load_from_checkpoint(str(checkpoint))
    parameters = {name: param for name, param in model.named_parameters() if param.requires_grad}
    refuse_diverged(parameters.items(), f"{checkpoint}: ")
    trainer.accelerator.prepare_model(model, evaluation_mode=True)  # adds autocast; DDP would have nothing to reduce
    if trainer.args.gradient_checkpointing:  # as Trainer.train switches it on
        enable_checkpointing(model, trainer.args.gradient_checkpointing_kwargs or None)
    trainer.create_optimizer_and_scheduler(max(trainer.args.max_steps, 1))
    trainer.current_gradient_accumulation_steps = 1  # an attribute that Trainer.train sets
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
    restored = RestoredTrainer.of(trainer, checkpoint, steps_taken(checkpoint), policy)
    _refuse_unusable_optimizer(restored.shard, restored.optimizer, checkpoint)
    return restored


def _refuse_unsupported_trainer(trainer: GRPOTrainer) -> None:
    if trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled:
        raise UserError(
            "a checkpoint is analyzed in one process or under DDP: use launch/cpu.yaml, launch/ddp.yaml or no launch "
            "file, also for checkpoints that DeepSpeed wrote"
        )
    otherwise = sampling_reason(trainer, trainer.temperature)
    if otherwise:
        raise UserError(otherwise)
    if trainer.mask_truncated_completions:
        raise UserError("an analysis uses all responses of the step: set mask_truncated_completions=false")
    is_own_trainer = isinstance(trainer, DrGRPOTrainer)
    trained_with = trainer.attachment.loss_settings.differs if is_own_trainer else loss_settings(trainer).differs
    if "loss_type" in trained_with and trainer.loss_type in BY_TOKENS_OR_SEQUENCES:
        trained_with -= {"loss_type"}
    if not is_own_trainer and trained_with & NOT_READ:
        neutral = ", ".join(f"{name}={DR_GRPO[name]!r}" for name in sorted(trained_with & NOT_READ))
        raise UserError(
            "a step with this loss cannot be analyzed: to analyze the step of a supported loss from this checkpoint, "
            f"make the trainer with {neutral}"
        )
    if trained_with & NOT_READ or trained_with - loss_settings(trainer).differs:
        neutral = " ".join(f"trainer.{name}={DR_GRPO[name]}" for name in sorted(NOT_READ)).replace("None", "null")
        raise UserError(
            f"a step is analyzed with Dr-GRPO's loss, and this one differs in {', '.join(sorted(trained_with))}: give "
            f"{neutral} intervention=null to analyze the step that Dr-GRPO's loss would make from this checkpoint"
        )


def _refuse_damaged(checkpoint: Path) -> None:
    flaw = find_weights_flaw(checkpoint)
    if flaw:
        raise UserError(f"{checkpoint}: {flaw}")
    if (state_folder(checkpoint) / "optimizer.bin").is_file():
        raise UserError(
            f"{checkpoint} was written under FSDP, whose optimizer is not read here: choose a checkpoint of a run in "
            "one process, or under DDP, ZeRO-1 or ZeRO-2"
        )


def _load_optimizer(trainer: GRPOTrainer, checkpoint: Path) -> None:
    folder = state_folder(checkpoint)
    if not (folder / OPTIMIZER_FILE).is_file():
        raise UserError(
            f"{folder} has no optimizer.pt, which the next step needs: choose a checkpoint written with "
            "save_only_model=false"
        )
    settings = [{*group} for group in trainer.optimizer.param_groups]
    try:
        if (folder / SCHEDULER_FILE).is_file():
            trainer._load_optimizer_and_scheduler(str(folder))
        else:  # optimizer.pt also holds the learning rate of the next step
            trainer.optimizer.load_state_dict(_with_empty_groups(trainer.optimizer, folder / OPTIMIZER_FILE))
    except UserError:
        raise
    except UnpicklingError:
        for name in (OPTIMIZER_FILE, SCHEDULER_FILE):
            load_tensors(folder / name, "meta")  # its error names the file and what it holds
        raise
    except (ValueError, RuntimeError) as error:
        raise _other_optimizer(checkpoint, str(error)) from error
    for before, group in zip(settings, trainer.optimizer.param_groups, strict=True):
        if missing := sorted(before - group.keys()):  # torch takes the settings of another kind of optimizer
            raise _other_optimizer(checkpoint, f"it was written by one without {', '.join(missing)}")


def _other_optimizer(checkpoint: Path, why: str) -> UserError:
    return UserError(
        f"{checkpoint}/optimizer.pt does not fit this model's optimizer ({why}): adapter, trainer.optim and "
        "trainer.weight_decay must be those of the run"
    )


def _with_empty_groups(optimizer: torch.optim.Optimizer, file: Path) -> dict[str, Any]:
    """Return a saved state, adding the empty parameter groups that this optimizer has at its end."""
    saved: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=True)
    groups = optimizer.state_dict()["param_groups"][len(saved["param_groups"]) :]
    empty = [group for group in groups if not group["params"]]
    return {**saved, "param_groups": [*saved["param_groups"], *empty]}


# --- the guards -------------------------------------------------------------------------------------------------------


def refuse_without_gradients(
    policy: TrainerPolicy, parameters: Mapping[str, nn.Parameter], device: torch.device
) -> None:
    """Raise a UserError if the scores have no gradient (G2), or none for some trainable parameter (G3)."""
    try:
        scores = policy.score(_four_token_rollout(device), torch.tensor([0], device=device))
        gradients = torch.autograd.grad(
            scores.logps.sum() + scores.entropies.sum(), list(parameters.values()), allow_unused=True
        )
    except RuntimeError as error:
        if is_short_of_memory(error):
            raise
        raise UserError(
            f"the scores have no gradient ({error}): use non-reentrant checkpointing or none, "
            'trainer.gradient_checkpointing_kwargs={"use_reentrant": false}, and neither torch.no_grad() nor '
            "torch.inference_mode() around this call"
        ) from error
    unreached = [name for name, gradient in zip(parameters, gradients, strict=True) if gradient is None]
    if unreached:
        raise UserError(
            f"{format_sample(unreached)} is trainable and gets no gradient from the scores: freeze what the loss "
            "does not reach"
        )


def _refuse_unusable_optimizer(shard: Shard, optimizer: OptimizerView, checkpoint: Path) -> None:
    if optimizer.states is None:
        raise UserError(f"the step after {checkpoint} has no formula: {optimizer.reason}")
    if optimizer.rounding_reason:
        raise UserError(
            f"{optimizer.rounding_reason}, whose rounding changes the step: analyze with model.dtype=float32"
        )
    for name, state in optimizer.states.items():
        param = shard.optimized[name]
        held = [value for value in shard.optimizer.state[param].values() if isinstance(value, Tensor) and value.dim()]
        if state.is_fresh or any(moment.shape != param.shape for moment in held):
            raise UserError(
                f"the optimizer's moments of {name} are missing or have the shape of another parameter: {checkpoint} "
                "orders its parameters differently (set trainer.optim and trainer.weight_decay as in the run)"
            )
    if all(state.lr == 0.0 for state in optimizer.states.values()):
        raise UserError(
            f"the learning rate at {checkpoint} is 0 because its schedule has ended, so the step would be 0: set "
            "learning_rate=1e-6, or choose an earlier checkpoint"
        )


def _four_token_rollout(device: torch.device) -> Rollout:
    ids = torch.tensor([[0, 1]], device=device)
    mask = torch.ones(1, 2, dtype=torch.long, device=device)
    unknown = torch.full((1,), torch.nan, device=device)
    return Rollout(ids, mask, ids, mask, unknown, None, torch.zeros(1, dtype=torch.long, device=device), None, True)
