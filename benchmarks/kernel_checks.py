"""What the kernel of a checkpoint says, held against what it cannot know, as tables.

    python train.py run_dir=RUN trainer.max_steps=60 trainer.save_steps=10 ++trainer.save_total_limit=99
    python benchmarks/kernel_checks.py what_if RUN/training_state/checkpoint-20
    python benchmarks/kernel_checks.py shares RUN/training_state/checkpoint-20 --draws 8
    python benchmarks/kernel_checks.py sketches RUN/training_state/checkpoint-20 --prompts 128

`what_if` leaves sequences out of U and makes the step anew: its own clipping, its own P. Beside the prediction from the
stored kernel stand W·δθ of that step, which says what keeping P costs, the error as a share of what leaving them out
changes, and the measured change of log π, which differs from W·δθ by the second order of the step. With
++trainer.max_grad_norm=0.05 for the run, the clipping is at work.

`shares` draws U again and again, and E from U's own prompts, and adds up who moved entropy: the same text, the same
prompt, other prompts; with --tokens, what each token does to itself.

`sketches` holds sketches of the kernel's gradients against the gradients: errors of cosines and of entries, coverage of
95 % bars, time by processor.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import tempfile
import time
from pathlib import Path

import rl_training.job.silence  # noqa: F401

import torch
from hydra import initialize_config_dir
from safetensors.torch import load_file
from scipy.special import stdtrit
from torch import Tensor

from rl_training.engine.batch import take_rows
from rl_training.engine.updates import CAUSES
from rl_training.job.build import build_restored
from rl_training.job.run_settings import run_settings
from rl_training.mathematics.entropy import surrogate_weights
from rl_training.mathematics.importance import LOGP, sequence_totals
from rl_training.mathematics.sketches import CountSketches, cosines, inner_products
from rl_training.mathematics.vectors import pairs_dot
from rl_training.offline.first_order import TOKEN
from rl_training.offline.gradient_rows import GradientRows
from rl_training.offline.kernel_at_checkpoint import kernel_of_analysis
from rl_training.offline.kernel_blocks import metric_root, row_products
from rl_training.offline.kernel_what_if import chooser, what_if
from rl_training.offline.probe import Analysis, analyse
from rl_training.offline.restored import RestoredTrainer
from rl_training.offline.settings import Evaluation, KernelSettings, Memory, Settings, TruthSettings, UpdateConfig
from rl_training.offline.structure import Row, Structure
from rl_training.offline.truth import by_name
from rl_training.offline.update import Update, make_update

CONF = Path(__file__).parents[1] / "conf"
CLASSES = ("wrong", "right", "longest:64", "lowest:16")


def restored_at(checkpoint: Path) -> RestoredTrainer:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return build_restored(run_settings(checkpoint, []), checkpoint)


def analysed(restored: RestoredTrainer, evaluation: Evaluation, update: UpdateConfig) -> Analysis:
    settings = Settings(evaluation, update, truth=TruthSettings(enabled=False), conditioning=False)
    return analyse(restored, settings)


def what_if_table(checkpoint: Path, prompts: int) -> None:
    restored = restored_at(checkpoint)
    found = analysed(restored, Evaluation(prompts=prompts), UpdateConfig())
    assert found.first_order is not None
    folder = Path(tempfile.mkdtemp())
    kernel_of_analysis(restored, found, KernelSettings(store_gradients=True), folder)
    s = Structure.read(folder)
    w = torch.cat([load_file(path)["W"] for path in sorted(folder.glob("gradients-evaluation-*"))])
    right = s.right(s.evaluation)
    line("left out", "n", "dH1", "step anew", "error / effect", "log pi right", "W dtheta anew", "error / effect",
         "measured", "second order", "-half mean square", "clip", "clip anew")  # fmt: skip
    for name in (None, *CLASSES):
        without = chooser(name)(s) if name else torch.zeros(len(s.update), dtype=torch.bool)
        told, update = what_if(s, without), step_without(restored, found, without)
        linear = row_products(w, update.delta.unsqueeze(0))[:, 0]
        measured = change_of_log_probability(restored, found, update)
        of_entropy = row_products(found.first_order.direction[TOKEN : TOKEN + 1], update.delta.unsqueeze(0))
        line(
            name or "nobody", int(without.sum()), *against(told, "deltaH1", float(of_entropy)),
            *against(told, "log_probability_of_right", float(linear[right].mean())), float(measured[right].mean()),
            float((measured - linear)[right].mean()), -0.5 * float(linear[right].square().mean()),
            told["clip_coefficient"], update.clip,
        )  # fmt: skip
        line("  all of E", "", "", "", "", "", float(linear.mean()), "", float(measured.mean()),
             float((measured - linear).mean()), -0.5 * float(linear.square().mean()))  # fmt: skip


def against(told: Row, key: str, anew: float) -> tuple[float, float, float]:
    """Returns a number that was told, that of the step anew, and how far apart they are, as a share of the effect."""
    effect = anew - told[f"{key}_before"]
    return told[key], anew, (told[key] - anew) / effect if int(told["left_out"]) else math.nan


def sketches_table(checkpoint: Path, prompts: int, seeds: int = 3) -> None:
    restored = restored_at(checkpoint)
    folder = Path(tempfile.mkdtemp())
    found = analysed(restored, Evaluation(prompts=prompts), UpdateConfig())
    kernel_of_analysis(
        restored, found, KernelSettings(store_gradients=True, sketch_buckets=64, sketch_repeats=2), folder
    )
    root = metric_root(found.update)
    of_e, of_u = (
        torch.cat([load_file(path)["W"] for path in sorted(folder.glob(f"gradients-{name}-*"))]) * root
        for name in ("evaluation", "update")
    )
    exact, sq_e, sq_u = row_products(of_e, of_u), pairs_dot(of_e, of_e), pairs_dot(of_u, of_u)
    cosine = exact / (sq_e.unsqueeze(1) * sq_u).sqrt()
    sizes = {name: p.numel() for name, p in restored.parameters.items()}
    print(f"rms cosine {float(cosine.square().mean().sqrt()):.3f}, {len(root):,} coordinates, {seeds} seeds")
    line("m", "S x buckets", "cosine error", "x sqrt m", "over rms cosine", "entry error over rms", "coverage",
         "se/error", "ms per gradient")  # fmt: skip
    for size in (256, 1024, 4096, 16384):
        for repeats in (2, 8, 16):
            rows = []
            for seed in range(seeds):
                sketch = CountSketches(sizes, size // repeats, repeats, seed)
                started = time.process_time()
                parts = [torch.cat([sketch(part) for part in w.split(32)]) for w in (of_e, of_u)]
                taken = time.process_time() - started
                values, stderr = cosines(*parts, sq_e, sq_u)
                entries, _ = inner_products(*parts)
                error, rms = (values - cosine).square().mean().sqrt(), cosine.square().mean().sqrt()
                covered = ((values - cosine).abs() <= stdtrit(repeats - 1, 0.975) * stderr).double().mean()
                off = (entries - exact).square().mean().sqrt() / exact.square().mean().sqrt()
                claimed = stderr.square().mean().sqrt() / error
                ms = 1e3 * taken / (len(of_e) + len(of_u))
                rows.append([error, error * size**0.5, error / rms, off, covered, claimed, ms])
            line(size, f"{repeats} x {size // repeats}", *torch.tensor(rows).mean(dim=0).tolist())


def step_without(restored: RestoredTrainer, found: Analysis, without: Tensor) -> Update:
    """Returns the step that U makes when these of its sequences, in the kernel's order, have no advantage."""
    rollout = found.update_buffer.rollout
    order = rollout.prompt_index.argsort(stable=True)
    advantages = rollout.advantages.clone()
    advantages[order[without]] = 0.0
    buffer = dataclasses.replace(found.update_buffer, rollout=dataclasses.replace(rollout, advantages=advantages))
    return make_update(restored, buffer, Memory())


