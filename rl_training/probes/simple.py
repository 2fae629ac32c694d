"""The simple δH probe: how this optimizer step changes the policy's entropy to first order, why, and how sure that is.

    δH = X · δθ        X = ∂H, the entropy gradient (entropy/weights.py); δθ, the optimizer's own update (optim/)

An X and a δθ from the same batch share their noise, so that their plain product always claims that entropy falls. The
probe therefore reports (formulas: entropy/prediction.py)

    forward      the change on NEW prompts: X of each fold times the update of the other folds
    backward     X from the next step's fresh rollouts times this update: independent by construction
    reuse        the plain product, which is biased: a diagnostic only
    trapezoid    ½ (forward + backward), exact to second order: compare this with the measured change

All of them are in nats per token. With `per_sequence` they are also in nats per sequence, and the first-order changes
of length and reward are added (entropy/reward_gradient.py). `forward` is split by cause (momentum, this step's
gradient, weight decay), by layer and by kind of module. It is also given without gradient clipping.

Error bars average the variances of single steps over about three (statistics/running_variance.py). Sums over steps use
each batch's own variance, except for the last batch's part in the last step.
"""

from __future__ import annotations

import dataclasses

import torch

from rl_training.engine.context import StepContext
from rl_training.engine.probe import Probe, Reading
from rl_training.entropy.data import (
    DENOMINATORS,
    ENTROPY,
    LENGTH,
    LENGTH_CHANGE,
    REWARD_CHANGE,
    SEQUENCES,
    EntropyPrediction,
    EntropySettings,
    quantity_names,
)
from rl_training.errors import UserError
from rl_training.options import check_flag, check_num_folds, check_whole, half_by_measured_step
from rl_training.probes.trapezoid import SUMS, TrapezoidSum
from rl_training.statistics.estimate import Estimate
from rl_training.statistics.jackknife import FEW_FOLDS, estimates_over_units
from rl_training.statistics.unavailable import Unavailable
from rl_training.step.needs import Need

REWARD, TRUNCATED = "delta_reward/forward", "delta_length/truncated"
MEASURED = ("entropy", "backward")  # quantities that hold whatever the optimizer does
VISITED = ("entropy/visited_prefixes", "entropy/visited_prefixes_sequence")


