"""Does a run that is killed repeatedly end bitwise where an uninterrupted one does? Prints the differences if not.

    OMP_NUM_THREADS=1 python tests/support/kill_resume.py [--kills 10] [--processes 1] [--seed 0] [OVERRIDE ...]

Trains once undisturbed and once with SIGKILLs, resuming each time with resume=latest. Then compares the parameters and
all states in the last checkpoint, and every line of metrics.jsonl and probes.jsonl except timings.
The kills come at random moments of training, every second one within 50 ms after a checkpoint starts being written.
Just before a kill the process writes its stack on SIGUSR1, which shows what it was doing. Overrides are those of
train.py. Each training runs train.py in a fork of this process, which has already imported everything.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import random
import runpy
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any

import rl_training.job.silence

import torch
from accelerate.utils.other import get_free_port
from safetensors.torch import load_file

import rl_training.job.run.training  # noqa: F401, for the forks
from rl_training.records.checkpoint_flaws import find_flaw
from rl_training.records.folder import TRAINING_STATE
from rl_training.records.jsonl import read_estimates, read_metrics

ROOT = Path(__file__).parents[2]
SAVE_STEPS = 2
SETTINGS = [
    "trainer.max_steps=12",
    f"trainer.save_steps={SAVE_STEPS}",
    "trainer.num_generations=4",
    "batch.sequences_per_step=64",
    "batch.microbatch_size=8",
    "probe=all",
    "logger=none",
]
TIMINGS = ("seconds", "step_time", "runtime", "fraction_of_step", "per_second")
PLACES = {  # innermost first: a word in the stack, and what the process was doing then
    "_save_checkpoint": "checkpoint writing",
    "rl_training/probes": "probes",
    "_generate_and_score_completions": "generation",
    "backward": "backward",
    "compute_loss": "forward",
    "optimizer": "optimizer step",
}


def train(overrides: list[str], env: dict[str, str], log: Path) -> None:
    """Run train.py in this process, which is a fork."""
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    faulthandler.register(signal.SIGUSR1, file=2, all_threads=False)
    os.environ |= env
    os.chdir(ROOT)
    sys.argv = ["train.py", *overrides]
    runpy.run_path("train.py", run_name="__main__")


def start(run_dir: Path, processes: int, overrides: list[str], log: Path) -> list[ForkProcess]:
    """Start one training run and return its processes, each with the environment that a launcher would set."""
    port, workers = get_free_port(), []
    for rank in range(processes):
        env = {"HF_HUB_OFFLINE": "1"}
        if processes > 1:
            env |= {"WORLD_SIZE": str(processes), "RANK": str(rank), "LOCAL_RANK": str(rank)}
            env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        command = [*SETTINGS, *overrides, f"run_dir={run_dir}"]
        workers.append(ForkProcess(target=train, args=(command, env, Path(f"{log}.{rank}"))))
        workers[-1].start()
    return workers


def finish(workers: list[ForkProcess], log: Path) -> None:
    for worker in workers:
        worker.join()
    if any(worker.exitcode for worker in workers):
        sys.exit(f"a training run failed:\n{Path(f'{log}.0').read_text()[-3000:]}")


def num_lines(run_dir: Path) -> int:
    try:
        return len(read_metrics(run_dir / "logs"))
    except FileNotFoundError:
        return 0


def unfinished(run_dir: Path) -> list[Path]:
    checkpoints = (run_dir / TRAINING_STATE).glob("checkpoint-*")
    return [path for path in checkpoints if not (path / "trainer_state.json").exists()]


def kill(workers: list[ForkProcess], run_dir: Path, log: Path, wait: float, in_checkpoint: bool) -> str:
    """Kill a run `wait` seconds after its next line of metrics, or after its next line of a step with a checkpoint.

    A step's checkpoint is written after its line of metrics.

    Returns:
        What the run was doing when it was killed, or "" if it had already ended.
    """
    lines = num_lines(run_dir)
    while (now := num_lines(run_dir)) <= lines or (in_checkpoint and now % SAVE_STEPS):
        lines = min(lines, now)  # a resumed run drops the lines of the steps that it repeats
        if not workers[0].is_alive():
            break
        time.sleep(0.002)
    time.sleep(wait)
    if not workers[0].is_alive():
        finish(workers, log)
        return ""
    assert workers[0].pid is not None
    os.kill(workers[0].pid, signal.SIGUSR1)
    deadline, stack = time.monotonic() + 1, ""
    while "run_with_kills" not in stack and time.monotonic() < deadline:  # until the outermost frames are written
        stack = Path(f"{log}.0").read_text(errors="replace").rpartition("(most recent call first)")[2]
    for worker in workers:
        worker.kill()
    for worker in workers:
        worker.join()
    return next((place for word, place in PLACES.items() if word in stack), "elsewhere")


def same(a: Any, b: Any) -> bool:
    """Return whether two tensors are bitwise equal, nan included."""
    return a is not None and b is not None and a.numpy().tobytes() == b.numpy().tobytes()


def differences(a: Path, b: Path) -> list[str]:
    """Return the differences between the records and the last checkpoints of two runs."""
    differences = []
    for read in (read_metrics, read_estimates):
        left, right = (
            [{k: repr(value) for k, value in row.items() if not k.endswith(TIMINGS)} for row in read(run / "logs")]
            for run in (a, b)
        )
        if left != right:
            differences.append(f"{read.__name__}: {[(x, y) for x, y in zip(left, right, strict=False) if x != y][:1]}")
    last = max((a / TRAINING_STATE).glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1])).name
    for name in sorted(path.name for path in (a / TRAINING_STATE / last).glob("*.safetensors")):
        tensors, others = (load_file(run / TRAINING_STATE / last / name) for run in (a, b))
        unequal = [key for key in tensors.keys() | others.keys() if not same(tensors.get(key), others.get(key))]
        differences += [f"{last}/{name}: {', '.join(unequal)}"] * bool(unequal)
    optimizers: list[Any] = [torch.load(run / TRAINING_STATE / last / "optimizer.pt")["state"] for run in (a, b)]
    for index, state in optimizers[0].items():
        if any(not same(tensor, optimizers[1][index][key]) for key, tensor in state.items()):
            differences.append(f"{last}/optimizer.pt: parameter {index}")
    return differences


def compare(a: Path, b: Path) -> None:
    different = differences(a, b)
    if different:
        sys.exit("\n".join(["DIFFERENT:", *different]))


def run_with_kills(whole: Path, killed: Path, args: argparse.Namespace, log: Path) -> Counter[str]:
    """Kill and resume a run until it has been killed `args.kills` times, then let it finish as completely as `whole`.

    Returns:
        How many kills hit each part of the training.
    """
    moments, places = random.Random(args.seed), Counter[str]()
    seconds = sum(row["step_time"] for row in read_metrics(whole / "logs"))
    while True:
        complete = [path for path in (killed / TRAINING_STATE).glob("checkpoint-*") if not find_flaw(path)]
        if not complete:
            shutil.rmtree(killed, ignore_errors=True)  # killed before its first checkpoint: nothing to resume from
        workers = start(killed, args.processes, [*args.overrides, *["resume=latest"] * bool(complete)], log)
        number = places.total() + 1
        if number > args.kills:
            finish(workers, log)
            return places
        in_checkpoint = number % 2 == 0
        place = kill(workers, killed, log, moments.uniform(0, 0.05 if in_checkpoint else seconds / 3), in_checkpoint)
        if place:
            places[place] += 1
            half = [f", {path.name} half-written ({find_flaw(path)})" for path in unfinished(killed)]
            print(f"kill {number}: {place}, after step {num_lines(killed)}{''.join(half)}", flush=True)
        else:
            print("the run ended before the kill: it is compared, and a new one starts", flush=True)
            compare(whole, killed)
            shutil.rmtree(killed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("overrides", nargs="*", metavar="OVERRIDE", help="of train.py, such as trainer.max_steps=20")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        whole, killed, log = Path(folder) / "whole", Path(folder) / "killed", Path(folder) / "log"
        finish(start(whole, args.processes, args.overrides, log), log)
        places = run_with_kills(whole, killed, args, log)
        compare(whole, killed)
    print(f"{args.kills} kills of {args.processes} process(es): {dict(places)}")
    print("bitwise the same as uninterrupted")


if __name__ == "__main__":
    main()