def change_of_log_probability(restored: RestoredTrainer, found: Analysis, update: Update) -> Tensor:
    """Returns S(θ + δθ) − S(θ) of E's sequences, (N_E,), in the kernel's order."""
    rollout = found.evaluation.rollout
    before = sequence_totals(restored.policy.score_rollout(rollout))[:, LOGP]
    with restored.policy.shifted(by_name(restored, update.delta)):
        after = sequence_totals(restored.policy.score_rollout(rollout))[:, LOGP]
    return (after - before)[rollout.prompt_index.argsort(stable=True)].double()


def shares_table(checkpoint: Path, draws: int, tokens: bool) -> None:
    """Prints sums of contributions by class of pairs, in 1e-3 nats per token, with the error of their mean.

    tokens  the diagonal too: of pairs of the same text, what each token does to itself
    """
    restored = restored_at(checkpoint)
    rows = []
    for draw in range(draws):
        evaluation = Evaluation(prompts=32, responses=8, overlap="wanted", seed=2 * draw)
        found = analysed(restored, evaluation, UpdateConfig(seed=2 * draw + 1))
        folder = Path(tempfile.mkdtemp())
        kernel_of_analysis(restored, found, KernelSettings(sketch_buckets=64, sketch_repeats=2), folder)
        s = Structure.read(folder)
        parts = [float(s.contributions[s.classes[name]].sum()) for name in ("same text", "same prompt, other text")]
        parts += [float(s.contributions.sum()) - sum(parts), float(s.contributions.sum())]
        others = [float(s.kernel.about[f"delta_h/part/{cause}"]) for cause in CAUSES if cause != "gradient"]
        counts = [float(s.classes[name].double().mean()) for name in ("same text", "same prompt, other text")]
        diagonal = token_diagonal(restored, found, s) if tokens else math.nan
        rows.append([1e3 * x for x in (*parts, *others, diagonal)] + counts)
        line(draw, *rows[-1])
    values = torch.tensor(rows).double()
    line("", "same text", "same prompt, other text", "other prompt", "all pairs", "momentum", "decay", "token diagonal",
         "same text, of pairs", "same prompt, other text, of pairs")  # fmt: skip
    line("mean", *values.mean(dim=0).tolist())
    line("se", *(values.std(dim=0) / draws**0.5).tolist())


