"""The gradient of every single sequence of a batch, from one forward and one backward with hooks on modules.

If a module's output y is linear in its parameters, each sequence's gradient is a product of two tensors that autograd
already has: the module's input x and the derivative dy with respect to its output, both (B, T, features):

    Linear      y = W x + b      ∂W_i = Σ_t dy_it ⊗ x_it,   ∂b_i = Σ_t dy_it
    Embedding   y = W[id]        ∂W_i = Σ_t onehot(id_it) ⊗ dy_it
    all others  by the module's own vector-Jacobian product, sequence by sequence: norms, convolutions

A LoRA adapter is two Linears. A parameter used in several places (a head tied to the embedding) gets the sum over its
uses. `.grad` is not touched and no parameter hook fires, so DDP's reducer and ZeRO are not involved: score the
unwrapped model.

Cases that would otherwise fail silently are errors that name the module: a parameter used without calling its module
(a fused head), a module that sees tokens without their sequences (experts in one tensor) or has further inputs (DoRA's
magnitude), an output that gets no gradient. Hooks exist only during the forward, so modules that non-reentrant
checkpointing calls again in the backward are not counted twice. Checkpointing saves no memory: the inputs are kept.

Source: Goodfellow 2015, "Efficient per-example gradient computations"; Yousefpour et al. 2021, "Opacus", section 3.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from rl_training.errors import UserError, is_short_of_memory
from rl_training.parallel.vectors import Layout

Scored = TypeVar("Scored")
ADVICE = "freeze it (requires_grad_(False)), or train a LoRA adapter on linear layers"


@dataclass(frozen=True)
class _Owner:
    """A module that directly owns trainable parameters."""

    path: str
    module: nn.Module
    names: Mapping[str, str]  # a parameter's name in the module → its name in the trainer


@dataclass(frozen=True)
class _Use:
    """One call of a module during the forward, with its input and output."""

    owner: _Owner
    x: Tensor
    y: Tensor


class SequenceGradients:
    """Records forwards of a causal language model, from which the gradient of each single sequence can be computed.

    Args:
        model: A transformers model, plain or with a PEFT adapter, not wrapped by DDP. Its weights are not changed.
        parameters: The trainable parameters by name.

    Raises:
        UserError: A parameter is not one of the model's.
    """

    def __init__(self, model: nn.Module, parameters: Mapping[str, nn.Parameter]) -> None:
        self._embedding: nn.Module = model.get_input_embeddings()  # type: ignore[operator]
        self.layout = Layout.of(parameters)
        name_of = {param: name for name, param in parameters.items()}
        self._owners = []
        for path, module in model.named_modules():
            local_name = {
                local_name: name_of[p] for local_name, p in module.named_parameters(recurse=False) if p in name_of
            }
            if local_name:
                self._owners.append(_Owner(path, module, local_name))
        missing = set(parameters) - {name for owner in self._owners for name in owner.names.values()}
        if missing:
            raise UserError(f"{min(missing)!r} is not a parameter of this model: give the model that is trained")

    def record(self, forward: Callable[[], Scored]) -> tuple[Scored, Recording]:
        """Run `forward`, and return its result and the recording that gradients can be computed from.

        Args:
            forward: Runs the model once on a batch of sequences, and keeps the graph.

        Raises:
            UserError: The gradient of some parameter cannot be split by sequence. Names the module.
        """
        uses: list[_Use] = []
        embedding_outputs: list[Tensor] = []
        owner_of = {owner.module: owner for owner in self._owners}

        def on_forward(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], y: Tensor) -> None:
            if module is self._embedding:
                if not y.requires_grad:  # frozen under an adapter; the backward must get here
                    y.requires_grad_()
                embedding_outputs.append(y)
            if module in owner_of:
                x = args[0] if args else next(iter(kwargs.values()))
                uses.append(_Use(owner_of[module], x.detach(), y))

        with contextlib.ExitStack() as hooks, torch.enable_grad():
            for module in {*owner_of, self._embedding}:
                hooks.enter_context(module.register_forward_hook(on_forward, with_kwargs=True))
            scored = forward()
        self._require_all_seen(uses, embedding_outputs)
        return scored, Recording(self.layout, uses, embedding_outputs)

    def _require_all_seen(self, uses: Sequence[_Use], embedding_outputs: Sequence[Tensor]) -> None:
        if not embedding_outputs:
            raise UserError("the forward did not call the model's input embedding: score token ids with this model")
        batch = len(embedding_outputs[0])
        called = {use.owner.path for use in uses}
        for owner in self._owners:
            if owner.path not in called:
                raise UserError(
                    f"{owner.path} was not called in the forward, though {min(owner.names.values())} is trained: "
                    f"a fused head or kernel uses the weight directly. Score with the model's own logits, or {ADVICE}"
                )
        for use in uses:
            tokens = 2 if isinstance(use.owner.module, nn.Embedding) else 3
            if use.x.dim() < tokens or len(use.x) != batch:
                raise UserError(
                    f"{use.owner.path} was given {tuple(use.x.shape)} where a batch of {batch} sequences was expected: "
                    f"its tokens cannot be assigned to sequences (experts? positions?). {ADVICE.capitalize()}"
                )
            if not use.y.requires_grad:
                raise UserError(
                    f"the output of {use.owner.path} has no gradient (no_grad, or reentrant checkpointing): "
                    'score with gradients enabled, and with gradient_checkpointing_kwargs={"use_reentrant": False}'
                )


class Recording:
    """One recorded forward, from which gradients can be computed repeatedly."""

    def __init__(self, layout: Layout, uses: Sequence[_Use], embedding_outputs: Sequence[Tensor]) -> None:
        self._layout = layout
        self._uses = uses
        self._embedding_outputs = embedding_outputs

    def fill(
        self, rows: Tensor, outputs: Sequence[Tensor], weights: Sequence[Tensor], keep_graph: bool = False
    ) -> None:
        """Write the gradient of Σ weights[i]·outputs[i], summed over all outputs, into row i of `rows`, (B, P).

        Args:
            outputs: Results of the forward, (B, ·) each.
            weights: Their weights, (B, ·) each. Log-probabilities with weights 1 give W_i = ∂S_i.
            keep_graph: Whether to keep the graph for another call.

        Raises:
            UserError: No gradient reached some module.
        """
        entries = self._layout.by_name(self._layout.split(rows.zero_()))
        missing = dict(enumerate(self._uses))

        def on_backward(number: int, dy: Tensor) -> None:
            _add(entries, self._uses[number], dy.detach())
            missing.pop(number, None)

        with contextlib.ExitStack() as hooks:
            for number, use in enumerate(self._uses):
                hooks.enter_context(use.y.register_hook(functools.partial(on_backward, number)))
            # Autograd only goes from `outputs` back to the embedding: no gradient of parameters, and no `.grad`.
            torch.autograd.grad(outputs, self._embedding_outputs, weights, retain_graph=keep_graph)
        if missing:
            path = next(iter(missing.values())).owner.path
            raise UserError(f"no gradient came back to {path}: its share of the gradients is missing")


def _add(entries: Mapping[str, Tensor], use: _Use, dy: Tensor) -> None:
    """Add one use of a module to the gradients of its parameters: `entries`, (B, entries) each, by name."""
    module = use.owner.module
    kind = type(use.owner.module).forward
    x = use.x
    rows = {
        local_name: entries[name].view(len(x), *getattr(module, local_name).shape)
        for local_name, name in use.owner.names.items()
    }
    dtype = next(iter(rows.values())).dtype
    if kind is nn.Linear.forward:
        dy = dy.flatten(1, -2).to(dtype)
        if "weight" in rows:
            rows["weight"].baddbmm_(dy.transpose(1, 2), x.flatten(1, -2).to(dtype))
        if "bias" in rows:
            rows["bias"].add_(dy.sum(dim=1))
    elif isinstance(module, nn.Embedding) and kind is nn.Embedding.forward:
        if module.padding_idx is not None:  # like autograd, which gives padding no gradient
            dy = dy.masked_fill((x == module.padding_idx).unsqueeze(-1), 0.0)
        number = torch.arange(len(x), device=x.device).view(-1, *(1 for _ in x.shape[1:])).expand_as(x)
        rows["weight"].index_put_((number, x), dy.to(dtype), accumulate=True)
    else:
        for local_name, gradient in _by_vector_jacobian_product(use, dy).items():
            rows[local_name].add_(gradient)


def _by_vector_jacobian_product(use: _Use, dy: Tensor) -> dict[str, Tensor]:
    """Return the gradients of a module's own parameters, (B, *shape) each, by running its forward once more."""
    module = use.owner.module
    tensors = {name: getattr(module, name).detach() for name in use.owner.names}

    def of_one(x: Tensor, dy: Tensor) -> dict[str, Tensor]:
        def forward(parameters: dict[str, Tensor]) -> Tensor:
            return torch.func.functional_call(module, parameters, (x.unsqueeze(0),)).squeeze(0)

        return torch.func.vjp(forward, tensors)[1](dy)[0]

    try:
        return torch.func.vmap(of_one)(use.x, dy)
    except Exception as error:  # the module has further inputs, or branches on values
        if is_short_of_memory(error):
            raise
        raise UserError(
            f"{next(iter(use.owner.names.values()))} belongs to a {type(module).__name__} ({use.owner.path}), whose "
            f"gradient is not known sequence by sequence: {ADVICE}"
        ) from error
