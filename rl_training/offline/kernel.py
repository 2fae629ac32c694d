"""Which update sequence moves which evaluation sequence: the kernel of the checkpoint's next step, in blocks.

    K(i, j) = Σ_α W_iα M_α W_jα     X̃(i, j) = Σ_α x_iα M_α W_jα          W = ∂S, x = Σ_k w_k ∂log π + u_k ∂h, x̄ = ∂H_tok
    δH₁(gradient part) = c /(N_E N_U L) Σ_i Σ_j X̃(i, j) A_j              M = κP of THIS step, c its clipping

P contains the square of this step's gradient, so there are two passes over U: the batch gradient first, which gives M,
c and δθ; then U sequence by sequence, multiplied with a block of E's rows held in memory. With P of the previous step
the sum would be off by percents, and without bound while v is young. Formulas, scales and costs: kernel_blocks.py.

The pairs add up to the gradient part of δH₁ only. Momentum and decay, with the same M, are in `products`: each row
times δθ by cause.

Every run checks itself, or ends with an error: Σ_j A_j W_j against the batch gradient of the first pass, three rows
against a backward of that sequence alone, and the sum over all pairs against x̄·δθ of those rows: kernel_proofs.py.

A folder holds update.safetensors (U's side), block-N.safetensors (rows of E) as they are ready, each written under
another name and moved, so that a killed run resumes after the last; at the end, kernel.safetensors.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import torch
from safetensors.torch import load_file
from torch import Tensor
from tqdm import tqdm

from rl_training.engine.batch import Rollout
from rl_training.engine.updates import CAUSES
from rl_training.mathematics.sketches import inner_products
from rl_training.offline.buffers import tokens_of
from rl_training.offline.gradient_rows import GradientRows
from rl_training.offline.kernel_blocks import Blocks, plan_blocks, row_products, weighted_sum
from rl_training.offline.kernel_files import KERNEL_FILE, UPDATE_FILE, block_file, claim, save_tensors
from rl_training.offline.kernel_proofs import MAX_IDENTITY_ERROR, gradient_part, prove_identity, prove_row, prove_sum
from rl_training.offline.kernel_rows import RowSummarizer, expectation
from rl_training.offline.kernel_types import ALONE, DTYPES, KernelInputs, KernelSettings, KernelStep, Ranks
from rl_training.offline.sequences import token_hash

GRADIENT_PART = "gradient_part"  # in UPDATE_FILE


def calculate_kernel(
    rows: GradientRows, step: KernelStep, inputs: KernelInputs, settings: KernelSettings, folder: Path,
    ranks: Ranks = ALONE, about: Mapping[str, str] | None = None,
) -> Path:  # fmt: skip
    """Returns the file with the kernel of these sequences; resumes a killed run.

    about  further metadata for the file

    Raises ValueError when the folder holds another kernel, the budget fits no row, or a proof fails.
    """
    done = folder / KERNEL_FILE
    num_parameters = sum(p.numel() for p in rows.parameters.values())
    blocks = plan_blocks(
        inputs.evaluation.num_sequences,
        inputs.update.num_sequences,
        num_parameters,
        memory_bytes=settings.memory_gb * 1e9,
        microbatch=rows.microbatch,
        bytes_per_entry=DTYPES[settings.dtype].itemsize,
    )
    share = -(-blocks.num_held // ranks.count)
    blocks = dataclasses.replace(blocks, rows_per_block=min(blocks.rows_per_block, share))
    if ranks.rank == 0:
        claim(folder, _identity(inputs, step, settings, blocks, rows))
        if not done.is_file():
            print(expectation(rows, inputs, RowSummarizer(rows, step, settings), blocks, ranks))
    ranks.wait()
    if not done.is_file():
        _calculate_blocks(rows, inputs, settings, folder, ranks, step, blocks)
        ranks.wait()
        if ranks.rank == 0:
            _join_blocks(inputs, settings, folder, step, blocks, rows, about or {})
    ranks.wait()
    return done


# --- the second pass --------------------------------------------------------------------------------------------------


def _calculate_blocks(
    rows: GradientRows, inputs: KernelInputs, settings: KernelSettings, folder: Path, ranks: Ranks, step: KernelStep,
    blocks: Blocks,
) -> None:  # fmt: skip
    """Calculates this process's missing blocks; the first one of process 0 also writes U's side."""
    summarizer, held = RowSummarizer(rows, step, settings), blocks.rows_per_block
    missing = [n for n in range(ranks.rank, blocks.num_blocks, ranks.count) if not block_file(folder, n).is_file()]
    num_update = inputs.update.num_sequences
    with tqdm(
        total=sum(len(_rows_of(blocks, n)) + num_update for n in missing), desc="kernel", unit="sequence",
        disable=ranks.rank != 0,
    ) as bar:  # fmt: skip
        for number in missing:
            of_block = _rows_of(blocks, number)
            w, x = (torch.empty(held, len(step.root), dtype=DTYPES[settings.dtype], device=step.root.device)
                    for _ in range(2))  # fmt: skip
            found = _held_rows(rows, inputs, settings, folder, summarizer, of_block, w, x, bar)
            with_update = ranks.rank == 0 and not (folder / UPDATE_FILE).is_file()
            kernel = [torch.empty(len(of_block), num_update, dtype=torch.float64) for _ in range(2)]
            total, side = torch.zeros_like(step.root, dtype=torch.float64), []
            for batch in rows.batches(range(num_update)):
                streamed = rows.log_probability(inputs.update, batch)
                total += weighted_sum(inputs.update.advantages[batch], streamed)
                if with_update:
                    _store_gradients(settings, folder, f"update-{int(batch[0]):06d}", W=streamed)
                    side.append({"plain": summarizer.sketch_for_norms(streamed), **summarizer.scale(streamed)})
                else:
                    streamed *= step.root
                for out, of_held in zip(kernel, (w, x), strict=True):
                    out[:, batch.cpu()] = row_products(of_held[: len(of_block)], streamed).cpu()
                bar.update(len(batch))
            prove_sum(rows, inputs, step, total)
            if with_update:
                kept = {key: torch.cat([part[key] for part in side]) for key in side[0]}
                plain = kept.pop("plain")
                kept["gram"] = inner_products(plain, plain)[0]  # W_j · W_k, for the norm of the gradient without some
                save_tensors({**kept, GRADIENT_PART: gradient_part(inputs, step, total)}, folder / UPDATE_FILE)
            save_tensors({**found, "kernel": kernel[0], "entropy_kernel": kernel[1]}, block_file(folder, number))


def _held_rows(
    rows: GradientRows, inputs: KernelInputs, settings: KernelSettings, folder: Path, summarizer: RowSummarizer,
    of_block: range, w: Tensor, x: Tensor, bar: tqdm[NoReturn],
) -> dict[str, Tensor]:  # fmt: skip
    """Fills √M W_i and √M x_i of a block of E and returns what else is stored about them."""
    found: list[dict[str, Tensor]] = []
    proven = {of_block[0], of_block[len(of_block) // 2], of_block[-1]}
    for batch in rows.batches(of_block):
        place = slice(int(batch[0]) - of_block[0], int(batch[-1]) - of_block[0] + 1)
        both = rows.both(inputs.evaluation, batch, inputs.logp_weights, inputs.entropy_weights)
        own = next(both)
        for row in proven & set(batch.tolist()):
            prove_row(rows, inputs, row, own[row - int(batch[0])])
        _store_gradients(settings, folder, f"evaluation-{int(batch[0]):06d}", W=own)
        kept = summarizer.scale(own)
        w[place] = own
        of_entropy = next(both)
        _store_gradients(settings, folder, f"entropy-{int(batch[0]):06d}", x=of_entropy)
        found.append({**kept, **summarizer.scale_entropy(of_entropy)})
        x[place] = of_entropy
        bar.update(len(batch))
    return {key: torch.cat([part[key] for part in found]) for key in found[0]}


# --- files ------------------------------------------------------------------------------------------------------------


def _rows_of(blocks: Blocks, number: int) -> range:
    start = number * blocks.rows_per_block
    return range(start, min(start + blocks.rows_per_block, blocks.num_held))


def _store_gradients(settings: KernelSettings, folder: Path, name: str, **rows: Tensor) -> None:
    if settings.store_gradients:
        save_tensors(
            {k: t.to(DTYPES[settings.dtype]) for k, t in rows.items()}, folder / f"gradients-{name}.safetensors"
        )


def text_hashes(rollout: Rollout) -> list[str]:
    """Returns a hash of the tokens of each sequence, prompt and response, whatever the padding."""
    return [token_hash(*tokens_of(rollout, row)) for row in range(rollout.num_sequences)]


def _identity(
    inputs: KernelInputs, step: KernelStep, settings: KernelSettings, blocks: Blocks, rows: GradientRows
) -> dict[str, Any]:
    """Returns what must be the same for two runs to be parts of one kernel."""
    return {
        "evaluation": text_hashes(inputs.evaluation),
        "update": text_hashes(inputs.update),
        "advantages": inputs.update.advantages.tolist(),
        "max_length": inputs.max_length,
        "parameters": {name: list(p.shape) for name, p in rows.parameters.items()},
        "metric_norm": float(f"{float(step.root.double().square().sum()):.5g}"),  # P's: of this step
        "rows_per_block": blocks.rows_per_block,
        **{key: value for key, value in dataclasses.asdict(settings).items() if key != "memory_gb"},
    }


def _join_blocks(
    inputs: KernelInputs, settings: KernelSettings, folder: Path, step: KernelStep, blocks: Blocks, rows: GradientRows,
    about: Mapping[str, str],
) -> None:  # fmt: skip
    """Writes the blocks as one file, with the identity checked, and removes them."""
    parts = [load_file(block_file(folder, number)) for number in range(blocks.num_blocks)]
    joined = {key: torch.cat([part[key] for part in parts]) for key in parts[0]}
    of_update = load_file(folder / UPDATE_FILE)
    by_rows = of_update.pop(GRADIENT_PART)
    joined |= {f"update_{key}": value for key, value in of_update.items()}
    joined["advantages"] = inputs.update.advantages.double().cpu()
    by_cause = row_products(step.entropy_gradient.unsqueeze(0), step.update)[0]
    by_batch = float(by_cause[CAUSES.index("gradient")])
    limit = rows.rounding(100.0) * MAX_IDENTITY_ERROR[settings.dtype]
    proof = prove_identity(joined, inputs, step, by_rows, by_batch, limit)
    metadata = {
        "evaluation": json.dumps(text_hashes(inputs.evaluation)),
        "update": json.dumps(text_hashes(inputs.update)),
        "parameters": json.dumps({name: list(p.shape) for name, p in rows.parameters.items()}),
        "settings": json.dumps(dataclasses.asdict(settings)),
        "metric_sha256": hashlib.sha256(step.root.cpu().numpy().tobytes()).hexdigest(),
        "clip_coefficient": repr(step.clip),
        "gradient_norm": repr(float(step.gradient.double().norm())),
        "max_grad_norm": repr(step.max_grad_norm),
        "max_length": str(inputs.max_length),
        **proof,
        **{f"delta_h/part/{cause}": repr(float(value)) for cause, value in zip(CAUSES, by_cause, strict=True)},
        **about,
    }
    save_tensors(joined, folder / KERNEL_FILE, metadata)
    for number in range(blocks.num_blocks):
        block_file(folder, number).unlink()
    (folder / UPDATE_FILE).unlink()
