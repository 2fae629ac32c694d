"""The report of a run: charts on one self-contained HTML page, and a summary of it for the terminal.

    set_up.py           how the run is set up
    wording/            what to change, in the words of whichever trainer made the run; proposals.py: as what
    story/              what reward and entropy do, without their noise
    verdict/            what that means, in one sentence
    standing_out/       rules that each look for one fault
    advice.py           the one thing to change, from these
    opening.py          the first lines; predictions.py: do they hold, or why are there none; as_json.py: for programs
    summary/            the table below them
    interventions/      what interventions would do
    sections/           further parts of the page
    run_page.py         all parts, in their order

It reads a run from records/table/, and records/pages/ draws what it says. Of several runs: records/compare/.
Records alone are enough, whether the run is finished, killed or still going. A missing value is "–" with its reason.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from rl_training.records.files.printable import printable
from rl_training.records.folder import PAGE_FILE, REPORT_FOLDER
from rl_training.records.pages.page import pictures as draw_pictures
from rl_training.records.pages.page import write_page
from rl_training.records.report.opening import Opening, opening
from rl_training.records.report.run_page import RunPage, comparison_command
from rl_training.records.report.summary import summarize
from rl_training.records.report.summary.row import Row
from rl_training.records.report.summary.step_numbers import step_numbers
from rl_training.records.table.reading import read_run
from rl_training.records.table.series import Run


class WrittenReport(NamedTuple):
    """The files of a report that was written: its page, and its charts as pictures."""

    page: Path
    pictures: list[Path]


def write_report(run: str | Path | Run, pictures: str = "", reload: int = 0) -> Path:
    """Write the HTML page of a run and return its path. Only rank 0 writes.

    Not collective: rank 0 may also call it alone. The package's docstring names the file of each part of the page.

    Args:
        run: The folder of a run, or the result of `read_run`.
        pictures: "png" or "svg" also writes each chart as such a file next to the page, for papers and dashboards.
        reload: Seconds after which an open page reloads itself; 0 for never.

    Raises:
        UserError: If the folder has no readable records; names the file.
    """
    return write_report_files(run, pictures, reload).page


def write_report_files(run: str | Path | Run, pictures: str = "", reload: int = 0) -> WrittenReport:
    """Write the page of a run like `write_report`, and return the paths of the page and of its pictures.

    The folder of the report may hold other pictures: of charts that a run no longer has, or the user's.
    """
    if not _is_first_process():
        folder = run.folder if isinstance(run, Run) else Path(run)
        return WrittenReport(folder / REPORT_FOLDER / PAGE_FILE, [])
    records = _read(run)
    page = RunPage.of(records)
    drawn = draw_pictures(page.all_charts, pictures)
    path = records.folder / REPORT_FOLDER / PAGE_FILE
    write_page(path, "run.html", drawn, page=page, reload=reload)
    return WrittenReport(path, [path.with_name(name) for name in drawn])


def print_summary(run: str | Path | Run) -> None:
    """Print the first lines and the tables of the page of `write_report`. Only rank 0 prints."""
    if not _is_first_process():
        return
    records = _read(run)
    first = opening(records)
    rows = summarize(records)
    console = Console(highlight=False, record=True)
    console.print(Text(printable(records.name), style="bold"))
    _print_opening(console, first)
    _print_rows(console, rows)
    _print_step_numbers(console, step_numbers(records))
    of_findings = (setting for finding in first.findings for setting in finding.advice.settings)
    of_rows = (setting for row in rows for setting in row.settings)
    _repeat_broken(console, [*first.advice.settings, *of_findings, *of_rows])
    page = records.folder / REPORT_FOLDER / PAGE_FILE
    _print_whole(console, f"Report: {page}" if page.is_file() else f"No report yet: write_report puts it at {page}")
    _print_whole(console, f"To compare runs: {comparison_command(records)}")


def _print_rows(console: Console, rows: Iterable[Row]) -> None:
    table = Table(show_header=False, box=None)
    table.add_column(overflow="fold")
    table.add_column(overflow="fold")
    for row in rows:
        note = "; see ".join(filter(None, (row.note, row.see and row.see.text)))
        content = _as_recorded(row.value, style="bold")
        if note:
            content.append_text(_as_recorded(f"  {note}", style="not bold dim"))
        table.add_row(_as_recorded(row.label), content)
    console.print(table)


def _print_step_numbers(console: Console, numbers: Sequence[Sequence[str]]) -> None:
    if not numbers:
        return
    headings, *rows = numbers
    table = Table(box=None)
    for heading in headings:
        table.add_column(_as_recorded(heading), overflow="fold")
    for cells in rows:
        table.add_row(*map(_as_recorded, cells))
    console.print(table)


def _repeat_broken(console: Console, settings: Iterable[str]) -> None:
    """Print the settings that the lines above have in pieces, because the terminal is narrow."""
    printed = console.export_text(clear=False)
    for setting in dict.fromkeys(settings):
        if printable(setting) not in printed:
            _print_whole(console, f"To paste: {setting}")


def _print_whole(console: Console, line: str) -> None:
    """Print a line that rich does not break: a path or a command in pieces cannot be copied."""
    console.print(Text(printable(f" {line}")), soft_wrap=True)


def _as_recorded(text: str, style: str = "") -> Text:
    """Return text of the records in which nothing is read as markup, or obeyed by a terminal."""
    return Text(printable(text), style=style)


def _print_opening(console: Console, first: Opening) -> None:
    verdict = Text(printable(first.headline), style="bold").append(printable(first.evidence), style="not bold")
    console.print(Padding(verdict, (0, 1)))
    console.print(Padding(Text(printable(first.advice.text), style="bold"), (0, 1)))
    for sentence in first.further:
        console.print(Padding(Text(printable(sentence)), (0, 1)))
    for finding in first.findings:
        console.print(Padding(Text(printable(f"- {finding.text}")), (0, 1)))


def _is_first_process() -> bool:
    """Return whether this is rank 0 or the only process, without importing torch: without it there are no ranks."""
    distributed: Any = sys.modules.get("torch.distributed")
    has_ranks = distributed is not None and distributed.is_available() and distributed.is_initialized()
    return not has_ranks or distributed.get_rank() == 0


def _read(run: str | Path | Run) -> Run:
    return run if isinstance(run, Run) else read_run(Path(run))
