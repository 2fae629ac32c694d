"""The first-order change of entropy by a step: each fold's entropy gradient X times an update, summed over folds.

A fold holds whole prompts.

    forward   Σ_k n_k X_k · δθ_(−k) / N     leave-fold-out: the update that the other folds alone would have made
    backward  Σ_k n_k X_k · δθ_before / N   the previous step's update, which is independent of this batch
    reuse     Σ_k n_k X_k · δθ / N          biased: X and δθ share their noise

Where each quantity is calculated, and which reasons make it nan:

    all of them         X: fold_gradients.py                          `reason`, from _entropy_gradient_reason:
                                                                      sampling_mismatch (of the host, or
                                                                      edited_within_step, padding_matters),
                                                                      split_prompts (or uneven_prompts_elsewhere),
                                                                      one_response, hooked, no_sampling_logps,
                                                                      sampler_too_far, no_tokens; from
                                                                      step/score_check.py: other_scores,
                                                                      not_drawn_by_policy
    entropy             totals_of_folds in fold_gradients.py          no others
    forward, its        _LeaveOneOutProducts in products.py           `forward_reason`, from _forward_reason: reused,
    splits, unclipped                                                 `no_folds` (engine/step_reasons.py), as one_fold;
                                                                      the optimizer's, from view_optimizer in
                                                                      optim/state.py: no_formula, not_in_optimizer,
                                                                      no_..._formula of its file
    backward            FoldProducts._add in products.py              `backward_reason`: first_step, step_not_measured,
                                                                      step_taken_again, or the previous step's reason
                                                                      (previous_update.py); reused
    reuse               FoldProducts._multiply in products.py         the optimizer has no formula
    change of length    statistic in fold_sums.py                     `forward_reason`
    change of reward,   reward_products in reward_gradient.py         `forward_reason`, and `reward_reason`, from
    delta_reward/…                                                    reward_gradient: other_loss, other_terms,
                                                                      no_rewards, no_others, relative_rewards,
                                                                      no_sampling_logps
    every error bar     _quantities_of_batch in fold_sums.py          fewer than MIN_FOLDS_STEP folds

All of them are nan if engine/verifier.py finds, after the step, that the optimizer did not follow its formula
(not_the_formula).

Example: a KL term in the loss is part of the loss's weights on log-probabilities, so in this table it affects only
`delta_reward/forward`. That is nan (other_loss, from _step_gradient_factor in reward_gradient.py), because the step's
gradient is no longer a multiple of the reward's, except at the reference policy, where the term's gradient is 0. The
same requirement makes two things outside this table nan: the split of `gns` (_split_reason in probes/gns.py), and
interventions that need Dr-GRPO's loss or its advantages (unavailable_reason in interventions/named.py).

Vectors hold this rank's entries, and a fold may have sequences on several ranks. Products are sums over entries, so
they are summed over ranks once, at the end.

The jackknife leaves out fold l. Then the updates δθ_(−k) of the other folds lose fold l too:
δθ_(−k,−l) − δθ_(−k) ≈ δθ_(−l) − δθ. With S = Σ_k n_k X_k, this changes the sum by

    Σ_{k≠l} n_k X_k · (δθ_(−l) − δθ)  =  S · (δθ_(−l) − δθ) − n_l X_l · (δθ_(−l) − δθ).

So S and one entropy gradient at a time are enough. A step holds the K fold gradients, the previous δθ, S and
some entries of one X. Small models also hold δθ. For others it is calculated piece by piece wherever it is multiplied,
and written over the previous one at the end. A step holds all X_k only if they are small, or if a probe multiplies them
with changes of the step.

Where the optimizer's step is smooth (`is_smooth` in optim/formula.py), δθ_(−l) − δθ is taken to be linear in
g_(−l) − g.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from rl_training.entropy.attribution import Attribution
from rl_training.entropy.data import ENTROPY, LENGTH, EntropyPrediction, EntropySettings
from rl_training.entropy.fold_gradients import entropy_losses, ratios_to_sampler, send_fold_gradients, totals_of_folds
from rl_training.entropy.fold_sums import with_quantities
from rl_training.entropy.previous_update import PreviousUpdate
from rl_training.entropy.products import FoldProducts
from rl_training.optim.leave_one_out import FoldMeans, LeaveOneOutUpdates
from rl_training.optim.updates import OptimizerPieces, StepUpdate, clip_factors, compute_update
from rl_training.parallel.fold_vectors import FoldVectors, Receiver, fold_dtype, handing_to
from rl_training.parallel.ranks import Ranks
from rl_training.parallel.sums import square_norm
from rl_training.parallel.vectors import num_bytes
from rl_training.statistics.kish import kish_size_of_sums, kish_sums
from rl_training.statistics.unavailable import Unavailable
from rl_training.step.batch import Batch
from rl_training.step.data import StepData
from rl_training.step.loss_weights import LossWeights
from rl_training.step.needs import Need
from rl_training.step.passes import Passes
from rl_training.step.reasons import NO_SAMPLING_LOGPS, NO_TOKENS, Reasons
from rl_training.step.residual import ResidualTest
from rl_training.step.score_check import ScoreCheck

MIN_ESS = 0.5  # as a share of the sequences; below it importance weights are worthless
TOO_FAR = Unavailable(
    "sampler_too_far",
    "the sampler is too far from this policy: the effective sample size is {ess:.2f} of the sequences, below {least}",
    fix="fewer stale steps, sampling in fp32 or shorter responses help",
)


@dataclass(frozen=True)
class EntropyPredictor:
    """Predicts the steps of one training. It keeps nothing of a step: `PreviousUpdate` does."""

    settings: EntropySettings
    attribution: Attribution
    passes: Passes
    device: str | None = None  # where the entropy gradients of folds are kept; None: on the parameters' device

    def predict(
        self, step: StepData, needs: Need, previous: PreviousUpdate, test: ResidualTest | None = None
    ) -> tuple[EntropyPrediction, StepUpdate | None]:
        """Predict the step's change of entropy to first order. Collective.

        Args:
            step: The step, before it is taken.
            needs: Which parts of the prediction probes need.
            previous: What earlier steps have left. It is only read.
            test: Receives the scores that the entropy gradient is made of.

        Returns:
            The prediction without δθ, and what δθ is made of, None if the optimizer has no formula. `previous.advance`
            takes both.
        """
        batch = step.batch
        ranks = self.passes.ranks
        layout = step.gradients.layout
        settings = self.settings
        labels = self.attribution.all_labels
        reason = _entropy_gradient_reason(batch, ranks, step.reasons)
        if reason:
            return self._without_entropy_gradient(reason, test), None
        ratios = ratios_to_sampler(batch, ranks)
        totals = totals_of_folds(batch, ranks, ratios)
        sums = totals.sum(dim=0).tolist()
        if not sums[LENGTH]:
            return self._without_entropy_gradient(NO_TOKENS, test), None
        step_update, leave_one_out = _updates_of(step, ranks)
        products = None
        if Need.ENTROPY_CHANGE in needs:
            sizes = batch.fold_sizes
            update_before = previous.update_before(step.number)
            products = FoldProducts(
                layout, sizes, self.attribution, step_update, leave_one_out, update_before, settings
            )
        score_check = ScoreCheck(batch, self.passes.policy, test)
        losses = entropy_losses(batch, ratios, sums[ENTROPY] / sums[LENGTH], settings)
        gradients = self._entropy_gradients(step, needs, losses, products, score_check)
        peak_bytes = previous.num_bytes + _num_bytes(step_update, products, gradients)
        seen = score_check.check(ranks, step.reasons)
        if seen:
            return EntropyPrediction(settings, labels, seen, is_seen_in_scores=True, peak_bytes=peak_bytes), step_update
        prediction = EntropyPrediction(
            settings,
            labels,
            forward_reason=_forward_reason(step),
            backward_reason=previous.reason(step.number) or step.reasons.reused,
            totals=totals,
            entropy_gradients=gradients[0] if Need.FOLD_ENTROPY_GRADIENTS in needs else None,
            leave_one_out=leave_one_out,
            peak_bytes=peak_bytes,
        )
        if products is not None:
            prediction = with_quantities(prediction, step, ranks, previous.errors, products)
        return prediction, step_update

    def _without_entropy_gradient(self, reason: Unavailable, test: ResidualTest | None) -> EntropyPrediction:
        """Return the prediction of a step that has no entropy gradient, for this reason."""
        if test is not None:
            test.leave_untested(reason)
        return EntropyPrediction(self.settings, self.attribution.all_labels, reason)

    def _entropy_gradients(
        self,
        step: StepData,
        needs: Need,
        losses: Sequence[LossWeights],
        products: FoldProducts | None,
        score_check: ScoreCheck,
    ) -> list[FoldVectors]:
        """Calculate X of each fold, multiply it with `products` if given, and return what is kept of it. Collective.

        Args:
            step: The step.
            needs: What probes need.
            losses: Whose gradients are X, per token and perhaps per sequence.
            products: What X is multiplied with.
            score_check: Receives all scores that X is calculated from.

        Returns:
            X per token and per sequence of small models, else X per token if `needs` asks for it, or nothing.
        """
        batch = step.batch
        layout = step.gradients.layout
        # Small models: finish all backwards first; interleaving them with products thrashes the CPU cache.
        num_kept = len(losses) if layout.is_small else int(Need.FOLD_ENTROPY_GRADIENTS in needs)
        gradients = [FoldVectors(layout, batch.num_folds, fold_dtype(layout), self.device) for _ in range(num_kept)]
        receiver_of = functools.partial(_receiver_of, gradients, None if layout.is_small else products)
        send_fold_gradients(batch, self.passes, losses, self.settings, score_check, receiver_of)
        for x in gradients:
            x.complete()
        if products is not None and layout.is_small:
            _multiply(gradients, products, range(batch.num_folds))
        return gradients


def _entropy_gradient_reason(batch: Batch, ranks: Ranks, reasons: Reasons) -> Unavailable | None:
    """Return the reason why the step can have no X, or None. Collective if the rollout has sampling_logps.

    X needs all responses to each prompt. They must be sampled from the policy, or from a sampler whose
    log-probabilities are known.
    """
    log_ratios = batch.log_ratios()
    reason = reasons.sampling_mismatch or reasons.no_baseline or reasons.hooked
    if reason or log_ratios is None:
        return reason or NO_SAMPLING_LOGPS
    if batch.rollout.sampling_logps is None:
        return None
    total, total_of_squares = ranks.reduce(kish_sums(log_ratios.sum(dim=1).exp())).tolist()
    ess = kish_size_of_sums(total, total_of_squares) / batch.num_sequences
    return None if ess >= MIN_ESS else TOO_FAR.formatted(ess=ess, least=MIN_ESS)


def _forward_reason(step: StepData) -> Unavailable | None:
    """Return the reason why no fold can be left out of the step, or None."""
    reasons = step.reasons
    return step.optimizer.reason or reasons.no_folds or reasons.reused


def _updates_of(step: StepData, ranks: Ranks) -> tuple[StepUpdate | None, LeaveOneOutUpdates | None]:
    """Return the update of the step and the updates without each fold, by the optimizer's formula. Collective.

    Each is None if it is not available.
    """
    gradients = step.gradients
    layout = gradients.layout
    max_grad_norm = step.optimizer.max_grad_norm
    if step.optimizer.states is None:
        return None, None
    mean = layout.vector(gradients.mean.values()) if layout.is_small else gradients.mean  # else joined per piece
    pieces = OptimizerPieces(layout, step.weights, step.optimizer.states)
    square = torch.zeros((), dtype=torch.float64, device=layout.device)
    for span in pieces.spans:
        square += square_norm(span.of(mean))
    step_update = StepUpdate(pieces, mean, clip=float(clip_factors(ranks.reduce(square), max_grad_norm)))
    if not layout.is_large and not step.optimizer.rounding_reason:
        step_update = dataclasses.replace(step_update, vector=compute_update(layout, step_update))
    if gradients.by_fold is None or _forward_reason(step):
        return step_update, None
    folds = FoldMeans.of(mean, gradients.by_fold, step.batch.fold_sizes)
    return step_update, LeaveOneOutUpdates(pieces, folds, max_grad_norm, ranks, step_update)


def _receiver_of(
    gradients: Sequence[FoldVectors], products: FoldProducts | None, denominator: int, folds: range
) -> Receiver:
    """Return what takes the X of these folds: their vectors if they are kept, and what multiplies them."""
    receivers = [gradients[denominator].receiver(folds)] if denominator < len(gradients) else []
    if products is not None:
        receivers.append(products.receiver(denominator, folds))
    return handing_to(receivers, len(folds))


def _multiply(gradients: Sequence[FoldVectors], products: FoldProducts, folds: range) -> None:
    """Multiply the X of all folds, which are kept, for each denominator."""
    for denominator, vectors in enumerate(gradients):
        receiver = products.receiver(denominator, folds)
        for bucket, x in enumerate(vectors.of_folds(folds)):
            receiver.take(bucket, 0, x)


def _num_bytes(step_update: StepUpdate | None, products: FoldProducts | None, gradients: Sequence[FoldVectors]) -> int:
    """Return the size of the vectors that a prediction holds beside the previous update."""
    vectors = [] if products is None else [*products.gradient_sums]
    if step_update is not None and step_update.vector is not None:
        vectors.append(step_update.vector)
    return sum(map(num_bytes, vectors)) + sum(by_fold.num_bytes for by_fold in gradients)
