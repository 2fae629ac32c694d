"""The report of a run: charts on one self-contained HTML page, and a summary of it for the terminal.

    set_up.py           how the run is set up
    wording/            what to change, in the words of whichever trainer made the run
    proposals.py        what a report can propose: a change of a setting, or a task
    story/              what reward and entropy do, without their noise
    verdict/            what that means, in one sentence
    standing_out/       rules that each look for one fault
    advice.py           the one thing to change, from these
    opening.py          the first lines; predictions.py: do they hold, or why are there none; as_json.py: for programs
    summary/            the table below them
    interventions/      what interventions would do
    sections/           further parts of the page
    run_page.py         all parts of the page, in their order; terminal.py: the summary in the terminal

It reads a run from records/table/, and records/pages/ draws what it says. Of several runs: records/compare/.
Records alone are enough, whether the run is finished, killed or still going. A missing value is "–" with its reason.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, NamedTuple

from rl_training.records.folder import PAGE_FILE, REPORT_FOLDER
from rl_training.records.pages.page import pictures as draw_pictures
from rl_training.records.pages.page import write_page
from rl_training.records.report.run_page import RunPage
from rl_training.records.report.terminal import print_run
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
    if _is_first_process():
        print_run(_read(run))


def _is_first_process() -> bool:
    """Return whether this is rank 0 or the only process, without importing torch: without it there are no ranks."""
    distributed: Any = sys.modules.get("torch.distributed")
    has_ranks = distributed is not None and distributed.is_available() and distributed.is_initialized()
    return not has_ranks or distributed.get_rank() == 0


def _read(run: str | Path | Run) -> Run:
    return run if isinstance(run, Run) else read_run(Path(run))
