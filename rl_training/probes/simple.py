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

Cost: X comes from a forward and a backward of its own over `responses_per_prompt` responses of EVERY prompt (baselines
use all G). Memory: 2K + 2 parameter-size fp32 rows for K folds on this rank.

The error bar of `forward` is the delete-one-fold jackknife with δθ_(−k,−l) taken to first order,
δθ_(−k) + δθ_(−l) − δθ, and, for folds k on another rank than l, without the effect of l on their δθ. The error bars of
its parts leave that effect out altogether.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from rl_training.mathematics.calibration import Calibration
from rl_training.mathematics.entropy import Estimator
from rl_training.mathematics.estimate import MIN_FOLDS_FOR_STDERR, Estimate
from rl_training.mathematics.jackknife import jackknife_stderr
from rl_training.mathematics.trapezoid import BatchTerms, TrapezoidSum
from rl_training.mathematics.vectors import FlatVectors
from rl_training.probes.base import Need, Probe
from rl_training.step.causes import Splits
from rl_training.step.entropy_gradients import importance_ratios
from rl_training.step.fold_sums import PRODUCTS, FoldSums, statistic
from rl_training.step.ground_truth import GroundTruth
from rl_training.step.responses import top_responses
from rl_training.step.types import StepContext
from rl_training.step.updates import FIRST_FOLD, PREVIOUS, WHOLE

SUMS = ("trapezoid", "cumulative_predicted", "cumulative_measured")
MIN_ESS = 0.5  # share of the sequences below which importance weights are worthless
HOLE_IN_SUM = "a step before this one has no trapezoid estimate, and a sum with a hole is no sum"
HALF = "it needs this step's backward and the last one's forward, and one of them is not finite or was not asked for"
REUSED = (
    "an earlier step has learned from these responses (num_iterations > 1): the optimizer's momentum holds their "
    "noise, and leaving a fold out of this step's gradient does not remove it"
)
NO_ERROR = {
    "reuse": "no error bar: the same-batch product is biased",
    "layer": "no error bar: the splits by layer and kind have none; that in momentum, gradient and decay has",
    "kind": "no error bar: the splits by layer and kind have none; that in momentum, gradient and decay has",
}


