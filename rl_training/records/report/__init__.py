"""The report of a run: records → charts, one self-contained HTML page, and a short table for the terminal.

It shows only what the records of any run hold, finished, killed or still going; a missing value is "–" with the reason.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from rl_training.records.atomic_write import write_atomically
from rl_training.records.report.charts import Section
from rl_training.records.report.checkpoint_analyses import analyses_of
from rl_training.records.report.figures import draw_figures
from rl_training.records.report.page import render_page
from rl_training.records.report.series import read_run
from rl_training.records.report.summary import step_numbers, summarize
from rl_training.records.report.vega import pictures as draw_pictures

REPORT_FOLDER = "report"
PAGE_FILE = "report.html"


def write_report(
    run_dir: str | Path, analyses: Mapping[Path, Section] | None = None, pictures: bool = True, reload: int = 0
) -> Path:
    """Returns the path of the HTML page it wrote; its charts lie beside it as PNG.

    analyses  checkpoint analyses that are described already, by folder
    pictures  False: the page alone
    reload    seconds after which an open page loads itself again; 0: never

    Raises FileNotFoundError or ValueError when the folder holds no readable records, naming the file.
    """
    run = read_run(Path(run_dir))
    charts, page = draw_figures(run), run.folder / REPORT_FOLDER / PAGE_FILE
    files = {page.with_name(name): png for name, png in (draw_pictures(charts) if pictures else {}).items()}
    html = render_page(run, summarize(run), charts, analyses_of(run, analyses or {}), reload)
    write_atomically({**files, page: html.encode()})
    return page


def print_summary(run_dir: str | Path) -> None:
    """Prints the table of the run's first and last numbers, and what a step does. Raises as `write_report` does."""
    run = read_run(Path(run_dir))
    table = Table(title=Text(run.name, style="bold"), title_justify="left", show_header=False, box=None)
    for row in summarize(run):  # as Text: what a record says is never read as markup
        value = Text(row.value, style="bold")
        table.add_row(Text(row.label), value.append(f"  {row.note}", style="not bold dim") if row.note else value)
    page = run.folder / REPORT_FOLDER / PAGE_FILE
    console = Console(highlight=False)
    console.print(table)
    headings, *rows = step_numbers(run) or [[]]
    if rows:
        numbers = Table(*headings, box=None)
        for cells in rows:
            numbers.add_row(*cells)
        console.print(numbers)
    where = f"Report: {page}" if page.is_file() else f"No report yet: write_report puts it at {page}"
    console.print(Text(f" {where}"), soft_wrap=True)  # a path broken into lines cannot be copied
