"""What a step's δθ does to entropy to first order, by the entropy gradient of an evaluation buffer: X_E · δθ.

The buffer E knows nothing of the training batch, so that no fold has to be left out, and it holds unfiltered prompts
whatever the batch was filtered by. Per token and per sequence,

    X_E · δθ = Σ_b x_b,   x_b = Σ_{i in block b} Σ_k (w_ik ∂log π(t_ik) + u_ik ∂h_ik) · δθ

with the weights of entropy.py, baseline "buffer", over E of all ranks. The error leaves out one block at a time, a
block being what one backward takes: the level H_tok inside of the weights and their baseline are taken as given.
"""

from __future__ import annotations

import torch

from rl_training.engine.batch import Rollout
from rl_training.engine.entropy_gradients import entropy_gradient
from rl_training.engine.step import Step
from rl_training.mathematics.entropy import Target, surrogate_weights
from rl_training.mathematics.jackknife import JackknifeUnits, Replicates
from rl_training.mathematics.scores import Scores
from rl_training.mathematics.vectors import dot

MOST_BLOCKS = 32  # as many are enough for an error; small microbatches make more


def blocks_of(step: Step, buffer: Rollout, num_sequences: int) -> JackknifeUnits:
    """Returns which block each of this rank's sequences is in: as many neighbours as a microbatch, or fewer."""
    size = max(1, min(len(step.batch.microbatch_rows[0]), num_sequences // MOST_BLOCKS))
    is_first = torch.zeros(num_sequences, dtype=torch.float64, device=buffer.prompt_index.device)
    is_first[buffer.prompt_index[::size]] = 1.0
    is_first = step.ranks.reduce(is_first)
    first = buffer.prompt_index[::size].repeat_interleave(size)[: buffer.num_sequences]
    return JackknifeUnits((is_first.cumsum(dim=0) - 1.0).long()[first], int(is_first.sum()), step.ranks.reduce)


def evaluation_change(
    step: Step, buffer: Rollout, scores: Scores, blocks: JackknifeUnits, targets: tuple[Target, ...]
) -> Replicates:
    """Returns X_E · δθ, (q,) nats for each target, and without each block, (blocks, q). A collective.

    scores   of this rank's share of E at the present parameters, in tables as wide on every rank
    targets  "token", "sequence": a backward for each

    `.grad` and the reducer of DDP are not touched.
    """
    known = (scores.logps.double(), scores.entropies.double(), scores.mask, buffer.prompt_index)
    reduce, change = step.ranks.reduce, step.entropy_change
    weights = [surrogate_weights(*known, change.settings.estimator, target, "buffer", reduce) for target in targets]
    parameters, update = list(step.gradients.parameters.values()), change.update
    assert update is not None
    lengths = scores.mask.double().sum(dim=1)
    sizes = blocks.gather(torch.stack([torch.ones_like(lengths), lengths], dim=1))  # (blocks, 2)
    products = sizes.new_zeros(blocks.count, len(targets))
    for block in blocks.number.unique().tolist():
        rows = (blocks.number == block).nonzero().squeeze(1)
        with step.policy.measuring():
            fresh = step.policy.score(buffer, rows)
            width = fresh.logps.shape[1]
            pairs = [(w[rows, :width].to(fresh.logps), u[rows, :width].to(fresh.entropies)) for w, u in weights]
            directions = entropy_gradient(fresh, pairs, parameters, change.layout)
        products[block] = torch.stack([dot(direction, update) for direction in directions]).to(products)
    products = reduce(products) / sizes[:, 0].sum()  # each row is one rank's
    left = 1.0 - sizes / sizes.sum(dim=0)  # of E without a block, as a share of its sequences and of its tokens
    of_target = left[:, [int(target == "token") for target in targets]]
    total = products.sum(dim=0)
    return Replicates(total, (total - products) / of_target)
