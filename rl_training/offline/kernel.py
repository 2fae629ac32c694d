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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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
from rl_training.offline.kernel_blocks import plan_blocks, row_products, weighted_sum
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
    blocks = plan_blocks(
        inputs.evaluation.num_sequences,
        len(step.root),
        memory_bytes=settings.memory_gb * 1e9,
        microbatch=rows.microbatch,
        bytes_per_entry=DTYPES[settings.dtype].itemsize,
        num_ranks=ranks.count,
    )
    of_kernel = _Calculation(rows, step, inputs, settings, folder, RowSummarizer(rows, step, settings))
    if ranks.rank == 0:
        claim(folder, of_kernel.identity(blocks))
        if not done.is_file():
            print(expectation(rows, inputs, of_kernel.summarizer, blocks, ranks))
    ranks.wait()
    if not done.is_file():
        of_kernel.calculate(blocks, ranks)
        ranks.wait()
        if ranks.rank == 0:
            of_kernel.join(len(blocks), about or {})
    ranks.wait()
    return done


@dataclass(frozen=True)
class _Calculation:
    """The second pass over U, and its files."""

    rows: GradientRows
    step: KernelStep
    inputs: KernelInputs
    settings: KernelSettings
    folder: Path
    summarizer: RowSummarizer

    def calculate(self, blocks: Sequence[range], ranks: Ranks) -> None:
        """Calculates this process's missing blocks; the first one of process 0 also writes U's side."""
        own = range(ranks.rank, len(blocks), ranks.count)
        missing = [number for number in own if not block_file(self.folder, number).is_file()]
        total = sum(len(blocks[number]) + self.inputs.update.num_sequences for number in missing)
        with tqdm(total=total, desc="kernel", unit="sequence", disable=ranks.rank != 0) as bar:
            for number in missing:
                with_update = ranks.rank == 0 and not (self.folder / UPDATE_FILE).is_file()
                save_tensors(self._block(blocks[number], with_update, bar), block_file(self.folder, number))

    def _block(self, of_block: range, with_update: bool, bar: tqdm[NoReturn]) -> dict[str, Tensor]:
        """Returns the kernel's rows of a block of E, with what else is stored about them."""
        step, update, summarizer = self.step, self.inputs.update, self.summarizer
        dtype, device = DTYPES[self.settings.dtype], step.root.device
        w, x = (torch.empty(len(of_block), len(step.root), dtype=dtype, device=device) for _ in range(2))
        found = self._hold(of_block, w, x, bar)
        kernel = [torch.empty(len(of_block), update.num_sequences, dtype=torch.float64) for _ in range(2)]
        total, side = torch.zeros_like(step.root, dtype=torch.float64), []
        for batch in self.rows.batches(range(update.num_sequences)):
            streamed = self.rows.log_probability(update, batch)
            total += weighted_sum(update.advantages[batch], streamed)
            if with_update:
                self._store_gradients(f"update-{int(batch[0]):06d}", W=streamed)
                side.append({"plain": summarizer.sketch_for_norms(streamed), **summarizer.scale(streamed)})
            else:
                streamed *= step.root
            for out, of_held in zip(kernel, (w, x), strict=True):
                out[:, batch.cpu()] = row_products(of_held, streamed).cpu()
            bar.update(len(batch))
        prove_sum(self.rows, self.inputs, step, total)
        if with_update:
            kept = {key: torch.cat([part[key] for part in side]) for key in side[0]}
            plain = kept.pop("plain")
            kept["gram"] = inner_products(plain, plain)[0]  # W_j · W_k, for the norm of the gradient without some
            kept[GRADIENT_PART] = gradient_part(self.inputs, step, total)
            save_tensors(kept, self.folder / UPDATE_FILE)
        return {**found, "kernel": kernel[0], "entropy_kernel": kernel[1]}

    def _hold(self, of_block: range, w: Tensor, x: Tensor, bar: tqdm[NoReturn]) -> dict[str, Tensor]:
        """Fills √M W_i and √M x_i of a block of E and returns what else is stored about them."""
        inputs, found = self.inputs, []
        proven = {of_block[0], of_block[len(of_block) // 2], of_block[-1]}
        for batch in self.rows.batches(of_block):
            place = slice(int(batch[0]) - of_block[0], int(batch[-1]) - of_block[0] + 1)
            both = self.rows.both(inputs.evaluation, batch, inputs.logp_weights, inputs.entropy_weights)
            own = next(both)
            for row in proven & set(batch.tolist()):
                prove_row(self.rows, inputs, row, own[row - int(batch[0])])
            self._store_gradients(f"evaluation-{int(batch[0]):06d}", W=own)
            kept = self.summarizer.scale(own)
            w[place] = own
            of_entropy = next(both)
            self._store_gradients(f"entropy-{int(batch[0]):06d}", x=of_entropy)
            found.append({**kept, **self.summarizer.scale_entropy(of_entropy)})
            x[place] = of_entropy
            bar.update(len(batch))
        return {key: torch.cat([part[key] for part in found]) for key in found[0]}

    def _store_gradients(self, name: str, **rows: Tensor) -> None:
        if self.settings.store_gradients:
            dtype, path = DTYPES[self.settings.dtype], self.folder / f"gradients-{name}.safetensors"
            save_tensors({key: part.to(dtype) for key, part in rows.items()}, path)

    def identity(self, blocks: Sequence[range]) -> dict[str, Any]:
        """Returns what must be the same for two runs to be parts of one kernel."""
        settings = dataclasses.asdict(self.settings)
        return {
            "evaluation": text_hashes(self.inputs.evaluation),
            "update": text_hashes(self.inputs.update),
            "advantages": self.inputs.update.advantages.tolist(),
            "max_length": self.inputs.max_length,
            "parameters": {name: list(p.shape) for name, p in self.rows.parameters.items()},
            "metric_norm": float(f"{float(self.step.root.double().square().sum()):.5g}"),  # P's: of this step
            "rows_per_block": len(blocks[0]),
            **{key: value for key, value in settings.items() if key != "memory_gb"},
        }

    def join(self, num_blocks: int, about: Mapping[str, str]) -> None:
        """Writes the blocks as one file, with the identity checked, and removes them."""
        step, inputs, files = self.step, self.inputs, [block_file(self.folder, n) for n in range(num_blocks)]
        parts = [load_file(path) for path in files]
        joined = {key: torch.cat([part[key] for part in parts]) for key in parts[0]}
        of_update = load_file(self.folder / UPDATE_FILE)
        by_rows = of_update.pop(GRADIENT_PART)
        joined |= {f"update_{key}": value for key, value in of_update.items()}
        joined["advantages"] = inputs.update.advantages.double().cpu()
        by_cause = row_products(step.entropy_gradient.unsqueeze(0), step.update)[0]
        by_batch = float(by_cause[CAUSES.index("gradient")])
        limit = self.rows.rounding(100.0) * MAX_IDENTITY_ERROR[self.settings.dtype]
        metadata = {
            "evaluation": json.dumps(text_hashes(inputs.evaluation)),
            "update": json.dumps(text_hashes(inputs.update)),
            "parameters": json.dumps({name: list(p.shape) for name, p in self.rows.parameters.items()}),
            "settings": json.dumps(dataclasses.asdict(self.settings)),
            "metric_sha256": hashlib.sha256(step.root.cpu().numpy().tobytes()).hexdigest(),
            "clip_coefficient": repr(step.clip),
            "gradient_norm": repr(float(step.gradient.double().norm())),
            "max_grad_norm": repr(step.max_grad_norm),
            "max_length": str(inputs.max_length),
            **prove_identity(joined, inputs, step, by_rows, by_batch, limit),
            **{f"delta_h/part/{cause}": repr(float(value)) for cause, value in zip(CAUSES, by_cause, strict=True)},
            **about,
        }
        save_tensors(joined, self.folder / KERNEL_FILE, metadata)
        for path in (*files, self.folder / UPDATE_FILE):
            path.unlink()


def text_hashes(rollout: Rollout) -> list[str]:
    """Returns a hash of the tokens of each sequence, prompt and response, whatever the padding."""
    return [token_hash(*tokens_of(rollout, row)) for row in range(rollout.num_sequences)]
