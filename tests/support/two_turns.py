"""A tabular policy with two turns and a random environment: enumerated for exact values, sampled for error bars."""

from __future__ import annotations

import math
from typing import NamedTuple

import reference
import torch
from example_steps import step_of
from torch import Tensor

from rl_training.engine.context import StepContext
from rl_training.entropy.data import EntropySettings
from rl_training.optim.adamw import AdamWState
from rl_training.policy.policy import Policy
from rl_training.policy.rollout import Rollout
from rl_training.policy.scores import Scores
from rl_training.probes import SimpleEntropyProbe
from rl_training.statistics.estimate import Estimate

STOP, GO, CALL = 0, 1, 2  # the policy's tokens: after STOP and GO the response ends, after CALL the environment answers
ANSWERS = [(0,), (1, 1)]  # the environment's answers, of different lengths
LOGITS = [[0.3, -0.2, 0.7], [0.9, -0.4, -0.1], [-0.6, 0.2, 0.8]]  # first token; second token after either answer
CHANCE = 0.3  # probability of the first answer
WIDTH = 5


class Outcome(NamedTuple):
    """One possible outcome: the policy's tokens, the row of LOGITS for each, and their columns in the response."""

    tokens: tuple[int, ...]
    rows: tuple[int, ...]
    columns: tuple[int, ...]
    chance: float  # probability of the environment's answer


OUTCOMES = [
    *(Outcome((first,), (0,), (0,), 1.0) for first in (STOP, GO)),
    *(
        Outcome((CALL, second), (0, 1 + answer), (0, 1 + len(ANSWERS[answer])), chance)
        for answer, chance in ((0, CHANCE), (1, 1 - CHANCE))
        for second in (STOP, GO, CALL)
    ),
]


def exact(logits: reference.Table, *, of_length: bool) -> tuple[float, list[list[float]]]:
    """Return E[−S], or E[T], over all outcomes, and its derivative by each logit, Σ p·x·∂S. S is the policy's log π."""
    value, derivative = 0.0, [[0.0] * 3 for _ in logits]
    for outcome in OUTCOMES:
        logp = sum(reference.log_softmax(logits[row])[t] for row, t in zip(outcome.rows, outcome.tokens, strict=True))
        p, x = outcome.chance * math.exp(logp), float(len(outcome.tokens)) if of_length else -logp
        value += p * x
        for row, sampled in zip(outcome.rows, outcome.tokens, strict=True):
            for token in range(3):
                d_logp = (token == sampled) - math.exp(reference.log_softmax(logits[row])[token])
                derivative[row][token] += p * x * d_logp
    return value, derivative


def _in_columns(of_outcome: list[tuple[int, ...]]) -> Tensor:
    """Put numbers for the policy's tokens into the tokens' columns, (outcomes, WIDTH); other columns are 0."""
    table = torch.zeros(len(OUTCOMES), WIDTH, dtype=torch.long)
    for i, (outcome, numbers) in enumerate(zip(OUTCOMES, of_outcome, strict=True)):
        table[i, list(outcome.columns)] = torch.tensor(numbers)
    return table


ROWS = _in_columns([outcome.rows for outcome in OUTCOMES])
TOKENS = _in_columns([outcome.tokens for outcome in OUTCOMES])
MASK = _in_columns([(1,) * len(outcome.tokens) for outcome in OUTCOMES])


