"""The first lines and the tables of a report in the terminal.

Text of the records is printed as it is: nothing in it is markup, and no control character reaches the terminal.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from rl_training.records.files.printable import printable
from rl_training.records.folder import PAGE_FILE, REPORT_FOLDER
from rl_training.records.report.opening import Opening, opening
from rl_training.records.report.run_page import comparison_command
from rl_training.records.report.summary import summarize
from rl_training.records.report.summary.row import Row
from rl_training.records.report.summary.step_numbers import step_numbers
from rl_training.records.table.series import Run


def print_run(run: Run) -> None:
    """Print the first lines and the tables of a run's report, and where its page is."""
    first = opening(run)
    rows = summarize(run)
    console = Console(highlight=False, record=True)
    console.print(_as_recorded(run.name, style="bold"))
    _print_opening(console, first)
    _print_rows(console, rows)
    _print_step_numbers(console, step_numbers(run))
    of_findings = (setting for finding in first.findings for setting in finding.advice.settings)
    of_rows = (setting for row in rows for setting in row.settings)
    _repeat_broken(console, [*first.advice.settings, *of_findings, *of_rows])
    page = run.folder / REPORT_FOLDER / PAGE_FILE
    _print_whole(console, f"Report: {page}" if page.is_file() else f"No report yet: write_report puts it at {page}")
    _print_whole(console, f"To compare runs: {comparison_command(run)}")


def _print_opening(console: Console, first: Opening) -> None:
    rest = printable(f"{first.joint}{first.evidence}")
    sentence = _as_recorded(first.headline, style="bold").append(rest, style="not bold")
    others = [*first.further, *(f"- {finding.text}" for finding in first.findings)]
    for text in (sentence, _as_recorded(first.advice.text, style="bold"), *map(_as_recorded, others)):
        console.print(Padding(text, (0, 1)))


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
