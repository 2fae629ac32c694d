"""Whether the probes' forward pass says of a step's responses what training's said, with the same weights.

Everything that probes score anew is about the policy that is trained only if it does. Another temperature, another
mask, an adapter switched off, rotary tables that depend on the longest row of a batch: each shows in the difference of
log-probabilities of the very rows that an entropy gradient is made of, in the batches that it is made of. That takes no
forward pass: these rows are scored in any case. Where they differ by more than rounding, some rows are scored twice
more, with and without what a forward pass draws and rounds (dropout, autocast, TF32, noise on embeddings, jitter of a
router), and weights below fp32 once with padding: what that does, training's scores may be off, too.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from rl_training.policy.policy import Policy
from rl_training.policy.rng import preserve_rng, seed_torch
from rl_training.policy.rollout import response_index
from rl_training.policy.rotary import depends_on_longest_row
from rl_training.policy.scores import Scores
from rl_training.statistics.limit import Limit
from rl_training.step.batch import Batch
from rl_training.step.limits import OTHER_SCORES

LIMIT, LIMIT_ROUNDED = 0.002, 0.05  # nats per token, of the mean difference; the second where training rounds
NOISES = 3.0  # so many times the mean difference that noise makes are allowed beside
ROWS = 8  # of each process, that are scored twice more
SEED = 24  # of what these draw: any but training's own
OF_ROTARY_TABLES = (
    "the model's rotary tables depend on the longest row of a batch (rope_type dynamic or longrope), and probes have "
    "other batches: keep prompts and responses within its original_max_position_embeddings, or use another rope_type"
)
OF_THE_LOOP = (
    "the loss is made of a policy with another temperature, another mask, or an adapter merged or switched off. Keep "
    "the temperature that probes were told, and make the loss of the whole model's plain forward pass"
)


class ScoreCheck:
    """Holds scores of rows of a step against training's own, of the same rows."""

    def __init__(self, batch: Batch, policy: Policy) -> None:
        self._batch, self._policy = batch, policy
        # Σ |difference| of log-probabilities and of entropies, and tokens.
        self._sums = torch.zeros(3, dtype=torch.float64, device=batch.fold.device)

    def add(self, rows: Tensor, fresh: Scores) -> None:
        """Take scores of some rows of this process, calculated as training calculates them."""
        self._sums += _differences(fresh, self._batch.scores, rows)

    def look(self, rows: Tensor) -> None:
        """Score a few of these rows for this purpose alone, where no entropy gradient is made of them.

        All of them where a row's scores depend on its batch. A collective for sharded weights.
        """
        rows = rows if depends_on_longest_row(self._policy.model) else rows[:ROWS]
        for part in self._policy.in_batches(rows, max(map(len, self._batch.microbatch_rows))):
            self.add(part, self._policy.scorer.score(self._batch.rollout, part, graph=False))

    def limit(self, reduce: Callable[[Tensor], Tensor]) -> Limit | None:
        """Return the limit of a step whose scores on all processes are not training's, or None. A collective."""
        off, limit = _means(reduce(self._sums)), torch.full((2,), LIMIT, dtype=torch.float64)
        if bool((off <= limit).all()):
            return None
        if self._policy.scorer.training_rounding:
            limit += LIMIT_ROUNDED - LIMIT
        if bool((off > limit).any()):
            limit += NOISES * torch.stack([_means(reduce(sums)) for sums in self._noises()]).amax(dim=0)
        differing = (off > limit).tolist()
        if not any(differing):
            return None
        number = differing.index(True)
        cause = OF_ROTARY_TABLES if depends_on_longest_row(self._policy.model) else OF_THE_LOOP
        return OTHER_SCORES.filled(
            cause=cause,
            what=("log-probabilities", "entropies")[number],
            off=float(off[number]),
            temperature=self._policy.scorer.temperature,
            limit=float(limit[number]),
        )

    def _noises(self) -> list[Tensor]:
        """Return what drawing and rounding does to some rows, as `_sums` has it, by cause."""
        rows, scorer, rollout = self._some_rows(), self._policy.scorer, self._batch.rollout
        with self._policy.measuring():
            exact = scorer.score(rollout, rows, graph=False)
        with preserve_rng(self._sums.device):
            seed_torch(SEED, device=self._sums.device)
            noisy = scorer.score(rollout, rows, graph=False)
        others, numbers = [noisy], torch.arange(len(rows), device=rows.device)
        if scorer.rounding_reason:  # then a measurement is rounded, too: in another place of a row otherwise
            others.append(scorer.score_padded(rollout, rows))
        return [_differences(exact, other, numbers) for other in others]

    def _some_rows(self) -> Tensor:
        """Return the first response to each of a few prompts."""
        return (response_index(self._batch.rollout.prompt_index) == 0).nonzero().squeeze(1)[:ROWS]


def _differences(fresh: Scores, others: Scores, rows: Tensor) -> Tensor:
    """Return Σ |difference| of log-probabilities and of entropies over tokens, and their number, (3,) fp64.

    Numbers that are not finite, as of a policy that has diverged, are left out.

    rows  of the others
    """
    there = fresh.mask.bool()
    pairs = (fresh.logps, others.logps), (fresh.entropies, others.entropies)
    apart = [(first.detach().double() - other[rows, : there.shape[1]].double()).abs() for first, other in pairs]
    sums = [part.nan_to_num(0.0, 0.0).masked_fill(~there, 0.0).sum() for part in apart]
    return torch.stack([*sums, there.sum().double()])


def _means(sums: Tensor) -> Tensor:
    """Return the mean differences, (2,), in host memory; 0 where there is no token."""
    return (sums[:2] / sums[2].clamp(min=1.0)).cpu()