def tables(numbers: Tensor, logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return (logps, entropies, mask) of some OUTCOMES, each (B, WIDTH), with columns laid out as in TRL.

    Columns that are not the policy's tokens contain garbage.
    """
    rows, silent = ROWS[numbers], MASK[numbers] == 0
    log_pi = logits.log_softmax(dim=-1)
    entropy = -(log_pi.exp() * log_pi).sum(dim=-1)
    logps = log_pi[rows, TOKENS[numbers]]
    return logps.masked_fill(silent, 1e30), entropy[rows].masked_fill(silent, 1e30), MASK[numbers].double()


# --- the probe on batches from this policy ----------------------------------------------------------------------------

G, FOLDS = 4, 16  # a fold is one prompt


def policy_logp(outcome: Outcome, logits: reference.Table = LOGITS) -> float:
    rows = (reference.log_softmax(logits[row]) for row in outcome.rows)
    return sum(row[token] for row, token in zip(rows, outcome.tokens, strict=True))


# 1 for calling, and 1 more for GO after the second answer.
REWARDS = torch.tensor([float(CALL in o.tokens[:1]) + (o.columns == (0, 3) and o.tokens[1] == GO) for o in OUTCOMES])


class Tabular(Policy):
    """The policy behind the interface that probes use."""

    def __init__(self, logits: torch.nn.Parameter) -> None:
        self.logits = logits

    def score(self, rollout: Rollout, rows: Tensor, *, varentropy: bool = False) -> Scores:
        return Scores(*tables(rollout.completion_ids[rows, 0], self.logits))

    def sample(self, num_sequences: int, seed: int) -> Rollout:
        raise NotImplementedError

    def decode(self, ids: Tensor) -> str:
        raise NotImplementedError


def step_on(
    logits: torch.nn.Parameter, drawn: Tensor, states: dict[str, AdamWState], sampler: reference.Table | None = None
) -> StepContext:
    """Return what a probe sees of a Dr-GRPO step on these outcomes.

    Args:
        drawn: Indices into OUTCOMES, (prompts · G,).
        sampler: The logits that they were drawn from. None means the policy's.
    """
    sampled = None if sampler is None else tables(drawn, torch.tensor(sampler, dtype=torch.float64))[0]
    rewards = REWARDS[drawn].double().view(-1, G)
    advantages = (rewards - rewards.mean(dim=1, keepdim=True)).flatten()
    logps, entropies, mask = tables(drawn, logits)
    there = mask.flip(1).cumsum(dim=1).flip(1).clamp(max=1)
    numbers = drawn.unsqueeze(1).expand(-1, WIDTH)
    ones = torch.ones(len(drawn), 1, dtype=torch.long)
    weights = -advantages.unsqueeze(1) * mask / (len(drawn) * WIDTH)
    of_row = (weights * logps.masked_fill(mask == 0, 0.0)).sum(dim=1).view(FOLDS, -1).sum(dim=1) * FOLDS
    by_fold = torch.stack([torch.autograd.grad(of_fold, logits, retain_graph=True)[0].flatten() for of_fold in of_row])
    parameters = {"logits": logits}
    prompts = torch.arange(len(drawn)) // G
    return step_of(
        1,
        Rollout(ones, ones, numbers, mask, advantages, None, prompts, sampled, True, there - mask),
        Scores(logps.detach(), entropies.detach(), mask),
        weights,
        FOLDS,
        parameters,
        {"logits": by_fold.mean(dim=0).view_as(logits)},
        Tabular(logits),
        states=states,
        by_fold=[by_fold],
        entropy=EntropySettings(per_sequence=True, error_decay=0.0),
    )


class Coverage(NamedTuple):
    """Results over many batches, in nats per token and per sequence."""

    truth: tuple[float, ...]  # ∂H by enumeration · the mean leave-one-out update
    mean: tuple[float, ...]
    error_of_mean: tuple[float, ...]
    covered: tuple[float, ...]  # share of the 95 % intervals that cover the truth


def mean_step_without_a_fold(by_fold: Tensor, state: AdamWState, logits: Tensor) -> Tensor:
    """Return the mean over k of the updates from all folds except k, (9,), by torch's AdamW for one fold at a time.

    Args:
        by_fold: The gradients of the folds, (K, 9).
    """
    steps = []
    for k in range(len(by_fold)):
        param = torch.nn.Parameter(logits.detach().clone())
        param.grad = torch.cat([by_fold[:k], by_fold[k + 1 :]]).mean(dim=0).view_as(param)
        optimizer = torch.optim.AdamW([param], state.lr, state.betas, state.eps, state.weight_decay)
        optimizer.state[param] = {
            "step": torch.tensor(float(state.step)),
            "exp_avg": state.exp_avg.clone(),
            "exp_avg_sq": state.exp_avg_sq.clone(),
        }
        optimizer.step()
        steps.append((param.detach() - logits.detach()).flatten())
    return torch.stack(steps).mean(dim=0)


def coverage(batches: int, seed: int = 0, sampler: reference.Table | None = None) -> Coverage:
    """Evaluate `forward` on many batches of 16 prompts, at one state of a warm Adam.

    Args:
        batches: Number of batches.
        sampler: The logits of another policy that samples them. None samples from the policy.
    """
    generator = torch.Generator().manual_seed(seed)
    logits = torch.nn.Parameter(torch.tensor(LOGITS, dtype=torch.float64))
    first = 0.02 * torch.rand(3, 3, generator=generator, dtype=torch.float64)
    second = 0.001 + 0.002 * torch.rand(3, 3, generator=generator, dtype=torch.float64)
    states = {"logits": AdamWState(first, second, 30, 0.02, (0.9, 0.99), 1e-8, 0.1)}
    logps = [policy_logp(outcome, sampler or LOGITS) for outcome in OUTCOMES]
    chances = torch.tensor([o.chance * math.exp(x) for o, x in zip(OUTCOMES, logps, strict=True)], dtype=torch.float64)
    answers: list[list[Estimate]] = []
    steps = []
    for _ in range(batches):
        drawn = torch.multinomial(chances, FOLDS * G, replacement=True, generator=generator)
        ctx, probe = step_on(logits, drawn, states, sampler), SimpleEntropyProbe(per_sequence=True, error_decay=0.0)
        said = probe.measure(ctx, probe.init()).estimates
        answers.append([said["delta_h/forward"], said["delta_h/forward_sequence"]])
        assert ctx.step.gradients.by_fold is not None
        steps.append(mean_step_without_a_fold(ctx.step.gradients.by_fold.means()[0], states["logits"], logits))
    (entropy, d_entropy), (length, d_length) = (exact(LOGITS, of_length=of_length) for of_length in (False, True))
    by_sequence, by_length = (torch.tensor(d, dtype=torch.float64).flatten() for d in (d_entropy, d_length))
    by_token = (by_sequence - entropy / length * by_length) / length
    mean_step = torch.stack(steps).mean(dim=0)
    truth = tuple(float(x @ mean_step) for x in (by_token, by_sequence))
    values = torch.tensor([[e.value for e in pair] for pair in answers], dtype=torch.float64)
    covered = [[abs(e.value - t) <= e.half_width() for e, t in zip(pair, truth, strict=True)] for pair in answers]
    return Coverage(
        truth,
        tuple(values.mean(dim=0).tolist()),
        tuple((values.std(dim=0) / math.sqrt(batches)).tolist()),
        tuple(torch.tensor(covered, dtype=torch.float64).mean(dim=0).tolist()),
    )