class SimpleEntropyProbe(Probe):
    """Measures the first-order change of the policy's entropy at each optimizer step. See the module's docstring.

    Args:
        responses_per_prompt: Responses to each prompt that the entropy gradient uses. More reduce the noise and cost
            more time.
        num_folds: Folds of whole prompts, over all ranks. None: 8 to 15 if that needs no extra pass. More folds than
            microbatches cost another forward and backward pass.
        per_sequence: Also predict nats per sequence (`…_sequence`), length and reward, for a second backward. Error
            bars per token then include the noise of the entropy level.
        offload: Keep the folds' gradients in host memory.
        fold_dtype: Dtype of the folds' gradients: "float32", "bfloat16" for half the memory, or "int8" for a quarter,
            with a scale per block of entries. "auto": int8 from 2^25 trained entries per process on, else float32.
        compile: Fuse the passes over vectors with torch.compile. None: on a GPU, from 2^25 trained entries per process
            on. Estimates stay the same up to rounding. Without a working compiler, passes run uncompiled.
        error_decay: Weight of an optimizer step, measured or not, relative to the next one in the average of single
            steps' variances. None: a half per measured step, which averages about three.
            0: the error bar of this batch alone, which probes.jsonl always has as `stderr_of_batch`.
        every: Measure each `every`-th step.
        steps: Of every `every` steps, measure the first `steps`. backward and trapezoid need two. Sums contain the
            measured change over the steps in between, and say so.
        unclipped: Also predict what the step would do without gradient clipping (`delta_h/forward_unclipped`), which
            takes the optimizer's step twice more for each fold of a step that clips.
        keep_gathered: Under FSDP2, keep all weights gathered while the entropy gradients are computed: they are sent
            once, not twice per fold, for the memory of a whole model on each process. No effect elsewhere.
    """

    name = "simple"
    needs = Need.ENTROPY_CHANGE
    takes_num_folds = True

    def __init__(
        self,
        responses_per_prompt: int = 1,
        num_folds: int | None = None,
        per_sequence: bool = False,
        offload: bool = False,
        fold_dtype: str = "auto",
        compile: bool | None = None,
        error_decay: float | None = None,
        every: int = 1,
        steps: int = 1,
        unclipped: bool = False,
        keep_gathered: bool = False,
    ) -> None:
        super().__init__(every)
        check_whole("simple: steps", steps, 1, " (measure so many neighbouring steps of each `every`)")
        if steps > every:
            raise UserError(f"simple: steps={steps} must be at most every={every}")
        self.error_decay = half_by_measured_step(every / steps) if error_decay is None else error_decay
        try:
            self.entropy = EntropySettings(
                responses_per_prompt, per_sequence, self.error_decay, unclipped, keep_gathered
            )
        except ValueError as error:
            raise UserError(f"simple: {error}") from error
        check_num_folds("simple", num_folds)
        check_flag("simple: offload", offload)
        if compile is not None:
            check_flag("simple: compile", compile)
        if fold_dtype not in ("auto", "float32", "bfloat16", "int8"):
            raise UserError(f"simple: fold_dtype={fold_dtype} must be auto, float32, bfloat16 or int8")
        self.responses_per_prompt = responses_per_prompt
        self.num_folds = num_folds
        self.per_sequence = per_sequence
        self.offload = offload
        self.fold_dtype = None if fold_dtype == "auto" else getattr(torch, fold_dtype)
        self.compile = compile
        self.steps = steps
        self.unclipped = unclipped
        self.keep_gathered = keep_gathered
        self.needs = type(self).needs | (Need.TERMS_CHECK if per_sequence else Need.NOTHING)

    def measures_at(self, number: int) -> bool:
        return (number - 1) % self.every < self.steps

    @property
    def interval(self) -> str:
        if self.steps == self.every:
            return ""
        return super().interval if self.steps == 1 else f" {self.steps} of every {self.every} steps"

    def init(self) -> TrapezoidSum:
        return TrapezoidSum.empty(len(DENOMINATORS))

    def measure(self, ctx: StepContext, state: TrapezoidSum) -> Reading:
        prediction = ctx.prediction
        if prediction.reason:
            reading = self._without_entropy_gradient(ctx, prediction, state, prediction.reason)
        else:
            reading = self._reading(ctx, prediction, state)
        if not self.per_sequence:
            return reading
        return dataclasses.replace(reading, measured={**reading.measured, TRUNCATED: ctx.truncated_share()})

    def _without_entropy_gradient(
        self, ctx: StepContext, prediction: EntropyPrediction, state: TrapezoidSum, reason: Unavailable
    ) -> Reading:
        missing = Estimate.missing(reason)
        names = (*quantity_names(prediction.labels), *SUMS)
        predicted = {metric: missing for name in names if name not in MEASURED for metric in self._metrics(name)}
        measured = {metric: missing for name in MEASURED for metric in self._metrics(name)}
        if ctx.reasons.sampling_mismatch:
            measured |= visited_entropy(ctx)
        return Reading(predicted, measured, state)

    def _reading(self, ctx: StepContext, prediction: EntropyPrediction, state: TrapezoidSum) -> Reading:
        half_step_stderr = prediction.half_step_stderr
        assert half_step_stderr is not None
        level, forward, backward = (prediction.quantities[name] for name in ("entropy", "forward", "backward"))
        state, closed = state.add(ctx.step.number, level, forward, backward, half_step_stderr)
        predicted = dict[str, Estimate]()
        measured = dict[str, Estimate]()
        copied_groups = ctx.step.batch.copies.reason
        few = copied_groups and copied_groups.prefixed("no error bar")
        for quantity in (*prediction.quantities.values(), *closed):
            estimates = quantity.estimates(ctx.step.batch.num_folds, few)
            by_metric = zip(self._metrics(quantity.name), estimates, strict=False)
            (measured if quantity.name in MEASURED else predicted).update(by_metric)
        if prediction.reward_reason and not prediction.forward_reason:
            predicted[REWARD] = Estimate.missing(prediction.reward_reason)
        return Reading(predicted, measured, state)

    def _metrics(self, quantity: str) -> tuple[str, ...]:
        """Return the names of a quantity's metrics, as many of its numbers as are reported."""
        if quantity == "entropy":
            return "entropy/token", "entropy/sequence"
        if quantity == "forward_unclipped" and not self.unclipped:
            return ()
        if quantity in (LENGTH_CHANGE, REWARD_CHANGE):
            metric = "delta_length/forward" if quantity == LENGTH_CHANGE else REWARD
            return (metric,) if self.per_sequence else ()
        pair = f"delta_h/{quantity}", f"delta_h/{quantity}_sequence"
        return pair if self.per_sequence or quantity == "cumulative_measured" else pair[:1]


def visited_entropy(ctx: StepContext) -> dict[str, Estimate]:
    """Return Σ h / Σ T, nats per token, and Σ h / N, nats per sequence, over the visited prefixes. Collective.

    This is for sequences that are not samples of the scored policy. Its h is exact at every prefix, but the truncated
    or penalised policy decides which prefixes are visited how often. So this is neither policy's H_tok or H_seq.
    """
    return estimates_over_units(
        VISITED,
        lambda totals: totals[..., [ENTROPY]] / totals[..., [LENGTH, SEQUENCES]],
        ctx.totals(),
        no_bar=ctx.reasons.split_prompts,
        few=FEW_FOLDS,
    )
