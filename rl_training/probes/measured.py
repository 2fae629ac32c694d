"""What the last optimizer step did, measured: to entropy, length and reward, whatever the optimizer is.

This step's responses were sampled after the last one. Scored once more with the weights of before it, importance
weights say what the policy was there: mathematics/looking_back.py has the formulas. No formula of the optimizer, no
folds and no second backward are needed, and a step of any size is measured, clipped or edited as it may be. It takes
one forward pass over the chosen responses, and one vector of this process's entries.

Where steps share a rollout, all of them are measured together, when the next rollout is there; and so are the steps
since the last measured one with `every` above 1.

In half precision the rounding of two passes is as large as a small step. So where training's forward pass is rounded,
the scores of before the step come from weights S = SPAN steps to either side:

    log π' ≈ log π − (log π(θ + S δθ) − log π(θ − S δθ)) / 2S,      and so h'

to first order in δθ, the step. The error is the delete-one-prompt jackknife's, its variance averaged over about three
steps (running_variance.py).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

import torch
from torch import Tensor

from rl_training.engine.batch import take_rows
from rl_training.engine.entropy_gradients import log_ratios
from rl_training.engine.kept_vector import KeptVector
from rl_training.engine.probe import Probe
from rl_training.engine.step import Step
from rl_training.mathematics.entropy import running_sum
from rl_training.mathematics.estimate import Estimate
from rl_training.mathematics.folds import response_number
from rl_training.mathematics.jackknife import estimates_over_units
from rl_training.mathematics.kish import kish_size_of_sums, kish_sums
from rl_training.mathematics.looking_back import differences_before
from rl_training.mathematics.running_variance import RunningVariance
from rl_training.mathematics.scores import Scores
from rl_training.mathematics.vectors import Vector

CHANGES = tuple(f"measured/{name}" for name in ("delta_h", "delta_h_sequence", "delta_length", "delta_reward"))
KL, ESS, STEPS = "measured/kl", "measured/ess", "measured/steps"
NAMES = (*CHANGES, KL, ESS, STEPS)
SPAN = 3  # steps to either side, where numbers are rounded
SAME = 1e-5  # nats: mean difference of log-probabilities that come from the same weights in fp32
MIN_ESS = 0.5  # share of the responses below which importance weights are worthless
FIRST = "the weights before the last step are not known yet"
OLD_ROLLOUT = "this rollout was sampled before an earlier step: its steps are measured together, with the next rollout"
NO_REWARDS = "the rewards of these responses are not known"
ROUNDED = "a central difference over ± {span} steps, of first order: {why}"
FAR = "the effective sample size is {ess:.2f} of the responses, below {least}: measure smaller steps, or every=1"
NO_BAR = "no error bar: it describes these responses"


class MeasuredStepProbe(Probe):
    """Measures the change of entropy, length and reward by the last step. See the module's docstring.

    responses_per_prompt  responses of every prompt that are scored again, the first ones; baselines use all
    error_decay           weight of a step relative to the next in the average of the variances of single steps
    every                 measure each `every`-th step: the change by all steps since the last measured one
    """

    name = "measured"
    measured = ("measured/",)

    def __init__(self, responses_per_prompt: int = 1, error_decay: float = 0.5, every: int = 1) -> None:
        super().__init__(every)
        if responses_per_prompt < 1:
            raise ValueError(f"measured: responses_per_prompt={responses_per_prompt} must be at least 1")
        if not 0.0 <= error_decay < 1.0:
            raise ValueError(f"measured: error_decay={error_decay} must lie in [0, 1); 0.5 averages over three steps")
        self.responses_per_prompt = responses_per_prompt
        self._errors = RunningVariance(error_decay)
        self._kept: KeptVector | None = None  # the weights before the last step, from the first step on
        self._state: Mapping[str, Tensor] = {}  # of a checkpoint, until then

    def prepare(self, step: Step) -> None:
        kept, fresh = self._kept_of(step), step.batch.rollout.on_policy
        why = step.capabilities.sampling_mismatch or step.capabilities.split_prompts or ("" if fresh else OLD_ROLLOUT)
        if why or kept.vector is None:
            self._answers = dict.fromkeys(NAMES, Estimate.missing(why or FIRST))
        else:
            self._answers = self._measure(step, kept.vector, step.number - (kept.step or 0))
        if not why:
            assert step.policy.shard is not None
            kept.step, kept.vector = step.number, step.gradients.layout.vector(step.policy.shard.held().values())

    def num_vectors(self, num_folds: int) -> int:
        """The weights before the step, those after it, and where numbers are rounded those in between."""
        return 3

    def state_dict(self) -> dict[str, Tensor]:
        if self._kept is None:
            return dict(self._state)
        return self._kept.state_dict() | {f"error.{k}": value for k, value in self._errors.state_dict().items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self._state, self._kept = state, None

    def _kept_of(self, step: Step) -> KeptVector:
        if self._kept is None:
            shard = step.policy.shard
            assert shard is not None
            names = step.gradients.layout.names
            places = {name: (*shard.cut(name, shard.rank), shard.numel(name)) for name in names}
            self._kept = KeptVector(step.gradients.layout, places)
            self._kept.load_state_dict(self._state)
            prefix = "error."
            self._errors.load_state_dict(
                {k.removeprefix(prefix): value for k, value in self._state.items() if k.startswith(prefix)}
            )
        return self._kept

    def _measure(self, step: Step, before: Vector, steps: int) -> dict[str, Estimate]:
        """Returns the estimates of the change by so many steps. A collective."""
        rollout, why_rounded = step.batch.rollout, step.policy.scorer.why_training_rounds
        chosen = response_number(rollout.prompt_index) < self.responses_per_prompt
        rows = chosen.nonzero().squeeze(1)
        score = rounded_scores_before if why_rounded else scores_before
        now, then = score(step, rows, step.gradients.layout.by_name(before))
        rewards = rollout.rewards
        unknown = torch.full_like(rollout.advantages, torch.nan) if rewards is None else rewards
        logs = log_ratios(step.batch)
        assert logs is not None
        terms = differences_before(now, then, rows, rollout.prompt_index, unknown, logs)
        weights = step.ranks.reduce(torch.cat([kish_sums(terms[:, 4].exp()), terms.new_ones(1) * len(rows)])).tolist()
        ess = kish_size_of_sums(*weights[:2]) / weights[2]
        table = sums_by_prompt(step, rows, terms[:, :4], logs).cpu()
        estimates = estimates_over_units((*CHANGES, KL), changes, table)
        variances, batches = self._errors.add(torch.tensor([estimates[name].stderr ** 2 for name in CHANGES]).double())
        remark = ROUNDED.format(span=SPAN, why=why_rounded) if why_rounded else ""
        answers = {KL: estimates[KL], ESS: Estimate(ess, reason=NO_BAR), STEPS: Estimate(steps, reason=NO_BAR)}
        if rewards is None:
            estimates[CHANGES[3]] = Estimate.missing(NO_REWARDS)
        for name, variance, count in zip(CHANGES, variances.tolist(), batches.tolist(), strict=True):
            one = estimates[name]
            if ess < MIN_ESS:
                answers[name] = Estimate.missing(FAR.format(ess=ess, least=MIN_ESS))
            elif math.isnan(one.stderr):
                answers[name] = one
            else:
                num_samples = 1 + int((one.num_samples - 1) * count + 1e-9)
                answers[name] = Estimate(
                    one.value, math.sqrt(variance), num_samples, remark,
                    detail={"stderr_of_batch": one.stderr},
                )  # fmt: skip
        return {name: dataclasses.replace(answers[name], about_step=step.number - 1) for name in NAMES}


def scores_before(step: Step, rows: Tensor, before: Mapping[str, Tensor]) -> tuple[Scores, Scores]:
    """Returns the scores of all responses now, and of some with the weights of before. A collective.

    Training's own are taken for now, where they are those of a measurement: one row is scored once more to see it.
    """
    policy, rollout, now = step.policy, take_rows(step.batch.rollout, rows), step.batch.scores
    first = policy.score_rollout(take_rows(rollout, torch.zeros_like(rows[:1])))
    apart = (first.logps - now.logps[rows[:1]])[first.mask.bool()].double().abs()
    if not float(step.ranks.largest(apart.mean().nan_to_num(0.0))) <= SAME:  # dropout, TF32
        fresh = policy.score_rollout(rollout)
        logps, entropies = now.logps.clone(), now.entropies.clone()
        logps[rows], entropies[rows] = fresh.logps.to(logps), fresh.entropies.to(entropies)
        now = Scores(logps, entropies, now.mask)
    with policy.with_weights(before):
        return now, policy.score_rollout(rollout)


def rounded_scores_before(step: Step, rows: Tensor, before: Mapping[str, Tensor]) -> tuple[Scores, Scores]:
    """The same, extrapolated from SPAN steps to either side: see the module's docstring. A collective."""
    policy, rollout, now = step.policy, take_rows(step.batch.rollout, rows), step.batch.scores
    assert policy.shard is not None
    held = policy.shard.held()
    ends = []
    for steps in (-SPAN, SPAN):
        with policy.with_weights({name: w + steps * (w - before[name]) for name, w in held.items()}):
            ends.append(policy.score_rollout(rollout, as_training=True))
    behind, ahead = ends
    return now, Scores(
        now.logps[rows].double() - (ahead.logps.double() - behind.logps.double()) / (2 * SPAN),
        now.entropies[rows].double() - (ahead.entropies.double() - behind.entropies.double()) / (2 * SPAN),
        ahead.mask,
    )