def token_diagonal(restored: RestoredTrainer, found: Analysis, s: Structure) -> float:
    """Returns Σ c A_j /(N_E N_U L) Σ_k x_ik M ∂log π_k over pairs (i, j) of the same text and its tokens k."""
    e, scores = found.evaluation.rollout, found.evaluation.scores
    e = take_rows(e, e.prompt_index.argsort(stable=True))
    weights = surrogate_weights(scores.entropies, scores.mask, e.prompt_index, "token", "buffer")  # of E in this order
    metric = metric_root(found.update).double().square()
    rows, total = GradientRows(restored.trainer, restored.parameters, 32), 0.0
    hashes = [row["hash"] for row in s.evaluation]
    for text in sorted(set(hashes)):
        taught = sum(float(a) for a, row in zip(s.advantages, s.update, strict=True) if row["hash"] == text)
        if not taught:
            continue
        i = hashes.index(text)
        count = int(e.completion_mask[i].sum())
        copies, each = take_rows(e, torch.full((count,), i)), torch.eye(count, scores.logps.shape[1])
        w, u = (each * weight[i] for weight in weights)
        log_pi = list(rows.both(copies, torch.arange(count), each, torch.zeros_like(each)))[1].double() * metric
        x = list(rows.both(copies, torch.arange(count), w, u))[1].double()
        total += hashes.count(text) * taught * float((x * log_pi).sum())
    return s.kernel.scale * total / len(s.evaluation)


def line(*cells: object) -> None:
    print("\t".join(f"{cell:.4g}" if isinstance(cell, float) else str(cell) for cell in cells), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["what_if", "shares", "sketches"])
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--prompts", type=int, default=256, help="E of what_if and sketches")
    parser.add_argument("--draws", type=int, default=8, help="of U for shares")
    parser.add_argument("--tokens", action="store_true", help="of shares: what each token does to itself")
    arguments = parser.parse_args()
    if arguments.what == "what_if":
        what_if_table(arguments.checkpoint, arguments.prompts)
    elif arguments.what == "shares":
        shares_table(arguments.checkpoint, arguments.draws, arguments.tokens)
    else:
        sketches_table(arguments.checkpoint, arguments.prompts)


if __name__ == "__main__":
    main()
