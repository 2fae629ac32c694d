"""The policy of a trainer, for probes: it scores, samples and decodes exactly as training would.

The trainer may be running, or restored at a checkpoint without taking steps.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn
from trl import GRPOTrainer

from rl_training.engine.batch import Rollout
from rl_training.engine.policy import Policy
from rl_training.engine.scorer import Scorer
from rl_training.hosts.trl import sampling
from rl_training.mathematics.scores import Scores

LogpsAndEntropies = Callable[..., tuple[Tensor, Tensor, Tensor | None]]


class TrainerPolicy(Policy):
    """The policy of this trainer.

    call_head  the head's module is called when scoring, for hooks on it
    """

    def __init__(self, trainer: GRPOTrainer, call_head: bool = False) -> None:
        self._trainer, self._call_head = trainer, call_head
        super().__init__(trainer.model, self._scorer_of(trainer.model), trainer.args.per_device_train_batch_size)

    def _scorer_of(self, model: nn.Module) -> Scorer:
        trainer = self._trainer
        return Scorer(
            model,
            trainer.temperature,
            autocast=trainer.accelerator.autocast,
            fp32_head=trainer.args.cast_lm_head_to_fp32,
            call_head=self._call_head,
        )

    @property
    def has_reference(self) -> bool:
        """Whether there is a reference model for a KL term: TRL's, if beta > 0, or the model without its adapters."""
        if "ref" in getattr(self.model, "peft_config", {}):  # TRL's copy of an adapter that is trained further
            return False
        is_cut = self._trainer.is_deepspeed_enabled or self._trainer.is_fsdp_enabled
        return super().has_reference or (self._trainer.ref_model is not None and not is_cut)

    def reference_logps(self, rollout: Rollout) -> Tensor | None:
        """Returns the log-probabilities of that model, (B, T), as a measurement; None where there is none."""
        if not self.has_reference or self._trainer.ref_model is None:
            return super().reference_logps(rollout)
        return self.score_rollout(rollout, self._scorer_of(self._trainer.ref_model)).logps

    def with_hidden(self, scores: Scores, rollout: Rollout, hidden: Tensor) -> Scores:
        """Returns these scores with those of hidden rows, (B,), recomputed: training's forward pass masks them.

        Without graph, and otherwise as training would score them.
        """
        logps, entropies = scores.logps.detach().clone(), scores.entropies.detach().clone()
        for rows in hidden.nonzero().squeeze(1).split(self._trainer.args.per_device_train_batch_size):
            if len(rows):
                fresh = self.scorer.score(rollout, rows, graph=False)
                width = fresh.logps.shape[1]
                logps[rows, :width], entropies[rows, :width] = fresh.logps.to(logps), fresh.entropies.to(entropies)
        return Scores(logps, entropies, scores.mask)

    def sample(self, num_sequences: int, seed: int) -> Rollout:
        """Returns this rank's share of so many fresh responses to random prompts: see sampling.py."""
        return sampling.sample(self._trainer, num_sequences, seed)

    def decode(self, ids: Tensor) -> str:
        """Returns the text of one sequence of tokens, as TRL decodes completions."""
        return self._trainer._tokenizer.decode(ids, skip_special_tokens=True)
