"""The rows that the kernel multiplies: gradients of single sequences at a checkpoint, and the batch gradients beside.

Everything is measured without dropout. Where the head is trained it is called, so that hooks see it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from rl_training.engine.batch import Rollout
from rl_training.engine.precision import without_dropout
from rl_training.hosts.trl.policy import TrainerPolicy
from rl_training.hosts.trl.trainer import DrGRPOTrainer
from rl_training.mathematics.scores import Scores
from rl_training.offline.flat_vectors import FlatVectors
from rl_training.offline.sequence_gradients import SequenceGradients


class GradientRows:
    """Takes gradients of sequences, `microbatch` at a time, as rows over the trainable parameters, (B, P) fp32."""

    def __init__(self, trainer: DrGRPOTrainer, parameters: Mapping[str, nn.Parameter], microbatch: int) -> None:
        self.parameters, self.microbatch = parameters, microbatch
        self._model = trainer.model
        head = self._model.get_output_embeddings()
        trained = any(p is own for own in head.parameters() for p in parameters.values())
        self._policy = TrainerPolicy(trainer, call_head=trained)
        self._policy.scorer.verify()  # before hooks are set
        self._rounded = trainer.accelerator.mixed_precision != "no"
        self._recorder = SequenceGradients(self._model, parameters)
        self._layout = self._room = FlatVectors(parameters, 0)

    def rounding(self, factor: float) -> float:
        """Returns how much wider limits are that fp32 would keep: `factor` under autocast, else 1."""
        return factor if self._rounded else 1.0

    def batches(self, rows: Sequence[int]) -> list[Tensor]:
        """Returns these rows of a rollout in microbatches."""
        device = next(iter(self.parameters.values())).device
        return list(torch.tensor(list(rows), device=device).split(self.microbatch))

    def log_probability(self, rollout: Rollout, rows: Tensor) -> Tensor:
        """Returns W_i = ∂S_i of these rows, (B, P); the next call writes over it."""
        buffer = self._buffer(len(rows))
        with without_dropout(self._model):
            scores, recording = self._recorder.record(lambda: self._policy.score(rollout, rows))
            recording.fill(buffer, [scores.logps], [scores.mask.to(scores.logps)])
        return buffer.matrix

    def both(self, rollout: Rollout, rows: Tensor, logp_weights: Tensor, entropy_weights: Tensor) -> Iterator[Tensor]:
        """Yields W_i, then x_i = Σ_k w_k ∂log π(t_k) + u_k ∂h_k of these rows, (B, P) each, from one forward.

        logp_weights, entropy_weights  (N, T) w and u of the whole rollout. The second writes over the first.
        """
        buffer = self._buffer(len(rows))
        with without_dropout(self._model):
            scores, recording = self._recorder.record(lambda: self._policy.score(rollout, rows))
            recording.fill(buffer, [scores.logps], [scores.mask.to(scores.logps)], keep_graph=True)
        yield buffer.matrix
        weights = [_of_rows(w, rows, scores) for w in (logp_weights, entropy_weights)]
        with without_dropout(self._model):  # checkpointed modules run once more
            recording.fill(buffer, [scores.logps, scores.entropies], weights)
        yield buffer.matrix

    def sum(
        self, rollout: Rollout, rows: Tensor, logp_weights: Tensor, entropy_weights: Tensor | None = None
    ) -> Tensor:
        """Returns Σ_i Σ_k w_ik ∂log π(t_ik) + u_ik ∂h_ik over these rows, (P,), by an ordinary backward."""
        with without_dropout(self._model):
            scores = self._policy.score(rollout, rows)
            outputs, weights = [scores.logps], [_of_rows(logp_weights, rows, scores)]
            if entropy_weights is not None:
                outputs.append(scores.entropies)
                weights.append(_of_rows(entropy_weights, rows, scores))
            gradients = torch.autograd.grad(outputs, list(self.parameters.values()), weights)
        return self._layout.flatten(gradients)

    def _buffer(self, num_rows: int) -> FlatVectors:
        if self._room.num_rows != num_rows:
            self._room = self._layout  # free the old one before allocating the new one
            self._room = FlatVectors(self.parameters, num_rows)
        return self._room


def _of_rows(weights: Tensor, rows: Tensor, scores: Scores) -> Tensor:
    width = scores.logps.shape[1]
    return weights[rows, :width].to(scores.logps) * scores.mask.to(scores.logps)
