"""Products of many long rows with many others, in blocks under a memory budget: the arithmetic of the sequence kernel.

With g = −(1/N_U) Σ_j (A_j/L) W_j Dr-GRPO's gradient of the update sequences U and δθ = −M ⊙ c g the part of the
optimizer's step that is this step's gradient, M = κP: for AdamW κ = lr (1−β1)/(1−β1^t), P = 1/(√v̂ + ε) of THIS step;
for SGD M = lr. What is multiplied, and why: kernel.py.

√M goes into both sides, which leaves plain matrix products. E's rows are held, n_b at a time, U's stream by:

    seconds ≈ [N_U (1 + ⌈N_E/n_b⌉) + 1.6 N_E] t  +  (N_E + N_U) s  +  4 N_E N_U P / F

t is the time of one sequence's forward and backward (a second backward from the same forward costs 0.6 t), s that of
its summary (sketches, sketches.py; norm; products with δθ), F operations per second.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from rl_training.engine.batch import Rollout
from rl_training.engine.loss_weights import gradient_of
from rl_training.engine.precision import ieee_fp32, without_dropout
from rl_training.hosts.trl.policy import TrainerPolicy
from rl_training.hosts.trl.trainer import DrGRPOTrainer
from rl_training.mathematics.scores import Scores
from rl_training.mathematics.sketches import CountSketches
from rl_training.mathematics.vectors import pairs_dot
from rl_training.offline.sequence_gradients import SequenceGradients
from rl_training.offline.settings import KernelSettings
from rl_training.offline.update import Update

ROUNDED = 300.0  # how much wider limits are where the forward runs under bf16 autocast
COLUMNS = 2**14  # whose products are summed in fp32; beyond that, in fp64


@dataclass(frozen=True)
class KernelInputs:
    """What is asked of a checkpoint's next step: all sequences of all processes, on each of them."""

    evaluation: Rollout  # E, N_E sequences
    logp_weights: Tensor  # (N_E, T), w: x̄ is the mean over E of Σ_k w_k ∂log π(t_k) + u_k ∂h_k
    entropy_weights: Tensor  # (N_E, T), u
    entropy_gradient: Tensor  # (P,), x̄
    update: Rollout  # U, N_U sequences with their advantages
    step: Update  # that U makes
    max_length: int  # L of the loss

    @cached_property
    def root(self) -> Tensor:
        return metric_root(self.step)

    @property
    def scale(self) -> float:
        """c /(N_U L)."""
        return self.step.clip / (self.update.num_sequences * self.max_length)


def metric_root(step: Update) -> Tensor:
    """Returns √M, (P,), of the metric M in which the step takes its own gradient."""
    root = torch.empty_like(step.gradient)
    for piece in step.pieces:
        factor = piece.state.gradient_factor(piece.param, step.clip * step.gradient[piece.flat])
        root[piece.flat] = (-factor).sqrt()
    return root


def row_products(rows: Tensor, others: Tensor) -> Tensor:
    """Returns rows · othersᵀ, (n, q) fp64, of (n, P) and (q, P) of which either may be stored in bf16.

    Products and sums over COLUMNS columns are in fp32 (fp64 if a side is), those over all in fp64. The error in the
    Frobenius norm is about 1e-6 for fp32 rows of any length, and 2e-4 where one side was rounded to bf16.
    """
    dtype = torch.promote_types(torch.promote_types(rows.dtype, others.dtype), torch.float32)
    total = torch.zeros(len(rows), len(others), dtype=torch.float64, device=rows.device)
    with ieee_fp32():
        for a, b in zip(rows.split(COLUMNS, dim=1), others.split(COLUMNS, dim=1), strict=True):
            total += a.to(dtype) @ b.to(dtype).T
    return total


