"""The gradient noise scale during training: how large a batch still pays off, from square norms of the gradients.

B_simple = tr Σ / |G|² is the batch size at which noise and signal are equal. Both are estimated from the mean gradients
of blocks (folds of whole prompts) and of the whole batch, see statistics/noise_scale.py. The unit is the PROMPT
with its responses, whose advantages sum to zero and are not independent.

One step is too noisy. So tr Σ and |G|² are averaged separately over steps, with weights decay^age, and only the
averages are divided. |G|² / tr Σ always has a value. Its inverse, the noise scale, has none unless the averaged |G|² is
above 0, and its interval (Fieller's) has no upper end if |G|² may be 0. Errors are from the delete-one-step jackknife.
In Adam's metric, |x|² is Σ P x² over the entries with v > 0. P is the previous step's, used once v is warm.

Gradients are measured before clipping. With `split_prompts`, tr Σ is split into the noise that more responses per
prompt would average away and the noise that only more prompts would. This takes two backwards, over halves of a
prompt's responses.

Source: McCandlish et al. 2018, "An empirical model of large-batch training", appendix A.1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from rl_training.engine.context import StepContext
from rl_training.engine.probe import Probe, Reading
from rl_training.entropy.attribution import KINDS, module_kind
from rl_training.options import check_share, check_whole
from rl_training.parallel.vectors import Vector, dot
from rl_training.policy.rollout import response_index
from rl_training.statistics import noise_scale as noise
from rl_training.statistics.estimate import NOT_FINITE_GRADIENT, Estimate
from rl_training.statistics.noise_scale import BOUNDS
from rl_training.statistics.running_variance import counts_at
from rl_training.statistics.unavailable import Unavailable
from rl_training.step.needs import Need

MIN_WEIGHT = 1e-4  # a step is dropped once its weight decay^age is below this
CHANNELS = ("all", "adam", *KINDS, "split")  # pairs: (tr Σ, |G|²); for "split", tr Σ (between, within)
NOT_SPLIT = "the trace can be split only for Dr-GRPO's loss"
NO_RAW_ERROR = "no error bar: norms alone do not give one step's error; the averages over steps have one"
RAW = ("gns/trace_step", "gns/grad_sq_norm_step")
AVERAGED = ("gns/trace", "gns/grad_sq_norm")
RATIOS = tuple(
    f"gns/{name}{bound}" for name in ("noise_scale_prompts", "noise_scale_sequences", "batch_ratio") for bound in BOUNDS
)
ADAM = ("gns/adam_signal_to_noise", *(f"gns/adam_noise_scale_prompts{bound}" for bound in BOUNDS))
SPLIT = ("gns/trace_between", "gns/trace_within")
NAMES = (*RAW, *AVERAGED, "gns/signal_to_noise", *RATIOS, *ADAM)


def _no_moments() -> Tensor:
    return torch.zeros(0, len(CHANNELS), 2, dtype=torch.float64)


@dataclass(frozen=True)
class NoiseHistory:
    """The moments of the noise at the last steps."""

    moments: Tensor = field(default_factory=_no_moments)  # (steps, channels, 2), see CHANNELS
    steps: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.long))  # (steps,), their numbers

    def add(self, moments: Tensor, step: int, decay: float) -> NoiseHistory:
        """Return the history with a step's moments, (channels, 2), and without steps whose weight is negligible."""
        is_remembered = counts_at(step, self.steps, decay, MIN_WEIGHT)
        return NoiseHistory(
            torch.cat([self.moments[is_remembered], moments.unsqueeze(0)]),
            torch.cat([self.steps[is_remembered], torch.tensor([step])]),
        )


