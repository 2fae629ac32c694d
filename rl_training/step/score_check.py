"""Check that the probes' forward pass gives a step's responses the same scores as training's, with the same weights.

What probes score describes the trained policy only if this holds. Another temperature, another mask, a disabled
adapter, or rotary tables that depend on the longest row of a batch all show up in the scores. The check compares the
very rows and batches that an entropy gradient is made of, so it needs no further forward pass. If they differ by
more than rounding, some rows are scored twice more: with and without what a forward pass draws and rounds (dropout,
autocast, TF32, noise on embeddings, jitter of a router). If weights are below fp32, they are scored once more with
padding. Differences of that size may be in training's scores, too. If dropout makes them, it must make them in both
directions: the mean difference with its sign is held against its error over rows.

If they do not differ, the same scores show whether the policy drew the responses (residual.py). Three tolerances thus
bear on which policy is scored, sampled and trained:

    TOLERANCE            how far scores of probes may be from training's own, of the same rows: other_scores
    SAMPLER_TOLERANCE    how far the sampler may be from the scored policy, as a temperature (residual.py):
                         not_drawn_by_policy
    SAME_SCORES          how far two passes of one policy may be from each other (policy/precision.py): beyond it,
                         padding_matters, engine/terms_check.py compares no gradients, and TRL's old log-probabilities
                         are not taken for the policy's
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from rl_training.parallel.ranks import Ranks
from rl_training.policy.dropout import draws_noise, has_dropout
from rl_training.policy.policy import Policy, split_rows
from rl_training.policy.rng import preserve_rng, seed_torch
from rl_training.policy.rollout import response_index
from rl_training.policy.rotary import depends_on_longest_row
from rl_training.policy.scores import Scores
from rl_training.statistics.estimate import Estimate
from rl_training.statistics.unavailable import Unavailable
from rl_training.step.batch import Batch
from rl_training.step.reasons import Reasons
from rl_training.step.residual import ResidualTest

TOLERANCE = 0.002  # nats per token, for the mean difference
TOLERANCE_ROUNDED = 0.05  # the same if training rounds
NOISE_FACTOR = 3.0  # allowed in addition: this many times the mean difference that noise makes
ROWS = 8  # per rank, scored again to measure the noise
SHIFT_ROWS = 32  # per rank, scored again to tell dropout from another policy
SHIFT_CHANCE = 1e-6  # probability that dropout alone makes a larger mean difference than is allowed
SEED = 24  # for what these passes draw; any seed but training's
ROTARY_CAUSE = (
    "the model's rotary tables depend on the longest row of a batch (rope_type dynamic or longrope), and probes have "
    "other batches: keep prompts and responses within its original_max_position_embeddings, or use another rope_type"
)
LOOP_CAUSE = (
    "the loss comes from a policy with another temperature, another mask, or an adapter merged or switched off. Keep "
    "the temperature that probes were given, and compute the loss from a plain forward pass of the whole model"
)
OTHER_SCORES = Unavailable(
    "other_scores",
    "{cause} (training's {what} differ by {difference:.2g} nats per token from those that probes calculate with the "
    "same weights at temperature={temperature:g}; rounding and dropout explain at most {tolerance:.2g})",
)
RANDOM_PASSES = Unavailable(
    "random_passes",
    "the probes' passes are training's, with dropout or another noise of their own, and the sampler has none",
)


class ScoreCheck:
    """Compares the probes' scores of a step's rows with training's own scores of the same rows.

    Args:
        batch: The step's sequences.
        policy: The policy that probes score.
        test: Tests the same scores, unless they differ from training's. None: who drew the responses is not tested.
    """

    def __init__(self, batch: Batch, policy: Policy, test: ResidualTest | None = None) -> None:
        self._batch = batch
        self._policy = policy
        self._test = test
        self._is_sampler = test is not None and batch.rollout.sampling_logps is not None
        self._log_ratios = _known_log_ratios(batch) if self._is_sampler else None
        # Σ |difference| of log-probabilities, the same of entropies, and the number of tokens.
        self._sums = torch.zeros(3, dtype=torch.float64, device=batch.fold.device)

    @property
    def is_tested(self) -> bool:
        """Whether the same scores test the responses, which takes varentropies."""
        return self._test is not None

    def compare(self, rows: Tensor, fresh: Scores) -> None:
        """Compare scores of some rows on this rank, computed as training computes them."""
        self._sums += _differences(fresh, self._batch.scores, rows)
        if self._test is not None:
            of_rows = None if self._log_ratios is None else self._log_ratios[rows]
            self._test.add(rows, fresh, of_rows, self._batch.rollout.untested)

    def score_and_compare(self, rows: Tensor) -> None:
        """Score a few of these rows just for this check, if no entropy gradient is made of them.

        Takes all of them if a row's scores depend on its batch. Collective if weights are sharded.
        """
        rows = rows if depends_on_longest_row(self._policy.model) else rows[:ROWS]
        batches = split_rows(rows, max(map(len, self._batch.microbatch_rows)))
        scorer = self._policy.scorer
        rollout = self._batch.rollout
        scored = self._policy.run_passes(
            batches, lambda part: scorer.score(rollout, part, graph=False, varentropy=self.is_tested)
        )
        for part, fresh in zip(batches, scored, strict=True):
            self.compare(part, fresh)

    def check(self, ranks: Ranks, reasons: Reasons) -> Unavailable | None:
        """Return the reason why scores are not training's, or the policy did not draw the tokens, or None. Collective.

        The second is tested only if there is no first.

        Args:
            ranks: The ranks that train together.
            reasons: What else cannot be measured at the step.
        """
        differing = self.difference_reason(ranks)
        if self._test is None:
            return differing
        if differing:
            self._test.leave_untested(differing)
            return differing
        missing = reasons.reused or (RANDOM_PASSES if draws_noise(self._policy.model) else None)
        return self._test.decide(ranks, missing, self._is_sampler)

    def difference_reason(self, ranks: Ranks) -> Unavailable | None:
        """Return the reason why the step's scores on all ranks are not training's, or None. Collective."""
        difference = _means(ranks.reduce(self._sums))
        tolerance = torch.full((2,), TOLERANCE, dtype=torch.float64)
        if bool((difference <= tolerance).all()):
            return None
        if self._policy.scorer.training_rounding:
            tolerance += TOLERANCE_ROUNDED - TOLERANCE
        if bool((difference > tolerance).any()):
            noise = NOISE_FACTOR * torch.stack([_means(ranks.reduce(sums)) for sums in self._noise_sums()]).amax(dim=0)
            if has_dropout(self._policy.model) and bool((difference <= tolerance + noise).all()):
                difference, noise = self._shift(ranks)
            tolerance += noise
        differing = (difference > tolerance).tolist()
        if not any(differing):
            return None
        first = differing.index(True)
        cause = ROTARY_CAUSE if depends_on_longest_row(self._policy.model) else LOOP_CAUSE
        return OTHER_SCORES.formatted(
            cause=cause,
            what=("log-probabilities", "entropies")[first],
            difference=float(difference[first]),
            temperature=self._policy.scorer.temperature,
            tolerance=float(tolerance[first]),
        )

    def _noise_sums(self) -> list[Tensor]:
        """Return how much random draws and rounding change some rows: one tensor like `_sums` for each cause."""
        rows = self._rows_for_noise()
        scorer = self._policy.scorer
        rollout = self._batch.rollout
        with self._policy.measuring():
            exact = scorer.score(rollout, rows, graph=False)
        with preserve_rng(self._sums.device):
            seed_torch(SEED, device=self._sums.device)
            noisy = scorer.score(rollout, rows, graph=False)
        others = [noisy]
        indices = torch.arange(len(rows), device=rows.device)
        if scorer.rounding_reason:  # the measurement is then rounded too, differently at another position in the row
            others.append(scorer.score_padded(rollout, rows))
        return [_differences(exact, other, indices) for other in others]

    def _shift(self, ranks: Ranks) -> tuple[Tensor, Tensor]:
        """Return the absolute mean SIGNED difference, and the largest that dropout explains, (2,) each. Collective.

        Dropout masks of two passes are drawn alike, so they move scores by the same on average, and the mean difference
        over independent rows is 0 within its error.
        """
        rows = response_index(self._batch.rollout.prompt_index).argsort(stable=True)[:SHIFT_ROWS]
        parts = split_rows(rows, max(map(len, self._batch.microbatch_rows)))
        sums = self._sums.new_zeros(9)
        for part, fresh in zip(parts, self._score_with_other_masks(parts), strict=True):
            lengths = fresh.mask.sum(dim=1).double()
            values = -_token_differences(fresh, self._batch.scores, part).sum(dim=2)  # training − fresh, (2, rows)
            by_score = (values.sum(dim=1), values.square().sum(dim=1), (values * lengths).sum(dim=1))
            counts = torch.stack([lengths.sum(), lengths.square().sum(), (lengths > 0).sum().double()])
            sums += torch.cat([*by_score, counts])
        total, square, product, (num_tokens, square_tokens, num_rows) = ranks.reduce(sums).cpu().split([2, 2, 2, 3])
        if num_rows < 2:
            return torch.zeros_like(total), torch.full_like(total, torch.inf)
        mean = total / num_tokens
        variance = (square - 2.0 * mean * product + mean.square() * square_tokens).clamp(min=0.0)
        variance *= num_rows / (num_rows - 1.0) / num_tokens.square()
        estimates = (Estimate(0.0, error, int(num_rows)) for error in variance.sqrt().tolist())
        return mean.abs(), torch.tensor([estimate.half_width(1.0 - SHIFT_CHANCE) for estimate in estimates]).to(mean)

    def _score_with_other_masks(self, parts: list[Tensor]) -> list[Scores]:
        """Return the scores of each part's rows, with its own dropout masks. Collective if weights are sharded."""
        seeds = itertools.count()

        def score(part: Tensor) -> Scores:
            seed_torch(SEED, next(seeds), device=self._sums.device)
            return self._policy.scorer.score(self._batch.rollout, part, graph=False)

        with preserve_rng(self._sums.device):
            return self._policy.run_passes(parts, score)

    def _rows_for_noise(self) -> Tensor:
        """Return the first response to each of a few prompts."""
        return (response_index(self._batch.rollout.prompt_index) == 0).nonzero().squeeze(1)[:ROWS]


