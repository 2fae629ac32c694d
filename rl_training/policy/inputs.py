"""What a model is given to score some sequences: tokens, what goes with them, and where completions are predicted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rl_training.policy.rollout import Rollout


@dataclass(frozen=True)
class ModelInputs:
    """Some rows of a rollout as a model takes them."""

    ids: Tensor  # (B, W)
    inputs: dict[str, Any]  # images and the like, by the names of the model's arguments
    columns: Tensor  # (B, T), where a completion's tokens are predicted
    targets: Tensor  # (B, T), these tokens
    mask: Tensor  # (B, T), 1 on sampled ones
    num_sampled: int  # of these, in host memory

    def sampled_tokens(self) -> Tensor:
        """Return where the sampled tokens are among all (B T) of the completions."""
        # Not by nonzero(), for whose size the host waits.
        return self.mask.flatten().argsort(descending=True, stable=True)[: self.num_sampled]

    def at_tokens(self, tokens: Tensor) -> Tensor:
        """Return where these tokens are predicted, among all (B W) columns."""
        return tokens // self.mask.shape[1] * self.ids.shape[1] + self.columns.flatten()[tokens]


def right_padded_inputs(sequences: Rollout, rows: Tensor) -> ModelInputs:
    """Return these rows with the padding on their right, each sequence from the first column on."""
    prompt_mask, mask = sequences.prompt_mask[rows], sequences.completion_mask[rows]
    prompt_length, length = prompt_mask.sum(dim=1), sequences.token_mask[rows].sum(dim=1)
    padded = torch.cat([sequences.prompt_ids[rows], sequences.completion_ids[rows]], dim=1)
    width, longest, num_sampled = torch.stack([(prompt_length + length).max(), length.max(), mask.sum()]).tolist()
    columns = (prompt_mask.shape[1] - prompt_length).unsqueeze(1) + torch.arange(width, device=padded.device)
    columns = columns.clamp(max=padded.shape[1] - 1)
    before = (prompt_length - 1).unsqueeze(1) + torch.arange(longest, device=padded.device)
    return ModelInputs(
        ids=padded.gather(1, columns),
        inputs=_further_inputs(sequences, rows, columns),
        columns=before.clamp(max=width - 1),
        targets=sequences.completion_ids[rows][:, :longest],
        mask=mask[:, :longest],
        num_sampled=num_sampled,
    )


def left_padded_inputs(sequences: Rollout, rows: Tensor) -> ModelInputs:
    """Return these rows with the padding on their left, by an attention mask and without positions."""
    ids = torch.cat([sequences.prompt_ids[rows], sequences.completion_ids[rows]], dim=1)
    attention = torch.cat([sequences.prompt_mask[rows], sequences.token_mask[rows]], dim=1)
    targets, mask = sequences.completion_ids[rows], sequences.completion_mask[rows]
    columns = torch.arange(ids.shape[1] - targets.shape[1] - 1, ids.shape[1] - 1, device=ids.device)
    inputs = {"attention_mask": attention, **_further_inputs(sequences, rows, None)}
    return ModelInputs(ids, inputs, columns.expand_as(targets), targets, mask, int(mask.sum()))


def _further_inputs(sequences: Rollout, rows: Tensor, columns: Tensor | None) -> dict[str, Any]:
    """Return what the model takes beside tokens, of these rows; types of tokens go with the tokens, to `columns`."""
    inputs: dict[str, Any] = {}
    for name, values in (sequences.images or {}).items():
        if not isinstance(values, Tensor):
            own = [values[row] for row in rows.tolist()]
            if isinstance(own[0], Tensor):  # otherwise it counts what rows have, and is no input of the model
                inputs[name] = torch.cat(own)
        elif columns is not None and name.endswith("token_type_ids"):
            inputs[name] = values[rows].gather(1, columns)
        else:
            inputs[name] = values[rows]
    return inputs