class SimpleEntropyProbe(Probe):
    """Measures the first-order change of the policy's entropy at each optimizer step. See the module's docstring.

    estimator             "rb" (default) or "score": how X is estimated, see entropy.py
    responses_per_prompt  responses of every prompt that X is computed from; more (up to G) cost more, with less noise
    num_folds             folds of whole prompts on each rank, K; None: one per microbatch, or one per rank when there
                          are 8 ranks or more. More than microbatches costs another forward and backward of training
    per_sequence          predict in nats per sequence too, `…_sequence`: a second backward
    own_prompts           measure `delta_h/own_prompts` too: another backward, and half as many optimizer steps again
    top_responses         name so many responses of the main process that push entropy down most in each step, with
                          prompt, reward and advantage, in probes.jsonl: responses.py. Two forwards over all responses
    offload               keep the parameter-size rows in host memory
    validate_every        measure the true change on a buffer of its own at every so many steps, and hold `forward`
                          against it: ground_truth.py, calibration.py; 0 for never. It costs two to three forwards
    validate_sequences    responses in that buffer, over all ranks
    seed                  of that buffer
    every                 measure each `every`-th step; backward, trapezoid and the sums need every=1
    """

    name = "simple"
    needs = Need.FOLD_GRADIENTS

    def __init__(
        self,
        estimator: Estimator = "rb",
        responses_per_prompt: int = 1,
        num_folds: int | None = None,
        per_sequence: bool = False,
        own_prompts: bool = False,
        top_responses: int = 0,
        offload: bool = False,
        validate_every: int = 0,
        validate_sequences: int = 512,
        seed: int = 0,
        every: int = 1,
    ) -> None:
        super().__init__(every)
        if estimator not in ("rb", "score"):
            raise ValueError(f"simple: unknown estimator {estimator!r}: choose 'rb' or 'score'")
        if responses_per_prompt < 1:
            raise ValueError(f"simple: responses_per_prompt={responses_per_prompt} must be at least 1")
        if num_folds is not None and num_folds < 1:
            raise ValueError(f"simple: num_folds={num_folds} must be at least 1, or null for one per microbatch")
        if type(per_sequence) is not bool:
            raise ValueError(f"simple: per_sequence={per_sequence} must be true or false")
        self.estimator: Estimator = estimator
        self.responses_per_prompt = responses_per_prompt
        self.num_folds = num_folds
        self.per_sequence = per_sequence
        self.own_prompts = own_prompts
        self.top_responses = top_responses
        self.offload = offload
        self._truth = GroundTruth(validate_every, validate_sequences, seed) if validate_every else None
        self._calibration = Calibration()
        self._updates: FlatVectors | None = None
        self._update_row: Tensor | None = None  # row PREVIOUS: the δθ of `_update_step`
        self._update_step: int | None = None
        self._sum = TrapezoidSum()
        self._known_splits: Splits | None = None
        self._answers: dict[str, Estimate] = {}

    def on_pre_optimizer_step(self, ctx: StepContext) -> None:
        if self._truth is not None:
            self._truth.draw(ctx)
        ratios = importance_ratios(ctx)
        reason = _why_no_entropy_gradient(ctx, ratios)
        if reason:
            quantities = ("entropy", *PRODUCTS, *self._splits(ctx).labels, *SUMS)
            self._answers = {metric: Estimate.missing(reason) for q in quantities for metric in self._metrics(q)}
            names = [f"delta_h/response/{rank + 1}" for rank in range(self.top_responses)]
            self._answers |= {name: Estimate.missing(reason) for name in names}
            return
        assert ratios is not None
        updates = self._buffer(ctx, int(ctx.fold.max()) + 1)
        sums = FoldSums(
            ctx,
            ratios,
            updates,
            self._splits(ctx),
            estimator=self.estimator,
            responses_per_prompt=self.responses_per_prompt,
            per_sequence=self.per_sequence,
            own_prompts=self.own_prompts,
            with_halves=self.top_responses > 0,
        )
        values = statistic(sums.total).cpu()  # a few numbers, which are summed over steps and go into the checkpoint
        stderrs = jackknife_stderr(statistic, sums.total, sums.without, ctx.reduce).cpu()
        if sums.num_folds < MIN_FOLDS_FOR_STDERR:
            stderrs = torch.full_like(stderrs, torch.nan)
        self._answers = self._estimates(ctx, values, stderrs, sums.num_folds)
        if sums.halves is not None:
            reason = _why_no_forward(ctx, num_folds=len(ctx.fold.unique()))
            self._answers |= top_responses(ctx, updates, sums.halves, self.top_responses, reason)
        self._keep_update(ctx, updates)

    def on_optimizer_step(self, ctx: StepContext) -> None:
        if ctx.optimizer.states is None and self._update_step == ctx.step:
            assert self._updates is not None
            for name, param in ctx.parameters.items():
                row = self._updates.view(name)[PREVIOUS]  # the old parameters, see _keep_update
                row.copy_(param.detach().to(row.device) - row)
        if self._truth is not None and self._truth.measures_at(ctx.step):
            self._answers |= self._truth.measure(ctx)
            self._calibration.add(self._answers["delta_h/forward"], self._answers["delta_h/true"])
            calibration = self._calibration.estimates()
            self._answers |= {f"calibration/{name}": estimate for name, estimate in calibration.items()}

    def measure(self, ctx: StepContext) -> dict[str, Estimate]:
        return self._answers

    @property
    def num_buffer_bytes(self) -> int:
        return self._updates.num_bytes if self._updates is not None else 0

    def state_dict(self) -> dict[str, Tensor]:
        state = {f"sum.{name}": tensor for name, tensor in self._sum.state_dict().items()}
        state |= self._calibration.state_dict()
        if self._update_row is not None and self._update_step is not None:
            state |= {"update": self._update_row, "update_step": torch.tensor(self._update_step)}
        return state

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self._sum.load_state_dict({k.removeprefix("sum."): v for k, v in state.items() if k.startswith("sum.")})
        if "pairs" in state:
            self._calibration.load_state_dict(state)
        self._update_row = state.get("update")
        self._update_step = int(state["update_step"]) if "update_step" in state else None

    def _splits(self, ctx: StepContext) -> Splits:
        if self._known_splits is None:
            self._known_splits = Splits(list(ctx.parameters))
        return self._known_splits

    def _buffer(self, ctx: StepContext, num_folds: int) -> FlatVectors:
        """Returns the rows for the updates of this step's folds, its row PREVIOUS nan unless it is the last step's."""
        num_rows = FIRST_FOLD + num_folds
        if self._updates is None or self._updates.num_rows != num_rows:
            self._updates = FlatVectors(ctx.parameters, num_rows, "cpu" if self.offload else None)
        previous = self._updates.matrix[PREVIOUS]
        if self._update_row is None or self._update_step != ctx.step - 1:
            previous.fill_(torch.nan)
        else:
            previous.copy_(self._update_row)
        self._update_row = previous
        return self._updates

    def _estimates(self, ctx: StepContext, values: Tensor, stderrs: Tensor, num_folds: int) -> dict[str, Estimate]:
        """Returns every metric of this step, from `statistic`'s values and their errors."""
        quantities = ("entropy", *PRODUCTS, *self._splits(ctx).labels)
        gap, no_forward = self._why_no_backward(ctx), _why_no_forward(ctx, num_folds)
        reasons = dict.fromkeys(quantities, no_forward) | {
            "entropy": "",
            "backward": gap,
            "reuse": ctx.optimizer.reason,
        }
        reasons["own_prompts"] = _why_no_own_prompts(ctx, self.responses_per_prompt)
        value_of = dict(zip(quantities, values[:-1], strict=True))
        stderr_of = dict(zip(quantities, stderrs[:-1], strict=True))
        for quantity, reason in reasons.items():
            if reason:
                value_of[quantity] = stderr_of[quantity] = torch.full((2,), torch.nan)
        closed = self._sum.add(
            ctx.step,
            BatchTerms(
                level=value_of["entropy"],
                level_stderr=stderr_of["entropy"],
                forward=value_of["forward"],
                forward_stderr=stderr_of["forward"],
                backward=value_of["backward"],
                backward_stderr=stderr_of["backward"],
                half_step_stderr=stderrs[-1],
            ),
        )
        value_of |= dict(zip(SUMS, (closed.trapezoid, closed.predicted, closed.measured), strict=True))
        stderr_of |= dict(
            zip(SUMS, (closed.trapezoid_stderr, closed.predicted_stderr, closed.measured_stderr), strict=True)
        )
        reasons |= dict(zip(SUMS, (gap or no_forward or HALF, HOLE_IN_SUM, ""), strict=True))
        looks_back = ("backward", *SUMS)
        return {
            metric: _estimate(
                value,
                stderr,
                num_folds,
                reasons[quantity],
                NO_ERROR.get(quantity.split("/")[0], ""),
                ctx.step - 1 if quantity in looks_back else ctx.step,
            )
            for quantity in value_of
            for metric, value, stderr in zip(
                self._metrics(quantity), value_of[quantity].tolist(), stderr_of[quantity].tolist(), strict=False
            )
        }

    def _metrics(self, quantity: str) -> tuple[str, ...]:
        """Returns the metric names of a quantity, per token and per sequence: those that were asked for."""
        if quantity == "own_prompts" and not self.own_prompts:
            return ()
        if quantity == "entropy":
            return "entropy/token", "entropy/sequence"
        pair = f"delta_h/{quantity}", f"delta_h/{quantity}_sequence"
        return pair if self.per_sequence or quantity == "cumulative_measured" else pair[:1]

    def _why_no_backward(self, ctx: StepContext) -> str:
        if self._update_step is None:
            return "the first measured step: there is no update before it to look back on"
        if self._update_step != ctx.step - 1:
            return f"step {ctx.step - 1} was not measured, so its update is not known; backward needs every=1"
        return REUSED if ctx.reused else ""

    def _keep_update(self, ctx: StepContext, updates: FlatVectors) -> None:
        """Keeps this step's δθ for `backward`; without a formula, the old parameters until the new ones are there."""
        if ctx.optimizer.states is not None:
            updates.matrix[PREVIOUS] = updates.matrix[WHOLE]
        else:
            for name, param in ctx.parameters.items():
                updates.view(name)[PREVIOUS] = param.detach()
        self._update_step = ctx.step


