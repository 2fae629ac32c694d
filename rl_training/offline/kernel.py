"""Which update sequence moves which evaluation sequence: the kernel of the checkpoint's next step, in blocks.

    K(i, j) = Σ_α W_iα M_α W_jα     X̃(i, j) = Σ_α x_iα M_α W_jα          W = ∂S, x = Σ_k w_k ∂log π + u_k ∂h, x̄ = ∂H_tok
    δH₁(gradient part) = c /(N_E N_U L) Σ_i Σ_j X̃(i, j) A_j              M = κP of THIS step, c its clipping

P holds the square of this very step's gradient, so there are two passes over U: the batch gradient first, which gives
M, c and δθ, then U again, sequence by sequence, past a block of rows of E that is held. With P of the step before, the
sum would be off by percents, and without bound where v is young. Formulas, scales and costs: mathematics/kernels.py.

The pairs add up to the gradient part of δH₁ only. Beside it stand momentum and decay, with the same M: `products` of
each row with δθ by cause.

Every run proves itself, or ends with an error: Σ_j A_j W_j against the batch gradient of the first pass, three rows
against a backward of that sequence alone, and the sum over all pairs against x̄·δθ.

A folder holds update.safetensors (U's side), block-N.safetensors (rows of E) as they are ready, each written under
another name and moved, so that a killed run goes on after the last; and kernel.safetensors in the end.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import torch
from safetensors.torch import load_file
from torch import Tensor
from tqdm import tqdm

from rl_training.mathematics.entropy import Estimator, surrogate_weights
from rl_training.mathematics.kernels import Blocks, plan_blocks, row_products
from rl_training.mathematics.sketches import CountSketches
from rl_training.offline.first_order import TOKEN
from rl_training.offline.gradient_rows import GradientRows
from rl_training.offline.kernel_files import (
    KERNEL_FILE,
    UPDATE_FILE,
    block_file,
    claim,
    save_tensors,
)
from rl_training.offline.kernel_proofs import identity_error, prove_row, prove_sum
from rl_training.offline.kernel_types import ALONE, DTYPES, KernelSettings, Question, Ranks, Step
from rl_training.offline.probe import Look
from rl_training.offline.sequences import token_hash, tokens_of, write_sequences
from rl_training.offline.standing import Standing
from rl_training.offline.update import Update
from rl_training.step.rollout import Rollout, join_rollouts, take_rows
from rl_training.step.updates import CAUSES


def calculate_kernel(
    rows: GradientRows, step: Step, question: Question, settings: KernelSettings, folder: Path,
    ranks: Ranks = ALONE, about: Mapping[str, str] | None = None,
) -> Path:  # fmt: skip
    """Returns the file with the kernel of these sequences, calculated or, where a killed run left off, finished.

    about  what else the file should say of itself

    Raises ValueError when the folder holds another kernel, the budget no row, or a proof fails.
    """
    done = folder / KERNEL_FILE
    num_parameters = sum(p.numel() for p in rows.parameters.values())
    blocks = plan_blocks(
        question.evaluation.num_sequences,
        question.update.num_sequences,
        num_parameters,
        memory_bytes=settings.memory_gb * 1e9,
        microbatch=rows.microbatch,
        bytes_per_entry=DTYPES[settings.dtype].itemsize,
    )
    share = -(-blocks.num_held // ranks.count)
    blocks = dataclasses.replace(blocks, rows_per_block=min(blocks.rows_per_block, share))
    if ranks.rank == 0:
        claim(folder, _identity(question, step, settings, blocks, rows))
        if not done.is_file():
            print(_expectation(rows, question, settings, blocks, ranks))
    ranks.wait()
    if not done.is_file():
        _calculate_blocks(rows, question, settings, folder, ranks, step, blocks)
        ranks.wait()
        if ranks.rank == 0:
            _join_blocks(question, settings, folder, step, blocks, rows, about or {})
    ranks.wait()
    return done


# --- what is asked ----------------------------------------------------------------------------------------------------


def kernel_of_look(
    standing: Standing, look: Look, settings: KernelSettings, folder: Path, estimator: Estimator = "rb"
) -> Path:
    """Returns the file with the kernel between the E and the U of a look at a checkpoint, of its very step.

    estimator  of the entropy gradient, that of the look's first order

    Raises ValueError as `calculate_kernel` does, and where the look has no first order.
    """
    if look.first_order is None:
        raise ValueError("kernel.enabled=true needs the entropy gradient: set first_order.enabled=true")
    evaluation = look.evaluation
    of_e, of_u = (_of_all_processes(buffer.rollout, standing) for buffer in (evaluation, look.update_buffer))
    scores = evaluation.scores
    weights = surrogate_weights(
        scores.logps, scores.entropies, scores.mask, of_e.prompt_index, estimator, "token", "buffer"
    )
    question = Question(of_e, *weights, of_u, standing.trainer.max_completion_length)
    rows = GradientRows(standing.trainer, standing.parameters, settings.microbatch_size)
    ranks = Ranks(standing.rank, standing.num_ranks, standing.trainer.accelerator.wait_for_everyone)
    step = step_of(look.update, look.first_order.direction[TOKEN])
    about = {"checkpoint": str(standing.checkpoint), "step": str(standing.step + 1), "baseline": "buffer"}
    path = calculate_kernel(rows, step, question, settings, folder, ranks, about)
    write_sequences(standing, look.evaluation, look.update, of_e, of_u, folder)
    return path


def step_of(update: Update, entropy_gradient: Tensor) -> Step:
    """Returns the step that U makes, with the metric M in which it takes this step's gradient.

    entropy_gradient  (P,), x̄
    """
    root = torch.empty_like(update.gradient)
    for piece in update.pieces:
        factor = piece.state.gradient_factor(piece.param, update.clip * update.gradient[piece.columns])
        root[piece.columns] = (-factor).sqrt()
    return Step(update.gradient, entropy_gradient, update.clip, root, torch.stack(list(update.parts)))


def _of_all_processes(rollout: Rollout, standing: Standing) -> Rollout:
    """Returns the sequences of all processes, on each of them, in the order of `prompt_index`."""
    if standing.num_ranks > 1:
        parts: list[Any] = [None] * standing.num_ranks
        torch.distributed.all_gather_object(parts, _on(rollout, torch.device("cpu")))
        rollout = _on(join_rollouts(parts), standing.device)
    return take_rows(rollout, rollout.prompt_index.argsort(stable=True))


def _on(rollout: Rollout, device: torch.device) -> Rollout:
    values: dict[str, Any] = {
        key: value.to(device) for key, value in vars(rollout).items() if isinstance(value, Tensor)
    }
    return dataclasses.replace(rollout, **values)


# --- the second pass --------------------------------------------------------------------------------------------------


def _expectation(rows: GradientRows, question: Question, settings: KernelSettings, blocks: Blocks, ranks: Ranks) -> str:
    """Returns what is about to be calculated and how long the cost formula says it takes, from one microbatch."""
    batch = rows.batches(range(question.update.num_sequences))[0]
    rows.log_probability(question.update, batch)
    started = time.perf_counter()
    own = rows.log_probability(question.update, batch)
    per_sequence = (time.perf_counter() - started) / len(batch)
    started = time.perf_counter()
    _sketches(rows, settings)(own)
    per_sketch = (time.perf_counter() - started) / len(batch)
    rate = _operations_per_second(blocks, own.device)
    streamed = blocks.num_streamed * -(-blocks.num_blocks // ranks.count)
    held = blocks.num_held * 1.6 / ranks.count
    seconds = (streamed + held) * per_sequence + blocks.operations / ranks.count / rate
    seconds += (blocks.num_streamed + blocks.num_held / ranks.count) * per_sketch
    return (
        f"kernel: {blocks.num_held} × {blocks.num_streamed} sequences, {blocks.num_parameters:,} parameters, "
        f"{blocks.num_blocks} block{'s' * (blocks.num_blocks > 1)} of {blocks.rows_per_block} rows; "
        f"about {seconds:.0f} s"
    )


def _sketches(rows: GradientRows, settings: KernelSettings) -> CountSketches:
    sizes = {name: p.numel() for name, p in rows.parameters.items()}
    return CountSketches(sizes, settings.sketch_buckets, settings.sketch_repeats, settings.sketch_seed)


def _operations_per_second(blocks: Blocks, device: torch.device) -> float:
    """Returns how fast this machine multiplies matrices of the kernel's kind: a moment's measurement."""
    a, b = torch.ones(blocks.rows_per_block, 2**16, device=device), torch.ones(32, 2**16, device=device)
    row_products(a, b)
    started = time.perf_counter()
    float(row_products(a, b).sum())
    return 2.0 * len(a) * len(b) * a.shape[1] / (time.perf_counter() - started)


def _calculate_blocks(
    rows: GradientRows, question: Question, settings: KernelSettings, folder: Path, ranks: Ranks, step: Step,
    blocks: Blocks,
) -> None:  # fmt: skip
    """Calculates the blocks of this process that are not there yet; the first of process 0 also sees to U's side."""
    sketch = _sketches(rows, settings)
    held = blocks.rows_per_block
    missing = [n for n in range(ranks.rank, blocks.num_blocks, ranks.count) if not block_file(folder, n).is_file()]
    num_update = question.update.num_sequences
    with tqdm(
        total=sum(len(_rows_of(blocks, n)) + num_update for n in missing), desc="kernel", unit="sequence",
        disable=ranks.rank != 0,
    ) as bar:  # fmt: skip
        for number in missing:
            of_block = _rows_of(blocks, number)
            w, x = (torch.empty(held, len(step.root), dtype=DTYPES[settings.dtype], device=step.root.device)
                    for _ in range(2))  # fmt: skip
            found = _held_rows(rows, question, settings, folder, step, sketch, of_block, w, x, bar)
            with_update = ranks.rank == 0 and not (folder / UPDATE_FILE).is_file()
            kernel = [torch.empty(len(of_block), num_update, dtype=torch.float64) for _ in range(2)]
            total, side = torch.zeros_like(step.root, dtype=torch.float64), []
            for batch in rows.batches(range(num_update)):
                streamed = rows.log_probability(question.update, batch)
                total += question.update.advantages[batch].double() @ streamed.double()
                if with_update:
                    side.append(_of_rows(streamed, step, sketch))
                    _store_gradients(settings, folder, f"update-{int(batch[0]):06d}", W=streamed)
                streamed *= step.root
                for out, of_held in zip(kernel, (w, x), strict=True):
                    out[:, batch.cpu()] = row_products(of_held[: len(of_block)], streamed).cpu()
                bar.update(len(batch))
            prove_sum(rows, question, step, total)
            if with_update:
                save_tensors({key: torch.cat([part[key] for part in side]) for key in side[0]}, folder / UPDATE_FILE)
            save_tensors({**found, "kernel": kernel[0], "entropy_kernel": kernel[1]}, block_file(folder, number))


