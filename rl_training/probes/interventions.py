"""The interventions probe: what other losses or optimizer settings would do to entropy and to reward at this step.

    ΔH        Σ_k n_k X_k · [δθ_(−k)(w) − δθ_(−k)] / Σ T    nats per token, beside what the step itself does
    Δreward   Σ_k n_k J_k · [δθ_(−k)(w) − δθ_(−k)] / N      J_k, the gradient of the reward: −g_k L G/(G−1) in Dr-GRPO
    price     −Δreward / ΔH                                 reward given up per nat kept
    halves    the strength at which the step's own ΔH is half of what it is: at this one step, and when it is kept

leave-fold-out over whole-prompt folds, as `simple` has it, with AdamW and clipping calculated anew for the weights w.
The error is the jackknife's of the DIFFERENCE to the plain step, in which the noise of X is shared. ΔH's takes this
batch's two steps as given. Δreward's leaves each fold out of the steps too, because J and the step are one gradient
with one noise. It costs a forward pass and a backward over the sequences whose weights change, once for all
interventions that are multiples of one another.

One step is not many. `…/delta_h` is this step; a warm Adam step has 1 − β1 of its gradient in it, and `…_kept` is what
a step does when the intervention has long been there, ×1/(1 − β1). Adam undoes a mere scaling of the gradient within
1/(1 − β2) steps. One batch gives sizes only to a factor of two: compare the means over steps, `…/mean_…`.
Δreward is on the prompts that training draws.
"""

from __future__ import annotations

from collections.abc import Sequence

from rl_training.engine.probe import Need, Probe
from rl_training.engine.step import Step
from rl_training.engine.step_by_folds import why_no_folds
from rl_training.interventions.effects import LOST, NO_REWARD, QUANTITIES, Effects, kept_halving
from rl_training.interventions.loss import loss_inputs
from rl_training.interventions.named import intervention
from rl_training.mathematics.estimate import MIN_FOLDS_FOR_STDERR, Estimate
from rl_training.mathematics.running_pairs import Pair, RunningPair, RunningPairs

USUAL = ("bonus", "psr", "nsr", "lr", "clip_cov")
MEANS = ("mean_delta_h", "mean_delta_reward", "mean_price", "kept_halves_at")
PLAIN = "plain"  # the step as it is
OF_PLAIN = tuple(
    f"intervention/{PLAIN}_{name}" for name in ("delta_h", "delta_reward", "mean_delta_h", "mean_delta_reward")
)
OFF_POLICY = "off-policy: predictions of what ratios change came out 1.6 times too large; use one step per rollout"


class InterventionsProbe(Probe):
    """Predicts what interventions would do at this step. See the module's docstring.

    which      interventions by name, see interventions/named.py: bonus, bonus:0.02, my.py:softer, …
    every      measure each `every`-th step
    num_folds  folds of whole prompts on each rank; None for what another probe says
    decay      weight of a measured step relative to the next in the means: 0.9 is about ten of them
    """

    name = "interventions"
    needs = Need.ENTROPY_ROWS
    min_folds = MIN_FOLDS_FOR_STDERR

    def __init__(
        self, which: Sequence[str] = USUAL, every: int = 10, num_folds: int | None = None, decay: float = 0.9
    ) -> None:
        super().__init__(every)
        if not which:
            raise ValueError(f"interventions: which=[] names none: give some, as which=[{','.join(USUAL)}]")
        if not 0.0 < decay <= 1.0:
            raise ValueError(f"interventions: decay={decay} must lie in (0, 1]; 0.9 averages over ten measured steps")
        self.which = [intervention(text) for text in which]
        names = [of.name for of in self.which]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"interventions: which has {', '.join(twice)} twice")
        self.num_folds = num_folds
        self.running = RunningPairs({name: RunningPair(decay) for name in (*names, PLAIN)})

    def prepare(self, step: Step) -> None:
        why, names = why_no_folds(step, OFF_POLICY), (*QUANTITIES, *MEANS)
        self._answers = dict.fromkeys(OF_PLAIN, Estimate.missing(why)) if why else {}
        missing = dict.fromkeys((of.name for of in self.which), why)
        if not why:
            with_reference = any("reference" in of.remedy.needs for of in self.which)
            reference = step.policy.reference_logps(step.batch.rollout) if with_reference else None
            loss = loss_inputs(step.batch, step.ranks.reduce, reference)
            missing = {of.name: of.why_none(loss[0]) for of in self.which}
            measured = Effects(step, loss, [of for of in self.which if not missing[of.name]])
            plain = self.running[PLAIN].add(measured.plain)
            of_plain = (*_rewarded(measured.plain, measured.has_reward), *_rewarded(plain, measured.has_reward))
            self._answers |= dict(zip(OF_PLAIN, of_plain, strict=True))
        for of in self.which:
            if missing[of.name]:
                estimates = dict.fromkeys(names, Estimate.missing(missing[of.name]))
            else:
                mean = self.running[of.name].add(measured.pairs[of.name])
                delta, reward = _rewarded(mean, measured.has_reward, f"measured steps: {self.running[of.name].steps}")
                price = mean.minus_ratio(LOST) if measured.has_reward else reward
                halves = kept_halving(of, mean, plain, measured.kept(of))
                means = dict(zip(MEANS, (delta, reward, price, halves), strict=True))
                estimates = measured.estimates(of) | means
            self._answers |= {f"intervention/{of.name}/{quantity}": e for quantity, e in estimates.items()}

    def num_vectors(self, num_folds: int) -> int:
        """One basis of changes by fold, and over all folds the basis and the gradient of the reward."""
        return num_folds + 2


def _rewarded(pair: Pair, has_reward: bool, remark: str = "") -> tuple[Estimate, Estimate]:
    return pair.estimate(0, remark), pair.estimate(1, remark) if has_reward else Estimate.missing(NO_REWARD)
