"""The rows that the kernel multiplies: gradients of single sequences at a checkpoint, and the batch gradients beside.

Everything is measured without dropout. Where the head is trained it is called, so that hooks see it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from rl_training.engine.batch import Rollout
from rl_training.engine.loss_weights import gradient_of
from rl_training.engine.precision import without_dropout
from rl_training.hosts.trl.policy import TrainerPolicy
from rl_training.hosts.trl.trainer import DrGRPOTrainer
from rl_training.mathematics.scores import Scores
from rl_training.offline.sequence_gradients import SequenceGradients

ROUNDED = 300.0  # how much wider limits are where the forward runs under bf16 autocast


class GradientRows:
    """Takes gradients of sequences, `microbatch` at a time, as rows over the trainable parameters, (B, P) fp32."""

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
            of_entropies = None if entropy_weights is None else _of_rows(entropy_weights, rows, scores)
            own = _of_rows(logp_weights, rows, scores)
            gradient = gradient_of(scores, own, of_entropies, list(self.parameters.values()))
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