class GradientNoiseScaleProbe(Probe):
    """Measures the gradient noise scale, in prompts and in sequences, from square norms of the folds' gradients.

    Args:
        decay: Weight of an optimizer step, measured or not, relative to the next one in the running average. .95
            averages about 40 steps.
        split_prompts: Prompts per step and rank that are used to split the noise into between and within prompts; 0
            for no split. Each costs a forward pass, two backwards over its responses, and briefly two gradients.
        every: Measure each `every`-th step.
    """

    name = "gns"
    needs = Need.SQ_NORMS

    def __init__(self, decay: float = 0.95, split_prompts: int = 0, every: int = 1) -> None:
        super().__init__(every)
        check_whole("gns: split_prompts", split_prompts, 0, " (no split of the trace)")
        check_share("gns: decay", decay, "(0, 1)", "; .95 remembers about 40 steps")
        self.decay = decay
        self.split_prompts = split_prompts
        self.needs = type(self).needs | (Need.TERMS_CHECK if split_prompts else Need.NOTHING)

    def init(self) -> NoiseHistory:
        return NoiseHistory()

    def measure(self, ctx: StepContext, state: NoiseHistory) -> Reading:
        step = ctx.step
        blocks, group = step.batch.num_folds, step.batch.responses_per_prompt
        reason = ctx.reasons.no_folds or ctx.reasons.reused or step.batch.copies.reason
        if reason:
            names = NAMES + SPLIT * bool(self.split_prompts)
            return Reading(measured=dict.fromkeys(names, Estimate.missing(reason)), state=state)
        assert step.gradients.sq_norms is not None
        sq_norms, prompts = step.gradients.sq_norms.cpu(), step.batch.fold_sizes / group
        kinds = [module_kind(name) for name in step.gradients.layout.names]
        of_blocks, of_batch = _channels(sq_norms[:-1].mean(dim=0), kinds), _channels(sq_norms[-1], kinds)
        block_size, batch_size = blocks / float((1.0 / prompts).sum()), float(prompts.sum())
        moments = noise.noise_moments(of_blocks, of_batch, block_size, batch_size)
        split_reason = _split_reason(ctx) if self.split_prompts else None
        if self.split_prompts and not split_reason:
            same_prompt = _mean_product_within_prompts(ctx, self.split_prompts).cpu()
            moments[-1] = noise.split_trace(same_prompt, moments[0], step.batch.responses_per_prompt)
        history = state.add(moments, step.number, self.decay)
        return Reading(measured=self._estimates(ctx, history, int(blocks), batch_size, split_reason), state=history)

    def after_step(self, ctx: StepContext, reading: Reading) -> Reading:
        remark = ctx.gradient_remark
        if not remark:
            return reading
        raw = {name: reading.measured[name] for name in RAW}
        remarked = {name: replace(e, reason=remark) for name, e in raw.items() if math.isfinite(e.value)}
        return replace(reading, measured={**reading.measured, **remarked})

    def _estimates(
        self, ctx: StepContext, history: NoiseHistory, blocks: int, batch_size: float, split_reason: Unavailable | None
    ) -> dict[str, Estimate]:
        raw = history.moments[-1, 0]
        reason = NO_RAW_ERROR if raw.isfinite().all() else NOT_FINITE_GRADIENT
        estimates = {
            name: Estimate(value, math.nan, blocks, reason) for name, value in zip(RAW, raw.tolist(), strict=True)
        }
        ages = ctx.step.number - history.steps
        averages = {
            name: noise.average(history.moments[:, number], self.decay, ages) for number, name in enumerate(CHANNELS)
        }
        everything, adam = averages["all"], averages["adam"]
        estimates |= dict(zip(AVERAGED, noise.mean_estimates(everything), strict=True))
        signal, scale = noise.signal_to_noise_estimate(everything), noise.noise_scale(everything)
        ends = [noise.interval_end(everything, end) for end in noise.signal_to_noise_interval(everything)]
        estimates["gns/signal_to_noise"] = signal
        estimates |= noise.with_bounds("gns/noise_scale_prompts", scale)
        estimates |= noise.with_bounds("gns/noise_scale_sequences", scale, ctx.step.batch.responses_per_prompt)
        estimates |= noise.with_bounds("gns/batch_ratio", [signal, *ends], batch_size)
        estimates["gns/adam_signal_to_noise"] = noise.signal_to_noise_estimate(adam)
        estimates |= noise.with_bounds("gns/adam_noise_scale_prompts", noise.noise_scale(adam))
        kinds = [kind for kind in KINDS if averages[kind].steps > 0]  # a model need not have every kind
        estimates |= {f"gns/kind/{kind}": noise.noise_scale(averages[kind])[0] for kind in kinds}
        if self.split_prompts:
            split = [Estimate.missing(split_reason)] * 2 if split_reason else noise.mean_estimates(averages["split"])
            estimates |= dict(zip(SPLIT, split, strict=True))
        return estimates


def _split_reason(ctx: StepContext) -> Unavailable | None:
    """Return the reason why the noise cannot be split between prompts and responses, or None. Collective.

    The split is only valid for a gradient of rewards minus their groups' means, without other terms.
    """
    if ctx.reasons.sampling_mismatch:
        return ctx.reasons.sampling_mismatch
    reason = ctx.reward_multiple_reason()
    return reason and reason.prefixed(NOT_SPLIT)


def _channels(sq_norms: Tensor, kinds: list[str]) -> Tensor:
    """Return the square norms of CHANNELS, (channels,), from those of parameters, (parameters, 2); "split" is nan."""
    parts = [sq_norms[[k == kind for k in kinds], 0] for kind in KINDS]
    none = torch.tensor(torch.nan, dtype=sq_norms.dtype)
    by_kind = [part.sum() if len(part) else none for part in parts]
    return torch.stack([*sq_norms.sum(dim=0), *by_kind, none])


def _mean_product_within_prompts(ctx: StepContext, num_prompts: int) -> Tensor:
    """Return the mean of r_i·r_j over pairs of responses to a prompt, one from each half. Collective."""
    step = ctx.step
    index, weights = step.batch.rollout.prompt_index, step.batch.loss_weights
    prompts = index.unique()[:num_prompts]
    _, place, sizes = index.unique(return_inverse=True, return_counts=True)
    is_first = response_index(index) < sizes[place] // 2
    half = torch.where(is_first, sizes[place] // 2, sizes[place] - sizes[place] // 2).double()
    shares = (step.batch.num_sequences / ctx.ranks.count / half).unsqueeze(1)
    halves = [weights.where(chosen.unsqueeze(1)) for chosen in (is_first, ~is_first)]
    total = torch.zeros((), dtype=torch.float64, device=index.device)
    rows_per_pass = [(index == prompt).nonzero().squeeze(1) for prompt in prompts]

    def add_product(vectors: list[Vector]) -> None:
        total.add_(dot(*vectors).sum())

    ctx.gradients_by_rank(rows_per_pass, halves, shares, add_product)
    total, num_products = ctx.ranks.reduce(torch.stack([total, total.new_tensor(len(prompts))]))
    return total / num_products
