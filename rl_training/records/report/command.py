"""python -m rl_training.report RUN_DIR: makes the report of a run again and prints its summary."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from rl_training.records.report import print_summary, write_report


def main(arguments: Sequence[str] | None = None) -> None:
    """Writes the report of the run named on the command line, and prints its summary; exits with 2 if it cannot."""
    parser = argparse.ArgumentParser(
        prog="python -m rl_training.report",
        description="Make the report of a run from its records, and print its summary. "
        "Any run will do: finished, killed or still going.",
        epilog="Writes RUN_DIR/report/: report.html (one self-contained page), reward.png, entropy.png, delta_h.png.",
    )
    parser.add_argument(
        "run_dir", metavar="RUN_DIR", help="the run's folder, the one that holds logs/metrics.jsonl: runs/run_…"
    )
    run_dir = parser.parse_args(arguments).run_dir
    try:
        write_report(run_dir)
        print_summary(run_dir)
    except (OSError, ValueError) as error:
        parser.exit(2, f"{parser.prog}: error: {error}\n")
