"""The files of a kernel, and its sequences as lines of sequences.jsonl, to read beside its numbers.

Each is written under another name and moved, so that no file is ever incomplete.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from rl_training.engine.batch import Rollout
from rl_training.mathematics.importance import LOGP, sequence_totals
from rl_training.offline.buffers import rewards_of, text_of, tokens_of
from rl_training.offline.restored import RestoredTrainer
from rl_training.offline.truth import by_name
from rl_training.records.atomic_write import write_atomically
from rl_training.records.jsonl import from_json, to_json

KERNEL_FILE, UPDATE_FILE, PLAN_FILE = "kernel.safetensors", "update.safetensors", "plan.json"
SEQUENCES_FILE = "sequences.jsonl"
EVALUATION, UPDATE = "evaluation", "update"


def block_file(folder: Path, number: int) -> Path:
    return folder / f"block-{number:05d}.safetensors"


def save_tensors(tensors: Mapping[str, Tensor], path: Path, metadata: Mapping[str, str] | None = None) -> None:
    scratch = path.with_suffix(".tmp")
    try:
        save_file({k: t.detach().cpu().contiguous() for k, t in tensors.items()}, scratch, dict(metadata or {}))
    except Exception as error:  # safetensors has errors of its own
        raise OSError(
            f"{path} cannot be written ({error}): make room; a finished block is not calculated again"
        ) from error
    scratch.replace(path)


def claim(folder: Path, identity: dict[str, Any]) -> None:
    """Claims the folder for this kernel. Raises ValueError when it belongs to another one."""
    folder.mkdir(parents=True, exist_ok=True)
    plan = folder / PLAN_FILE
    if plan.is_file():
        other = json.loads(plan.read_text(encoding="utf-8"))
        different = [key for key in identity if other.get(key) != identity[key]]
        if different:
            raise ValueError(
                f"{folder} holds a kernel with other {', '.join(different)}: name another folder, or remove this one"
            )
        return
    write_atomically({plan: json.dumps(identity).encode()})


@dataclass(frozen=True)
class Kernel:
    """A finished kernel, as its file has it."""

    tensors: Mapping[str, Tensor]
    about: Mapping[str, str]

    @property
    def scale(self) -> float:
        """c /(N_U L): what turns K(i, j) A_j into a change of log π(i)."""
        return float(self.about["clip_coefficient"]) / (self.tensors["kernel"].shape[1] * int(self.about["max_length"]))


def load_kernel(folder: Path) -> Kernel:
    """Returns the kernel in this folder. Raises ValueError when it is not finished."""
    path = folder / KERNEL_FILE
    if not path.is_file():
        raise ValueError(f"{folder} holds no {KERNEL_FILE}: run rl-training analyze kernel.enabled=true")
    try:
        with safe_open(path, framework="pt") as file:
            about = dict(file.metadata())
        return Kernel(load_file(path), about)
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged ({error}): remove it, and run rl-training analyze again") from error


def text_hashes(rollout: Rollout) -> list[str]:
    """Returns a hash of the tokens of each sequence, prompt and response, whatever the padding."""
    return [_token_hash(*tokens_of(rollout, row)) for row in range(rollout.num_sequences)]


def write_sequences(
    restored: RestoredTrainer, prompts: Sequence[Any], delta: Tensor, evaluation: Rollout, update: Rollout, folder: Path
) -> None:
    """Writes a line for each sequence, E's first: texts, tokens, log-probability, entropy, reward and advantage, and
    the change of its log-probability by the step delta, (P,).

    Every process calls it, one writes. E's rewards use the data set's row with the same prompt.

    prompts  (N_E,) of E, as the data set has them
    """
    rewards = rewards_of(restored, prompts, evaluation)
    if restored.rank != 0:
        return
    assert update.rewards is not None
    shift = by_name(restored, delta)
    rows = [
        *_lines(restored, EVALUATION, evaluation, rewards, shift),
        *_lines(restored, UPDATE, update, update.rewards, shift),
    ]
    write_atomically({folder / SEQUENCES_FILE: "".join(json.dumps(row) + "\n" for row in rows).encode()})


def read_sequences(folder: Path) -> list[dict[str, Any]]:
    """Returns the lines of sequences.jsonl, null as nan."""
    lines = (folder / SEQUENCES_FILE).read_text(encoding="utf-8").splitlines()
    return [from_json(json.loads(line)) for line in lines]


def _token_hash(*parts: Sequence[int]) -> str:
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
            "buffer": buffer, "row": row, "prompt_hash": _token_hash(prompt), "hash": _token_hash(prompt, response),
            "tokens": int(length), "ids": response,
            **to_json({key: float(value) for key, value in values.items()}),
            **text_of(restored, rollout, row),
        })  # fmt: skip
    return lines