def sums_by_prompt(step: Step, rows: Tensor, terms: Tensor, logs: Tensor) -> Tensor:
    """Returns (prompts, 8), of all processes: 1, and a prompt's means of H, T, the terms, and T of the scored ones.

    A collective.
    """
    scores, index = step.batch.scores, step.batch.rollout.prompt_index
    mask = scores.mask.double()
    weights = mask * (running_sum(logs) - logs).exp()  # of tokens: 1 where the policy sampled itself
    entropies = (weights * scores.entropies.double().masked_fill(mask == 0, 0.0)).sum(dim=1)
    prompts, place = index.unique(return_inverse=True)

    def means(values: Tensor, place: Tensor) -> Tensor:
        sums = values.new_zeros(len(prompts), values.shape[1]).index_add_(0, place, values)
        return sums / place.bincount(minlength=len(prompts)).unsqueeze(1)

    lengths = weights.sum(dim=1)
    all_of_them = torch.stack([torch.ones_like(lengths), entropies, lengths], dim=1)
    own = torch.cat([means(all_of_them, place), means(torch.cat([terms, lengths[rows, None]], dim=1), place[rows])], 1)
    counts = step.ranks.gather(own.new_tensor([float(len(own))])).long().flatten().tolist()
    start = sum(counts[: step.ranks.number])
    table = own.new_zeros(sum(counts), own.shape[1])
    table[start : start + len(own)] = own
    return step.ranks.reduce(table)


def changes(sums: Tensor) -> Tensor:
    """Returns (…, 5): CHANGES and the KL divergence per token, from sums over prompts."""
    count, entropy, length, more_entropy, longer, more_reward, kl, scored = sums.unbind(-1)
    per_token = entropy / length - (entropy + more_entropy) / (length + longer)
    return torch.stack([per_token, -more_entropy / count, -longer / count, -more_reward / count, kl / scored], dim=-1)
