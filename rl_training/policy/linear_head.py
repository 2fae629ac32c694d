"""Log-probabilities and exact entropies behind a linear head, with gradients, without ever storing all logits.

    z = c tanh(s (W x + b) / c) / τ           without a softcap: z = s (W x + b) / τ
    log p(t) = z_t − m − log S,     S = Σ_v e^(z_v − m),     m = max_v z_v
    h = −Σ_v p_v log p_v = log S + Σ_v p_v (m − z_v)           two terms ≥ 0: nothing cancels if h is small
    Σ_v p_v (log p_v + h)² = Σ_v p_v z_v (z_v − Σ_u p_u z_u)   the varentropy, without gradient
    ∂(w log p(t) + u h) / ∂z = w (onehot_t − p) − u p ⊙ (log p + h)

The forward saves two numbers per position, and the backward recomputes each chunk's logits. Products of half-precision
factors are summed in fp32, and everything after them is computed in fp32. N positions, V tokens, H features.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

CHUNK_LOGITS = 2**25  # 128 MB in fp32


@dataclass(frozen=True)
class LogitMap:
    """The map from the head's output y to the logits of the softmax, z = c tanh(s y / c) / τ, and how y is calculated.

    y = W x + b, with hidden states x.
    """

    scale: float = 1.0  # s
    softcap: float | None = None  # c; None: z = s y / τ
    temperature: float = 1.0  # τ
    dtype: torch.dtype = torch.float32  # to which x, W and b are rounded before the product
    chunk: int = CHUNK_LOGITS  # the number of logits to hold at once; at least one position's

    @classmethod
    def from_config(cls, config: Any, temperature: float, chunk: int) -> LogitMap:
        """Read the map from a model's config. The scale's name depends on the model."""
        text = config.get_text_config()
        factors = [getattr(text, name, None) for name in ("logit_scale", "output_multiplier", "lm_head_multiplier")]
        scaling = getattr(text, "logits_scaling", None)
        if scaling is not None:  # most models divide by it, hyperclovax multiplies
            factors.append(scaling if text.model_type == "hyperclovax" else 1 / scaling)
        scale = next((factor for factor in factors if factor is not None), 1.0)
        return cls(scale, getattr(text, "final_logit_softcapping", None), temperature, chunk=chunk)

    def __call__(self, product: Tensor) -> Tensor:
        if self.softcap is None:
            return product if self.scale == self.temperature else product * (self.scale / self.temperature)
        return (product * (self.scale / self.softcap)).tanh() * (self.softcap / self.temperature)

    def slope(self, z: Tensor) -> Tensor | float:
        """Return ∂z/∂y at the y that maps to z."""
        slope = self.scale / self.temperature
        return slope if self.softcap is None else slope * (1 - (z * (self.temperature / self.softcap)).square())


def scores_of_logits(z: Tensor, targets: Tensor, varentropy: bool = False) -> tuple[Tensor, ...]:
    """Return the targets' log-probabilities and the entropies, (...) each, from (..., V) logits, by autograd.

    With `varentropy` also the varentropies, without graph.
    """
    logps = z.log_softmax(dim=-1)
    p = logps.exp()
    # A token of probability 0 contributes 0, not 0 · −inf.
    entropies = -(p * logps.masked_fill(p == 0, 0.0)).sum(dim=-1)
    values = logps.gather(-1, targets.unsqueeze(-1)).squeeze(-1), entropies
    if not varentropy:
        return values
    with torch.no_grad():
        centred = logps.masked_fill(p == 0, 0.0) + entropies.unsqueeze(-1)
        return *values, centred.square_().mul_(p).sum(dim=-1)


def scores_of_hidden(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    logit_map: LogitMap,
    varentropy: bool = False,
) -> tuple[Tensor, ...]:
    """Return the targets' log-probabilities and the entropies, (N,) each, in fp32; in fp64 if the product is.

    Args:
        hidden: The head's input, (N, H).
        weight: The head's weight, (V, H).
        bias: The head's bias, (V,).
        targets: The tokens whose log-probabilities are returned, (N,).
        logit_map: Makes logits of it.
        varentropy: Return the varentropies too, (N,), without graph.
    """
    values: tuple[Tensor, ...] = _LinearHead.apply(  # type: ignore[no-untyped-call]
        hidden, weight, bias, targets, logit_map, varentropy
    )
    return values


class _LinearHead(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        logit_map: LogitMap,
        varentropy: bool,
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.logit_map = logit_map
        exact = torch.promote_types(logit_map.dtype, torch.float32)
        logps, entropies, log_sums, varentropies = (hidden.new_empty(len(hidden), dtype=exact) for _ in range(4))
        with torch.autocast(hidden.device.type, enabled=False):
            for part, z, _, _ in logit_chunks(hidden, weight, bias, logit_map):
                top = z.amax(dim=-1, keepdim=True)
                z -= top
                at_target = z.gather(-1, targets[part].unsqueeze(-1)).squeeze(-1)
                p = z.exp()
                total = p.sum(dim=-1)
                log_total = total.log()
                logps[part] = at_target - log_total
                mean = p.mul_(z).sum(dim=-1) / total
                entropies[part] = log_total - mean
                log_sums[part] = log_total + top.squeeze(-1)
                if varentropy:
                    varentropies[part] = p.mul_(z.sub_(mean.unsqueeze(-1))).sum(dim=-1) / total
        ctx.save_for_backward(hidden, weight, bias, targets, log_sums, entropies)
        if not varentropy:
            return logps, entropies
        ctx.mark_non_differentiable(varentropies)
        return logps, entropies, varentropies

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, w: Tensor | None, u: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, log_sums, entropies = ctx.saved_tensors
        gradients = [
            torch.zeros_like(x, dtype=log_sums.dtype) if needed else None
            for x, needed in zip((hidden, weight, bias), ctx.needs_input_grad[:3], strict=True)
        ]
        d_hidden, d_weight, d_bias = gradients
        with torch.autocast(hidden.device.type, enabled=False):
            for part, z, x, matrix in logit_chunks(hidden, weight, bias, ctx.logit_map):
                slope = ctx.logit_map.slope(z)
                dz = _by_logits(z, targets[part], log_sums[part], entropies[part], *(
                    None if g is None else g[part] for g in (w, u)
                )).mul_(slope)  # fmt: skip
                if d_bias is not None:
                    d_bias += dz.sum(dim=0)
                dz = dz.to(matrix.dtype)
                if d_hidden is not None:
                    _add_product(d_hidden[part], dz, matrix)
                if d_weight is not None:
                    _add_product(d_weight, dz.t(), x)
        hidden_weight_bias = zip(gradients, (hidden, weight, bias), strict=True)
        return *(None if g is None else g.to(x.dtype) for g, x in hidden_weight_bias), *[None] * 3


def _by_logits(
    z: Tensor, targets: Tensor, log_sums: Tensor, entropies: Tensor, w: Tensor | None, u: Tensor | None
) -> Tensor:
    """Return ∂(w log p(t) + u h)/∂z, (n, V). Overwrites z."""
    logp = z.sub_(log_sums.unsqueeze(-1))
    p = logp.exp()
    if u is None:
        dz = p.mul_(torch.zeros_like(log_sums).unsqueeze(-1) if w is None else -w.unsqueeze(-1))
    else:
        dz = logp.add_(entropies.unsqueeze(-1)).mul_(-u.unsqueeze(-1))
        dz = (dz if w is None else dz.sub_(w.unsqueeze(-1))).mul_(p)
    return dz if w is None else dz.scatter_add_(-1, targets.unsqueeze(-1), w.unsqueeze(-1))


def logit_chunks(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, logit_map: LogitMap
) -> Iterator[tuple[slice, Tensor, Tensor, Tensor]]:
    """Yield each chunk's positions, their logits, and the factors x and W in the dtype of the product."""
    dtype = logit_map.dtype
    rows = max(1, logit_map.chunk // len(weight))
    exact = torch.promote_types(dtype, torch.float32)
    # A GPU multiplies half-precision factors and sums in fp32. Elsewhere, the rounded factors are converted to fp32.
    factor = dtype if _mm_allows(exact, dtype, hidden.device) else exact
    matrix = weight.to(dtype).to(factor)
    for start in range(0, max(1, len(hidden)), rows):  # one empty chunk if there are no positions
        part = slice(start, start + rows)
        x = hidden[part].to(dtype).to(factor)
        y = torch.mm(x, matrix.t()) if factor == exact else torch.mm(x, matrix.t(), out_dtype=exact)
        yield part, logit_map(y if bias is None else y.add_(bias.to(dtype))), x, matrix


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Add a @ b to `total` in place, summed in the precision of `total`."""
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    elif _addmm_allows(total.dtype, a.dtype, a.device):
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total += torch.mm(a, b, out_dtype=total.dtype)


@functools.cache
def _mm_allows(exact: torch.dtype, dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether torch.mm multiplies factors of a dtype and sums in another on this device. A small one decides.

    Versions of torch and devices differ in which products they allow.
    """
    a = torch.ones(16, 16, dtype=dtype, device=device)
    try:
        torch.mm(a, a, out_dtype=exact)
    except (RuntimeError, TypeError):
        return False
    return exact != dtype


@functools.cache
def _addmm_allows(exact: torch.dtype, dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether torch.addmm does so too: newer versions of torch only."""
    a = torch.ones(16, 16, dtype=dtype, device=device)
    total = torch.zeros(16, 16, dtype=exact, device=device)
    try:
        torch.addmm(total, a, a, out_dtype=exact, out=total)
    except (RuntimeError, TypeError):
        return False
    return True
