"""The simple δH probe: how this optimizer step changes the policy's entropy, to first order, and how sure that is.

    δH = X · δθ        X = ∂H, the entropy gradient (entropy.py);  δθ, the change the real optimizer makes (adamw.py)

X and δθ from one batch share their noise, and their plain product always claims that entropy falls. Hence

    forward     Σ_k n_k X_k · δθ_(−k) / N      leave-fold-out over whole-prompt folds: the change this step will make
    backward    X(θ_{s+1}) · δθ_s              from the next step's fresh rollouts: independent by construction
    trapezoid   ½ (forward + backward)         exact to second order: what to hold against the measured change
    reuse       X · δθ                         the biased same-batch product, a diagnostic only

in nats per token (H_tok = E[Σh]/E[T], through ∂H_tok = (∂H_seq − H_tok ∂E[T]) / E[T]) and in nats per sequence.

Cost: X comes from a forward of its own over `responses_per_prompt` responses of EVERY prompt (baselines use all G) and
two backwards (∂H_seq and ∂E[T]). Memory: 2K + 2 parameter-size fp32 rows for K microbatches.

The error bar of `forward` is the delete-one-fold jackknife with δθ_(−k,−l) taken to first order,
δθ_(−k) + δθ_(−l) − δθ, and, for folds k on another rank than l, without the effect of l on their δθ.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from rl_training.adamw import adamw_delta, clip_coefficient
from rl_training.entropy import Estimator, surrogate_weights
from rl_training.estimate import MIN_FOLDS_FOR_STDERR, Estimate
from rl_training.folds import jackknife_stderr, leave_fold_out, response_number, split_prompts
from rl_training.gradients import GradientBuffer
from rl_training.probes.base import Need, Probe
from rl_training.trapezoid import BatchTerms, TrapezoidSum
from rl_training.types import StepContext

# Columns of the additive statistics of a fold. A product X·δθ has two: for X = ∂H_seq and for X = ∂E[T].
SEQUENCES, ENTROPY, LENGTH = 0, 1, 2
FORWARD, BACKWARD, REUSE = slice(3, 5), slice(5, 7), slice(7, 9)
NUM_COLUMNS = 9
# Rows of the buffer of updates.
PREVIOUS, WHOLE, FIRST_FOLD = 0, 1, 2  # last step's δθ; this step's δθ; δθ_(−0), δθ_(−1), ...
METRICS = {  # of each quantity, per token and per sequence
    "entropy": ("entropy/token", "entropy/sequence"),
    **{
        quantity: (f"delta_h/{quantity}", f"delta_h/{quantity}_sequence")
        for quantity in ("forward", "backward", "trapezoid", "reuse", "cumulative_predicted", "cumulative_measured")
    },
}
HOLE_IN_SUM = "a step before this one has no trapezoid estimate, and a sum with a hole is no sum"


def _statistic(sums: Tensor) -> Tensor:
    """Returns (..., 5, 2): entropy, forward, backward, reuse and ½(forward + backward), from sums over folds.

    The last dimension is per token, per sequence. ½(forward + backward) of ONE batch is this batch's share of the
    cumulative trapezoid; its error is not that of two independent numbers.
    """
    sequences, entropy, length = sums[..., SEQUENCES], sums[..., ENTROPY], sums[..., LENGTH]

    def change(columns: slice) -> Tensor:
        d_entropy, d_length = sums[..., columns].unbind(-1)
        per_token = (d_entropy - entropy / length * d_length) / length
        return torch.stack([per_token, d_entropy / sequences], dim=-1)

    level = torch.stack([entropy / length, entropy / sequences], dim=-1)
    forward, backward, reuse = change(FORWARD), change(BACKWARD), change(REUSE)
    return torch.stack([level, forward, backward, reuse, 0.5 * (forward + backward)], dim=-2)


def first_order_updates(ctx: StepContext, fold_sizes: Tensor, total_size: float, out: GradientBuffer) -> None:
    """Fills `out` with AdamW steps from the present state: row WHOLE is δθ, row FIRST_FOLD + k is δθ_(−k).

    Each row is clipped by its own norm, as the trainer would clip that gradient. Fold k is row k of
    ctx.microbatch_gradients. What cannot be had stays nan: all rows for another optimizer than AdamW, the folds' rows
    when the only fold is the whole batch.
    """
    if ctx.optimizer.adamw is None:
        out.matrix[WHOLE:] = torch.nan
        return
    assert ctx.microbatch_gradients is not None
    out.matrix[WHOLE] = out.flatten(ctx.gradients.values())
    if ctx.whole_prompts and total_size > float(fold_sizes.max()):
        folds = ctx.microbatch_gradients.matrix
        out.matrix[FIRST_FOLD:] = leave_fold_out(out.matrix[WHOLE], folds, fold_sizes, total_size)
    else:
        out.matrix[FIRST_FOLD:] = torch.nan
    norms = out.sq_norms()[WHOLE:].sqrt()
    clip = clip_coefficient(norms, ctx.optimizer.max_grad_norm).to(out.matrix.dtype).unsqueeze(1)
    out.matrix[WHOLE:] *= clip
    for name, state in ctx.optimizer.adamw.items():
        rows = out.view(name)[WHOLE:]
        delta = adamw_delta(
            ctx.parameters[name].detach(),
            rows,
            state.exp_avg,
            state.exp_avg_sq,
            state.step,
            lr=state.lr,
            betas=state.betas,
            eps=state.eps,
            weight_decay=state.weight_decay,
        )
        rows.copy_(delta.total)


def entropy_gradients(
    ctx: StepContext, rows_of_fold: list[Tensor], estimator: Estimator
) -> Iterator[tuple[tuple[Tensor, ...], tuple[Tensor, ...]]]:
    """Yields (∂H_seq, ∂E[T]) by parameter for each fold: means over its rows, baselines from all responses.

    One small forward and two backwards per fold on the unwrapped model; `.grad` and the reducer of DDP are not touched.
    Σ_k w_k ∂log π(t_k) + u_k ∂h_k is a vector-Jacobian product, so the weights go straight into the backward.
    """
    known = (ctx.scores.logps, ctx.scores.entropies, ctx.scores.mask, ctx.rollout.prompt_index)
    entropy_weights = surrogate_weights(*known, estimator, target="sequence")
    length_weights, _ = surrogate_weights(*known, estimator, target="length")  # ∂E[T] has no ∂h term
    parameters = list(ctx.parameters.values())
    for rows in rows_of_fold:
        fresh = ctx.score(rows)
        width = fresh.logps.shape[1]
        w, u, v = (weights[rows, :width] / len(rows) for weights in (*entropy_weights, length_weights))
        d_entropy = torch.autograd.grad([fresh.logps, fresh.entropies], parameters, [w, u], retain_graph=True)
        yield d_entropy, torch.autograd.grad(fresh.logps, parameters, v)


class SimpleEntropyProbe(Probe):
    """Measures the first-order change of the policy's entropy at each optimizer step. See the module's docstring.

    estimator             "rb" (default) or "score": how X is estimated, see entropy.py
    responses_per_prompt  responses of every prompt that X is computed from; more (up to G) cost more, with less noise
    every                 measure each `every`-th step; backward, trapezoid and the sums need every=1
    """

    name = "simple"
    needs = Need.MICROBATCH_GRADIENTS

    def __init__(self, estimator: Estimator = "rb", responses_per_prompt: int = 1, every: int = 1) -> None:
        super().__init__(every)
        if estimator not in ("rb", "score"):
            raise ValueError(f"simple: unknown estimator {estimator!r}: choose 'rb' or 'score'")
        if responses_per_prompt < 1:
            raise ValueError(f"simple: responses_per_prompt={responses_per_prompt} must be at least 1")
        self.estimator: Estimator = estimator
        self.responses_per_prompt = responses_per_prompt
        self._updates: GradientBuffer | None = None
        self._update_row: Tensor | None = None  # row PREVIOUS: the δθ of `_update_step`
        self._update_step: int | None = None
        self._sum = TrapezoidSum()
        self._answers: dict[str, Estimate] = {}

    def on_pre_optimizer_step(self, ctx: StepContext) -> None:
        reason = _why_no_entropy_gradient(ctx)
        if reason:
            self._answers = {name: Estimate.missing(reason) for pair in METRICS.values() for name in pair}
            return
        folds = _folds(ctx)
        sizes = torch.bincount(folds).double()
        num_folds, total_size = (float(x) for x in ctx.reduce(torch.stack([torch.ones_like(sizes), sizes]).sum(dim=1)))
        updates = self._buffer(ctx)
        first_order_updates(ctx, sizes, total_size, out=updates)
        sums, sums_without = self._sums(ctx, folds, sizes, updates)
        values = _statistic(sums).cpu()  # a few numbers, which are summed over steps and go into the checkpoint
        stderrs = jackknife_stderr(_statistic, sums, sums_without, ctx.reduce).cpu()
        if num_folds < MIN_FOLDS_FOR_STDERR:
            stderrs = torch.full_like(stderrs, torch.nan)
        self._answers = self._estimates(ctx, values, stderrs, int(num_folds))
        self._keep_update(ctx, updates)

    def on_optimizer_step(self, ctx: StepContext) -> None:
        if ctx.optimizer.adamw is None and self._update_step == ctx.step:
            assert self._updates is not None
            for name, param in ctx.parameters.items():
                row = self._updates.view(name)[PREVIOUS]  # the old parameters, see _keep_update
                row.copy_(param.detach() - row)

    def measure(self, ctx: StepContext) -> dict[str, Estimate]:
        return self._answers

    def state_dict(self) -> dict[str, Tensor]:
        state = {f"sum.{name}": tensor for name, tensor in self._sum.state_dict().items()}
        if self._update_row is not None and self._update_step is not None:
            state |= {"update": self._update_row, "update_step": torch.tensor(self._update_step)}
        return state

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self._sum.load_state_dict({k.removeprefix("sum."): v for k, v in state.items() if k.startswith("sum.")})
        self._update_row = state.get("update")
        self._update_step = int(state["update_step"]) if "update_step" in state else None

    def _buffer(self, ctx: StepContext) -> GradientBuffer:
        """Returns the buffer of updates for this step's folds, its row PREVIOUS nan unless it is the last step's."""
        assert ctx.microbatch_gradients is not None
        num_rows = FIRST_FOLD + ctx.microbatch_gradients.num_rows
        if self._updates is None or self._updates.num_rows != num_rows:
            self._updates = GradientBuffer(ctx.parameters, num_rows)
        previous = self._updates.matrix[PREVIOUS]
        if self._update_row is None or self._update_step != ctx.step - 1:
            previous.fill_(torch.nan)
        else:
            previous.copy_(self._update_row)
        self._update_row = previous
        return self._updates

    def _sums(self, ctx: StepContext, folds: Tensor, sizes: Tensor, updates: GradientBuffer) -> tuple[Tensor, Tensor]:
        """Returns the (NUM_COLUMNS,) sums over all folds, and (K, NUM_COLUMNS), row l the sums without fold l."""
        num_folds = len(sizes)
        chosen = response_number(ctx.rollout.prompt_index) < self.responses_per_prompt
        rows_of_fold = [(chosen & (folds == k)).nonzero().squeeze(1) for k in range(num_folds)]
        products = torch.stack(  # (K folds of X, rows of updates, 2 kinds of X)
            [
                updates.dot(torch.stack([updates.flatten(gradient) for gradient in gradients]))
                for gradients in entropy_gradients(ctx, rows_of_fold, self.estimator)
            ]
        )
        products = sizes.view(-1, 1, 1) * products
        mask = ctx.scores.mask.double()
        per_sequence = torch.stack(
            [torch.ones_like(mask[:, 0]), (ctx.scores.entropies.double() * mask).sum(dim=1), mask.sum(dim=1)], dim=1
        )
        left_out = products[:, FIRST_FOLD : FIRST_FOLD + num_folds]  # [k, l]: X_k · δθ_(−l)
        by_fold = sizes.new_zeros(num_folds, NUM_COLUMNS)
        by_fold[:, : LENGTH + 1].index_add_(0, folds, per_sequence)
        by_fold[:, FORWARD] = torch.diagonal(left_out, dim1=0, dim2=1).T
        by_fold[:, BACKWARD] = products[:, PREVIOUS]
        by_fold[:, REUSE] = products[:, WHOLE]
        sums = ctx.reduce(by_fold.sum(dim=0))
        sums_without = sums - by_fold
        # Without fold l the other folds' steps lose l too: δθ_(−k,−l) − δθ_(−k) ≈ δθ_(−l) − δθ.
        shift = left_out - products[:, WHOLE : WHOLE + 1]
        sums_without[:, FORWARD] += shift.sum(dim=0) - torch.diagonal(shift, dim1=0, dim2=1).T
        return sums, sums_without

    def _estimates(self, ctx: StepContext, values: Tensor, stderrs: Tensor, num_folds: int) -> dict[str, Estimate]:
        """Returns every metric of this step, from `_statistic`'s values and their errors."""
        (level, forward, backward, reuse, _), (level_se, forward_se, backward_se, _, half_step_se) = values, stderrs
        step, gap, no_forward = ctx.step, self._why_no_backward(ctx.step), _why_no_forward(ctx, num_folds)
        closed = self._sum.add(
            step, BatchTerms(level, level_se, forward, forward_se, backward, backward_se, half_step_se)
        )
        answers = {
            "entropy": (level, level_se, "", step),
            "forward": (forward, forward_se, no_forward, step),
            "reuse": (reuse, torch.full_like(reuse, torch.nan), ctx.optimizer.reason, step),
            "backward": (backward, backward_se, gap, step - 1),
            "trapezoid": (closed.trapezoid, closed.trapezoid_stderr, gap or no_forward, step - 1),
            "cumulative_predicted": (closed.predicted, closed.predicted_stderr, HOLE_IN_SUM, step - 1),
            "cumulative_measured": (closed.measured, closed.measured_stderr, "", step - 1),
        }
        return {
            metric: _estimate(float(value), float(stderr), num_folds, reason, about_step)
            for quantity, (pair, stderr_pair, reason, about_step) in answers.items()
            for metric, value, stderr in zip(METRICS[quantity], pair, stderr_pair, strict=True)
        }

    def _why_no_backward(self, step: int) -> str:
        if self._update_step is None:
            return "the first measured step: there is no update before it to look back on"
        if self._update_step != step - 1:
            return f"step {step - 1} was not measured, so its update is not known; backward needs every=1"
        return ""

    def _keep_update(self, ctx: StepContext, updates: GradientBuffer) -> None:
        """Keeps this step's δθ for `backward`; without a formula, the old parameters until the new ones are there."""
        if ctx.optimizer.adamw is not None:
            updates.matrix[PREVIOUS] = updates.matrix[WHOLE]
        else:
            for name, param in ctx.parameters.items():
                updates.view(name)[PREVIOUS] = param.detach()
        self._update_step = ctx.step


