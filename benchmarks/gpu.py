"""All measurements that need a GPU, in one command without a network. Writes FOLDER/gpu.md, row by row.

    python benchmarks/gpu.py --out FOLDER              # one GPU of 80 GB; ends within 9 minutes
    python benchmarks/gpu.py --out FOLDER --small      # the same on any machine; its figures mean nothing
    python benchmarks/gpu.py --out FOLDER --only costs # one section, or several

gpu_sections.py has the measurements. Each section is a process of its own with a limit on its time. Its heading is
written before it starts and each row as soon as it is measured, so whatever ends this command, or hangs, what was
measured until then is in gpu.md. A section that fails or runs past its limit is named at the end, and the exit code is
then 1. What the sections print is in FOLDER/gpu.log.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import rl_training.job.silence  # noqa: F401

LINES_OF_LOG = 30  # how much of a failed section's output is shown
SCRIPT = Path(__file__).with_name("gpu_sections.py")


@dataclass(frozen=True)
class Section:
    """A section of the page: a function of gpu_sections.py, and how long it may take on an H100, in seconds."""

    name: str
    title: str
    limit: float


SECTIONS = (
    Section("machine", "Machine", 30),
    Section("tests", "Tests that need CUDA", 120),
    Section("waits", "How often the host waits for the GPU in a step", 45),
    Section("costs", "Time and memory of a step's forward, backward and optimizer, with a LoRA", 120),
    Section("all_weights", "The same where all weights are trained", 50),
    Section("bounded", "Time of a bounded step", 40),
    Section(
        "offload",
        "Vectors by fold in host memory (`probes.simple.offload`); the tests check that values stay the same",
        50,
    ),
    Section("precisions", "bf16 against fp32, on the same rollouts (`benchmarks/precision.py`)", 60),
    Section("products", "Products of the sequence kernel (`rl_training/offline/kernel/blocks.py`)", 25),
)


def append(page: Path, text: str) -> None:
    """Append lines to the page, at once."""
    with page.open("a", encoding="utf-8") as file:
        file.write(f"{text}\n")


def run_section(section: Section, command: Sequence[str], limit: float, page: Path, log: Path) -> bool:
    """Run a section's process, which appends its rows to the page, and return whether it succeeded in time.

    Args:
        section: The section.
        command: Starts its process.
        limit: Seconds after which the process is killed, with all that it has started.
        page: gpu.md.
        log: Takes what the process prints.
    """
    append(page, f"\n## {section.title}\n")
    start, first_byte = time.monotonic(), log.stat().st_size if log.exists() else 0
    with log.open("ab") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        code: int | None = process.wait(timeout=limit)
    except subprocess.TimeoutExpired:
        code = None
    finally:
        if process.poll() is None:  # also after Ctrl-C
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if code is None:
        append(page, f"\nSTOPPED: it took longer than its limit of {limit:.0f} s")
    elif code:
        lines = log.read_bytes()[first_byte:].decode(errors="replace").splitlines()[-LINES_OF_LOG:]
        append(page, "\n".join((f"\nFAILED with exit code {code}:\n", "```", *lines, "```")))
    seconds = time.monotonic() - start
    append(page, f"\n({seconds:.0f} s)")
    print(f"{section.name}: {seconds:.0f} s", flush=True)
    return code == 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="the folder that gpu.md is written into")
    parser.add_argument("--small", action="store_true", help="everything small enough for a CPU")
    parser.add_argument("--only", nargs="+", choices=[section.name for section in SECTIONS], help="these sections")
    parser.add_argument("--minutes", type=float, default=9.0, help="sections are stopped, or left out, after this time")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    page, log = options.out / "gpu.md", options.out / "gpu.log"
    for file in (page, log):
        file.write_bytes(b"")
    deadline, failed = time.monotonic() + 60 * options.minutes, []
    for section in SECTIONS:
        if options.only and section.name not in options.only:
            continue
        # On a CPU that other jobs share, a small section takes as long as a full one on a GPU.
        limit = min(section.limit * (3 if options.small else 1), deadline - time.monotonic())
        command = [sys.executable, str(SCRIPT), section.name, "--page", str(page), "--seconds", f"{limit:.0f}"]
        if limit <= 0:
            append(page, f"\n## {section.title}\n\nLeft out for lack of time.")
            failed.append(section.name)
        elif not run_section(section, [*command, *["--small"] * options.small], limit, page, log):
            failed.append(section.name)
    print(page)
    if failed:
        sys.exit(f"failed, stopped or left out: {', '.join(failed)}; see {page}")


if __name__ == "__main__":
    main()
