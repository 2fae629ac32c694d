"""Do all command lines end well? Runs more than 200, valid and invalid.

    OMP_NUM_THREADS=1 python benchmarks/command_lines.py [--only WORD] [--seconds 60]

Each command line runs in a separate process, a fork of this one, which has already imported everything. The output is
how it ended, with its last line. A command line ends badly if its last line is part of a traceback, if it fails without
a message, if it exits with 0 but has trained nothing, if it takes longer than --seconds, or if it leaves a process
behind. Those listed under `tries` also end badly if the expected message is missing. The exit code is 1 if any command
line ends badly.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import signal
import sys
import tempfile
import time
from dataclasses import dataclass
from itertools import product
from multiprocessing.context import ForkProcess
from pathlib import Path

import rl_training.job.silence  # noqa: F401

import yaml

from rl_training.__main__ import main as rl_training_main
from rl_training.records.jsonl import METRICS_FILE, read_metrics

SMALL = [
    "trainer.max_steps=1",
    "trainer.num_generations=4",
    "batch.sequences_per_step=16",
    "batch.microbatch_size=4",
    "trainer.max_completion_length=8",
    "logger=none",
    "trainer.disable_tqdm=true",
]
TYPED = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
MEASURED = "train $SMALL run_dir=$NEW probe=interventions batch.sequences_per_step=32 probes.interventions.which="


@dataclass
class Ending:
    """How a command line ended. `bad` says why that is wrong, or is "" if it ended well."""

    line: str
    code: int | None
    seconds: float
    last: str
    bad: str


def command_lines() -> list[str]:
    """Return the command lines without the settings that make runs small. Nearly all set one thing, right or wrong."""
    pairs = (product(("run_dir", "data=gsm8k data.path"), TYPED["paths"]), product(TYPED["settings"], TYPED["values"]))
    return [*TYPED["tries"], *TYPED["others"], *(f"{key}={value}" for both in pairs for key, value in both)]


def run(words: list[str], log: Path) -> None:
    """Run a command in this process, a fork, as the leader of a new process group."""
    os.setsid()
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.chdir(log.parent)  # so that relative paths stay inside this folder
    os.environ["HF_HUB_OFFLINE"] = "1"
    sys.argv = ["rl-training", *words]
    rl_training_main()


def words_of(line: str, folder: Path, runs: Path) -> list[str]:
    """Return the words of a command: one of `tries`, or the settings of a small run."""
    if line in TYPED["tries"]:
        places = {"$MEASURED": MEASURED, "$RUN": runs / "run", "$LORA": runs / "lora", "$NEW": folder / "run"}
        for name, place in (places | {"$SMALL": " ".join(SMALL)}).items():
            line = line.replace(name, str(place))
        return shlex.split(line)
    words = line.split(" ") if "run_dir=" not in line else [line]  # a path may hold spaces
    if line.startswith("data=gsm8k data.path="):
        words = ["data=gsm8k", line.removeprefix("data=gsm8k ")]
    return ["train", *SMALL, f"run_dir={folder / 'run'}", *words]


def run_to_end(line: str, folder: Path, runs: Path, seconds: float) -> Ending:
    """Run a command line and return how it ended."""
    log = folder / "log"
    (folder / "own.py").write_text(TYPED["own"], encoding="utf-8")
    process = ForkProcess(target=run, args=(words_of(line, folder, runs), log))
    started = time.monotonic()
    process.start()
    assert process.pid is not None
    process.join(seconds)
    took = time.monotonic() - started
    code = process.exitcode
    left = kill_group(process.pid)
    process.join()
    said = [text for text in log.read_text(errors="replace").splitlines() if text.strip()] if log.exists() else []
    last = said[-1] if said else ""
    return Ending(line, code, took, last, find_flaw(line, code, last, left, folder / "run", said))


def kill_group(group: int) -> bool:
    """Kill what is left of the process group, and return whether anything was left."""
    try:
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True


def find_flaw(line: str, code: int | None, last: str, left: bool, run_dir: Path, said: list[str]) -> str:
    """Return why this ending is bad, or "" if it is not."""
    if code is None:
        return "did not end in time"
    if left:
        return "left a process behind"
    if code and not last.startswith(("error: ", "train: error", "usage:", "ended by", "rl-training")):
        return "its last line is not an error"
    if code == 1 or ("--debug" not in line and any(text.startswith("Traceback") for text in said)):
        return "an unexpected error"
    if (expected := TYPED["tries"].get(line)) is not None:
        if not expected:
            return "" if code == 0 else "is valid, but refused"
        if code == 0:  # when a probe fails, measuring ends but training continues
            return "" if any(expected in text for text in said) else "does not report the mistake"
        return "" if expected in last else f"does not say {expected!r}"
    asked = {"--help", "--cfg", "--version", "--info", "-x", "--hlep", "--multirun"} & set(line.split())
    trained = (run_dir / "logs" / METRICS_FILE).exists() and bool(read_metrics(run_dir / "logs"))
    elsewhere = line.startswith("run_dir=") or "logging_" in line
    if not code and not (asked or trained or elsewhere) and not any("Report:" in text for text in said):
        return "trained nothing"
    return ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="only command lines with this word")
    parser.add_argument("--seconds", type=float, default=60, help="time limit of each (default: %(default)s)")
    args = parser.parse_args()
    lines = [line for line in command_lines() if args.only in line]
    bad, codes, runs = 0, {}, Path(tempfile.mkdtemp())
    for name, adapter in (("run", "none"), ("lora", "lora")):
        words = ["train", *SMALL, f"run_dir={runs / name}", f"adapter={adapter}", "trainer.max_steps=2"]
        process = ForkProcess(target=run, args=([*words, "trainer.save_steps=1"], runs / "log"))
        process.start()
        process.join()
        assert process.exitcode == 0, (runs / "log").read_text()
    for line in lines:
        folder = Path(tempfile.mkdtemp())
        ending = run_to_end(line, folder, runs, args.seconds)
        shutil.rmtree(folder, ignore_errors=True)
        bad += bool(ending.bad)
        codes[ending.code] = codes.get(ending.code, 0) + 1
        mark = f"BAD, {ending.bad}" if ending.bad else "ok"
        print(f"{mark:12} {ending.code} {ending.seconds:5.1f} s  {line}\n             {ending.last[:200]}", flush=True)
    shutil.rmtree(runs)
    print(f"{len(lines)} command lines, by exit code {codes}; {bad} ended badly")
    sys.exit(bool(bad))


if __name__ == "__main__":
    main()
