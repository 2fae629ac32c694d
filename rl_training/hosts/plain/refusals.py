"""Errors for what a plain loop must not do: each is one line that includes the fix."""

from __future__ import annotations

import itertools
import math
import traceback
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import grad_scaler

from rl_training.engine.driver import StepDriver
from rl_training.errors import UserError
from rl_training.hosts.devices import refuse_devices_without_float64
from rl_training.parallel.sharding import dtype_name
from rl_training.policy.policy import Policy
from rl_training.policy.precision import half_dtypes
from rl_training.policy.rollout import Rollout
from rl_training.policy.rotary import depends_on_longest_row

# Largest mean difference between the loop's log-probabilities and the scorer's, in nats per token.
MAX_LOGP_DIFFERENCE = 0.1
# The same for entropies, as a share of their mean. Bits instead of nats are off by 0.44.
MAX_ENTROPY_DIFFERENCE = 0.2

SCALED = (
    "a GradScaler scales the loss, and with it the gradients that probes read: train in bf16 or fp32, with "
    "GradScaler(enabled=False) or without one"
)


# --- the loop, before it begins ---------------------------------------------------------------------------------------


def refuse_what_cannot_be_measured(model: nn.Module, module: nn.Module, optimizer: Any) -> None:
    """Raise UserError if the device is unfit, nothing is trained, or a second backward would be corrupted.

    Args:
        model: The model, possibly inside DDP.
        module: The same model without DDP.
        optimizer: As the loop steps it.
    """
    refuse_what_is_no_language_model(module)
    for parameter in itertools.islice(module.parameters(), 1):
        refuse_devices_without_float64(parameter.device)
    refuse_what_is_not_trained(module, optimizer)
    if getattr(model, "static_graph", False):
        raise UserError("a second backward silently corrupts DDP's static_graph: switch it off")
    checkpointing = [getattr(part, "_gradient_checkpointing_func", None) for part in module.modules()]
    if any(getattr(function, "keywords", {}).get("use_reentrant") for function in checkpointing):
        raise UserError(
            "reentrant checkpointing gives a second backward no gradients: enable it with use_reentrant=False"
        )


def refuse_what_is_no_language_model(module: nn.Module) -> None:
    """Raise UserError if the module has no logits to score with, such as a wrapper of a language model and a critic."""
    if _is_language_model(module):
        return
    inside = [name for name, part in module.named_modules() if name and _is_language_model(part)]
    hint = f"pass model.{inside[0]}, which is one" if inside else "pass the one whose logits the loss is computed from"
    raise UserError(f"{type(module).__name__} is not a Hugging Face causal language model: {hint}")


def _is_language_model(module: Any) -> bool:
    base = module.get_base_model() if hasattr(module, "get_base_model") else module
    can_score = hasattr(base, "config") and hasattr(base, "get_output_embeddings")
    return can_score and (not hasattr(base, "can_generate") or base.can_generate())  # False for a model without a head


def refuse_impossible_settings(counts: dict[str, int], temperature: Any, max_grad_norm: Any) -> None:
    """Raise UserError for a number that no loop can have. `counts` are whole numbers by argument."""
    for name, value in counts.items():
        if type(value) is not int or value < 1:
            raise UserError(f"measured_loop({name}={value!r}): give a whole number, at least 1")
    if not (_is_positive(temperature) and temperature < math.inf):
        raise UserError(f"measured_loop(temperature={temperature!r}): give a number above 0")
    if not (max_grad_norm is None or _is_positive(max_grad_norm)):
        raise UserError(f"measured_loop(max_grad_norm={max_grad_norm!r}): give a number above 0, or None")


def _is_positive(value: Any) -> bool:
    return isinstance(value, Real) and float(value) > 0.0


def refuse_what_is_not_trained(module: Any, optimizer: Any) -> None:
    """Raise UserError if the optimizer is no torch optimizer, or trains no parameter of the model."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UserError(f"{type(optimizer).__name__} is not a torch.optim.Optimizer: pass the one inside it")
    trained = {parameter for parameter in module.parameters() if parameter.requires_grad}
    if trained.isdisjoint(parameter for group in optimizer.param_groups for parameter in group["params"]):
        raise UserError(
            "the optimizer has no parameter of the model that requires a gradient: build it from model.parameters()"
        )


def refuse_scaled_optimizer(optimizer: Any) -> None:
    """Raise UserError if accelerate's optimizer steps with a GradScaler."""
    if getattr(optimizer, "scaler", None) is not None:
        raise UserError(SCALED)


