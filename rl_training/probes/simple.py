"""The simple δH probe: how this optimizer step changes the policy's entropy, to first order, why, and how sure that is.

    δH = X · δθ        X = ∂H, the entropy gradient (entropy.py);  δθ, the change the real optimizer makes (adamw.py)

X and δθ from one batch share their noise, and their plain product always claims that entropy falls. Hence

    forward      Σ_k n_k X_k · δθ_(−k) / N     leave-fold-out over whole-prompt folds: the change on NEW prompts
    own_prompts  Σ_k n_k X_k · δθ_(−c_k) / N   without the responses of X_k only: the change on the batch's OWN prompts
    backward     X(θ_{s+1}) · δθ_s             from the next step's fresh rollouts: independent by construction
    trapezoid    ½ (forward + backward)        exact to second order: what to hold against the measured change
    reuse        X · δθ                        the biased same-batch product, a diagnostic only

in nats per token (H_tok = E[Σh]/E[T], through ∂H_tok = (∂H_seq − H_tok ∂E[T]) / E[T]) and, if asked for, in nats per
sequence. forward is split by cause (momentum, this step's gradient, weight decay), by layer and by kind of module, and
set beside what it would be without gradient clipping.

Cost: X comes from a forward pass and a backward of its own over `responses_per_prompt` responses of EVERY prompt
(baselines use all G). Memory: 2K + 2 parameter-size fp32 rows for K folds on this rank; where
steps learn from responses again, 3K more (fold_moments.py).

The error bar of `forward` is the delete-one-fold jackknife with δθ_(−k,−l) taken to first order,
δθ_(−k) + δθ_(−l) − δθ, and, for folds k on another rank than l, without the effect of l on their δθ. The error bars of
its parts leave that effect out altogether. A batch that misses rare responses does not know how far off it is: the
variances of single steps are averaged over about three of them (running_variance.py). Sums use each batch's own, but
for the end of their last step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from rl_training.mathematics.calibration import Calibration
from rl_training.mathematics.entropy import Estimator
from rl_training.mathematics.estimate import MIN_FOLDS_FOR_STDERR, Estimate
from rl_training.mathematics.jackknife import jackknife_stderr
from rl_training.mathematics.running_variance import RunningVariance
from rl_training.mathematics.trapezoid import BatchTerms, TrapezoidSum
from rl_training.probes.base import Need, Probe
from rl_training.step.attribution import Attribution
from rl_training.step.entropy_gradients import Choice, importance_ratios
from rl_training.step.error_shares import SHARES, ErrorShares
from rl_training.step.fold_moments import FoldMoments
from rl_training.step.fold_sums import PRODUCTS, FoldSums, statistic, sum_over_folds
from rl_training.step.ground_truth import MEASURED, GroundTruth
from rl_training.step.quantities import Quantity
from rl_training.step.reasons import (
    REUSED,
    why_no_entropy_gradient,
    why_no_forward,
    why_no_own_prompts,
    why_no_responses,
)
from rl_training.step.responses import top_responses
from rl_training.step.types import StepContext
from rl_training.step.update_rows import UpdateRows
from rl_training.step.updates import WHOLE
from rl_training.step.visited_entropy import visited_entropy

UNITS = ("token", "sequence")  # that each sum is kept in
EVALUATION = ("evaluation", "evaluation_error")
SUMS = ("trapezoid", "cumulative_predicted", "cumulative_measured")
HOLE_IN_SUM = "a step before this one has no trapezoid estimate, and a sum with a hole is no sum"
HALF = "it needs this step's backward and the last one's forward, and one of them is not finite or was not asked for"


class SimpleEntropyProbe(Probe):
    """Measures the first-order change of the policy's entropy at each optimizer step. See the module's docstring.

    estimator             how X is estimated, see entropy.py: "rb" (default), Rao-Blackwell, sums the exact entropies of
                          the next token; "score" has their one-sample values −log π in their place, with more noise
    responses_per_prompt  responses of every prompt that X is computed from; more (up to G) cost more, with less noise
    draw                  which: "first", the first of each prompt (default); "norm", drawn by the norms of their
                          weights and reweighted, see entropy_gradients.py
    prompt_share          with draw="norm": below 1, so many times fewer, drawn from all of a fold; no own_prompts then
    num_folds             folds of whole prompts on each rank, K; None: one per microbatch, or one per rank when there
                          are 8 ranks or more. More than microbatches costs what another forward pass and backward do
    per_sequence          predict in nats per sequence too, `…_sequence`: a second backward, from which error bars per
                          token have the noise of the H_tok inside of X as well
    own_prompts           measure `delta_h/own_prompts` too: another backward, and half as many optimizer steps again
    split_error           say what of forward's variance comes from X, which more responses_per_prompt make less noisy,
                          and what from δθ, which only a larger batch does: `delta_h/error_share/…`; one process only
    top_responses         name so many responses of the main process that push entropy down most in each step, with
                          prompt, reward and advantage, in probes.jsonl: responses.py. Two passes over all responses
    offload               keep the parameter-size rows in the CPU's memory
    validate_every        measure the true change on a buffer of its own at every so many steps, and hold `forward`
                          against it: ground_truth.py, calibration.py; 0 for never. It costs three forward passes over
                          that buffer, and one with a backward for what its own entropy gradient predicts
    validate_sequences    responses in that buffer, over all ranks
    seed                  of that buffer, and of the draw
    error_decay           weight of a step relative to the next in the average of the variances of single steps; 0 for
                          the bar of the batch alone, which is in probes.jsonl in any case (`stderr_of_batch`)
    every                 measure each `every`-th step; backward, trapezoid and the sums need every=1
    """

    name = "simple"
    needs = Need.FOLD_GRADIENTS

    def __init__(
        self,
        estimator: Estimator = "rb",
        responses_per_prompt: int = 1,
        draw: Literal["norm", "first"] = "first",
        prompt_share: float = 1.0,
        num_folds: int | None = None,
        per_sequence: bool = False,
        own_prompts: bool = False,
        split_error: bool = False,
        top_responses: int = 0,
        offload: bool = False,
        validate_every: int = 0,
        validate_sequences: int = 512,
        seed: int = 0,
        error_decay: float = 0.5,
        every: int = 1,
    ) -> None:
        super().__init__(every)
        if not 0.0 <= error_decay < 1.0:
            raise ValueError(f"simple: error_decay={error_decay} must lie in [0, 1); 0.5 averages over three steps")
        if estimator not in ("rb", "score"):
            raise ValueError(f"simple: unknown estimator {estimator!r}: choose 'rb' or 'score'")
        if responses_per_prompt < 1:
            raise ValueError(f"simple: responses_per_prompt={responses_per_prompt} must be at least 1")
        if draw not in ("norm", "first"):
            raise ValueError(f"simple: unknown draw {draw!r}: choose 'norm' or 'first'")
        if not 0.0 < prompt_share <= 1.0 or (prompt_share < 1.0 and draw != "norm"):
            raise ValueError(f"simple: prompt_share={prompt_share} must lie in (0, 1], and be 1 unless draw='norm'")
        if num_folds is not None and num_folds < 1:
            raise ValueError(f"simple: num_folds={num_folds} must be at least 1, or null for one per microbatch")
        if type(per_sequence) is not bool:
            raise ValueError(f"simple: per_sequence={per_sequence} must be true or false")
        self.estimator: Estimator = estimator
        self.choice = Choice(responses_per_prompt, draw == "norm", prompt_share, seed)
        self.num_folds = num_folds
        self.per_sequence = per_sequence
        self.own_prompts = own_prompts
        self.split_error = split_error
        self.top_responses = top_responses
        self.offload = offload
        self._truth = GroundTruth(validate_every, validate_sequences, seed) if validate_every else None
        self._calibration = Calibration()
        self._moments = FoldMoments("cpu" if offload else None)
        self._updates = UpdateRows("cpu" if offload else None)
        self._errors = RunningVariance(error_decay)
        self._error_shares = ErrorShares(error_decay)
        self._sum = TrapezoidSum()
        self._known_splits: Attribution | None = None
        self._answers: dict[str, Estimate] = {}

    def on_pre_optimizer_step(self, ctx: StepContext) -> None:
        if self._truth is not None and not ctx.no_fresh_responses:
            self._truth.draw(ctx)
        ratios = importance_ratios(ctx)
        reason = why_no_entropy_gradient(ctx, ratios)
        if reason:
            self._answers = self._without_entropy_gradient(ctx, reason)
            return
        assert ratios is not None
        updates = self._updates.begin(ctx)
        sums = sum_over_folds(
            ctx,
            ratios,
            updates,
            self._splits(ctx),
            self._moments,
            estimator=self.estimator,
            choice=self.choice,
            per_sequence=self.per_sequence,
            own_prompts=self.own_prompts,
            with_halves=self.top_responses > 0,
        )
        values = statistic(sums.total).cpu()  # a few numbers, which are summed over steps and go into the checkpoint
        stderrs = jackknife_stderr(statistic, sums.total, sums.without, ctx.reduce).cpu()
        if sums.num_folds < MIN_FOLDS_FOR_STDERR:
            stderrs = torch.full_like(stderrs, torch.nan)
        self._answers = {
            metric: estimate
            for row in self._quantities(ctx, values, stderrs, sums)
            for metric, estimate in zip(self._metrics(row.name), row.estimates(sums.num_folds), strict=False)
        }
        if self.split_error:
            shares = self._error_shares.estimates(
                sums, ctx.num_ranks, why_no_forward(ctx, sums.num_folds, sums.left_out)
            )
            self._answers |= {
                metric: e for name, pair in shares.items() for metric, e in zip(self._metrics(name), pair, strict=False)
            }
        if sums.halves is not None:
            reason = why_no_responses(ctx, num_folds=len(ctx.fold.unique()))
            self._answers |= top_responses(ctx, updates, sums.halves, self.top_responses, reason)
        if self._truth is not None and self._truth.measures_at(ctx.step) and ctx.no_fresh_responses:
            missing = Estimate.missing(ctx.no_fresh_responses)
            self._answers |= {metric: missing for name in EVALUATION for metric in self._metrics(name)}
        elif self._truth is not None:
            self._truth.predict(ctx, updates.matrix[WHOLE], updates, self.estimator, self.per_sequence)
        self._updates.keep(ctx)

    def on_optimizer_step(self, ctx: StepContext) -> None:
        self._updates.finish(ctx)
        if self._truth is not None and self._truth.measures_at(ctx.step):
            no_truth = ctx.no_fresh_responses
            self._answers |= (
                dict.fromkeys(MEASURED, Estimate.missing(no_truth)) if no_truth else self._truth.measure(ctx)
            )
            self._calibration.add(self._answers["delta_h/forward"], self._answers["delta_h/true"])
            calibration = self._calibration.estimates()
            self._answers |= {f"calibration/{name}": estimate for name, estimate in calibration.items()}

    def measure(self, ctx: StepContext) -> dict[str, Estimate]:
        return self._answers

    @property
    def num_buffer_bytes(self) -> int:
        return self._moments.num_bytes + self._updates.num_bytes

    def state_dict(self) -> dict[str, Tensor]:
        state = {f"sum.{name}": tensor for name, tensor in self._sum.state_dict().items()}
        state |= {f"error.{name}": tensor for name, tensor in self._errors.state_dict().items()}
        state |= {f"error_share.{name}": tensor for name, tensor in self._error_shares.state_dict().items()}
        return state | self._calibration.state_dict() | self._updates.state_dict()

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        for name, tensor in state.items():
            if name.startswith("sum.") and name != "sum.step" and tensor.shape != (len(UNITS),):
                raise ValueError(f"{name} has shape {tuple(tensor.shape)}, not {(len(UNITS),)}")
        self._sum.load_state_dict({k.removeprefix("sum."): v for k, v in state.items() if k.startswith("sum.")})
        self._errors.load_state_dict({k.removeprefix("error."): v for k, v in state.items() if k.startswith("error.")})
        shares = {k.removeprefix("error_share."): v for k, v in state.items() if k.startswith("error_share.")}
        self._error_shares.load_state_dict(shares)
        if "pairs" in state:
            self._calibration.load_state_dict(state)
        self._updates.load_state_dict(state)

    def _without_entropy_gradient(self, ctx: StepContext, reason: str) -> dict[str, Estimate]:
        """Returns what can be said of a step without X: that it is missing, and entropies where they mean something."""
        validated = self._truth is not None and self._truth.measures_at(ctx.step)
        names = (*self._of_step(ctx), *SUMS, *EVALUATION) if validated else (*self._of_step(ctx), *SUMS)
        answers = {metric: Estimate.missing(reason) for name in names for metric in self._metrics(name)}
        answers |= {f"delta_h/response/{rank + 1}": Estimate.missing(reason) for rank in range(self.top_responses)}
        answers |= {metric: Estimate.missing(reason) for share in SHARES for metric in self._metrics(share)}
        if ctx.sampled_otherwise:
            answers |= visited_entropy(ctx)
        return answers

    def _splits(self, ctx: StepContext) -> Attribution:
        if self._known_splits is None:
            self._known_splits = Attribution(list(ctx.parameters))
        return self._known_splits

    def _quantities(self, ctx: StepContext, values: Tensor, stderrs: Tensor, sums: FoldSums) -> list[Quantity]:
        """Returns every quantity of this step, from `statistic`'s values and their errors; takes it into the sums."""
        gap = self._updates.why_no_previous(ctx) or ("" if sums.left_out else REUSED)
        no_forward = why_no_forward(ctx, sums.num_folds, sums.left_out)
        reasons = {
            "entropy": "",
            "backward": gap,
            "reuse": ctx.optimizer.reason,
            "own_prompts": why_no_own_prompts(ctx, self.choice),
        }
        rows = {
            name: Quantity(name, value, stderr, ctx.step).unless(reasons.get(name, no_forward))
            for name, value, stderr in zip(self._of_step(ctx), values[:-1], stderrs[:-1], strict=True)
        }
        rows |= self._averaged(list(rows.values())[1:])  # all but the level
        rows["backward"] = dataclasses.replace(rows["backward"], about_step=ctx.step - 1)
        level, forward, backward = rows["entropy"], rows["forward"], rows["backward"]
        closed = self._sum.add(
            ctx.step,
            BatchTerms(
                level=level.value,
                level_stderr=level.stderr,
                forward=forward.value,
                forward_stderr=forward.stderr,
                forward_batches=forward.batches,
                backward=backward.value,
                backward_stderr=backward.stderr,
                backward_batches=backward.batches,
                half_step_stderr=stderrs[-1],
            ),
        )
        trapezoid, predicted, measured = SUMS
        before = ctx.step - 1
        no_trapezoid = gap or no_forward or HALF
        return [
            *rows.values(),
            Quantity(
                trapezoid, closed.trapezoid, closed.trapezoid_stderr, before, no_trapezoid, closed.trapezoid_batches
            ),
            Quantity(
                predicted, closed.predicted, closed.predicted_stderr, before, HOLE_IN_SUM, closed.predicted_batches
            ),
            Quantity(measured, closed.measured, closed.measured_stderr, before),
        ]

    def _averaged(self, rows: list[Quantity]) -> dict[str, Quantity]:
        """Returns these quantities with their variances averaged over steps, by name."""
        raw = torch.stack([row.stderr for row in rows])
        variances, batches = self._errors.add(raw.square())
        return {
            row.name: dataclasses.replace(row, stderr=stderr, batches=of, stderr_of_batch=row.stderr)
            for row, stderr, of in zip(rows, variances.sqrt(), batches, strict=True)
        }

    def _of_step(self, ctx: StepContext) -> tuple[str, ...]:
        """Returns the names of the quantities that one step has, in the order of `statistic`."""
        return ("entropy", *PRODUCTS, *self._splits(ctx).labels)

    def _metrics(self, quantity: str) -> tuple[str, ...]:
        """Returns the metric names of a quantity, per token and per sequence: those that were asked for."""
        if (quantity == "own_prompts" and not self.own_prompts) or (quantity in SHARES and not self.split_error):
            return ()
        if quantity == "entropy":
            return "entropy/token", "entropy/sequence"
        pair = f"delta_h/{quantity}", f"delta_h/{quantity}_sequence"
        return pair if self.per_sequence or quantity == "cumulative_measured" else pair[:1]
