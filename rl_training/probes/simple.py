"""The simple δH probe: how this optimizer step changes the policy's entropy, to first order, why, and how sure that is.

    δH = X · δθ        X = ∂H, the entropy gradient (entropy.py);  δθ, the change the real optimizer makes (adamw.py)

X and δθ from one batch share their noise, and their plain product always claims that entropy falls. Hence `forward`,
the change on NEW prompts; `backward`, from the next step's fresh rollouts, independent by construction; and `reuse`,
the biased product, a diagnostic only: entropy/prediction.py.
Added to them is

    trapezoid    ½ (forward + backward)        exact to second order: compare this with the measured change

in nats per token and, if asked for, in nats per sequence, and then with the first-order changes of length and reward
(entropy/length_and_reward.py). forward is split by cause (momentum, this step's gradient,
weight decay), by layer and by kind of module, and set beside what it would be without gradient clipping.

The variances of single steps are averaged over about three (running_variance.py). Sums use each batch's own, but for
the end of their last step.
"""

from __future__ import annotations

import dataclasses

import torch

from rl_training.engine.context import StepContext
from rl_training.engine.probe import Probe, Reading
from rl_training.entropy.trapezoid import SUMS, TrapezoidSum
from rl_training.errors import UserError
from rl_training.options import check_flag, check_num_folds, half_by_measured_step
from rl_training.statistics.estimate import FEW_FOLDS, Estimate
from rl_training.statistics.jackknife import estimates_over_units
from rl_training.statistics.limit import Limit
from rl_training.step.data import EntropyPrediction, EntropySettings
from rl_training.step.needs import Need
from rl_training.step.quantities import LENGTH_AND_REWARD, PRODUCTS

REWARD, TRUNCATED = "delta_reward/forward", "delta_length/truncated"
MEASURED = ("entropy", "backward")  # quantities for which it does not matter what the step is
UNITS = ("token", "sequence")  # that each sum is kept in
VISITED = ("entropy/visited_prefixes", "entropy/visited_prefixes_sequence")


class SimpleEntropyProbe(Probe):
    """Measures the first-order change of the policy's entropy at each optimizer step. See the module's docstring.

    responses_per_prompt  responses to every prompt from which the entropy gradient is computed; more cost more, with
                          less noise
    num_folds             folds of whole prompts, over all processes; None: 8 to 15 where that takes no further pass.
                          More folds than microbatches cost another forward and backward pass
    per_sequence          also predict nats per sequence (`…_sequence`), length and reward, for a second backward; error
                          bars per token then include the noise of the entropy level
    offload               keep the gradients of the folds in host memory
    rows_dtype            dtype of the folds' gradients: "float32", or "bfloat16" in half the memory
    error_decay           weight of an optimizer step relative to the next, measured or not, in the average of the
                          variances of single steps; None: a half for each measured step, which averages about three;
                          0: the error bar of the batch alone, which probes.jsonl always has as `stderr_of_batch`
    every                 measure each `every`-th step; backward, trapezoid and the sums need every=1
    """

    name = "simple"
    needs = Need.ENTROPY_CHANGE

    def __init__(
        self,
        responses_per_prompt: int = 1,
        num_folds: int | None = None,
        per_sequence: bool = False,
        offload: bool = False,
        rows_dtype: str = "float32",
        error_decay: float | None = None,
        every: int = 1,
    ) -> None:
        super().__init__(every)
        error_decay = half_by_measured_step(every) if error_decay is None else error_decay
        try:
            self.entropy = EntropySettings(responses_per_prompt, per_sequence, error_decay)
        except ValueError as error:
            raise UserError(f"simple: {error}") from error
        check_num_folds("simple", num_folds)
        check_flag("simple: offload", offload)
        if rows_dtype not in ("float32", "bfloat16"):
            raise UserError(f"simple: rows_dtype={rows_dtype} must be float32 or bfloat16")
        self.num_folds, self.rows_dtype = num_folds, torch.bfloat16 if rows_dtype == "bfloat16" else None
        self.per_sequence, self.offload = per_sequence, offload
        self.needs = type(self).needs | (Need.LOSS_CHECK if per_sequence else Need.NOTHING)

    def init(self) -> TrapezoidSum:
        return TrapezoidSum.empty(len(UNITS))

    def measure(self, ctx: StepContext, state: TrapezoidSum) -> Reading:
        change = ctx.prediction
        if change.limit:
            reading = self._without_entropy_gradient(ctx, change, state, change.limit)
        else:
            reading = self._reading(ctx, change, state)
        if not self.per_sequence:
            return reading
        return dataclasses.replace(reading, measured={**reading.measured, TRUNCATED: ctx.truncated_share()})

    def _without_entropy_gradient(
        self, ctx: StepContext, change: EntropyPrediction, state: TrapezoidSum, limit: Limit
    ) -> Reading:
        missing = Estimate.missing(limit)
        names = ("entropy", *PRODUCTS, *change.labels, LENGTH_AND_REWARD, *SUMS)
        predicted = {metric: missing for name in names if name not in MEASURED for metric in self._metrics(name)}
        measured = {metric: missing for name in MEASURED for metric in self._metrics(name)}
        if ctx.limits.sampling_mismatch:
            measured |= visited_entropy(ctx)
        return Reading(predicted, measured, state)

    def _reading(self, ctx: StepContext, change: EntropyPrediction, state: TrapezoidSum) -> Reading:
        half_step_stderr = change.half_step_stderr
        assert half_step_stderr is not None
        level, forward, backward = (change.quantities[name] for name in ("entropy", "forward", "backward"))
        state, closed = state.add(ctx.step.number, level, forward, backward, half_step_stderr)
        predicted = dict[str, Estimate]()
        measured = dict[str, Estimate]()
        for row in (*change.quantities.values(), *closed):
            estimates = zip(self._metrics(row.name), row.estimates(ctx.step.batch.num_folds), strict=False)
            (measured if row.name in MEASURED else predicted).update(estimates)
        if change.reward_limit and not change.forward_limit:
            predicted[REWARD] = Estimate.missing(change.reward_limit)
        return Reading(predicted, measured, state)

    def _metrics(self, quantity: str) -> tuple[str, ...]:
        """Return the metric names of a quantity, per token and per sequence: those that were asked for."""
        if quantity == "entropy":
            return "entropy/token", "entropy/sequence"
        if quantity == LENGTH_AND_REWARD:
            return ("delta_length/forward", REWARD) if self.per_sequence else ()
        pair = f"delta_h/{quantity}", f"delta_h/{quantity}_sequence"
        return pair if self.per_sequence or quantity == "cumulative_measured" else pair[:1]


def visited_entropy(ctx: StepContext) -> dict[str, Estimate]:
    """Return Σ h / Σ T, nats per token, and Σ h / N, nats per sequence, of the visited prefixes. A collective.

    For sequences that are no samples of the scored policy: h is exact at every prefix, but which ones are visited, and
    how often, the cut or penalised policy decides. So this is no H_tok or H_seq of either policy.
    """
    return estimates_over_units(
        VISITED,
        lambda sums: sums[..., 1:2] / sums[..., [2, 0]],  # of the number, entropies and lengths of sequences
        ctx.levels(),
        no_bar=ctx.limits.split_prompts,
        few=FEW_FOLDS,
    )