def _held_rows(
    rows: GradientRows, question: Question, settings: KernelSettings, folder: Path, step: Step, sketch: CountSketches,
    of_block: range, w: Tensor, x: Tensor, bar: tqdm[NoReturn],
) -> dict[str, Tensor]:  # fmt: skip
    """Fills √M W_i and √M x_i of a block of E and returns what else there is to keep of them."""
    found: list[dict[str, Tensor]] = []
    middle = {of_block[0], of_block[len(of_block) // 2], of_block[-1]}
    for batch in rows.batches(of_block):
        place = slice(int(batch[0]) - of_block[0], int(batch[-1]) - of_block[0] + 1)
        both = rows.both(question.evaluation, batch, question.logp_weights, question.entropy_weights)
        own = next(both)
        for row in middle & set(batch.tolist()):
            prove_row(rows, question, row, own[row - int(batch[0])].clone())
        _store_gradients(settings, folder, f"evaluation-{int(batch[0]):06d}", W=own)
        kept = _of_rows(own, step, sketch)
        w[place] = own * step.root
        of_entropy = next(both)
        kept["entropy_products"] = row_products(of_entropy, step.update)
        kept["entropy_sq_norms"] = (of_entropy * step.root).square().double().sum(dim=1)
        _store_gradients(settings, folder, f"entropy-{int(batch[0]):06d}", x=of_entropy)
        x[place] = of_entropy * step.root
        found.append(kept)
        bar.update(len(batch))
    return {key: torch.cat([part[key] for part in found]) for key in found[0]}


def _of_rows(own: Tensor, step: Step, sketch: CountSketches) -> dict[str, Tensor]:
    """Returns what is kept of every sequence: sketches of √M W, |√M W|² exactly, and W·δθ by cause, (n, 3)."""
    scaled = own * step.root
    return {
        "sketches": sketch(scaled),
        "sq_norms": torch.stack([part.square().sum(dim=1).double() for part in scaled.split(2**16, dim=1)]).sum(dim=0),
        "products": row_products(own, step.update),
    }


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
    question: Question, step: Step, settings: KernelSettings, blocks: Blocks, rows: GradientRows
) -> dict[str, Any]:
    """Returns what must be the same for two runs to be parts of one kernel."""
    return {
        "evaluation": text_hashes(question.evaluation),
        "update": text_hashes(question.update),
        "advantages": question.update.advantages.tolist(),
        "max_length": question.max_length,
        "parameters": {name: list(p.shape) for name, p in rows.parameters.items()},
        "metric_norm": float(f"{float(step.root.double().square().sum()):.5g}"),  # P's: of this step
        "rows_per_block": blocks.rows_per_block,
        **{key: value for key, value in dataclasses.asdict(settings).items() if key != "memory_gb"},
    }


def _join_blocks(
    question: Question, settings: KernelSettings, folder: Path, step: Step, blocks: Blocks, rows: GradientRows,
    about: Mapping[str, str],
) -> None:  # fmt: skip
    """Writes the blocks as one file, with the identity checked, and removes them."""
    parts = [load_file(block_file(folder, number)) for number in range(blocks.num_blocks)]
    joined = {key: torch.cat([part[key] for part in parts]) for key in parts[0]}
    of_update = {f"update_{key}": value for key, value in load_file(folder / UPDATE_FILE).items()}
    joined |= {**of_update, "advantages": question.update.advantages.double().cpu()}
    gradient_part = CAUSES.index("gradient")
    by_cause = row_products(step.entropy_gradient.unsqueeze(0), step.update)[0]
    total, error = identity_error(joined, step.clip, question.max_length, float(by_cause[gradient_part]))
    metadata = {
        "evaluation": json.dumps(text_hashes(question.evaluation)),
        "update": json.dumps(text_hashes(question.update)),
        "parameters": json.dumps({name: list(p.shape) for name, p in rows.parameters.items()}),
        "settings": json.dumps(dataclasses.asdict(settings)),
        "metric_sha256": hashlib.sha256(step.root.cpu().numpy().tobytes()).hexdigest(),
        "clip_coefficient": repr(step.clip),
        "max_length": str(question.max_length),
        "pairs_sum": repr(total),
        "identity_error": repr(error),
        **{f"delta_h/part/{cause}": repr(float(value)) for cause, value in zip(CAUSES, by_cause, strict=True)},
        **about,
    }
    save_tensors(joined, folder / KERNEL_FILE, metadata)
    for number in range(blocks.num_blocks):
        block_file(folder, number).unlink()
    (folder / UPDATE_FILE).unlink()
