"""Products of many long rows with many others, in blocks under a memory budget: the arithmetic of the sequence kernel.

calculate.py explains what is multiplied, and why. Dr-GRPO's gradient of U, g = −(1/N_U) Σ_j (A_j/L) W_j, contributes
δθ = −M ⊙ c g to the optimizer's step, where c is the clipping factor and M = κP. For AdamW κ = lr (1−β1)/(1−β1^t) and
P = 1/(√v̂ + ε) of THIS step; for SGD M = lr.

Both sides are multiplied by √M, which leaves plain matrix products. n_b of E's rows are held in memory at a time, and
U's rows are streamed past them. This takes about

    [N_U (1 + ⌈N_E/n_b⌉) + 1.6 N_E] t  +  (N_E + N_U) s  +  4 N_E N_U P / F        seconds

where t is the time of one sequence's forward and backward (a second backward from the same forward costs 0.6 t), s the
time of its sketches, norm and products with δθ, and F the number of operations per second.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from rl_training.errors import UserError
from rl_training.hosts.trl.policy import TrainerPolicy
from rl_training.hosts.trl.trainer import GRPOTrainer
from rl_training.offline.kernel.sequence_gradients import SequenceGradients
from rl_training.offline.restored import RestoredTrainer
from rl_training.offline.update import Update
from rl_training.optim.formula import CAUSES
from rl_training.policy.precision import ieee_fp32, without_dropout
from rl_training.policy.rollout import Rollout
from rl_training.policy.scores import Scores
from rl_training.step.loss_weights import gradient_of

AUTOCAST_TOLERANCE_FACTOR = 300.0  # factor on error limits if the forward runs under bf16 autocast
COLUMNS = 2**14  # columns whose products are summed in fp32; these sums are added in fp64


@dataclass(frozen=True)
class KernelInputs:
    """The inputs of a kernel. Every process has the sequences of all processes."""

    evaluation: Rollout  # E, N_E sequences
    logp_weights: Tensor  # (N_E, T), w: x̄ is the mean over E of Σ_k w_k ∂log π(t_k) + u_k ∂h_k
    entropy_weights: Tensor  # (N_E, T), u
    entropy_gradient: Tensor  # (P,), x̄
    update: Rollout  # U, N_U sequences with their advantages
    gradient: Tensor  # (P,), the mean over U, before clipping
    clip: float  # its clipping factor
    parts: Tensor  # (3, P), the parts of the step, in the order of CAUSES
    sqrt_metric: Tensor  # √M, (P,): the step multiplies its own clipped gradient by −M
    max_length: int  # L of the loss

    @classmethod
    def of_step(
        cls,
        restored: RestoredTrainer,
        evaluation: Rollout,
        weights: tuple[Tensor, Tensor],
        entropy_gradient: Tensor,
        update: Rollout,
        step: Update,
    ) -> KernelInputs:
        """Return the inputs for the optimizer's step on U. Collective."""
        layout = restored.layout
        sqrt_metric, *parts = (layout.zeros() for _ in range(1 + len(CAUSES)))
        for piece in step.whole.pieces:
            gradient = step.whole.gradient(piece)
            piece.of(sqrt_metric).copy_((-piece.state.gradient_factor(piece.param, gradient)).sqrt())
            for vector, part in zip(parts, piece.delta(gradient), strict=True):
                piece.of(vector).copy_(part)
        return cls(
            evaluation,
            *weights,
            entropy_gradient,
            update,
            gradient=restored.whole(step.gradient),
            clip=step.whole.clip,
            parts=torch.stack([restored.whole(part) for part in parts]),
            sqrt_metric=restored.whole(sqrt_metric),
            max_length=restored.trainer.max_completion_length,
        )

    @property
    def scale(self) -> float:
        """The factor c /(N_U L)."""
        return self.clip / (self.update.num_sequences * self.max_length)


def row_products(rows: Tensor, others: Tensor) -> Tensor:
    """Return rows · othersᵀ, (n, q) fp64, for (n, P) `rows` and (q, P) `others`. Either may be stored in bf16.

    Products and sums over COLUMNS columns are in fp32, or in fp64 if either side is. These sums are added in fp64. The
    relative error in the Frobenius norm is about 1e-6 for fp32 rows of any length, and 2e-4 if one side is in bf16.
    """
    dtype = torch.promote_types(torch.promote_types(rows.dtype, others.dtype), torch.float32)
    total = torch.zeros(len(rows), len(others), dtype=torch.float64, device=rows.device)
    with ieee_fp32():
        for a, b in zip(rows.split(COLUMNS, dim=1), others.split(COLUMNS, dim=1), strict=True):
            total += a.to(dtype) @ b.to(dtype).T
    return total


def weighted_sum(weights: Tensor, rows: Tensor) -> Tensor:
    """Return Σ_i weights_i rows_i, (P,), for (n,) weights and (n, P) rows, summed in fp64."""
    weights = weights.double()
    return torch.cat([weights @ part.double() for part in rows.split(COLUMNS, dim=1)])


