"""Test whether the policy drew a step's responses, with nothing but its own scores of them.

With h the entropy of the next-token distribution π at a prefix,

    log π(t) + h     has mean 0 over tokens t ~ π, and variance Σ_v π_v (log π_v + h)², the varentropy,

whatever the prefix. Forced tokens, a logits processor, other weights or another temperature while sampling shift the
mean: if μ ∝ π^(1/τ) draws instead, it is about (1/τ − 1) times the varentropy. So Σ (log π(t) + h) over the tokens of a
run is a sum of martingale differences whose variances are known exactly. The scatter between prompts could not replace
them: where rare tokens were not drawn it is too small.

If a known sampler μ drew the tokens, each is weighted by w = π(t)/μ(t) of that token alone: E_μ[w (log π + h)] = 0. The
variance Σ_v π_v w_v (log π_v + h)² needs μ at tokens that were not drawn. It is estimated as the sum of varentropies
times Σ w²x² / Σ w x² over the drawn tokens, x = log π + h, and at least times 1.

Chance (step/martingale.py) exceeds the bound of the running sum with probability RUN_ALPHA over a run of any
length, and that of single steps with STEPS_ALPHA over 10,000 measured steps: together less than 1 %. A sampler as close
as an inverse temperature of 1 ± SAMPLER_TOLERANCE is taken for the policy, since kernels and half precision make such
differences, and a long run would find any.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from rl_training.parallel.ranks import Ranks
from rl_training.policy.scores import Scores
from rl_training.statistics.estimate import Estimate
from rl_training.statistics.unavailable import Unavailable
from rl_training.step.martingale import bound
from rl_training.step.reasons import NO_TOKENS

MEAN = "sampler/residual"
RUN = "sampler/residual_run"
BOUND = "sampler/residual_bound"
RUN_ALPHA = STEPS_ALPHA = 0.0045
MAX_STEPS = 10_000
SAMPLER_TOLERANCE = 0.005
POLICY = "the policy did not draw these responses"
SAMPLER = "the sampler did not draw these responses with the log-probabilities that it reports"
NO_BAR = "no error bar: it is a sum in units of its own standard error"
BOUND_REMARK = "no error bar: it is what chance does not exceed"
NOT_DRAWN = Unavailable(
    "not_drawn_by_policy",
    "{what}: over the {tokens} tested tokens {which}, log π(token) + entropy is {mean:+.2g} nats on average, "
    "{errors:+.1f} standard errors from 0, and chance stays within {chance:.1f}",
    fix="generate with the weights that are trained, at temperature {temperature:g}, without forced tokens and logits "
    "processors, or report the sampler's own log-probabilities. If responses are chosen by their rewards, say so: "
    "Rollout(untested=True)",
)
UNTESTED = Unavailable(
    "untested",
    "responses were chosen by what had been drawn (groups of equal rewards left out, say) or are given, so whether the "
    "policy drew their tokens is not tested",
)


@dataclass(frozen=True)
class ResidualSums:
    """Sums over tokens, of one step or of all steps so far. x is w (log π + h), w is 1 if the policy itself draws."""

    residual: float = 0.0  # Σ x, nats
    variance: float = 0.0  # of Σ x, nats²
    squares: float = 0.0  # Σ x²
    tokens: float = 0.0
    steps: int = 0

    def __add__(self, other: ResidualSums) -> ResidualSums:
        names = (field.name for field in dataclasses.fields(self))
        return ResidualSums(**{name: getattr(self, name) + getattr(other, name) for name in names})

    @property
    def stderr(self) -> float:
        """The standard error of Σ x."""
        return math.sqrt(self.variance)

    def in_errors(self, value: float) -> float:
        """Return a value in units of the standard error of Σ x."""
        return value / self.stderr if self.variance else math.copysign(math.inf, value)

    def bound(self, alpha: float) -> float:
        """Return what |Σ x| exceeds at any look with probability `alpha` at most.

        A sampler within the tolerance shifts Σ x by at most that times its variance, either way. Where |Σ x| is beyond
        both, the sum without its shift is beyond the martingale's bound, which holds for both signs at once.
        """
        quadratic = (self.squares + 2.0 * self.variance) / 3.0
        return bound(quadratic, alpha) + SAMPLER_TOLERANCE * self.variance

    def exceeds(self, alpha: float) -> bool:
        """Return whether Σ x is further from 0 than `bound`."""
        return abs(self.residual) > self.bound(alpha)


class ResidualTest:
    """Tests the tokens of each step, and of all steps so far.

    Args:
        run: The sums that a checkpoint has kept.
        temperature: The sampling temperature, for the advice.
        device: The device of the scores.
    """

    name = "residual"  # key of its state in a checkpoint

    def __init__(self, run: ResidualSums, temperature: float, device: torch.device | None = None) -> None:
        self.run = run  # up to the last step that was taken
        self._temperature = temperature
        self._device = device
        self._is_sampler = False  # whether the latest tokens were weighted by their ratios to a sampler
        self.begin()

    def begin(self) -> None:
        """Begin a step. The sums of a step that was not taken are dropped."""
        # Of this rank's tokens, in the order of `decide`. A rank may have none.
        self._sums = torch.zeros(6, dtype=torch.float64, device=self._device)
        self._pending_rows: list[Tensor] = []  # added since the last `decide`
        self._tested_rows: list[Tensor] = []
        self._step: ResidualSums | None = None
        self._missing: Unavailable | None = None  # why the step's tokens cannot be tested
        self.reason = self._reason(ResidualSums())  # of the run so far, until the step's tokens are known

    def add(self, rows: Tensor, scores: Scores, log_ratios: Tensor | None, is_untested: bool) -> None:
        """Add rows of the step on this rank, which differ until the next `decide`. Tested ones do not count again.

        Args:
            rows: Their numbers in the step, (rows,).
            scores: The policy's scores of these rows, with varentropies.
            log_ratios: log π − log μ of these rows, (rows, T) or wider. None if the policy itself draws.
            is_untested: Whether any of these rows must not be tested, so that the step is not.
        """
        assert scores.varentropies is not None
        x = scores.logps.detach().double() + scores.entropies.detach().double()
        ratio = torch.ones_like(x) if log_ratios is None else log_ratios[:, : x.shape[1]].exp()
        columns = [ratio * x, scores.varentropies.double(), (ratio * x).square(), ratio * x.square()]
        # A policy that has diverged has no scores.
        is_token = scores.mask.bool() & torch.stack(columns).isfinite().all(dim=0)
        if self._tested_rows:
            is_token &= ~torch.isin(rows, torch.cat(self._tested_rows)).unsqueeze(1)
        self._pending_rows.append(rows)
        sums = [column.masked_fill(~is_token, 0.0).sum() for column in [*columns, torch.ones_like(x)]]
        self._sums += torch.stack([*sums, x.new_tensor(float(is_untested))])

    def decide(self, ranks: Ranks, missing: Unavailable | None, is_sampler: bool) -> Unavailable | None:
        """Return the reason why the step's tokens, or the run's so far, are not the policy's, or None. Collective.

        It takes what was added since the last call. A step may have several.

        Args:
            ranks: The ranks that train together.
            missing: Why this step's tokens cannot be tested, the same on all ranks.
            is_sampler: Whether tokens are weighted by their ratios to a sampler.
        """
        residual, variance, squares, single, tokens, num_untested = ranks.reduce(self._sums).tolist()
        self._sums = torch.zeros_like(self._sums)
        pending = self._pending_rows
        self._pending_rows = []
        missing = missing or (UNTESTED if num_untested else None) or (None if tokens else NO_TOKENS)
        if missing:
            self._missing = missing
            return self.reason
        self._tested_rows += pending
        variance *= max(1.0, squares / single) if single else 1.0
        sums = ResidualSums(residual, variance, squares, tokens, steps=0 if self._step else 1)
        self._step = (self._step or ResidualSums()) + sums
        self._is_sampler = is_sampler
        self.reason = self._reason(self._step)
        return self.reason

    def leave_untested(self, missing: Unavailable) -> None:
        """Drop what was added since the last `decide`, and record why it is not tested."""
        self._sums = torch.zeros_like(self._sums)
        self._pending_rows = []
        self._missing = missing

    def finish(self, was_taken: bool) -> dict[str, Estimate]:
        """Return the step's estimates, and keep its sums if it was taken: otherwise its responses may come again."""
        estimates = self.estimates()
        if was_taken and self._step is not None:
            self.run = self.run + self._step
            self._step = None
        return estimates

    def estimates(self) -> dict[str, Estimate]:
        """Return the mean residual of the step, the run's sum in standard errors, and the bound of that sum.

        Empty if nothing has tried to test the step.
        """
        if self._step is None and self._missing is None:
            return {}
        step = self._step or ResidualSums()
        run = self.run + step
        missing = Estimate.missing(self._missing or NO_TOKENS)
        names = MEAN, RUN, BOUND
        if not run.variance:
            return dict.fromkeys(names, missing)
        count = int(step.tokens)
        mean = Estimate(step.residual / count, step.stderr / count, count, self.reason or "") if count else missing
        total = run.in_errors(run.residual)
        chance = run.in_errors(run.bound(RUN_ALPHA))
        rest = Estimate(total, reason=self.reason or NO_BAR), Estimate(chance, reason=BOUND_REMARK)
        return dict(zip(names, (mean, *rest), strict=True))

    def _reason(self, step: ResidualSums) -> Unavailable | None:
        """Return the reason why chance does not explain the sums of this step, or of the run with it, or None."""
        run = self.run + step
        for sums, alpha, which in (
            (step, STEPS_ALPHA / MAX_STEPS, "of this step"),
            (run, RUN_ALPHA, f"of {run.steps} steps"),
        ):
            if sums.exceeds(alpha):
                return NOT_DRAWN.formatted(
                    what=SAMPLER if self._is_sampler else POLICY,
                    which=which,
                    tokens=int(sums.tokens),
                    mean=sums.residual / sums.tokens,
                    errors=sums.in_errors(sums.residual),
                    chance=sums.in_errors(sums.bound(alpha)),
                    temperature=self._temperature,
                )
        return None
