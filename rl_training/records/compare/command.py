"""rl-training report: the report of a run, or the comparison of several."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from rl_training.records.folder import COMPARISON_FILE, LOGS_FOLDER


def main(arguments: Sequence[str] | None = None) -> None:
    """Writes the report or the comparison that the command line asks for; exits with 2, in one line, if it cannot."""
    parser = argparse.ArgumentParser(
        prog="rl-training report",
        description="Make the report of a run from its records, and print its summary; or compare several runs on one "
        "page. Any run will do: finished, killed or still going.",
        epilog="Of one run it writes RUN/report/: report.html, one self-contained page, and its pictures. Of several, "
        "one self-contained page: what differs, curves in one picture, runs trained alike but for seeds pooled.",
    )
    parser.add_argument(
        "runs", metavar="RUN", nargs="+",
        help="the folder of a run, the one that holds logs/metrics.jsonl; a folder of runs stands for all in it",
    )  # fmt: skip
    parser.add_argument(
        "--out", metavar="PATH", help=f"where the page of a comparison goes: a file, or a folder (./{COMPARISON_FILE})"
    )
    chosen = parser.parse_args(arguments)
    try:
        # Here, because --help waits for no slow import.
        from rl_training.records.compare.page import write_comparison
        from rl_training.records.report import print_summary, write_report

        first = Path(chosen.runs[0])
        holds_runs = not (first / LOGS_FOLDER).is_dir() and any(first.rglob(LOGS_FOLDER))
        if len(chosen.runs) == 1 and not holds_runs:
            if chosen.out:
                raise ValueError("--out is for a comparison: the report of one run lies in its folder, RUN/report/")
            write_report(chosen.runs[0])
            print_summary(chosen.runs[0])
        else:
            page, findings = write_comparison(chosen.runs, chosen.out or COMPARISON_FILE)
            print(*findings, f"Comparison: {page}", sep="\n")
    except (OSError, ValueError) as error:
        parser.exit(2, f"{parser.prog}: error: {error}\n")