# --- a call within a step ---------------------------------------------------------------------------------------------


def refuse_grad_scaler() -> None:
    """Raise UserError if a GradScaler called the optimizer step that is about to run.

    The optimizer does not know its caller, and a gradient that was scaled, unscaled and clipped looks like a clipped
    one. So only the call stack shows the GradScaler.
    """
    for frame, _ in traceback.walk_stack(None):
        if frame.f_code.co_filename == grad_scaler.__file__:
            scaler = frame.f_locals.get("self")
            if isinstance(scaler, grad_scaler.GradScaler) and scaler.is_enabled():
                raise UserError(SCALED)


def refuse_one_more_microbatch(driver: StepDriver, microbatches: int) -> None:
    """Raise UserError if the step already has all its microbatches."""
    if driver.num_microbatches == microbatches:
        raise UserError(f"this step has more microbatches than measured_loop(microbatches={microbatches})")


def refuse_missing_microbatches(driver: StepDriver, microbatches: int) -> None:
    """Raise UserError if a step ends with too few microbatches."""
    if driver.num_microbatches != microbatches:
        raise UserError(f"{driver.num_microbatches} microbatches given, but measured_loop(microbatches={microbatches})")


def refuse_other_shapes(rollout: Rollout, logps: Tensor, entropies: Tensor | None, size: int) -> None:
    """Raise UserError for a microbatch of the wrong size, scores of the wrong shape, or logps without graph."""
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
    """Raise UserError if the loop's scores are not the scorer's: a shift by one token makes them differ by nats.

    Skipped for models whose scores depend on the other rows of a batch: there every measured step reports the
    difference.
    """
    if policy.lockstep_ranks is None:  # a pass with a graph and no backward would leave sharded weights gathered
        _refuse_undeclared_autocast(rollout, logps, policy)
    if depends_on_longest_row(policy.model):
        return
    mask = rollout.completion_mask.bool()
    exact, noisy = policy.score_rollout(rollout), policy.score_rollout(rollout, as_training=True, dropout=True)

    def mean_difference(first: Tensor, other: Tensor) -> float:
        return float((first.detach() - other)[mask].abs().mean())

    difference, noise = mean_difference(logps, exact.logps), mean_difference(noisy.logps, exact.logps)
    if mask.any() and not difference <= MAX_LOGP_DIFFERENCE + 2 * noise:
        raise UserError(
            f"logps are {difference:.2g} nats per token off the model's at temperature={policy.scorer.temperature:g}: "
            "check the shift by one token, the temperature and the attention mask"
        )
    if mask.any() and entropies is not None:
        difference = mean_difference(entropies, exact.entropies)
        noise = mean_difference(noisy.entropies, exact.entropies)
        mean = float(exact.entropies[mask].mean())
        if not difference <= MAX_ENTROPY_DIFFERENCE * mean + 2 * noise:
            raise UserError(
                f"entropies are {difference:.2g} off the model's, whose mean is {mean:.2g} nats per token: pass those "
                "over the whole vocabulary, in nats, at the same temperature, or none"
            )


def _refuse_undeclared_autocast(rollout: Rollout, logps: Tensor, policy: Policy) -> None:
    """Raise UserError if the loop's forward pass computes in half precision and the scorer's does not.

    The graphs show it: under autocast, some of their nodes are in a dtype that the weights do not have.
    """
    scored = policy.score(rollout, torch.arange(1, device=logps.device)).logps
    undeclared = half_dtypes(logps) - half_dtypes(scored)
    if undeclared:
        dtype, device = min(map(dtype_name, undeclared)), logps.device.type
        raise UserError(
            f"the loop's forward pass computes in {dtype}, and measured_loop was not told so: "
            f'give autocast=lambda: torch.autocast("{device}", torch.{dtype}), or run the forward pass without autocast'
        )


def refuse_missing_backward(driver: StepDriver) -> None:
    """Raise UserError if the latest microbatch had no backward: the order of backwards assigns gradients to them."""
    if driver.lacks_backward:
        raise UserError(
            f"the backward of microbatch {driver.num_microbatches} did not reach its logps: compute the loss from the "
            "same tensor that you pass, and call backward before the next microbatch"
        )
