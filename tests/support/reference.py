"""Slow plain twins of the library's formulas: Python floats (float64), loops, straight from the definitions.

They share no code with the library. They take ragged lists, so they need no padding, masks or batches.
The tabular policy is small enough to enumerate: vocabulary {0, 1, EOS}, at most three tokens, a logit for each token
after each of the 7 prefixes. 8 of its 15 responses are truncated (without EOS), so lengths are ragged and informative.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

EOS = 2
MAX_LENGTH = 3
PREFIXES = [p for length in range(MAX_LENGTH) for p in itertools.product((0, 1), repeat=length)]
RESPONSES = [(*p, EOS) for p in PREFIXES] + list(itertools.product((0, 1), repeat=MAX_LENGTH))

Ragged = Sequence[Sequence[float]]
Table = Sequence[Sequence[float]]  # logits, (prefix, token)


# --- the tabular policy, by enumeration -------------------------------------------------------------------------------


class Exact(NamedTuple):
    """Exact moments of a tabular policy and their derivatives by each logit, (prefix, token)."""

    entropy: float  # H_seq = E[−S]
    length: float  # E[T]
    d_entropy: list[list[float]]
    d_length: list[list[float]]


def log_softmax(logits: Sequence[float]) -> list[float]:
    log_sum = math.log(sum(math.exp(x) for x in logits))
    return [x - log_sum for x in logits]


def prefix_numbers(response: Sequence[int]) -> list[int]:
    """Return for each token of a response the row of the table from which it was sampled."""
    return [PREFIXES.index(tuple(response[:k])) for k in range(len(response))]


def sequence_logp(table: Table, response: Sequence[int]) -> float:
    rows = prefix_numbers(response)
    return sum(log_softmax(table[row])[token] for row, token in zip(rows, response, strict=True))


def exact(table: Table) -> Exact:
    """Return H_seq = Σ_t p(t)·(−S(t)), E[T] = Σ_t p(t)·T(t) and their derivatives, over all responses t.

    With ∂p = p ∂S and Σ_t ∂p = 0:  ∂H_seq = Σ p·(−S)·∂S,  ∂E[T] = Σ p·T·∂S.
    """
    entropy, length = 0.0, 0.0
    d_entropy = [[0.0] * 3 for _ in PREFIXES]
    d_length = [[0.0] * 3 for _ in PREFIXES]
    for response in RESPONSES:
        logp = sequence_logp(table, response)
        p = math.exp(logp)
        entropy += p * -logp
        length += p * len(response)
        for row, sampled in zip(prefix_numbers(response), response, strict=True):
            for token in range(3):
                d_logp = (token == sampled) - math.exp(log_softmax(table[row])[token])
                d_entropy[row][token] += p * -logp * d_logp
                d_length[row][token] += p * len(response) * d_logp
    return Exact(entropy, length, d_entropy, d_length)


# --- surrogate weights of the entropy gradient ------------------------------------------------------------------------


def surrogate_weights(
    entropies: Ragged,
    prompts: Sequence[int],
    target: str,
    baseline: str = "others",
    ratios: tuple[Ragged, Ragged] | None = None,
) -> tuple[list[list[float]], list[list[float]]]:
    """Return (w, u), ragged like `entropies`.

    The estimate is the mean over sequences of Σ_k w_k ∂log π(t_k) + u_k ∂h_k.

    Args:
        baseline: "others" is the definition. "all" is the mistake of including the response itself in the mean.
        ratios: Ratios to the policy that sampled: for each token, of the tokens before it, and including it.
    """
    lengths = [len(row) for row in entropies]
    before, through = ratios or ([[1.0] * length for length in lengths],) * 2
    if target == "token":  # the quotient rule: ∂(H/T) = (∂H − H/T ∂T) / T
        total = sum(map(sum, before))
        mean_length = total / len(lengths)
        level = (
            sum(sum(r * h for r, h in zip(*rows, strict=True)) for rows in zip(before, entropies, strict=True)) / total
        )
        w_entropy, u_entropy = surrogate_weights(entropies, prompts, "sequence", baseline, ratios)
        w_length, _ = surrogate_weights(entropies, prompts, "length", baseline, ratios)
        w = [
            [(a - level * b) / mean_length for a, b in zip(x, y, strict=True)]
            for x, y in zip(w_entropy, w_length, strict=True)
        ]
        return w, [[a / mean_length for a in row] for row in u_entropy]

    def signal(i: int, k: int) -> float:
        costs = entropies[i] if target == "sequence" else [1.0] * lengths[i]
        return sum(ratio * cost for ratio, cost in list(zip(before[i], costs, strict=True))[k + 1 :])

    w = []
    for i in range(len(lengths)):
        group = [j for j in range(len(lengths)) if prompts[j] == prompts[i] and (j != i or baseline == "all")]
        w.append([])
        for k in range(lengths[i]):
            counted = [j for j in group if k < lengths[j]]
            mean = sum(signal(j, k) for j in counted) / sum(through[j][k] for j in counted) if counted else 0.0
            w[i].append(signal(i, k) - through[i][k] * mean)
    u_value = 1.0 if target == "sequence" else 0.0
    return w, [[u_value * ratio for ratio in row] for row in before]


def prefix_ratios(log_ratios: Ragged) -> tuple[list[list[float]], list[list[float]]]:
    """Return for each token the ratio of the tokens before it, and that including it, normalized at each position.

    Each ratio is divided by its mean over all responses at the same position. A response that has ended counts in this
    mean with its final ratio.
    """
    upto = [[math.exp(total) for total in itertools.accumulate(row, initial=0.0)] for row in log_ratios]
    means = [sum(row[min(k, len(row) - 1)] for row in upto) / len(upto) for k in range(max(len(row) for row in upto))]
    before, through = (
        [[row[k + more] / means[k + more] for k in range(len(row) - 1)] for row in upto] for more in (0, 1)
    )
    return before, through


# --- the policy before a step, from responses after it ----------------------------------------------------------------


def terms_before(
    logps: Sequence[float],
    entropies: Sequence[float],
    logps_before: Sequence[float],
    entropies_before: Sequence[float],
    reward: float,
    others: Ragged,
    rewards_of_others: Sequence[float],
    logps_of_sampler: Sequence[float] | None = None,
) -> list[float]:
    """Return the terms of one response: H' − H, T' − T, r' − r, the KL divergence, log w.

    Args:
        others: Entropies after the step, for each of the prompt's other responses.
    """
    sampler = logps if logps_of_sampler is None else logps_of_sampler
    count = len(logps)
    entropy = length = kl = 0.0
    for k in range(count):
        alive = [row for row in others if k < len(row)]
        to_come = sum(sum(row[k + 1 :]) for row in alive) / len(alive) if alive else 0.0
        tokens = sum(len(row) - k - 1 for row in alive) / len(alive) if alive else 0.0
        entropy += entropies_before[k] - entropies[k]
        for sign, policy, h in ((1, logps_before, entropies_before), (-1, logps, entropies)):
            prefix = math.exp(sum(policy[:k]) - sum(sampler[:k]))
            moved = sign * prefix * (math.exp(policy[k] - sampler[k]) - 1)
            entropy += moved * (sum(h[k + 1 :]) - to_come)
            length += moved * (count - k - 1 - tokens)
        log_ratio = logps_before[k] - logps[k]
        kl += math.exp(sum(logps[: k + 1]) - sum(sampler[: k + 1])) * (math.exp(log_ratio) - 1 - log_ratio)
    now, before = (sum(policy) - sum(sampler) for policy in (logps, logps_before))
    above = reward - sum(rewards_of_others) / len(rewards_of_others)
    return [entropy, length, (math.exp(before) - math.exp(now)) * above, kl, before]


# --- AdamW ------------------------------------------------------------------------------------------------------------


class AdamWStep(NamedTuple):
    """One AdamW step of a list of scalars: the change of each, split by cause, and the moments afterwards."""

    momentum: list[float]
    gradient: list[float]
    decay: list[float]
    exp_avg: list[float]
    exp_avg_sq: list[float]

    @property
    def total(self) -> list[float]:
        return [a + b + c for a, b, c in zip(self.momentum, self.gradient, self.decay, strict=True)]


def adamw_step(
    param: Sequence[float],
    grad: Sequence[float],
    exp_avg: Sequence[float],
    exp_avg_sq: Sequence[float],
    step: int,
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
) -> AdamWStep:
    """Take step number `step` + 1 of Loshchilov & Hutter's algorithm 2, scalar by scalar."""
    beta1, beta2 = betas
    t = step + 1
    out = AdamWStep([], [], [], [], [])
    for theta, g, m, v in zip(param, grad, exp_avg, exp_avg_sq, strict=True):
        m_new = beta1 * m + (1 - beta1) * g
        v_new = beta2 * v + (1 - beta2) * g * g
        denominator = math.sqrt(v_new / (1 - beta2**t)) + eps
        out.momentum.append(-lr * beta1 * m / (1 - beta1**t) / denominator)
        out.gradient.append(-lr * (1 - beta1) * g / (1 - beta1**t) / denominator)
        out.decay.append(-lr * weight_decay * theta)
        out.exp_avg.append(m_new)
        out.exp_avg_sq.append(v_new)
    return out


# --- folds ------------------------------------------------------------------------------------------------------------


def mean_of_the_others(folds: Ragged, sizes: Sequence[float], left_out: int) -> list[float]:
    """Return the mean over all folds but one, each fold's mean weighted by its size."""
    kept = [k for k in range(len(folds)) if k != left_out]
    total = sum(sizes[k] for k in kept)
    return [sum(sizes[k] * folds[k][i] for k in kept) / total for i in range(len(folds[0]))]


def jackknife_stderr(statistic: Callable[[list[float]], float], folds: Ragged) -> float:
    """Return √((K−1)/K Σ_l (f_(−l) − mean f_(−·))²), with f_(−l) the statistic of the column sums without fold l."""
    count = len(folds)
    left_out = [
        statistic([sum(folds[k][i] for k in range(count) if k != one_out) for i in range(len(folds[0]))])
        for one_out in range(count)
    ]
    mean = sum(left_out) / count
    return math.sqrt((count - 1) / count * sum((x - mean) ** 2 for x in left_out))
