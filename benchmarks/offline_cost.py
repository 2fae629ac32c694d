"""What a checkpoint analysis costs in memory and in time, against the formulas of docs/how_to/analyze_checkpoints.md.

    OMP_NUM_THREADS=1 python benchmarks/offline_cost.py [--shape default_task hidden256 hidden512] [--rank 0]

Random weights, one optimizer step, a checkpoint, and its analysis. Memory is what this process has at most during that,
beyond what it had before (the trainer with weights and moments), from Linux's own account of it. Seconds of a
sequence (generated, scored, a backward) are measured apart, in batches as large, and put into the formula.
"""

from __future__ import annotations

import argparse
import gc
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import rl_training.job.silence  # noqa: F401

import torch
from workload import Workload, make_trainer

from rl_training.offline.buffers import sample_evaluation
from rl_training.offline.probe import analyse
from rl_training.offline.restored import RestoredTrainer, restore
from rl_training.offline.settings import Evaluation, Memory, Settings, UpdateConfig
from rl_training.offline.truth import num_scorings

PROMPTS, RESPONSES = 8, 2  # of U
MB = 2**20


def restored_of(workload: Workload, folder: Path) -> RestoredTrainer:
    """Returns a trainer that stands after the one step that another of its shape has taken."""
    trained = make_trainer(workload, [], max_steps=1)
    trained.args.save_strategy, trained.args.output_dir = "no", str(folder)
    trained.train()
    trained.save_model(str(folder / "checkpoint-1"))
    torch.save(trained.optimizer.state_dict(), folder / "checkpoint-1" / "optimizer.pt")
    trained.state.save_to_json(str(folder / "checkpoint-1" / "trainer_state.json"))
    del trained
    gc.collect()
    return restore(make_trainer(workload, [], max_steps=1), folder / "checkpoint-1", learning_rate=1e-6)


def resident(peak: bool = False) -> float:
    """Returns this process's resident memory, or its peak since `forget_peak`, in MB."""
    name = "VmHWM:" if peak else "VmRSS:"
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) / 1024


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def seconds_of(run: Callable[[], object], sequences: int) -> float:
    """Returns processor seconds per sequence, the better of two runs."""
    times = []
    for _ in range(2):
        start = time.process_time()
        run()
        times.append(time.process_time() - start)
    return min(times) / sequences


def rates(restored: RestoredTrainer, size: int) -> tuple[float, float, float]:
    """Returns seconds of a sequence: to be generated, to be scored, and for a backward through its scores."""
    e = sample_evaluation(restored, Evaluation(size, seed=9), None, size)
    rows = torch.arange(size)

    def backward() -> None:
        scores = restored.policy.score(e.rollout, rows)
        torch.autograd.grad(scores.logps.sum(), list(restored.parameters.values()))

    scored = seconds_of(lambda: restored.policy.score_rollout(e.rollout), size)
    generated = seconds_of(lambda: sample_evaluation(restored, Evaluation(size, seed=9), None, size), size)
    return generated - scored, scored, seconds_of(backward, size) - scored


def measure(workload: Workload, evaluation: int, microbatch: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        restored = restored_of(workload, Path(folder))
    settings = Settings(
        Evaluation(prompts=evaluation),
        UpdateConfig(prompts=PROMPTS),
        memory=Memory(microbatch, generation_size=evaluation),
    )
    t_g, t_s, t_b = rates(restored, microbatch)
    gc.collect()
    before = resident()
    forget_peak()
    start = time.process_time()
    found = analyse(restored, settings)
    seconds = time.process_time() - start
    peak = resident(peak=True) - before
    size = sum(param.numel() for param in restored.parameters.values())
    vectors = 4 * size * (found.update.num_folds + 13) / MB
    teach = 1.0 - found.results["zero_advantage"]
    n_u, n_e = found.update_buffer.num_sequences, evaluation
    formula = n_u * (t_g + t_s + teach * (t_s + t_b))
    formula += n_e * (t_g + 2 * t_s + 2 * t_b + num_scorings([1.0], odd=True) * t_s)
    cells = [workload.shape, f"{size:,}", f"{peak:.0f}", f"{vectors:.0f}", f"{seconds:.1f}", f"{formula:.1f}"]
    cells += [f"{1e3 * t:.1f}" for t in (t_g, t_s, t_b)]
    print(f"| {' | '.join(cells)} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", nargs="+", default=["default_task", "hidden256", "hidden512"])
    parser.add_argument("--rank", type=int, default=0, help="of a LoRA on all linear layers; 0 trains all weights")
    parser.add_argument("--evaluation", type=int, default=32, help="sequences of E")
    parser.add_argument("--microbatch", type=int, default=8)
    options = parser.parse_args()
    print("| shape | trained | peak MB | formula, vectors | seconds | formula | ms generated | scored | backward |")
    print("|" + "---|" * 9)
    for shape in options.shape:
        measure(
            Workload(
                shape, options.rank, prompts=4, responses=RESPONSES, prompt_tokens=8, completion_tokens=24, folds=4
            ),
            options.evaluation, options.microbatch,
        )  # fmt: skip


if __name__ == "__main__":
    main()
