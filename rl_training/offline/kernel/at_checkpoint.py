"""The kernel of a checkpoint analysis, from the analysis's own E, U and step.

With kernel.source=fixed, E has the same texts at every checkpoint: those that the first analysis sampled. At other
checkpoints they are not samples of the policy. Gradients, cosines and changes of their log-probabilities stay valid,
but their x̄ is not the gradient of the policy's entropy, and shares of the entropy change are meaningless.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rl_training.entropy.weights import surrogate_weights
from rl_training.hosts.trl.versions import tokenizer_of
from rl_training.offline.analysis import Analysis, Numbers
from rl_training.offline.buffers import evaluation_rewards, gather_rollout, text_of, tokens_of
from rl_training.offline.first_order import TOKEN
from rl_training.offline.kernel.blocks import KernelInputs, KernelRows
from rl_training.offline.kernel.calculate import calculate_kernel, token_hash
from rl_training.offline.kernel.report import write_report
from rl_training.offline.kernel.structure import EVALUATION, SEQUENCES_FILE, UPDATE, Structure, headline_groups
from rl_training.offline.restored import RestoredTrainer
from rl_training.offline.settings import KernelSettings
from rl_training.parallel.vectors import Vector
from rl_training.policy.rollout import Rollout, as_rollout
from rl_training.probes.importance import LOGP, sequence_totals
from rl_training.records.files.atomic_write import write_atomically
from rl_training.records.files.limited import MAX_STATE_BYTES, read_text
from rl_training.records.json_values import to_json

TEXTS_FILE = "kernel_texts.json"


def add_kernel(restored: RestoredTrainer, analysis: Analysis, settings: KernelSettings, folder: Path) -> list[Numbers]:
    """Compute and draw the kernel of an analysis, and return its headline numbers with reasons. Collective.

    Args:
        folder: Folder of the kernel's files and page. The file of fixed texts is two levels above.

    Raises:
        UserError: As for `calculate_kernel`.
    """
    assert analysis.first_order is not None, "settings.py refuses a kernel without the entropy gradient"
    rows = KernelRows(restored.trainer, restored.parameters, settings.microbatch_size)
    evaluation, update = (gather_rollout(b.rollout, restored) for b in (analysis.evaluation, analysis.update_buffer))
    written_by = restored.step
    data_rows = analysis.evaluation.rows
    if settings.source == "fixed":
        written_by, evaluation, data_rows = _fixed(restored, folder.parents[1] / TEXTS_FILE, evaluation, data_rows)
    is_own_step = written_by == restored.step
    scores = analysis.evaluation.scores if is_own_step else restored.policy.score_rollout(evaluation)
    weights = surrogate_weights(scores.entropies, scores.mask, evaluation.prompt_index, "token", "buffer")
    if is_own_step:
        entropy_gradient = restored.whole(analysis.first_order.direction[TOKEN])
    else:
        batches = rows.batches(range(evaluation.num_sequences))
        total = torch.stack([rows.sum(evaluation, batch, *weights).double() for batch in batches]).sum(dim=0)
        entropy_gradient = (total / evaluation.num_sequences).float()
    inputs = KernelInputs.of_step(restored, evaluation, weights, entropy_gradient, update, analysis.update)
    metadata = {
        "checkpoint": str(restored.checkpoint), "step": str(restored.step + 1), "baseline": "buffer",
        "texts_of_step": str(written_by + 1),
    }  # fmt: skip
    calculate_kernel(rows, inputs, settings, folder, metadata)
    write_sequences(restored, data_rows, analysis.update.delta, evaluation, update, folder)
    if restored.rank == 0:
        print(f"kernel: {write_report(folder)}")
    restored.trainer.accelerator.wait_for_everyone()
    return headline_groups(Structure.read(folder))


def _fixed(
    restored: RestoredTrainer, path: Path, evaluation: Rollout, rows: tuple[dict[str, Any], ...]
) -> tuple[int, Rollout, tuple[dict[str, Any], ...]]:
    """Read the fixed texts; if there are none yet, write E as the fixed texts first. Collective.

    Args:
        evaluation: E of this analysis.
        rows: The row of the data set that each sequence of E answers.

    Returns:
        The step whose policy sampled the fixed texts, the texts, and their rows of the data set.
    """
    if restored.rank == 0 and not path.is_file():
        content = {
            "step": restored.step, "rows": rows,
            "tokens": [tokens_of(evaluation, row) for row in range(evaluation.num_sequences)],
        }  # fmt: skip
        write_atomically({path: json.dumps(content).encode()})
    restored.trainer.accelerator.wait_for_everyone()
    content = json.loads(read_text(path, MAX_STATE_BYTES))
    prompt_ids, completion_ids = (
        [torch.tensor(pair[side], device=restored.device) for pair in content["tokens"]] for side in (0, 1)
    )
    pad = tokenizer_of(restored.trainer).pad_token_id
    rollout = as_rollout(prompt_ids, completion_ids, range(len(prompt_ids)), pad)
    return content["step"], rollout, tuple(content["rows"])


# --- the kernel's sequences -------------------------------------------------------------------------------------------


def write_sequences(
    restored: RestoredTrainer, data_rows: Sequence[dict[str, Any]], delta: Vector, evaluation: Rollout,
    update: Rollout, folder: Path,
) -> None:  # fmt: skip
    """Write one line per sequence, E's first. Collective; the main process writes.

    A line has the sequence's texts, tokens, log-probability, entropy, reward and advantage, and the change of its
    log-probability by the step.

    Args:
        data_rows: The row of the data set that each sequence of E answers, (N_E,).
        delta: The step δθ.
    """
    rewards = evaluation_rewards(restored, data_rows, evaluation)
    assert update.rewards is not None
    rows = [
        *_lines(restored, EVALUATION, evaluation, rewards, delta),
        *_lines(restored, UPDATE, update, update.rewards, delta),
    ]
    if restored.rank == 0:
        write_atomically({folder / SEQUENCES_FILE: "".join(json.dumps(row) + "\n" for row in rows).encode()})


def _lines(
    restored: RestoredTrainer, buffer: str, rollout: Rollout, rewards: Tensor, delta: Vector
) -> list[dict[str, Any]]:
    """Return a line for each sequence. Collective."""
    totals = sequence_totals(restored.policy.score_rollout(rollout))
    with restored.stepped(delta):
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
            **text_of(restored, rollout, row),
        })  # fmt: skip
    return lines
