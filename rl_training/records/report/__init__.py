"""The report of a run: records → charts, one self-contained HTML page, and the same in short for the terminal.

    series.py         the records of a run as series of estimates
    verdict.py        what entropy and reward do, with trends.py; advice.py and set_up.py: the one thing to change
    opening.py        the first lines, from these; hindrance.py: what hinders the predictions
    standing_out/     rules that name a fault, each a function of the series
    findings.py, interventions.py, sampler.py, checkpoint_analyses.py, branches.py   the sections
    charts.py, figures.py, labels.py, writing.py                                     how they are drawn and written
    page.py (by environment.py's templates), summary.py                              the page, and the terminal

It shows only what the records of any run hold, finished, killed or still going; a missing value is "–" with the reason.
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
from rl_training.records.report import findings
from rl_training.records.report.branches import branch_commands
from rl_training.records.report.checkpoint_analyses import analyses_of
from rl_training.records.report.figures import draw_figures
from rl_training.records.report.interventions import interventions_of_run
from rl_training.records.report.opening import Opening, opening
from rl_training.records.report.page import pictures as draw_pictures
from rl_training.records.report.page import write_page
from rl_training.records.report.sampler import sampler_and_trainer
from rl_training.records.report.series import Run, read_run
from rl_training.records.report.summary import step_numbers, summarize


def write_report(run_dir: str | Path | Run, pictures: str = "", reload: int = 0) -> Path:
    """Write the HTML page of a run, and return its path. Of the processes of a training, the first one writes it.

    No process waits for another, so that the first one may also call it alone.

    run_dir   the folder of a run, or what `read_run` made of it
    pictures  "png" or "svg": the page's charts lie beside it as such files, for papers and dashboards
    reload    seconds after which an open page loads itself again; 0: never

    Raises FileNotFoundError or ValueError when the folder holds no readable records, naming the file.
    """
    if not _is_first_process():
        return (run_dir.folder if isinstance(run_dir, Run) else Path(run_dir)) / REPORT_FOLDER / PAGE_FILE
    run = _read(run_dir)
    charts, analyses = draw_figures(run), analyses_of(run)
    interventions = interventions_of_run(run, branch_commands(run))
    shown = [*charts, *(chart for section in (interventions, *analyses) if section for chart in section.charts)]
    page, drawn = run.folder / REPORT_FOLDER / PAGE_FILE, draw_pictures(shown, pictures)
    return write_page(
        page, "run.html", drawn, run=run, reload=reload, opening=opening(run), rows=summarize(run),
        step_numbers=step_numbers(run), charts=charts, interventions=interventions, analyses=analyses,
        sampler=sampler_and_trainer(run), findings=findings,
    )  # fmt: skip


def print_summary(run_dir: str | Path | Run) -> None:
    """Print what the page of `write_report` begins with: its first lines, and its tables."""
    if not _is_first_process():
        return
    run = _read(run_dir)
    console = Console(highlight=False)
    console.print(Text(printable(run.name), style="bold"))
    _print_opening(console, opening(run))
    table = Table(show_header=False, box=None)
    for row in summarize(run):  # as Text: what a record says is never read as markup
        label, said, note = map(printable, row)
        value = Text(said, style="bold")
        table.add_row(Text(label), value.append(f"  {note}", style="not bold dim") if note else value)
    page = run.folder / REPORT_FOLDER / PAGE_FILE
    console.print(table)
    headings, *rows = step_numbers(run) or [[]]
    if rows:
        numbers = Table(*headings, box=None)
        for cells in rows:
            numbers.add_row(*cells)
        console.print(numbers)
    where = f"Report: {page}" if page.is_file() else f"No report yet: write_report puts it at {page}"
    console.print(Text(printable(f" {where}")), soft_wrap=True)  # a path broken into lines cannot be copied


def _print_opening(console: Console, first: Opening) -> None:
    said = Text(printable(first.headline), style="bold").append(printable(first.evidence), style="not bold")
    console.print(Padding(said, (0, 1)))
    console.print(Padding(Text(printable(first.advice), style="bold"), (0, 1)))
    for line in first.lines:
        console.print(Padding(Text(printable(f"- {line.text}")), (0, 1)))


def _is_first_process() -> bool:
    """Return whether this is rank 0, or alone. The report needs no torch: what has not been imported has no ranks."""
    distributed: Any = sys.modules.get("torch.distributed")
    has_ranks = distributed is not None and distributed.is_available() and distributed.is_initialized()
    return not has_ranks or distributed.get_rank() == 0


def _read(run: str | Path | Run) -> Run:
    return run if isinstance(run, Run) else read_run(Path(run))
