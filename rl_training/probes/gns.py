"""The gradient noise scale, in the loop: how large a batch still pays, from square norms that stream by.

With G the true mean gradient and Σ the covariance of one independent unit's gradient, B_simple = tr Σ / |G|² is the
batch size at which noise and signal are equal: much smaller batches waste no data, much larger ones waste compute.
The unit is the PROMPT with its responses, whose advantages sum to zero and are not independent. From the mean gradients
g_b of M blocks (microbatches, over all ranks) of b prompts each, and g_B of the whole batch, B = M b,

    |G|²^ = (B |g_B|² − b mean|g_b|²) / (B − b)         tr Σ^ = (mean|g_b|² − |g_B|²) / (1/b − 1/B).

Both are unbiased, and either may come out negative. One step says little, so they are averaged over steps with weights
decay^age, numerator and denominator apart, and divided last; the error is a delete-one-step jackknife of that ratio.
In Adam's metric |x|² is Σ P x² with P of the step before, where v > 0, once v is warm.

No further pass and no parameter-size buffer: only norms are kept. Measured before clipping.

Source: McCandlish et al. 2018, "An empirical model of large-batch training", appendix A.1.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from rl_training.adamw import WARM_STEPS
from rl_training.estimate import MIN_FOLDS_FOR_STDERR, Estimate
from rl_training.folds import jackknife_stderr
from rl_training.gradients import sq_norm_in_metrics
from rl_training.module_kinds import KINDS, module_kind
from rl_training.probes.base import Need, Probe
from rl_training.types import StepContext

SMALLEST_WEIGHT = 1e-4  # a step is forgotten when its weight decay^age is below
CHANNELS = ("all", "adam", *KINDS)
NOT_WARM = f"no step of AdamW with {WARM_STEPS} steps behind it: its preconditioner is no metric before"
RAW = ("gns/trace_step", "gns/grad_sq_norm_step")
AVERAGED = ("gns/trace", "gns/grad_sq_norm")
RATIOS = ("gns/noise_scale_prompts", "gns/noise_scale_sequences", "gns/batch_ratio")
NAMES = (*RAW, *AVERAGED, *RATIOS, "gns/adam_noise_scale_prompts")


def noise_moments(block_sq_norm: Tensor, batch_sq_norm: Tensor, block_size: float, batch_size: float) -> Tensor:
    """Returns the unbiased (tr Σ^, |G|²^), stacked in a new last dimension; either may be negative.

    block_sq_norm  mean of |g_b|² over the blocks        block_size  b, units in a block
    batch_sq_norm  |g_B|²                                batch_size  B > b, units in all of them

    Example, noiseless: |g_b|² = |g_B|² = 4 gives (0, 4).
    """
    trace = (block_sq_norm - batch_sq_norm) / (1.0 / block_size - 1.0 / batch_size)
    grad_sq_norm = (batch_size * batch_sq_norm - block_size * block_sq_norm) / (batch_size - block_size)
    return torch.stack([trace, grad_sq_norm], dim=-1)


def weighted_ratio(history: Tensor, decay: float) -> tuple[Tensor, Tensor, float]:
    """Returns the averaged (tr Σ, |G|²), the jackknife errors of these and of their ratio (3,), the effective steps.

    history  (steps, 2), oldest first; the weight of a step is decay^age. Rows with nan are not counted.
    """
    ages = torch.arange(len(history) - 1, -1, -1, dtype=history.dtype)
    known = ~history.isnan().any(dim=1)
    weights, rows = (decay**ages)[known], history[known]
    terms = torch.cat([weights.unsqueeze(1) * rows, weights.unsqueeze(1)], dim=1)

    def statistic(sums: Tensor) -> Tensor:
        trace, grad_sq_norm, weight = sums.unbind(-1)
        return torch.stack([trace / weight, grad_sq_norm / weight, trace / grad_sq_norm], dim=-1)

    sums = terms.sum(dim=0)
    stderr = jackknife_stderr(statistic, sums, sums - terms, reduce=lambda tensor: tensor)
    effective_steps = float(weights.sum() ** 2 / weights.square().sum()) if len(weights) else 0.0
    return statistic(sums)[:2], stderr, effective_steps


class GradientNoiseScaleProbe(Probe):
    """Measures the gradient noise scale, in prompts and in sequences, from the norms of the microbatch gradients.

    decay  weight of a step relative to the next in the running average; .95 remembers about 40 steps
    every  measure each `every`-th step
    """

    name = "gns"
    needs = Need.MICROBATCH_SQ_NORMS

    def __init__(self, decay: float = 0.95, every: int = 1) -> None:
        super().__init__(every)
        if not 0.0 < decay < 1.0:
            raise ValueError(f"gns: decay={decay} must lie between 0 and 1; .95 remembers about 40 steps")
        self.decay = decay
        self._history = torch.zeros(0, len(CHANNELS), 2, dtype=torch.float64)  # (steps, channels, tr Σ and |G|²)
        self._answers: dict[str, Estimate] = {}

    def on_pre_optimizer_step(self, ctx: StepContext) -> None:
        prompts = len(ctx.rollout.prompt_index.unique())
        blocks, batch_size = ctx.reduce(
            torch.tensor(
                [len(ctx.microbatch_rows), prompts], dtype=torch.float64, device=ctx.rollout.prompt_index.device
            )
        ).tolist()
        reason = _why_not(ctx, blocks)
        if reason:
            self._answers = {name: Estimate.missing(reason) for name in NAMES}
            return
        assert ctx.microbatch_sq_norms is not None
        block = ctx.reduce(ctx.microbatch_sq_norms.double().sum(dim=0)) / blocks
        batch = torch.stack(
            [sq_norm_in_metrics(gradient, _warm_preconditioner(ctx, name)) for name, gradient in ctx.gradients.items()]
        ).double()
        kinds = [module_kind(name) for name in ctx.gradients]
        by_channel = noise_moments(
            _channels(block.cpu(), kinds), _channels(batch.cpu(), kinds), batch_size / blocks, batch_size
        )
        remembered = math.ceil(math.log(SMALLEST_WEIGHT) / math.log(self.decay))
        self._history = torch.cat([self._history, by_channel.unsqueeze(0)])[-remembered:]
        self._answers = self._estimates(ctx, int(blocks), batch_size)

    def measure(self, ctx: StepContext) -> dict[str, Estimate]:
        return self._answers

    def state_dict(self) -> dict[str, Tensor]:
        return {"history": self._history}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        if state:
            self._history = state["history"]

    def _estimates(self, ctx: StepContext, blocks: int, batch_size: float) -> dict[str, Estimate]:
        (trace, grad_sq_norm), stderr, steps = weighted_ratio(self._history[:, 0], self.decay)
        scale = _ratio(trace, grad_sq_norm, stderr[2], steps)
        group = ctx.responses_per_prompt
        raw = self._history[-1, 0].tolist()
        answers = {name: Estimate(value, num_samples=blocks) for name, value in zip(RAW, raw, strict=True)}
        answers["gns/trace"] = Estimate(float(trace), _error(stderr[0], steps), int(steps))
        answers["gns/grad_sq_norm"] = Estimate(float(grad_sq_norm), _error(stderr[1], steps), int(steps))
        answers["gns/noise_scale_prompts"] = scale
        answers["gns/noise_scale_sequences"] = Estimate(
            scale.value * group, scale.stderr * group, scale.num_samples, scale.reason
        )
        ratio = batch_size / scale.value if scale.value else math.nan
        answers["gns/batch_ratio"] = Estimate(ratio, reason=scale.reason or "the noise scale is 0")
        for channel, kind in enumerate(CHANNELS[1:], start=1):
            (trace, grad_sq_norm), stderr, steps = weighted_ratio(self._history[:, channel], self.decay)
            if kind == "adam":
                answers["gns/adam_noise_scale_prompts"] = _ratio(trace, grad_sq_norm, stderr[2], steps, NOT_WARM)
            elif steps > 0:  # a model need not have every kind
                answers[f"gns/kind/{kind}"] = _ratio(trace, grad_sq_norm, stderr[2], steps)
        return answers


def _channels(sq_norms: Tensor, kinds: list[str]) -> Tensor:
    """Returns the square norms by channel, from (parameters, 2): all, all in Adam's metric, and by kind of module."""
    of_kind = [sq_norms[[k == kind for k in kinds], 0] for kind in KINDS]
    none = torch.tensor(torch.nan, dtype=sq_norms.dtype)
    by_kind = [part.sum() if len(part) else none for part in of_kind]
    return torch.stack([*sq_norms.sum(dim=0), *by_kind])


def _warm_preconditioner(ctx: StepContext, name: str) -> Tensor | None:
    state = ctx.optimizer.adamw[name] if ctx.optimizer.adamw is not None else None
    return state.preconditioner() if state is not None and state.is_warm else None


def _ratio(trace: Tensor, grad_sq_norm: Tensor, stderr: Tensor, steps: float, reason: str = "") -> Estimate:
    if steps == 0:
        return Estimate.missing(reason)
    if not grad_sq_norm > 0:
        return Estimate.missing(
            f"the averaged estimate of |G|² is {float(grad_sq_norm):.3g}: the gradient is lost in its noise"
        )
    return Estimate(float(trace / grad_sq_norm), _error(stderr, steps), int(steps))


def _error(stderr: Tensor, steps: float) -> float:
    return float(stderr) if steps >= MIN_FOLDS_FOR_STDERR else math.nan


def _why_not(ctx: StepContext, blocks: float) -> str:
    if not ctx.whole_prompts:
        return (
            "the microbatches mix prompts, and responses of one prompt are no independent units: "
            "use DrGRPOTrainer, or attach(..., whole_prompts=True)"
        )
    if blocks < 2:
        return "one block in all: use smaller microbatches, or more processes, so that a step has at least two"
    return ""
