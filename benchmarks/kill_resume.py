"""Does a run that is killed again and again end where an uninterrupted one does? Bitwise, or it says where not.

    OMP_NUM_THREADS=1 python benchmarks/kill_resume.py [--kills 10] [--processes 1] [--seed 0] [OVERRIDE ...]

trains once in peace and once with SIGKILLs, resuming each time by resume=latest, and compares the last checkpoint's
parameters, optimizer state and probe states, and every line of metrics.jsonl and probes.jsonl but for the timings.
Every third kill waits for a checkpoint that is being written; the others come at random moments of training. Where a
process stood when it was killed is read off its stack, which it writes on SIGUSR1, a moment before.
Overrides are those of train.py.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from rl_training.checkpoints import TRAINING_STATE, what_is_wrong_with
from rl_training.records import read_estimates, read_metrics

ROOT = Path(__file__).parents[1]
SETTINGS = [
    "trainer.max_steps=12",
    "trainer.save_steps=2",
    "trainer.num_generations=4",
    "batch.sequences_per_step=64",
    "batch.microbatch_size=8",
    "probe=all",
    "logger=none",
]
WITH_STACKS = (
    "import faulthandler, runpy, signal, sys; faulthandler.register(signal.SIGUSR1, all_threads=False); "
    "sys.argv = ['train.py', *sys.argv[1:]]; runpy.run_path('train.py', run_name='__main__')"
)
TIMINGS = ("seconds", "step_time", "runtime", "fraction_of_step", "per_second")
PLACES = {  # innermost first: a word of the stack, and what it means
    "_save_checkpoint": "checkpoint writing",
    "rl_training/probes": "probes",
    "_generate_and_score_completions": "generation",
    "backward": "backward",
    "compute_loss": "forward",
    "optimizer": "optimizer step",
}


def start(run_dir: Path, processes: int, overrides: list[str], log: Path) -> list[subprocess.Popen[bytes]]:
    """Returns the processes of one training run, as a launcher would start them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-c", WITH_STACKS, *SETTINGS, *overrides, f"run_dir={run_dir}"]
    workers = []
    for rank in range(processes):
        env = {**os.environ, "HF_HUB_OFFLINE": "1"}
        if processes > 1:
            env |= {"WORLD_SIZE": str(processes), "RANK": str(rank), "LOCAL_RANK": str(rank)}
            env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        with open(f"{log}.{rank}", "wb") as output:
            workers.append(subprocess.Popen(command, cwd=ROOT, env=env, stdout=output, stderr=output))
    return workers


def finish(workers: list[subprocess.Popen[bytes]], log: Path) -> None:
    codes = [worker.wait() for worker in workers]
    if any(codes):
        sys.exit(f"a training run failed:\n{Path(f'{log}.0').read_text()[-3000:]}")


def num_lines(run_dir: Path) -> int:
    try:
        return len(read_metrics(run_dir / "logs"))
    except FileNotFoundError:
        return 0


def unfinished(run_dir: Path) -> list[Path]:
    checkpoints = (run_dir / TRAINING_STATE).glob("checkpoint-*")
    return [path for path in checkpoints if not (path / "trainer_state.json").exists()]


def kill(workers: list[subprocess.Popen[bytes]], run_dir: Path, log: Path, wait: float | None) -> str:
    """Kills a run `wait` seconds after its first step, or in its next checkpoint, and returns where it then stood.

    Returns "" when it had already ended.
    """
    lines = num_lines(run_dir)
    while (now := num_lines(run_dir)) <= lines and workers[0].poll() is None:
        lines = now  # a resumed run drops the lines of the steps it takes again
        time.sleep(0.01)
    if wait is not None:
        time.sleep(wait)
    else:
        while not unfinished(run_dir) and workers[0].poll() is None:
            time.sleep(0.0005)
    if workers[0].poll() is not None:
        finish(workers, log)
        return ""
    workers[0].send_signal(signal.SIGUSR1)
    time.sleep(0.002)
    for worker in workers:
        worker.kill()
    for worker in workers:
        worker.wait()
    stack = Path(f"{log}.0").read_text(errors="replace").rpartition("(most recent call first)")[2]
    return next((place for word, place in PLACES.items() if word in stack), "elsewhere")


def same(a: Any, b: Any) -> bool:
    """Returns whether two tensors hold the same bits, nan included."""
    return a is not None and b is not None and a.numpy().tobytes() == b.numpy().tobytes()


def differences(a: Path, b: Path) -> list[str]:
    """Returns what differs between the measurements and the last checkpoints of two runs."""
    found = []
    for read in (read_metrics, read_estimates):
        left, right = (
            [{k: repr(value) for k, value in row.items() if not k.endswith(TIMINGS)} for row in read(run / "logs")]
            for run in (a, b)
        )
        if left != right:
            found.append(f"{read.__name__}: {[(x, y) for x, y in zip(left, right, strict=False) if x != y][:1]}")
    last = max((a / TRAINING_STATE).glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1])).name
    for name in ("model.safetensors", "probes.safetensors"):
        tensors, others = (load_file(run / TRAINING_STATE / last / name) for run in (a, b))
        unequal = [key for key in tensors.keys() | others.keys() if not same(tensors.get(key), others.get(key))]
        found += [f"{last}/{name}: {', '.join(unequal)}"] * bool(unequal)
    optimizers: list[Any] = [torch.load(run / TRAINING_STATE / last / "optimizer.pt")["state"] for run in (a, b)]
    for index, state in optimizers[0].items():
        if any(not same(tensor, optimizers[1][index][key]) for key, tensor in state.items()):
            found.append(f"{last}/optimizer.pt: parameter {index}")
    return found


def compare(a: Path, b: Path) -> None:
    different = differences(a, b)
    if different:
        sys.exit("\n".join(["DIFFERENT:", *different]))


def run_with_kills(whole: Path, killed: Path, args: argparse.Namespace, log: Path) -> Counter[str]:
    """Returns where the kills hit. `killed` is then as complete as `whole`."""
    moments, places = random.Random(args.seed), Counter[str]()
    seconds = sum(row["step_time"] for row in read_metrics(whole / "logs"))
    while True:
        complete = [path for path in (killed / TRAINING_STATE).glob("checkpoint-*") if not what_is_wrong_with(path)]
        if not complete:
            shutil.rmtree(killed, ignore_errors=True)  # killed before its first checkpoint: nothing to go on from
        workers = start(killed, args.processes, [*args.overrides, *["resume=latest"] * bool(complete)], log)
        number = places.total() + 1
        if number > args.kills:
            finish(workers, log)
            return places
        place = kill(workers, killed, log, None if number % 3 == 0 else moments.uniform(0, seconds / 3))
        if place:
            places[place] += 1
            half = [f", {path.name} half-written ({what_is_wrong_with(path)})" for path in unfinished(killed)]
            print(f"kill {number}: {place}, after step {num_lines(killed)}{''.join(half)}", flush=True)
        else:
            print("it ended first: compared, and started afresh", flush=True)
            compare(whole, killed)
            shutil.rmtree(killed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("overrides", nargs="*", metavar="OVERRIDE", help="as of train.py: trainer.max_steps=20")
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
