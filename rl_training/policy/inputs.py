"""A model's inputs to score some sequences: tokens, further inputs, and where completions are predicted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rl_training.policy.rollout import Rollout


@dataclass(frozen=True)
class ModelInputs:
    """Some rows of a rollout as inputs of a model, W columns wide, and which scores of them are wanted."""

    ids: Tensor  # (B, W)
    inputs: dict[str, Any]  # images and the like, by the model's argument names
    columns: Tensor  # (B, T), the columns of `ids` at which a completion's tokens are predicted
    targets: Tensor  # (B, T), the completion's tokens
    mask: Tensor  # (B, T), 1 on sampled tokens
    num_sampled: int  # sampled tokens, in host memory
    varentropy: bool = False  # whether varentropies are wanted beside log-probabilities and entropies

    def sampled_tokens(self) -> Tensor:
        """Return the indices of the sampled tokens among all B·T tokens of the completions."""
        # nonzero() would make the host wait for the device.
        return self.mask.flatten().argsort(descending=True, stable=True)[: self.num_sampled]

    def at_tokens(self, tokens: Tensor) -> Tensor:
        """Return where `tokens`, indices among all B·T tokens, are predicted: indices among all B·W columns."""
        return tokens // self.mask.shape[1] * self.ids.shape[1] + self.columns.flatten()[tokens]


def right_padded_inputs(rollout: Rollout, rows: Tensor, varentropy: bool = False) -> ModelInputs:
    """Return some rows right-padded: every sequence starts in the first column."""
    prompt_mask = rollout.prompt_mask[rows]
    mask = rollout.completion_mask[rows]
    prompt_length = prompt_mask.sum(dim=1)
    length = rollout.token_mask[rows].sum(dim=1)
    padded = torch.cat([rollout.prompt_ids[rows], rollout.completion_ids[rows]], dim=1)
    width, longest, num_sampled = torch.stack([(prompt_length + length).max(), length.max(), mask.sum()]).tolist()
    columns = (prompt_mask.shape[1] - prompt_length).unsqueeze(1) + torch.arange(width, device=padded.device)
    columns = columns.clamp(max=padded.shape[1] - 1)
    before = (prompt_length - 1).unsqueeze(1) + torch.arange(longest, device=padded.device)
    return ModelInputs(
        ids=padded.gather(1, columns),
        inputs=_further_inputs(rollout, rows, columns),
        columns=before.clamp(max=width - 1),
        targets=rollout.completion_ids[rows][:, :longest],
        mask=mask[:, :longest],
        num_sampled=num_sampled,
        varentropy=varentropy,
    )


def left_padded_inputs(rollout: Rollout, rows: Tensor) -> ModelInputs:
    """Return some rows left-padded, with an attention mask and without position ids."""
    ids = torch.cat([rollout.prompt_ids[rows], rollout.completion_ids[rows]], dim=1)
    attention = torch.cat([rollout.prompt_mask[rows], rollout.token_mask[rows]], dim=1)
    targets = rollout.completion_ids[rows]
    mask = rollout.completion_mask[rows]
    columns = torch.arange(ids.shape[1] - targets.shape[1] - 1, ids.shape[1] - 1, device=ids.device)
    inputs = {"attention_mask": attention, **_further_inputs(rollout, rows, None)}
    return ModelInputs(ids, inputs, columns.expand_as(targets), targets, mask, int(mask.sum()))


def _further_inputs(rollout: Rollout, rows: Tensor, columns: Tensor | None) -> dict[str, Any]:
    """Return the model's inputs other than tokens for some rows. Token types move to `columns`, as tokens do."""
    inputs: dict[str, Any] = {}
    for name, values in (rollout.images or {}).items():
        if not isinstance(values, Tensor):
            of_rows = [values[row] for row in rows.tolist()]
            if isinstance(of_rows[0], Tensor):  # otherwise it counts a row's images and is not a model input
                inputs[name] = torch.cat(of_rows)
        elif columns is not None and name.endswith("token_type_ids"):
            inputs[name] = values[rows].gather(1, columns)
        else:
            inputs[name] = values[rows]
    return inputs
