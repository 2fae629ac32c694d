"""Refuses what a loop may not do while it is measured, in one line with the fix."""

from __future__ import annotations

import math
import traceback
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import grad_scaler

from rl_training.engine.loop_spec import StepShape
from rl_training.engine.probe import Probe
from rl_training.engine.recorder import StepRecorder
from rl_training.errors import UserError
from rl_training.options import check_num_folds
from rl_training.policy.policy import Policy
from rl_training.policy.rollout import Rollout
from rl_training.policy.rotary import depends_on_longest_row
from rl_training.probes import BUILT_IN

FARTHEST = 0.1  # nats per token: largest mean difference between the loop's log-probabilities and the scorer's
FARTHEST_ENTROPY = 0.2  # of their mean: that of entropies, of which bits are .44 more

SCALED = (
    "a GradScaler scales the loss, and with it the gradients that probes read: train in bf16 or fp32, with "
    "GradScaler(enabled=False) or without one"
)


def refuse_what_cannot_be_measured(probes: Any, model: nn.Module, module: nn.Module, optimizer: Any) -> None:
    """Raise ValueError where there is nothing to measure with or to measure, or a second backward would be corrupted.

    module  the model less DDP
    """
    probes_in(probes)
    refuse_what_is_no_language_model(module)
    refuse_what_is_not_trained(module, optimizer)
    if getattr(model, "static_graph", False):
        raise UserError("a second backward silently corrupts DDP's static_graph: switch it off")
    checkpointing = [getattr(part, "_gradient_checkpointing_func", None) for part in module.modules()]
    if any(getattr(function, "keywords", {}).get("use_reentrant") for function in checkpointing):
        raise UserError(
            "reentrant checkpointing gives a second backward no gradients: enable it with use_reentrant=False"
        )


def probes_in(given: Any) -> tuple[Probe, ...]:
    """Return the probes that were given: several, or one by itself; by name, with default options, or as objects.

    Raises:
        UserError: for what is no probe and names none, and for a number of folds that no step can have.
    """
    probes = (given,) if isinstance(given, Probe | type | str) or not isinstance(given, Iterable) else tuple(given)
    return tuple(map(_probe_in, probes))


def _probe_in(given: Any) -> Probe:
    if isinstance(given, str):
        if given not in BUILT_IN:
            raise UserError(f"{given!r} names no probe: there are {', '.join(BUILT_IN)}")
        return BUILT_IN[given]()
    if not isinstance(given, Probe):
        raise UserError(
            f"{given!r} is no probe: give the name of one, such as 'simple', or an object of rl_training.Probe, such "
            "as SimpleEntropyProbe()"
        )
    check_num_folds(given.name, given.num_folds)
    return given


def refuse_what_is_no_language_model(module: nn.Module) -> None:
    """Raise ValueError where there are no logits to score with: for a module around a language model and a critic."""
    if _is_language_model(module):
        return
    inside = [name for name, part in module.named_modules() if name and _is_language_model(part)]
    hint = f"model.{inside[0]} is one, so give that" if inside else "give the one whose logits the loss is made of"
    raise UserError(f"{type(module).__name__} is no causal language model of Hugging Face's: {hint}")


def _is_language_model(module: Any) -> bool:
    base = module.get_base_model() if hasattr(module, "get_base_model") else module
    can_score = hasattr(base, "config") and hasattr(base, "get_output_embeddings")
    return can_score and (not hasattr(base, "can_generate") or base.can_generate())  # which a body alone cannot


def refuse_impossible_settings(shape: StepShape, temperature: Any, max_grad_norm: Any) -> None:
    """Raise ValueError for a number that no loop can have."""
    for name, value in vars(shape).items():
        if type(value) is not int or value < 1:
            raise UserError(f"measured_loop({name}={value!r}): give a whole number, at least 1")
    if not 0.0 < temperature < math.inf:
        raise UserError(f"measured_loop(temperature={temperature}): give a number above 0")
    if max_grad_norm is not None and not max_grad_norm > 0.0:
        raise UserError(f"measured_loop(max_grad_norm={max_grad_norm}): give a number above 0, or None")


