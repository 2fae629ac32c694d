"""The policy of a trainer as probes may question it: what is scored, sampled and decoded is what training would.

A trainer that stands at a checkpoint and takes no step will do as well as one that runs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager

import torch
from torch import Tensor
from trl import GRPOTrainer
from trl.trainer.utils import unsplit_pixel_values_by_grid

from rl_training.live import sampling
from rl_training.mathematics.scores import Scores
from rl_training.step.rollout import Rollout, images_of, in_one_width

LogpsAndEntropies = Callable[..., tuple[Tensor, Tensor, Tensor | None]]


class TrainerPolicy:
    """The policy of this trainer, a `Policy`.

    logps_and_entropies  TRL's forward pass, as it is before anybody stands in front of it
    """

    def __init__(self, trainer: GRPOTrainer) -> None:
        self._trainer = trainer
        self.logps_and_entropies: LogpsAndEntropies = trainer._get_per_token_logps_and_entropies

    def score(self, rollout: Rollout, rows: Tensor) -> Scores:
        """Returns log-probabilities and entropies WITH graph for some rows, on the unwrapped model.

        Each sequence starts in the first column, and the batch is as wide as the longest of these rows. What stands to
        the right of a sequence no causal model looks at, so there is no attention mask to build and to apply. The
        random streams (dropout) are put back as they were.
        """
        prompt_mask, mask = rollout.prompt_mask[rows], rollout.completion_mask[rows]
        prompt_length, length = prompt_mask.sum(dim=1), rollout.token_mask[rows].sum(dim=1)
        width, shortest_prompt = int((prompt_length + length).max()), int(prompt_length.min())
        padded = torch.cat([rollout.prompt_ids[rows], rollout.completion_ids[rows]], dim=1)
        columns = (prompt_mask.shape[1] - prompt_length).unsqueeze(1) + torch.arange(width, device=padded.device)
        columns_there = columns.clamp(max=padded.shape[1] - 1)
        ids = padded.gather(1, columns_there)
        images = images_of(rollout, rows) or {}
        for name in images.keys() & {"token_type_ids", "mm_token_type_ids"}:  # they go with the tokens
            images[name] = images[name].gather(1, columns_there)
        devices = [ids.device] if ids.device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices):
            scores = self.logps_and_entropies(
                self._trainer.model,
                ids,
                torch.ones_like(ids),
                logits_to_keep=width - shortest_prompt,
                compute_entropy=True,
                **unsplit_pixel_values_by_grid(images),
            )
        mask = mask[:, : int(length.max())]
        columns = (prompt_length - shortest_prompt).unsqueeze(1) + torch.arange(mask.shape[1], device=ids.device)
        columns = columns.clamp(max=width - shortest_prompt - 1)
        return Scores(logps=scores[0].gather(1, columns), entropies=scores[1].gather(1, columns), mask=mask)

    def with_hidden(self, scores: Scores, rollout: Rollout, hidden: Tensor) -> Scores:
        """Returns these scores with those of hidden rows, (B,), taken afresh: training's forward pass masks them.

        Without graph, and otherwise as training would score them.
        """
        logps, entropies = scores.logps.clone(), scores.entropies.clone()
        for rows in hidden.nonzero().squeeze(1).split(self._trainer.args.per_device_train_batch_size):
            if not len(rows):
                return scores
            with torch.no_grad():
                fresh = self.score(rollout, rows)
            width = fresh.logps.shape[1]
            logps[rows, :width], entropies[rows, :width] = fresh.logps.to(logps), fresh.entropies.to(entropies)
        return Scores(logps, entropies, scores.mask)

    def score_rollout(self, rollout: Rollout) -> Scores:
        """Returns log-probabilities and entropies of all rows at the present parameters, without graph.

        In batches of at most the trainer's microbatch, each only as wide as its longest row.
        """
        width = rollout.completion_ids.shape[1]
        rows = torch.arange(rollout.num_sequences, device=rollout.completion_ids.device)
        with sampling.measuring(self._trainer):
            parts = [self.score(rollout, batch) for batch in rows.split(self._trainer.args.per_device_train_batch_size)]

        return Scores(
            logps=in_one_width([part.logps for part in parts], at_least=width),
            entropies=in_one_width([part.entropies for part in parts], at_least=width),
            mask=rollout.completion_mask,
        )

    def sample(self, num_sequences: int, seed: int) -> Rollout:
        """Returns this rank's share of so many fresh responses to random prompts: see sampling.py."""
        return sampling.sample(self._trainer, num_sequences, seed)

    @contextlib.contextmanager
    def shifted(self, shift: Mapping[str, Tensor]) -> Iterator[None]:
        """A context in which parameters point to moved copies; what they pointed to is never written to."""
        parameters = {name: self._trainer.model.get_parameter(name) for name in shift}
        originals = {name: param.data for name, param in parameters.items()}
        try:
            for name, param in parameters.items():
                param.data = param.data + shift[name]
            yield
        finally:
            for name, param in parameters.items():
                param.data = originals[name]

    def as_measured(self) -> AbstractContextManager[None]:
        """Returns a context in which `score` leaves out autocast and dropout, as `score_rollout` does."""
        return sampling.measuring(self._trainer, with_graph=True)

    def decode(self, ids: Tensor) -> str:
        """Returns the text of one sequence of tokens, as TRL decodes completions."""
        return self._trainer._tokenizer.decode(ids, skip_special_tokens=True)
