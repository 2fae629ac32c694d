"""Writes the report of a run from its records and prints its summary, or compares several runs on one page.

Any run will do: finished, killed or still going. The report of one run is RUN/report/report.html, a self-contained
page. A comparison is a self-contained page too: it shows what differs, draws all curves in one chart, and pools runs
that differ only in their seeds.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from rl_training.errors import UserError
from rl_training.options import ArgumentParser
from rl_training.records.files.printable import printable
from rl_training.records.folder import COMPARISON_FILE, LOGS_FOLDER
from rl_training.records.jsonl import METRICS_FILE


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the report or the comparison that the command line asks for.

    Raises:
        UserError: If it cannot.
    """
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.watch is not None and not 1 <= options.watch < math.inf:
        parser.error("--watch takes seconds, 1 or more")
    try:
        _run(options)
    except OSError as error:
        if error.filename is None:  # of no file, such as a pipe that nobody reads any more
            raise
        raise UserError(
            f"{error.filename} cannot be opened ({error.strerror}): allow it, or copy the run to where you may read it"
        ) from error


def _run(options: argparse.Namespace) -> None:
    # Here, as in the functions below, so that --help does not wait for slow imports.
    from rl_training.records.frames import find_runs

    runs = find_runs(options.runs[0]) if len(options.runs) == 1 else []
    is_one = len(runs) == 1
    _refuse_options_without_effect(options, is_one)
    if not is_one:
        _compare(options.runs, options.out or COMPARISON_FILE, options.pictures)
    elif options.json:
        _print_json(runs[0])
    else:
        if options.watch:
            _watch(runs[0], options.watch)
        _report(runs[0], options.pictures)


def _parser() -> argparse.ArgumentParser:
    parser = ArgumentParser(prog="rl-training report", description=__doc__)
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
    return parser


def _refuse_options_without_effect(chosen: argparse.Namespace, is_one: bool) -> None:
    """Raise UserError for an option that does nothing.

    Args:
        is_one: Whether the report is of one run, and no comparison.
    """
    if chosen.out and is_one:
        raise UserError("--out is for a comparison: the report of one run lies in its folder, RUN/report/")
    for option in ("watch", "json"):
        if getattr(chosen, option) and not is_one:
            raise UserError(f"--{option} is for the report of one run")
    for option in ("watch", "pictures"):
        if getattr(chosen, option) and chosen.json:
            raise UserError(f"--{option} is for a page, and --json writes none")


def _print_json(folder: Path) -> None:
    from rl_training.records.report.as_json import first_lines
    from rl_training.records.table.reading import read_run

    print(json.dumps(first_lines(read_run(folder)), indent=2, ensure_ascii=False, allow_nan=False))


def _report(folder: Path, pictures: str) -> None:
    from rl_training.records.report import print_summary, write_report
    from rl_training.records.table.reading import read_run

    run = read_run(folder)
    try:
        write_report(run, pictures)
    except UserError:  # as of a run that may only be read
        print_summary(run)
        raise
    print_summary(run)


def _compare(folders: Sequence[str], out: str, pictures: str) -> None:
    from rl_training.records.compare.page import write_comparison  # imports torch, half of a report's time

    page, findings = write_comparison(folders, out, pictures)
    print(*map(printable, findings), printable(f"Comparison: {page}"), sep="\n")


def _watch(run: Path, seconds: float) -> None:
    """Rewrite the page whenever the run has logged more, until Ctrl-C."""
    from rl_training.records.report import write_report

    log = run / LOGS_FOLDER / METRICS_FILE
    last_size: int | None = None  # of the log, when the page was last drawn
    with _until_ctrl_c():
        while True:
            size = log.stat().st_size if log.is_file() else 0
            if size != last_size:
                page = write_report(run, reload=math.ceil(seconds))
                if last_size is None:
                    print(printable(f"Report: {page}"), flush=True)
                else:
                    print(".", end="", flush=True)
            last_size = size
            time.sleep(seconds)


@contextlib.contextmanager
def _until_ctrl_c() -> Iterator[None]:
    """Let Ctrl-C end what is inside this context, and not the command, which has a handler of its own."""
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    except KeyboardInterrupt:
        print()
    finally:
        signal.signal(signal.SIGINT, handler)
