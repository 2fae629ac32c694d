"""Writes the report of a run from its records and prints its summary, or compares several runs on one page.

Any run will do: finished, killed or still going. The report of one run is RUN/report/report.html, a self-contained
page. A comparison is a self-contained page too: it shows what differs, draws all curves in one chart, and pools runs
that differ only in their seeds.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Sequence
from pathlib import Path

from rl_training.errors import UserError
from rl_training.records.files.printable import printable
from rl_training.records.folder import COMPARISON_FILE, LOGS_FOLDER
from rl_training.records.jsonl import METRICS_FILE


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the report or the comparison that the command line asks for.

    Raises:
        UserError: If it cannot.
    """
    parser = argparse.ArgumentParser(prog="rl-training report", description=__doc__)
    parser.add_argument(
        "runs", metavar="RUN", nargs="+",
        help="the folder of a run, the one that holds logs/metrics.jsonl; a folder of runs stands for all in it",
    )  # fmt: skip
    parser.add_argument(
        "--out", metavar="PATH", help=f"where the page of a comparison goes: a file, or a folder (./{COMPARISON_FILE})"
    )
    parser.add_argument(
        "--watch", metavar="SECONDS", type=float,
        help="draw a run's page again whenever it has logged more, until Ctrl-C; an open page reloads itself",
    )  # fmt: skip
    parser.add_argument(
        "--pictures", choices=["png", "svg"], default="",
        help="also write each chart of the page as a file next to it, for papers and slides",
    )  # fmt: skip
    parser.add_argument(
        "--json", action="store_true",
        help="print the first lines of a run's report, and the settings to change, as JSON; no page is written",
    )  # fmt: skip
    chosen = parser.parse_args(arguments)
    if chosen.watch is not None and not 1 <= chosen.watch < math.inf:
        parser.error("--watch takes seconds, 1 or more")
    # Imported here, so that --help does not wait for slow imports.
    from rl_training.records.frames import find_runs
    from rl_training.records.report import print_summary, write_report
    from rl_training.records.table.series import read_run

    first = Path(chosen.runs[0])
    if len(chosen.runs) == 1 and find_runs(first) == [first]:
        if chosen.json:
            from rl_training.records.report.as_json import first_lines

            print(json.dumps(first_lines(read_run(first)), indent=2, ensure_ascii=False, allow_nan=False))
            return
        if chosen.out:
            raise UserError("--out is for a comparison: the report of one run lies in its folder, RUN/report/")
        if chosen.watch:
            _watch(first, chosen.watch)
        run = read_run(first)
        write_report(run, chosen.pictures)
        print_summary(run)
    elif chosen.watch or chosen.json:
        raise UserError(f"{'--watch' if chosen.watch else '--json'} is for the report of one run")
    else:
        from rl_training.records.compare.page import write_comparison  # imports torch, half of a report's time

        page, findings = write_comparison(chosen.runs, chosen.out or COMPARISON_FILE, chosen.pictures)
        print(*map(printable, findings), printable(f"Comparison: {page}"), sep="\n")


def _watch(run: Path, seconds: float) -> None:
    """Rewrite the page whenever the run has logged more, until Ctrl-C."""
    from rl_training.records.report import write_report

    log, drawn = run / LOGS_FOLDER / METRICS_FILE, -1
    try:
        while True:
            size = log.stat().st_size if log.is_file() else 0
            if size != drawn:
                page = write_report(run, reload=math.ceil(seconds))
                print(printable(f"Report: {page}") if drawn < 0 else ".", end="\n" if drawn < 0 else "", flush=True)
            drawn = size
            time.sleep(seconds)
    except KeyboardInterrupt:
        print()
