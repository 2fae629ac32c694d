"""The report of a run: charts on one self-contained HTML page, and a summary of it for the terminal.

    set_up.py           how the run is set up; wording.py: what to change, in the words of whichever trainer made it
    story/              what reward and entropy do, without their noise
    verdict/            what that means, in one sentence
    standing_out/       rules that each detect one fault
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
from pathlib import Path
from typing import Any

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
from rl_training.records.report.summary.step_numbers import step_numbers
from rl_training.records.table.series import Run, read_run


def write_report(run_dir: str | Path | Run, pictures: str = "", reload: int = 0) -> Path:
    """Write the HTML page of a run and return its path. Only rank 0 writes.

    Not collective: rank 0 may also call it alone. The package's docstring names the file of each part of the page.

    Args:
        run_dir: The folder of a run, or the result of `read_run`.
        pictures: "png" or "svg" also writes each chart as such a file next to the page, for papers and dashboards.
        reload: Seconds after which an open page reloads itself; 0 for never.

    Raises:
        UserError: If the folder has no readable records; names the file.
    """
    if not _is_first_process():
        return (run_dir.folder if isinstance(run_dir, Run) else Path(run_dir)) / REPORT_FOLDER / PAGE_FILE
    run = _read(run_dir)
    page = RunPage.of(run)
    drawn = draw_pictures(page.all_charts, pictures)
    return write_page(run.folder / REPORT_FOLDER / PAGE_FILE, "run.html", drawn, page=page, reload=reload)


def print_summary(run_dir: str | Path | Run) -> None:
    """Print the first lines and the tables of the page of `write_report`. Only rank 0 prints."""
    if not _is_first_process():
        return
    run = _read(run_dir)
    console = Console(highlight=False)
    console.print(Text(printable(run.name), style="bold"))
    _print_opening(console, opening(run))
    table = Table(show_header=False, box=None)
    for row in summarize(run):
        note = "; see ".join(filter(None, (row.note, row.see and row.see.text)))
        value = _as_recorded(row.value, style="bold")
        said = value.append_text(_as_recorded(f"  {note}", style="not bold dim")) if note else value
        table.add_row(_as_recorded(row.label), said)
    page = run.folder / REPORT_FOLDER / PAGE_FILE
    console.print(table)
    headings, *rows = step_numbers(run) or [[]]
    if rows:
        numbers = Table(box=None)
        for heading in headings:
            numbers.add_column(_as_recorded(heading))
        for cells in rows:
            numbers.add_row(*map(_as_recorded, cells))
        console.print(numbers)
    where = f"Report: {page}" if page.is_file() else f"No report yet: write_report puts it at {page}"
    console.print(Text(printable(f" {where}")), soft_wrap=True)  # a path broken into lines cannot be copied
    console.print(Text(printable(f" To compare runs: {comparison_command(run)}")), soft_wrap=True)


def _as_recorded(text: str, style: str = "") -> Text:
    """Return text of the records in which nothing is read as markup, or obeyed by a terminal."""
    return Text(printable(text), style=style)


def _print_opening(console: Console, first: Opening) -> None:
    said = Text(printable(first.headline), style="bold").append(printable(first.evidence), style="not bold")
    console.print(Padding(said, (0, 1)))
    console.print(Padding(Text(printable(first.advice), style="bold"), (0, 1)))
    for sentence in first.further:
        console.print(Padding(Text(printable(sentence)), (0, 1)))
    for line in first.lines:
        console.print(Padding(Text(printable(f"- {line.text}")), (0, 1)))


def _is_first_process() -> bool:
    """Return whether this is rank 0 or the only process, without importing torch: without it there are no ranks."""
    distributed: Any = sys.modules.get("torch.distributed")
    has_ranks = distributed is not None and distributed.is_available() and distributed.is_initialized()
    return not has_ranks or distributed.get_rank() == 0


def _read(run: str | Path | Run) -> Run:
    return run if isinstance(run, Run) else read_run(Path(run))
