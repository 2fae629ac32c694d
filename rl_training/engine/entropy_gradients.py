"""The entropy gradient of each fold of a step: a small forward pass over some responses of every prompt, and backwards.

Where the step is off-policy, every mean over sequences is weighted by the importance ratio

    ρ_i = π_now(t_i) / π_sampling(t_i) = exp(Σ_k log π_now(t_ik) − log π_sampling(t_ik)),

and normalised by Σ ρ. On-policy, ρ = 1.

Which responses: the surrogate's weights are known from the training's own forward pass, before any backward, and how
much a response adds to the gradient goes mostly with their norm. So they can be drawn with probabilities that follow

    a_i = ρ_i (Σ_k w_ik² + u_ik²)^½

each counting by one over its probability: draws.py. The random numbers come from (seed, step, the prompt's tokens)
alone: training's streams are not touched, and a resumed run, or one in more processes, draws the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rl_training.mathematics.draws import drawn, inclusion_probabilities, keys_of, uniforms_of
from rl_training.mathematics.entropy import Estimator, surrogate_weights
from rl_training.mathematics.folds import response_number
from rl_training.mathematics.scores import Scores
from rl_training.mathematics.vectors import FlatVectors
from rl_training.step.types import StepContext


@dataclass(frozen=True)
class Choice:
    """Which responses of a step the entropy gradient is computed from.

    responses_per_prompt  so many of every prompt; from G on, all
    by_norm               drawn by the norms of their weights, and reweighted; else the first of each prompt
    prompt_share          below 1: so many times fewer, drawn by the same norms from all responses of a fold
    seed                  of the draw
    """

    responses_per_prompt: int = 1
    by_norm: bool = False
    prompt_share: float = 1.0
    seed: int = 0


@dataclass(frozen=True)
class FoldGradients:
    """What one fold says; all of it flat, baselines from all responses."""

    entropy: Tensor  # (1 or 2, P): Σ ρ (∂H_seq − H_tok ∂E[T]), Σ ρ ∂H_seq, each as a mean over the fold's responses
    training: Tensor | None  # (P,): the training gradient of the chosen responses, on the mean scale; if asked for


def importance_ratios(ctx: StepContext) -> Tensor | None:
    """Returns ρ, (B,) fp64: 1 on-policy; None when TRL did not keep the log-probabilities at sampling."""
    if ctx.rollout.on_policy:
        return torch.ones(ctx.rollout.num_sequences, dtype=torch.float64, device=ctx.scores.logps.device)
    if ctx.rollout.sampling_logps is None:
        return None
    difference = ctx.scores.logps.double() - ctx.rollout.sampling_logps.double()
    return difference.masked_fill(ctx.scores.mask == 0, 0.0).sum(dim=1).exp()


def fold_gradients(
    ctx: StepContext,
    layout: FlatVectors,
    ratios: Tensor,
    level: float,
    choice: Choice,
    estimator: Estimator,
    *,
    per_sequence: bool,
    with_training: bool,
) -> Iterator[FoldGradients]:
    """Yields the gradients of each fold of this rank, in order, from some of its responses.

    level  H_tok of the whole step: E[T] ∂H_tok = ∂H_seq − H_tok ∂E[T] is one direction, for one backward

    One small forward pass per fold on the unwrapped model, and a backward for each direction: per token, per sequence,
    and of the training loss; `.grad` and the reducer of DDP are not touched.
    """
    known = (ctx.scores.logps, ctx.scores.entropies, ctx.scores.mask, ctx.rollout.prompt_index)
    sequence_weights, entropy_weights = surrogate_weights(*known, estimator, target="sequence")
    length_weights, _ = surrogate_weights(*known, estimator, target="length")  # ∂E[T] has no ∂h term
    logp_weights = [sequence_weights - level * length_weights, sequence_weights][: 1 + per_sequence]
    norms = ratios * (logp_weights[0].square() + entropy_weights.square()).double().sum(dim=1).sqrt()
    multiplicity = _multiplicity(ctx, choice, norms)
    shares = ratios * multiplicity / torch.bincount(ctx.fold)[ctx.fold]
    parameters = list(ctx.parameters.values())
    for fold in range(int(ctx.fold.max()) + 1):
        rows = ((multiplicity > 0) & (ctx.fold == fold)).nonzero().squeeze(1)
        fresh = ctx.policy.score(ctx.rollout, rows)
        width = fresh.logps.shape[1]
        share = shares[rows].to(fresh.logps.dtype).unsqueeze(1)
        pairs = [(share * weights[rows, :width], share * entropy_weights[rows, :width]) for weights in logp_weights]
        entropy = entropy_gradient(fresh, pairs, parameters, layout, keep_graph=with_training)
        training = None
        if with_training:
            training = layout.flatten(ctx.loss_weights.gradient(fresh, rows, parameters, share=1.0 / len(rows)))
        yield FoldGradients(entropy, training)


def _multiplicity(ctx: StepContext, choice: Choice, norms: Tensor) -> Tensor:
    """Returns for how many responses each one stands, (B,) fp64: 0 for those that are not drawn."""
    number = response_number(ctx.rollout.prompt_index)
    if not choice.by_norm:
        group = min(choice.responses_per_prompt, ctx.responses_per_prompt)
        return (number < group).double() * (ctx.responses_per_prompt / group)
    stratum = ctx.fold
    if choice.prompt_share == 1.0:
        _, stratum = ctx.rollout.prompt_index.unique(return_inverse=True)
    sizes = torch.bincount(stratum)
    wanted = sizes / ctx.responses_per_prompt * choice.responses_per_prompt * choice.prompt_share
    counts = torch.minimum(wanted.round().clamp(min=1), sizes)
    keys = keys_of(ctx.rollout.prompt_ids, ctx.rollout.prompt_mask)
    of_stratum = keys.new_zeros(len(counts)).index_add_(0, stratum, keys)
    probability = inclusion_probabilities(norms, stratum, counts)
    taken = drawn(probability, stratum, uniforms_of(of_stratum, choice.seed, ctx.step))
    return taken / probability


def entropy_gradient(
    fresh: Scores,
    weights: Sequence[tuple[Tensor, Tensor]],
    parameters: Sequence[Tensor],
    layout: FlatVectors,
    *,
    keep_graph: bool = False,
) -> Tensor:
    """Returns Σ_ik w_ik ∂log π(t_ik) + u_ik ∂h_ik over some rows, (q, P), for each of q pairs of weights (w, u).

    fresh       scores of these rows, with graph
    weights     (rows, width) each, as wide as the scores, divided by the number of sequences of the mean that is meant
    keep_graph  for another backward through the same scores

    One backward for each pair: a sum like this is a vector-Jacobian product, so the weights go straight into it. A
    parameter that these rows do not reach has 0.
    """
    outputs, last = [fresh.logps, fresh.entropies], len(weights) - 1
    gradients = []
    for number, pair in enumerate(weights):
        again = keep_graph or number < last
        gradients.append(
            torch.autograd.grad(
                outputs, parameters, pair, retain_graph=again, allow_unused=True, materialize_grads=True
            )
        )
    return torch.stack([layout.flatten(gradient) for gradient in gradients])
