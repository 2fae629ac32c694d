"""Does a killed analysis leave anything half-written, and does the next one work? SIGKILL in every phase of it.

    OMP_NUM_THREADS=1 python benchmarks/kill_offline.py RUN/training_state/checkpoint-20 [OVERRIDE ...]

Analyses in one folder, one after another, each killed later than the one before: while it loads, in each phase,
between two of its files, while it writes pages; then one in peace, whose results must be those of an undisturbed one.
An analysis is offline.py in a fork of this process, which has imported everything already. Overrides are those of
offline.py.
"""

from __future__ import annotations

import argparse
import json
import os
import runpy
import signal
import sys
import tempfile
from multiprocessing.context import ForkProcess
from pathlib import Path

import rl_training.job.silence

import rl_training.job.analysis  # noqa: F401, for the forks
from rl_training.records import analysis_results, probe_logs, read_probe_log

ROOT = Path(__file__).parents[1]
MOMENTS = [
    "open:optimizer.pt", "said:sample U", "said:sample E", "said:gradient of U",
    "said:gradient of E", "said:truth", "open:.json.gz.tmp", "rename:.json.gz", "rename:_summary.json",
    "open:result.json.tmp", "rename:result.json", "open:sweep.csv.tmp", "rename:analyses.html", "open:report.html.tmp",
]  # fmt: skip


def run(words: list[str], log: Path) -> None:
    """Runs tests/killed.py, or offline.py itself, in this process, which is a fork."""
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.chdir(ROOT)
    sys.argv = words
    sys.path.insert(0, str((ROOT / words[0]).parent))
    runpy.run_path(words[0], run_name="__main__")


def ended(words: list[str], log: Path) -> int | None:
    process = ForkProcess(target=run, args=(words, log))
    process.start()
    process.join()
    return process.exitcode


def check_whole(folder: Path) -> str:
    """Returns what a kill has left, after reading each file that has its own name: what is half raises."""
    logs = probe_logs(folder)
    for path in logs["path"] if len(logs) else ():
        read_probe_log(path)
    for path in folder.rglob("*.json"):
        json.loads(path.read_text(encoding="utf-8"))
    for path in folder.rglob("*.html"):
        assert path.read_text(encoding="utf-8").rstrip().endswith("</html>"), f"{path} is half"
    for path in folder.rglob("*.png"):
        assert path.read_bytes().endswith(b"IEND\xaeB`\x82"), f"{path} is half"
    scratch = [path.name for path in folder.rglob("*.tmp")]
    results, pages = analysis_results(folder), list(folder.rglob("*.html"))
    return f"{len(logs)} logs, {len(results)} results, {len(pages)} pages, scratch {scratch}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("overrides", nargs="*", metavar="OVERRIDE")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        log, folders = Path(place) / "log", [Path(place) / name for name in ("killed", "undisturbed")]
        commands = [
            ["offline.py", f"checkpoint={options.checkpoint}", f"output={folder}", "trainer.disable_tqdm=false",
             "dashboards=false", *options.overrides]
            for folder in folders
        ]  # fmt: skip
        for moment in MOMENTS:
            code = ended(["tests/killed.py", moment, *commands[0]], log)
            assert code == -signal.SIGKILL, f"{moment}: ended with {code}\n{log.read_text()[-3000:]}"
            print(f"killed at {moment:26} {check_whole(folders[0])}", flush=True)
        assert [ended(command, log) for command in commands] == [0, 0], log.read_text()[-3000:]
        print(f"then, in peace{'':22} {check_whole(folders[0])}")
        said = [json.loads(next(folder.rglob("result.json")).read_text())["results"] for folder in folders]
    print("results are bitwise those of an undisturbed analysis" if said[0] == said[1] else "DIFFERENT RESULTS")
    sys.exit(said[0] != said[1])


if __name__ == "__main__":
    main()
