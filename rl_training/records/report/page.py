"""The report's page: one HTML file that fetches nothing. Pictures are embedded, and everything is escaped."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any

import yaml
from jinja2 import Environment, PackageLoader, StrictUndefined, Template

from rl_training.records.folder import LOGS_FOLDER
from rl_training.records.report.drawing import Picture
from rl_training.records.report.opening import opening
from rl_training.records.report.samples import samples_over_time
from rl_training.records.report.series import Run, gaps, probe_costs
from rl_training.records.report.summary import Row, evaluation_tables
from rl_training.version import VERSION


def template(name: str) -> Template:
    """Returns one of the page templates that lie beside this file; what is put into it is escaped."""
    environment = Environment(
        loader=PackageLoader(__name__.rpartition(".")[0]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["base64"] = lambda data: base64.b64encode(data).decode("ascii")
    return environment.get_template(name)


def render_page(run: Run, rows: Sequence[Row], pictures: Sequence[Picture], looks: Sequence[Any]) -> str:
    """Returns the page's HTML, with analyses of its checkpoints. Everything that comes from the run is escaped."""
    return template("run.html").render(
        run=run,
        opening=[*opening(run), *(told for section in looks for told in section.verdicts[-1:])],
        provenance=_provenance(run),
        rows=rows,
        pictures=pictures,
        looks=looks,
        gaps=gaps(run),
        costs=probe_costs(run),
        evaluations=evaluation_tables(run),
        samples=samples_over_time(run.folder / LOGS_FOLDER),
        version=VERSION,
    )


def _provenance(run: Run) -> dict[str, str]:
    """Returns what config.yaml says of where the run comes from; nothing where it says nothing, or cannot be read."""
    try:
        config = yaml.safe_load(run.config or "")
    except yaml.YAMLError:
        return {}
    told = config.get("provenance") if isinstance(config, dict) else None
    return {str(name): str(value) for name, value in told.items()} if isinstance(told, dict) else {}