def refuse_what_is_not_trained(module: Any, optimizer: Any) -> None:
    """Raise ValueError for what is no optimizer of torch's kind, and one that trains no parameter of the model."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UserError(f"{type(optimizer).__name__} is no torch.optim.Optimizer: give the one inside it, which steps")
    trained = {parameter for parameter in module.parameters() if parameter.requires_grad}
    if trained.isdisjoint(parameter for group in optimizer.param_groups for parameter in group["params"]):
        raise UserError(
            "the optimizer has no parameter of the model that requires a gradient: make it of model.parameters()"
        )


def refuse_scaled_optimizer(optimizer: Any) -> None:
    """Raise UserError for accelerate's optimizer where it steps with a GradScaler."""
    if getattr(optimizer, "scaler", None) is not None:
        raise UserError(SCALED)


def refuse_grad_scaler() -> None:
    """Raise UserError where a GradScaler steps the optimizer that is about to step.

    It tells the optimizer nothing of itself, and a scaled gradient that is unscaled and clipped is the clipped one of a
    plain loop: nothing but who calls tells them apart.
    """
    for frame, _ in traceback.walk_stack(None):
        if frame.f_code.co_filename == grad_scaler.__file__:
            scaler = frame.f_locals.get("self")
            if isinstance(scaler, grad_scaler.GradScaler) and scaler.is_enabled():
                raise UserError(SCALED)


def refuse_one_more_microbatch(step: StepRecorder, shape: StepShape) -> None:
    """Raise UserError for a microbatch beyond those that a step has."""
    if len(step.rollouts) == shape.microbatches:
        raise UserError(f"this step has more microbatches than measured_loop(microbatches={shape.microbatches})")


def refuse_missing_microbatches(step: StepRecorder, shape: StepShape) -> None:
    """Raise UserError for a step that ends with fewer microbatches than it should have."""
    if len(step.rollouts) != shape.microbatches:
        raise UserError(
            f"{len(step.rollouts)} microbatches given, but measured_loop(microbatches={shape.microbatches})"
        )


def refuse_other_shapes(rollout: Rollout, logps: Tensor, entropies: Tensor | None, size: int) -> None:
    """Raise ValueError for a microbatch of another size, scores of another shape, and logps without graph."""
    if rollout.num_sequences != size:
        raise UserError(
            f"a microbatch has {rollout.num_sequences} sequences, but measured_loop(microbatch_size={size})"
        )
    shape = tuple(rollout.completion_ids.shape)
    for name, values in {"logps": logps, "entropies": entropies}.items():
        if values is not None and values.shape != shape:
            raise UserError(
                f"{name} have shape {tuple(values.shape)}, and completion_ids {shape}: give one value per token"
            )
    if not logps.requires_grad:
        raise UserError("logps have no graph: pass those that the loss is computed from, not detached")


def refuse_other_scores(rollout: Rollout, logps: Tensor, entropies: Tensor | None, policy: Policy) -> None:
    """Raise ValueError where a loop's own scores are not the scorer's: a shift by a token costs nats.

    It says nothing where scores depend on the batch that a row is in: there each measured step says what it comes to.
    """
    if depends_on_longest_row(policy.model):
        return
    mask = rollout.completion_mask.bool()
    exact, noisy = policy.score_rollout(rollout), policy.score_rollout(rollout, as_training=True, dropout=True)

    def mean_distance(first: Tensor, other: Tensor) -> float:
        return float((first.detach() - other)[mask].abs().mean())

    off, noise = mean_distance(logps, exact.logps), mean_distance(noisy.logps, exact.logps)
    if mask.any() and not off <= FARTHEST + 2 * noise:
        raise UserError(
            f"logps are {off:.2g} nats per token off the model's at temperature={policy.scorer.temperature:g}: check "
            "the shift by one token, the temperature and the attention mask"
        )
    if mask.any() and entropies is not None:
        off, noise = mean_distance(entropies, exact.entropies), mean_distance(noisy.entropies, exact.entropies)
        level = float(exact.entropies[mask].mean())
        if not off <= FARTHEST_ENTROPY * level + 2 * noise:
            raise UserError(
                f"entropies are {off:.2g} off the model's, whose mean is {level:.2g} nats per token: give those of all "
                "of the vocabulary, in nats, at the same temperature, or leave them out"
            )


def refuse_missing_backward(step: StepRecorder) -> None:
    """Raise ValueError where the latest microbatch had no backward: gradients are told apart by when they arrive."""
    if step.loss_weights and "logps" not in step.loss_weights[-1]:
        raise UserError(
            f"the backward of microbatch {len(step.loss_weights)} did not reach its logps: compute the loss from the "
            "same tensor that you pass, and call backward before the next microbatch"
        )
