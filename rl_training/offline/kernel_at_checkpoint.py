"""The kernel of a checkpoint analysis: between its E and its U, of its very step.

With kernel.source=fixed E is the same texts at every checkpoint: those that the first analysis wrote. At other
checkpoints they are not samples of the policy: gradients, cosines and changes of their log-probabilities stay valid,
but their x̄ is not the gradient of the policy's entropy, and shares of its change are meaningless.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from rl_training.engine.batch import Rollout, as_rollout
from rl_training.mathematics.entropy import surrogate_weights
from rl_training.offline.buffers import gather_rollout, tokens_of
from rl_training.offline.first_order import TOKEN
from rl_training.offline.kernel import calculate_kernel
from rl_training.offline.kernel_blocks import KernelInputs, KernelRows
from rl_training.offline.kernel_files import write_sequences
from rl_training.offline.kernel_report import PAGE, write_report
from rl_training.offline.probe import Analysis
from rl_training.offline.restored import RestoredTrainer
from rl_training.offline.settings import KernelSettings
from rl_training.offline.structure import Structure, headline
from rl_training.records.atomic_write import write_atomically

TEXTS_FILE = "kernel_texts.json"


def add_kernel(
    restored: RestoredTrainer, analysis: Analysis, settings: KernelSettings, folder: Path
) -> dict[str, float]:
    """Returns the headline numbers of an analysis's kernel, which this calculates, stores and draws in `folder`."""
    kernel_of_analysis(restored, analysis, settings, folder, texts=folder.parents[1] / TEXTS_FILE)
    if restored.rank == 0:
        write_report(folder)
        print(f"kernel: {folder / PAGE}")
    restored.trainer.accelerator.wait_for_everyone()
    return headline(Structure.read(folder))


def kernel_of_analysis(
    restored: RestoredTrainer, analysis: Analysis, settings: KernelSettings, folder: Path, texts: Path | None = None
) -> Path:
    """Returns the file with the kernel between the E and the U of a checkpoint analysis, of its very step.

    texts  for kernel.source=fixed: the file of E's texts, written from this analysis's E where it is not there yet

    Raises ValueError as `calculate_kernel` does, and where the analysis has no first order.
    """
    if analysis.first_order is None:
        raise ValueError("kernel.enabled=true needs the entropy gradient: set first_order.enabled=true")
    rows = KernelRows(restored.trainer, restored.parameters, settings.microbatch_size)
    evaluation, update = (gather_rollout(b.rollout, restored) for b in (analysis.evaluation, analysis.update_buffer))
    written_by, prompts = restored.step, analysis.evaluation.prompts
    if texts is not None and settings.source == "fixed":
        written_by, evaluation, prompts = _fixed(restored, texts, evaluation, prompts)
    own = written_by == restored.step
    scores = analysis.evaluation.scores if own else restored.policy.score_rollout(evaluation)
    weights = surrogate_weights(scores.entropies, scores.mask, evaluation.prompt_index, "token", "buffer")
    if own:
        entropy_gradient = analysis.first_order.direction[TOKEN]
    else:
        mean = [w / evaluation.num_sequences for w in weights]
        batches = rows.batches(range(evaluation.num_sequences))
        entropy_gradient = (
            torch.stack([rows.sum(evaluation, batch, *mean).double() for batch in batches]).sum(dim=0).float()
        )
    longest = restored.trainer.max_completion_length
    inputs = KernelInputs(evaluation, *weights, entropy_gradient, update, analysis.update, longest)
    about = {
        "checkpoint": str(restored.checkpoint), "step": str(restored.step + 1), "baseline": "buffer",
        "texts_of_step": str(written_by + 1),
    }  # fmt: skip
    path = calculate_kernel(rows, inputs, settings, folder, about)
    write_sequences(restored, prompts, analysis.update.delta, evaluation, update, folder)
    return path


def _fixed(
    restored: RestoredTrainer, path: Path, evaluation: Rollout, prompts: Sequence[Any]
) -> tuple[int, Rollout, tuple[Any, ...]]:
    """Returns the step whose policy wrote the fixed texts, the texts, and their prompts as the data set has them.

    of_e, prompts  what is written where there are none yet
    """
    if restored.rank == 0 and not path.is_file():
        content = {
            "step": restored.step, "prompts": list(prompts),
            "tokens": [tokens_of(evaluation, row) for row in range(evaluation.num_sequences)],
        }  # fmt: skip
        write_atomically({path: json.dumps(content).encode()})
    restored.trainer.accelerator.wait_for_everyone()
    content = json.loads(path.read_text(encoding="utf-8"))
    prompt_ids, completion_ids = (
        [torch.tensor(pair[side], device=restored.device) for pair in content["tokens"]] for side in (0, 1)
    )
    rollout = as_rollout(prompt_ids, completion_ids, range(len(prompt_ids)), restored.trainer._tokenizer.pad_token_id)
    return content["step"], rollout, tuple(content["prompts"])
