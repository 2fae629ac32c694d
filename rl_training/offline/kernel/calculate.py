"""The kernel of the checkpoint's next step, in blocks: how update sequence j moves evaluation sequence i.

    K(i, j) = Σ_α W_iα M_α W_jα     X̃(i, j) = Σ_α x_iα M_α W_jα          W = ∂S, x = Σ_k w_k ∂log π + u_k ∂h, x̄ = ∂H_tok
    δH₁(gradient part) = c /(N_E N_U L) Σ_i Σ_j X̃(i, j) A_j              M = κP of THIS step, c its clipping factor

P contains the square of this step's gradient, so there are two passes over U. The first computes the batch gradient,
which gives M, c and δθ. The second computes U's gradients sequence by sequence and multiplies them with a block of E's
rows in memory. With P of the previous step the sum would be off by percents, and without bound in Adam's first
steps. Formulas, scales and costs: blocks.py.

The pairs add up to the gradient part of δH₁ only. The parts of momentum and decay, with the same M, are in `products`:
each row times the parts of δθ.

Three checks guard every run, and a failed one is an error: Σ_j A_j W_j must equal the batch gradient of the first pass,
three rows of each block must equal a backward of their sequence alone, and the sum over all pairs must equal x̄·δθ.

Each block is written to the folder as block-N.safetensors when it is ready (its rows of E; the first one also U's
tensors). Files are moved into place, so a killed run resumes after its last block. At the end the blocks are joined as
kernel.safetensors. The metadata of each file identify the kernel that it belongs to.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import load_file, save
from torch import Tensor
from tqdm import tqdm

from rl_training.errors import UserError
from rl_training.offline.buffers import tokens_of
from rl_training.offline.kernel.blocks import (
    COLUMNS,
    KernelInputs,
    KernelRows,
    plan_blocks,
    row_products,
    weighted_sum,
)
from rl_training.offline.kernel.checks import check_identity, check_row, check_sum, gradient_part
from rl_training.offline.kernel.sketches import CountSketches
from rl_training.offline.kernel.structure import KERNEL_FILE
from rl_training.offline.settings import KernelSettings
from rl_training.optim.formula import CAUSES
from rl_training.parallel.ranks import all_ranks
from rl_training.parallel.vectors import dot
from rl_training.policy.rollout import Rollout
from rl_training.records.files.atomic_write import write_atomically

BLOCK_FILE = "block-{:05d}.safetensors"
GRADIENT_PART = "gradient_part"  # a tensor of the first block
MAX_IDENTITY_ERROR = {"float32": 1e-4, "bfloat16": 1e-2}  # of the sum over all pairs, by dtype of the held rows
MAX_PAIRS_TOLERANCE_FACTOR = 100.0  # largest factor on that under autocast


def calculate_kernel(
    rows: KernelRows, inputs: KernelInputs, settings: KernelSettings, folder: Path,
    more_metadata: Mapping[str, str] | None = None,
) -> Path:  # fmt: skip
    """Compute the kernel of these sequences, or resume a killed run, and return the path of its file. Collective.

    Each process computes some of the blocks.

    Args:
        more_metadata: Further entries of the file's metadata.

    Raises:
        UserError: The folder holds another kernel, no row fits the memory budget, or a check fails.
    """
    ranks = all_ranks()
    blocks = plan_blocks(
        inputs.evaluation.num_sequences,
        len(inputs.sqrt_metric),
        memory_bytes=settings.memory_gb * 1e9,
        microbatch=rows.microbatch,
        bytes_per_entry=getattr(torch, settings.dtype).itemsize,
        num_ranks=ranks.count,
    )
    calculation = _Calculation(rows, inputs, settings, folder, blocks)
    if not calculation.has(KERNEL_FILE):
        if ranks.number == 0:
            sizes = f"{inputs.evaluation.num_sequences} × {inputs.update.num_sequences} sequences"
            parts = f"{len(blocks)} block{'s' * (len(blocks) > 1)} of {len(blocks[0])} rows"
            print(f"kernel: {sizes}, {len(inputs.sqrt_metric):,} parameters, {parts}")
        calculation.calculate(range(ranks.number, len(blocks), ranks.count))
        _wait()
        if ranks.number == 0:
            calculation.join(more_metadata or {})
    _wait()
    return folder / KERNEL_FILE


def _wait() -> None:
    if dist.is_initialized():
        dist.barrier()


class _Calculation:
    """The second pass over U, and its files."""

    def __init__(
        self, rows: KernelRows, inputs: KernelInputs, settings: KernelSettings, folder: Path, blocks: Sequence[range]
    ) -> None:
        self._rows = rows
        self._inputs = inputs
        self._settings = settings
        self._folder = folder
        self._blocks = blocks
        self._dtype: torch.dtype = getattr(torch, settings.dtype)
        self._identity = self._kernel_identity()
        sizes = {name: param.numel() for name, param in rows.parameters.items()}
        self._sketch = CountSketches(sizes, settings.sketch_buckets, settings.sketch_repeats, settings.sketch_seed)

    def has(self, name: str) -> bool:
        """Return whether the folder already has this file.

        Raises:
            UserError: The file belongs to another kernel.
        """
        if not (self._folder / name).is_file():
            return False
        with safe_open(self._folder / name, framework="pt") as file:
            metadata = file.metadata() or {}
        different = [key for key, value in self._identity.items() if metadata.get(key) != value]
        if different:
            raise UserError(
                f"{self._folder} holds a kernel with other {', '.join(different)}: name another folder, or remove this "
                "one"
            )
        return True

    def calculate(self, local_blocks: range) -> None:
        """Compute and write the missing ones of these blocks. The first block also has U's tensors."""
        numbers = range(len(self._blocks))  # all of them, so that every process refuses a block of another kernel
        missing = [number for number in numbers if not self.has(BLOCK_FILE.format(number)) and number in local_blocks]
        total = sum(len(self._blocks[number]) + self._inputs.update.num_sequences for number in missing)
        with tqdm(total=total, desc="kernel", unit="sequence", disable=local_blocks.start != 0) as bar:
            for number in missing:
                block = self._block(self._blocks[number], number == 0, bar)
                save_tensors(block, self._folder / BLOCK_FILE.format(number), self._identity)

    def _block(self, block: range, with_update: bool, bar: tqdm[NoReturn]) -> dict[str, Tensor]:
        """Compute the kernel's rows of a block of E, and the other tensors that the block's file stores."""
        inputs = self._inputs
        update = inputs.update
        sqrt_metric = inputs.sqrt_metric
        w, x = (sqrt_metric.new_empty(len(block), len(sqrt_metric), dtype=self._dtype) for _ in range(2))
        tables = self._fill_held_rows(block, w, x, bar)
        kernel = [torch.empty(len(block), update.num_sequences, dtype=torch.float64) for _ in range(2)]
        total = torch.zeros_like(sqrt_metric, dtype=torch.float64)
        update_tables = []
        for batch in self._rows.batches(range(update.num_sequences)):
            streamed = self._rows.logp_gradients(update, batch)
            total += weighted_sum(update.advantages[batch], streamed)
            if with_update:
                self._store_gradients(f"update-{int(batch[0]):06d}", W=streamed)
                update_tables.append(self._scale_rows(streamed))
            else:
                streamed *= sqrt_metric
            for products, held_rows in zip(kernel, (w, x), strict=True):
                products[:, batch.cpu()] = row_products(held_rows, streamed).cpu()
            bar.update(len(batch))
        check_sum(self._rows, inputs, total)
        if with_update:
            tables |= {f"update_{key}": value for key, value in _joined(update_tables).items()}
            tables[GRADIENT_PART] = gradient_part(inputs, total)
        return {**tables, "kernel": kernel[0], "entropy_kernel": kernel[1]}

    def _fill_held_rows(self, block: range, w: Tensor, x: Tensor, bar: tqdm[NoReturn]) -> dict[str, Tensor]:
        """Fill `w` with √M W_i and `x` with √M x_i of a block of E. Return the other tensors of the block's file."""
        inputs = self._inputs
        parts = []
        checked_rows = {block[0], block[len(block) // 2], block[-1]}
        for batch in self._rows.batches(block):
            first = int(batch[0])
            last = int(batch[-1])
            held_rows = slice(first - block[0], last - block[0] + 1)
            gradients_of_batch = self._rows.logp_and_entropy_gradients(
                inputs.evaluation, batch, inputs.logp_weights, inputs.entropy_weights
            )
            gradients = next(gradients_of_batch)
            for row in checked_rows & set(batch.tolist()):
                check_row(self._rows, inputs, row, gradients[row - first])
            self._store_gradients(f"evaluation-{first:06d}", W=gradients)
            parts.append(self._scale_rows(gradients))
            w[held_rows] = gradients
            entropy_rows = next(gradients_of_batch)
            self._store_gradients(f"entropy-{first:06d}", x=entropy_rows)
            x[held_rows] = entropy_rows.mul_(inputs.sqrt_metric)
            bar.update(len(batch))
        return _joined(parts)

    def _scale_rows(self, rows: Tensor) -> dict[str, Tensor]:
        """Multiply the rows W, (n, P), by √M in place, and return what is stored of each row.

        Returns:
            sketches: sketches of √M W.
            sq_norms: |√M W|², (n,).
            products: W·δθ by cause, (n, 3).
        """
        products = row_products(rows, self._inputs.parts)
        rows *= self._inputs.sqrt_metric
        parts = list(rows.split(COLUMNS, dim=1))
        return {"sketches": self._sketch(rows), "sq_norms": dot(parts, parts), "products": products}

    def _store_gradients(self, name: str, **rows: Tensor) -> None:
        if self._settings.store_gradients:
            path = self._folder / f"gradients-{name}.safetensors"
            save_tensors({key: part.to(self._dtype) for key, part in rows.items()}, path)

    def _kernel_identity(self) -> dict[str, str]:
        """Return what must be equal in two runs for their blocks to belong to one kernel, as JSON by name."""
        inputs = self._inputs
        settings = dataclasses.asdict(self._settings)
        metric_norm = float(inputs.sqrt_metric.double().square().sum())
        content = {
            "evaluation": _hashes(inputs.evaluation),
            "update": _hashes(inputs.update),
            "advantages": inputs.update.advantages.tolist(),
            "max_length": inputs.max_length,
            "parameters": {name: list(p.shape) for name, p in self._rows.parameters.items()},
            "metric_norm": float(f"{metric_norm:.5g}"),  # identifies this step's P
            "rows_per_block": len(self._blocks[0]),
            **{key: value for key, value in settings.items() if key not in ("enabled", "memory_gb")},
        }
        return {key: json.dumps(value) for key, value in content.items()}

    def join(self, more_metadata: Mapping[str, str]) -> None:
        """Check the sum over all pairs, join the blocks in one file, and remove the blocks' files."""
        inputs = self._inputs
        files = [self._folder / BLOCK_FILE.format(number) for number in range(len(self._blocks))]
        joined = _joined([load_file(path) for path in files])
        by_rows = joined.pop(GRADIENT_PART)
        joined["advantages"] = inputs.update.advantages.double().cpu()
        by_cause = row_products(inputs.entropy_gradient.unsqueeze(0), inputs.parts)[0].tolist()
        limit = min(self._rows.tolerance_factor, MAX_PAIRS_TOLERANCE_FACTOR) * MAX_IDENTITY_ERROR[self._settings.dtype]
        metadata = {
            **self._identity,
            "clip_coefficient": repr(inputs.clip),
            **check_identity(joined, inputs, by_rows, by_cause[CAUSES.index("gradient")], limit),
            **{f"delta_h/part/{cause}": repr(value) for cause, value in zip(CAUSES, by_cause, strict=True)},
            **more_metadata,
        }
        save_tensors(joined, self._folder / KERNEL_FILE, metadata)
        for path in files:
            path.unlink()


def _joined(parts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Concatenate the parts' tensors by name. Tensors that only the first part has are returned unchanged."""
    return {key: torch.cat([part[key] for part in parts if key in part]) for key in parts[0]}


# --- files of a kernel ------------------------------------------------------------------------------------------------


def save_tensors(tensors: Mapping[str, Tensor], path: Path, metadata: Mapping[str, str] | None = None) -> None:
    """Write tensors as a safetensors file, atomically."""
    content = save({key: tensor.detach().cpu().contiguous() for key, tensor in tensors.items()}, dict(metadata or {}))
    write_atomically({path: content}, "make room; a finished block is not calculated again")


def _hashes(rollout: Rollout) -> list[str]:
    """Return a hash of each sequence's tokens, prompt and response, without padding."""
    return [token_hash(*tokens_of(rollout, row)) for row in range(rollout.num_sequences)]


def token_hash(*parts: Sequence[int]) -> str:
    """Return a hash of token sequences. It depends on where one part ends and the next begins."""
    return hashlib.sha256(json.dumps([list(part) for part in parts]).encode()).hexdigest()[:16]