def plan_blocks(
    num_held: int,
    num_parameters: int,
    *,
    memory_bytes: float,
    microbatch: int,
    bytes_per_entry: int = 4,
    num_ranks: int = 1,
) -> list[range]:
    """Split the held sequences into equal blocks that fit the budget and are no larger than one rank's share.

    The budget covers two held rows per sequence, and the fp32 rows of one streamed microbatch.

    Args:
        num_held: Number of sequences to hold, N_E.
        num_parameters: Entries of a row, P.
        memory_bytes: The budget.
        microbatch: Sequences streamed at once.
        bytes_per_entry: Size of an entry of the held rows.

    Raises:
        UserError: Not even one sequence fits. The message says how much memory is enough.

    Example: a row of 10 fp32 entries takes 40 bytes. The streamed microbatch takes 40 of 280 bytes, and each held
    sequence 80, so three would fit:

    >>> plan_blocks(4, 10, memory_bytes=280, microbatch=1)
    [range(0, 2), range(2, 4)]
    """
    streaming = 4 * microbatch * num_parameters
    per_row = 2 * bytes_per_entry * num_parameters
    fitting = int((memory_bytes - streaming) // per_row)
    if fitting < 1:
        needed = (streaming + per_row) / 1e9
        raise UserError(
            f"kernel.memory_gb={memory_bytes / 1e9:.3g} is too small for a row of {num_parameters} parameters and a "
            f"microbatch of {microbatch}: give at least kernel.memory_gb={math.ceil(needed * 1000) / 1000}, or "
            "lower kernel.microbatch_size"
        )
    size = min(math.ceil(num_held / math.ceil(num_held / fitting)), math.ceil(num_held / num_ranks))
    return [range(first, min(first + size, num_held)) for first in range(0, num_held, size)]


class KernelRows:
    """Computes gradients of single sequences as rows over the trainable parameters, (B, P) fp32. Dropout is off.

    A trained output head is called as a module, so that hooks see it.

    Args:
        parameters: The trainable parameters by name.
        microbatch: Sequences per forward.
    """

    def __init__(self, trainer: GRPOTrainer, parameters: Mapping[str, nn.Parameter], microbatch: int) -> None:
        self.parameters = parameters
        self.microbatch = microbatch
        self._model = trainer.model
        head = self._model.get_output_embeddings()
        trained = any(p is weight for weight in head.parameters() for p in parameters.values())
        self._policy = TrainerPolicy(trainer, call_head=trained)
        self._policy.scorer.full_logits_reason()  # before hooks are registered
        is_autocast = trainer.accelerator.mixed_precision != "no"
        self.tolerance_factor = AUTOCAST_TOLERANCE_FACTOR if is_autocast else 1.0  # factor on limits set for fp32
        self._recorder = SequenceGradients(self._model, parameters)
        self._matrix = torch.empty(0)

    def batches(self, rows: Sequence[int]) -> list[Tensor]:
        """Split these rows of a rollout into microbatches."""
        return list(torch.tensor(list(rows), device=self._recorder.layout.device).split(self.microbatch))

    def logp_gradients(self, rollout: Rollout, rows: Tensor) -> Tensor:
        """Return W_i = ∂S_i of these rows, (B, P). The next call overwrites it."""
        (scores,) = self._row_gradients(rollout, rows)
        return scores

    def logp_and_entropy_gradients(
        self, rollout: Rollout, rows: Tensor, logp_weights: Tensor, entropy_weights: Tensor
    ) -> Iterator[Tensor]:
        """Yield W_i, then x_i = Σ_k w_k ∂log π(t_k) + u_k ∂h_k, of these rows, (B, P) each, from one forward.

        Each overwrites the one before.

        Args:
            logp_weights: w of the whole rollout, (N, T).
            entropy_weights: u of the whole rollout, (N, T).
        """
        return self._row_gradients(rollout, rows, (logp_weights, entropy_weights))

    def sum(
        self, rollout: Rollout, rows: Tensor, logp_weights: Tensor, entropy_weights: Tensor | None = None
    ) -> Tensor:
        """Return Σ_i Σ_k w_ik ∂log π(t_ik) + u_ik ∂h_ik over these rows, (P,), by an ordinary backward."""
        with without_dropout(self._model):
            scores = self._policy.score(rollout, rows)
            entropy_part = None if entropy_weights is None else _weights_of_rows(entropy_weights, rows, scores)
            row_weights = _weights_of_rows(logp_weights, rows, scores)
            gradient = gradient_of(scores, row_weights, entropy_part, list(self.parameters.values()))
        return torch.cat(self._recorder.layout.vector(gradient))

    def _row_gradients(self, rollout: Rollout, rows: Tensor, *more_weights: tuple[Tensor, Tensor]) -> Iterator[Tensor]:
        layout = self._recorder.layout
        if len(self._matrix) != len(rows):
            self._matrix = torch.empty(0)  # frees the old one before the new one is allocated
            self._matrix = torch.empty(len(rows), layout.num_entries, dtype=layout.dtype, device=layout.device)
        with without_dropout(self._model):
            scores, recording = self._recorder.record(lambda: self._policy.score(rollout, rows))
        payloads = [([scores.logps], [scores.mask.to(scores.logps)])]
        payloads += [
            ([scores.logps, scores.entropies], [_weights_of_rows(w, rows, scores) for w in pair])
            for pair in more_weights
        ]
        for remaining, payload in zip(range(len(more_weights), -1, -1), payloads, strict=True):
            with without_dropout(self._model):  # checkpointed modules run once more
                recording.fill(self._matrix, *payload, keep_graph=remaining > 0)
            yield self._matrix


def _weights_of_rows(weights: Tensor, rows: Tensor, scores: Scores) -> Tensor:
    width = scores.logps.shape[1]
    return weights[rows, :width].to(scores.logps) * scores.mask.to(scores.logps)