def _known_log_ratios(batch: Batch) -> Tensor | None:
    """Return log π − log μ per token, (B, T), nan where the sampler gave none: who drew that token is unknown."""
    log_ratios = batch.log_ratios()
    sampling_logps = batch.rollout.sampling_logps
    if log_ratios is None or sampling_logps is None:
        return None
    return log_ratios.masked_fill(sampling_logps.isnan(), torch.nan)


def _differences(fresh: Scores, reference: Scores, rows: Tensor) -> Tensor:
    """Return Σ |difference| of log-probabilities and of entropies over tokens, and the token count, (3,) fp64.

    Args:
        rows: Rows of `reference` that `fresh` has scored.
    """
    differences = _token_differences(fresh, reference, rows).abs()
    return torch.cat([differences.sum(dim=(1, 2)), fresh.mask.sum().double().view(1)])


def _token_differences(fresh: Scores, reference: Scores, rows: Tensor) -> Tensor:
    """Return fresh − reference per token, of log-probabilities and of entropies, (2, rows, T) fp64; 0 off the mask.

    Non-finite numbers, as from a policy that has diverged, are left out.
    """
    is_token = fresh.mask.bool()
    width = is_token.shape[1]
    pairs = (fresh.logps, reference.logps), (fresh.entropies, reference.entropies)
    differences = torch.stack([new.detach().double() - old[rows, :width].double() for new, old in pairs])
    return differences.nan_to_num(0.0, 0.0, 0.0).masked_fill(~is_token, 0.0)


def _means(sums: Tensor) -> Tensor:
    """Return the mean differences, (2,), in host memory; 0 if there is no token."""
    return (sums[:2] / sums[2].clamp(min=1.0)).cpu()