def weighted_sum(weights: Tensor, rows: Tensor) -> Tensor:
    """Returns Σ_i weights_i rows_i, (P,) fp64, of (n,) weights and (n, P) rows; all sums are in fp64."""
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
    """Returns the held rows in blocks, as large as fit into the budget, and at least one for each rank.

    The budget is for the held rows (two a sequence) and the fp32 rows of one microbatch that streams by.

    Raises ValueError, saying how much is enough, when not even one row fits.

    Rows of 10 parameters take 40 bytes; of 280, 40 are for the microbatch that streams by:

    >>> plan_blocks(4, 10, memory_bytes=280, microbatch=1)
    [range(0, 2), range(2, 4)]
    """
    streaming, per_row = 4 * microbatch * num_parameters, 2 * bytes_per_entry * num_parameters
    fitting = int((memory_bytes - streaming) // per_row)
    if fitting < 1:
        needed = (streaming + per_row) / 1e9
        raise ValueError(
            f"kernel.memory_gb={memory_bytes / 1e9:.3g} holds no row of {num_parameters} parameters beside a "
            f"microbatch of {microbatch}: give at least kernel.memory_gb={math.ceil(needed * 1000) / 1000}, or a "
            "smaller microbatch"
        )
    size = min(math.ceil(num_held / math.ceil(num_held / fitting)), math.ceil(num_held / num_ranks))
    return [range(first, min(first + size, num_held)) for first in range(0, num_held, size)]


class KernelRows:
    """Takes gradients of sequences, `microbatch` at a time, as rows over the trainable parameters, (B, P) fp32.

    Everything is measured without dropout. Where the head is trained it is called, so that hooks see it.
    """

    def __init__(self, trainer: DrGRPOTrainer, parameters: Mapping[str, nn.Parameter], microbatch: int) -> None:
        self.parameters, self.microbatch = parameters, microbatch
        self._model = trainer.model
        head = self._model.get_output_embeddings()
        trained = any(p is own for own in head.parameters() for p in parameters.values())
        self._policy = TrainerPolicy(trainer, call_head=trained)
        self._policy.scorer.verify()  # before hooks are set
        self.slack = ROUNDED if trainer.accelerator.mixed_precision != "no" else 1.0  # on limits that fp32 would keep
        self._recorder = SequenceGradients(self._model, parameters)
        self._matrix = torch.empty(0)

    def batches(self, rows: Sequence[int]) -> list[Tensor]:
        """Returns these rows of a rollout in microbatches."""
        return list(torch.tensor(list(rows), device=self._recorder.layout.device).split(self.microbatch))

    def log_probability(self, rollout: Rollout, rows: Tensor) -> Tensor:
        """Returns W_i = ∂S_i of these rows, (B, P); the next call writes over it."""
        (own,) = self._of(rollout, rows)
        return own

    def both(self, rollout: Rollout, rows: Tensor, logp_weights: Tensor, entropy_weights: Tensor) -> Iterator[Tensor]:
        """Yields W_i, then x_i = Σ_k w_k ∂log π(t_k) + u_k ∂h_k of these rows, (B, P) each, from one forward.

        logp_weights, entropy_weights  (N, T) w and u of the whole rollout. The second writes over the first.
        """
        return self._of(rollout, rows, (logp_weights, entropy_weights))

    def sum(
        self, rollout: Rollout, rows: Tensor, logp_weights: Tensor, entropy_weights: Tensor | None = None
    ) -> Tensor:
        """Returns Σ_i Σ_k w_ik ∂log π(t_ik) + u_ik ∂h_ik over these rows, (P,), by an ordinary backward."""
        with without_dropout(self._model):
            scores = self._policy.score(rollout, rows)
            entropy_part = None if entropy_weights is None else _of_rows(entropy_weights, rows, scores)
            own = _of_rows(logp_weights, rows, scores)
            gradient = gradient_of(scores, own, entropy_part, list(self.parameters.values()))
        return torch.cat(self._recorder.layout.vector(gradient))

    def _of(self, rollout: Rollout, rows: Tensor, *further: tuple[Tensor, Tensor]) -> Iterator[Tensor]:
        layout = self._recorder.layout
        if len(self._matrix) != len(rows):
            self._matrix = torch.empty(0)  # frees the old one before the new one is allocated
            self._matrix = torch.empty(len(rows), layout.num_entries, dtype=layout.dtype, device=layout.device)
        with without_dropout(self._model):
            scores, recording = self._recorder.record(lambda: self._policy.score(rollout, rows))
        payloads = [([scores.logps], [scores.mask.to(scores.logps)])]
        payloads += [([scores.logps, scores.entropies], [_of_rows(w, rows, scores) for w in pair]) for pair in further]
        for left, payload in zip(range(len(further), -1, -1), payloads, strict=True):
            with without_dropout(self._model):  # checkpointed modules run once more
                recording.fill(self._matrix, *payload, keep_graph=left > 0)
            yield self._matrix


def _of_rows(weights: Tensor, rows: Tensor, scores: Scores) -> Tensor:
    width = scores.logps.shape[1]
    return weights[rows, :width].to(scores.logps) * scores.mask.to(scores.logps)


class RowSummarizer:
    """Keeps of every sequence's gradient its sketches, its norm, and what the step does to it."""

    def __init__(self, inputs: KernelInputs, parameters: Mapping[str, Tensor], settings: KernelSettings) -> None:
        sizes = {name: p.numel() for name, p in parameters.items()}
        self._root, self._parts = inputs.root, torch.stack(inputs.step.parts)
        self._sketch = CountSketches(sizes, settings.sketch_buckets, settings.sketch_repeats, settings.sketch_seed)

    def scale(self, own: Tensor) -> dict[str, Tensor]:
        """Makes √M W of the rows W, (n, P), in place, and returns what is kept of them.

        sketches  of √M W                 sq_norms  |√M W|², (n,)                products  W·δθ by cause, (n, 3)
        """
        products = row_products(own, self._parts)
        own *= self._root
        return {"sketches": self._sketch(own), "sq_norms": pairs_dot(own, own), "products": products}


def expectation(
    rows: KernelRows, inputs: KernelInputs, summarizer: RowSummarizer, blocks: list[range], num_ranks: int
) -> str:
    """Returns a line on the size and the expected time, by the formula above.

    Each of its terms is timed on one microbatch.
    """
    streamed, held_rows = (rows.batches(range(r.num_sequences))[0] for r in (inputs.update, inputs.evaluation))
    both = rows.both(inputs.evaluation, held_rows, inputs.logp_weights, inputs.entropy_weights)
    holding = _seconds(lambda: list(both))
    own: list[Tensor] = []
    streaming = _seconds(lambda: own.append(rows.log_probability(inputs.update, streamed)))
    streaming += _seconds(lambda: weighted_sum(inputs.update.advantages[streamed], own[0]))
    keeping = _seconds(lambda: summarizer.scale(own[0]))
    a, b = (torch.ones(count, 2**16, device=own[0].device) for count in (len(blocks[0]), 32))
    row_products(a, b)
    multiplying = _seconds(lambda: row_products(a, b)) / (len(a) * len(b) * a.shape[1])
    num_held, num_streamed = inputs.evaluation.num_sequences, inputs.update.num_sequences
    num_parameters, held = own[0].shape[1], num_held / num_ranks
    seconds = num_streamed * -(-len(blocks) // num_ranks) * streaming / len(streamed) + held * holding / len(held_rows)
    seconds += (num_streamed + held) * keeping / len(streamed)
    seconds += 2 * held * num_streamed * num_parameters * multiplying
    return (
        f"kernel: {num_held} × {num_streamed} sequences, {num_parameters:,} parameters, "
        f"{len(blocks)} block{'s' * (len(blocks) > 1)} of {len(blocks[0])} rows; about {seconds:.0f} s"
    )


def _seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - started
