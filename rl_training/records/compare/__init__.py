"""The comparison of runs: their records → one self-contained HTML page.

write_comparison(folders, out)    writes the page
rl-training report RUN RUN … --out PATH    the same from the command line
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rl_training.records.atomic_write import write_atomically

COMPARISON_FILE = "comparison.html"


def write_comparison(folders: Sequence[str | Path], out: str | Path) -> tuple[Path, list[str]]:
    """Returns the path of the page it wrote, and its findings. The page is `out`, or comparison.html in that folder.

    Runs may be finished, running or killed; a folder stands for all runs in it.
    Raises FileNotFoundError where there is no run, and ValueError for what cannot be read or compared.
    """
    # Here, because --help waits for no slow import.
    from rl_training.records.compare.groups import read_groups
    from rl_training.records.compare.page import render_comparison

    groups = read_groups(folders)
    if sum(len(group.members) + len(group.repeats) for group in groups) < 2:
        raise ValueError(f"{groups[0].members[0].run.folder} is one run: a comparison needs at least two")
    page = Path(out) / COMPARISON_FILE if Path(out).is_dir() else Path(out)
    html, findings = render_comparison(groups)
    write_atomically({page: html.encode()})
    return page, findings
