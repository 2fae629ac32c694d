"""The sequences of a kernel as lines of sequences.jsonl, to read beside its numbers."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rl_training.engine.batch import Rollout
from rl_training.mathematics.importance import LOGP, sequence_totals
from rl_training.offline.buffers import rewards_of, tokens_of
from rl_training.offline.restored import RestoredTrainer
from rl_training.offline.truth import by_name
from rl_training.offline.update import Update
from rl_training.records.atomic_write import write_atomically
from rl_training.records.json_values import from_json, to_json

SEQUENCES_FILE = "sequences.jsonl"
EVALUATION, UPDATE = "evaluation", "update"


def write_sequences(
    restored: RestoredTrainer, prompts: Sequence[Any], update: Update, of_e: Rollout, of_u: Rollout, folder: Path
) -> None:
    """Writes a line for each sequence, E's first: texts, tokens, log-probability, entropy, reward and advantage, and
    the change of its log-probability that the step really makes.

    Every process calls it, one writes. E's rewards use the data set's row with the same prompt.

    prompts  (N_E,) of E, as the data set has them
    """
    rewards = rewards_of(restored, prompts, of_e)
    if restored.rank != 0:
        return
    assert of_u.rewards is not None
    shift = by_name(restored, update.delta)
    rows = [
        *_lines(restored, EVALUATION, of_e, rewards, shift),
        *_lines(restored, UPDATE, of_u, of_u.rewards, shift),
    ]
    write_atomically({folder / SEQUENCES_FILE: "".join(json.dumps(row) + "\n" for row in rows).encode()})


def read_sequences(folder: Path) -> list[dict[str, Any]]:
    """Returns the lines of sequences.jsonl, null as nan."""
    lines = (folder / SEQUENCES_FILE).read_text(encoding="utf-8").splitlines()
    return [from_json(json.loads(line)) for line in lines]


def token_hash(*parts: Sequence[int]) -> str:
    """Returns a short hash of sequences of tokens."""
    return hashlib.sha256(json.dumps([list(part) for part in parts]).encode()).hexdigest()[:16]


def _lines(
    restored: RestoredTrainer, buffer: str, rollout: Rollout, rewards: Tensor, shift: Mapping[str, Tensor]
) -> list[dict[str, Any]]:
    totals = sequence_totals(restored.policy.score_rollout(rollout))
    with restored.policy.shifted(shift):
        changes = sequence_totals(restored.policy.score_rollout(rollout))[:, LOGP] - totals[:, LOGP]
    lines = []
    for row in range(rollout.num_sequences):
        prompt, response = tokens_of(rollout, row)
        logp, entropy, length = totals[row].tolist()
        values = {"reward": rewards[row], "advantage": rollout.advantages[row], "logp": logp, "entropy": entropy,
                  "logp_change": changes[row]}  # fmt: skip
        lines.append({
            "buffer": buffer, "row": row, "prompt_hash": token_hash(prompt), "hash": token_hash(prompt, response),
            "tokens": int(length), "ids": response,
            **to_json({key: float(value) for key, value in values.items()}),
            "prompt": restored.policy.decode(torch.tensor(prompt)),
            "response": restored.policy.decode(torch.tensor(response)),
        })  # fmt: skip
    return lines