def _estimate(value: float, stderr: float, num_folds: int, reason: str, no_error: str, about_step: int) -> Estimate:
    """Returns the estimate, with `reason` if its value is nan, or the reason why only its error is."""
    if math.isnan(value):
        return Estimate(value, math.nan, num_folds, reason or "the gradient or the update is not finite", about_step)
    if no_error:
        return Estimate(value, math.nan, num_folds, no_error, about_step)
    if num_folds < MIN_FOLDS_FOR_STDERR:
        no_error = f"no error bar: it needs {MIN_FOLDS_FOR_STDERR} folds of whole prompts, the step has {num_folds}"
    return Estimate(value, stderr, num_folds, no_error, about_step)


def _why_no_entropy_gradient(ctx: StepContext, ratios: Tensor | None) -> str:
    if not ctx.complete_prompts:
        return (
            "the responses of a prompt are spread over several optimizer steps: "
            "use DrGRPOTrainer, or attach(..., whole_prompts=True)"
        )
    if ratios is None:
        return "an off-policy step whose rollout has no log-probabilities of its sampling: there are no weights for it"
    if ctx.rollout.on_policy:
        return ""
    sums = ctx.reduce(torch.stack([ratios.sum(), ratios.square().sum(), ratios.new_tensor(float(len(ratios)))]))
    ess = float(sums[0] ** 2 / sums[1] / sums[2])
    if not ess >= MIN_ESS:
        return f"off-policy: the effective sample size is {ess:.2f} of the sequences, below {MIN_ESS}"
    return ""


def _why_no_forward(ctx: StepContext, num_folds: int) -> str:
    if ctx.optimizer.states is None:
        return ctx.optimizer.reason
    if not ctx.whole_prompts:
        return (
            "the microbatches mix prompts, so no fold of whole prompts can be left out: "
            "use DrGRPOTrainer, or attach(..., whole_prompts=True)"
        )
    if num_folds < 2:
        return "one fold in all: nothing is left when it is left out; use smaller microbatches, or a larger num_folds"
    return REUSED if ctx.reused else ""


def _why_no_own_prompts(ctx: StepContext, responses_per_prompt: int) -> str:
    if responses_per_prompt >= ctx.responses_per_prompt:
        return "every response is in the entropy gradient, none is left for the update: lower responses_per_prompt"
    return _why_no_forward(ctx, num_folds=2)