def _folds(ctx: StepContext) -> Tensor:
    """Returns the fold of each sequence, (B,): its microbatch if these hold whole prompts, else a split of prompts."""
    if not ctx.whole_prompts:
        return split_prompts(ctx.rollout.prompt_index, len(ctx.microbatch_rows))
    return torch.cat([ctx.rollout.prompt_index.new_full((len(rows),), k) for k, rows in enumerate(ctx.microbatch_rows)])


def _estimate(value: float, stderr: float, num_folds: int, reason: str, about_step: int) -> Estimate:
    """Returns the estimate, with `reason` if its value is nan, or the reason why only its error is."""
    if math.isnan(value):
        reason = reason or "the gradient or the update is not a finite number"
    elif num_folds < MIN_FOLDS_FOR_STDERR:
        reason = f"no error bar: it needs {MIN_FOLDS_FOR_STDERR} folds of whole prompts, the step has {num_folds}"
    else:
        reason = "no error bar: the same-batch product is biased" if math.isnan(stderr) else ""
    return Estimate(value, stderr, num_folds, reason, about_step)


def _why_no_entropy_gradient(ctx: StepContext) -> str:
    if not ctx.rollout.on_policy:
        return (
            "the rollout was sampled before an earlier optimizer step (num_iterations > 1, or several steps per "
            "generation): the entropy gradient is estimated on-policy only"
        )
    if not ctx.complete_prompts:
        return (
            "the responses of a prompt are spread over several optimizer steps: "
            "use DrGRPOTrainer, or attach(..., whole_prompts=True)"
        )
    return ""


def _why_no_forward(ctx: StepContext, num_folds: int) -> str:
    if ctx.optimizer.adamw is None:
        return ctx.optimizer.reason
    if not ctx.whole_prompts:
        return (
            "the microbatches mix prompts, so no fold of whole prompts can be left out: "
            "use DrGRPOTrainer, or attach(..., whole_prompts=True)"
        )
    if num_folds < 2:
        return "one microbatch on one rank: nothing is left when it is left out; use smaller microbatches"
    return ""
