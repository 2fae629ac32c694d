"""Does a run that `accelerate launch` has started end well when it is told to, whoever is told?

    OMP_NUM_THREADS=1 python benchmarks/launched_signals.py [--only WORD] [--seconds 400]

starts train.py with one process and with two (gloo), and sends SIGINT or SIGTERM, once a step is taken, to the launcher
alone or to all of its process group, as a terminal does. Each run must finish its step, leave a checkpoint of that step
and the report, print the line that goes on, and leave no process behind. A second signal, three seconds after the run
has said what it would do, must end it within a few. A process that is killed ends the other, and the launcher names its
rank. Prints a line for each; exit code 1 if any ends badly.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import rl_training.job.silence  # noqa: F401

from rl_training.records.checkpoints import TRAINING_STATE, what_is_wrong_with
from rl_training.records.jsonl import METRICS_FILE, read_metrics

ROOT = Path(__file__).parents[1]
LAUNCH_FILES = {1: "launch/cpu.yaml", 2: "launch/cpu_ddp.yaml"}
SMALL = [
    "trainer.max_steps=5000",
    "trainer.num_generations=4",
    "batch.microbatch_size=4",
    "trainer.save_steps=5000",
    "trainer.disable_tqdm=true",
    "logger=none",
    "probe=none",
]
SECONDS_TO_END_AT_ONCE = 15  # on a busy machine


@dataclass(frozen=True)
class Case:
    """Who gets which signal."""

    processes: int
    signum: signal.Signals
    to: str  # launcher | group | rank: of two processes, the second
    twice: bool = False

    def __str__(self) -> str:
        again = ", twice" if self.twice else ""
        return f"{self.signum.name}{again} to the {self.to} of {self.processes} process{'es' * (self.processes > 1)}"


CASES = [
    *(Case(*case) for case in product(LAUNCH_FILES, (signal.SIGINT, signal.SIGTERM), ("launcher", "group"))),
    *(Case(processes, signal.SIGINT, "group", twice=True) for processes in LAUNCH_FILES),
    Case(2, signal.SIGKILL, "rank"),
]


def alive(session: int) -> list[int]:
    """Returns the processes of a session, its zombies left out."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, _, sid = stat.read_text().rpartition(")")[2].split()[:4]
        except OSError:  # gone meanwhile
            continue
        if int(sid) == session and state != "Z":
            found.append(int(stat.parent.name))
    return found


def wait_until(done: Callable[[], object], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not done():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def send(case: Case, launcher: int) -> None:
    if case.to == "group":
        os.killpg(launcher, case.signum)
    elif case.to == "launcher":
        os.kill(launcher, case.signum)
    else:
        ranks = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
        second = next(pid for pid in ranks if b"\0RANK=1\0" in Path(f"/proc/{pid}/environ").read_bytes())
        os.kill(int(second), case.signum)


def end_of(case: Case, folder: Path, seconds: float) -> tuple[int | None, float, str, str]:
    """Runs a case and returns the launcher's exit code, the seconds it took to end, the last line, what is bad."""
    run, log = folder / "run", folder / "log"
    size = 4096 if case.twice else 16  # steps of many seconds, so that the second signal comes within one
    launch = [str(Path(sys.executable).parent / "accelerate"), "launch", "--config_file", LAUNCH_FILES[case.processes]]
    command = [*launch, "train.py", *SMALL, f"batch.sequences_per_step={size}", f"run_dir={run}"]
    with open(log, "w", encoding="utf-8") as said:
        launcher = subprocess.Popen(command, cwd=ROOT, stdout=said, stderr=said, start_new_session=True)
    begun = run / "config.yaml" if case.twice else run / "logs" / METRICS_FILE
    started = wait_until(begun.exists, seconds)
    if case.twice:
        time.sleep(3)  # training is on its way
    signalled = time.monotonic()
    if started:
        send(case, launcher.pid)
        if case.twice:
            wait_until(lambda: "a second one ends at once" in log.read_text(errors="replace"), seconds)
            time.sleep(3)
            signalled = time.monotonic()
            send(case, launcher.pid)
    ended = started and wait_until(lambda: launcher.poll() is not None and not alive(launcher.pid), seconds)
    took = time.monotonic() - signalled
    for pid in alive(launcher.pid):
        os.kill(pid, signal.SIGKILL)
    code = launcher.wait()
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    last = next((line for line in reversed(lines) if line.startswith("ended by")), lines[-1] if lines else "")
    if not (started and ended):
        return code, took, last, "did not end" if started else "did not start"
    return code, took, last, what_is_bad(case, run, took, last, lines)


def what_is_bad(case: Case, run: Path, took: float, last: str, lines: list[str]) -> str:
    """Returns why this is no way to end, or ""."""
    if case.twice:
        return "" if took < SECONDS_TO_END_AT_ONCE else "took its time"
    if case.to == "rank":
        return "" if any("rank      : 1" in line for line in lines) and "SIGKILL" in "".join(lines) else "not named"
    taken = len(read_metrics(run / "logs"))
    checkpoint = run / TRAINING_STATE / f"checkpoint-{taken}"
    # A launcher of one process dies of its signal and passes nothing on: which one it was the run cannot know.
    name = "SIGTERM" if case.to == "launcher" and case.processes == 1 else case.signum.name
    if not last.startswith(f"ended by {name} after step {taken} of 5000; go on with: accelerate launch --config_file"):
        return f"no line that goes on from step {taken}"
    if what_is_wrong_with(checkpoint):
        return f"{checkpoint.name}: {what_is_wrong_with(checkpoint)}"
    if not (run / "report" / "report.html").is_file():
        return "no report"
    if any("Traceback" in line and "train.py" in lines[i + 1] for i, line in enumerate(lines[:-1])):
        return "a traceback of train.py"
    return ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="only cases with these words")
    parser.add_argument("--seconds", type=float, default=400, help="how long a case may last (default: %(default)s)")
    args = parser.parse_args()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # jobs in the background ignore it, and so would launchers
    bad = 0
    for case in CASES:
        if args.only not in str(case):
            continue
        folder = Path(tempfile.mkdtemp())
        code, took, last, why = end_of(case, folder, args.seconds)
        if why:
            print((folder / "log").read_text(errors="replace")[-4000:])
        shutil.rmtree(folder, ignore_errors=True)
        bad += bool(why)
        mark = f"BAD, {why}" if why else "ok"
        print(f"{mark:4} {case}: launcher's exit code {code}, {took:.1f} s\n     {last}", flush=True)
    sys.exit(bool(bad))


if __name__ == "__main__":
    main()
