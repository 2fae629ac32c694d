"""The report's page: one HTML file that fetches nothing. Pictures are embedded, and everything is escaped."""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Sequence
from hashlib import sha256
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from PIL import Image

from rl_training.mathematics.welch import is_significant
from rl_training.records.report.drawing import Picture
from rl_training.records.report.interventions import interventions_of_run
from rl_training.records.report.series import Run
from rl_training.records.report.summary import Row, in_words, opening, with_stderr
from rl_training.records.report.tables import gaps, probe_costs, samples_over_time, token_classes
from rl_training.version import VERSION

CONTENTS = Markup("<!-- contents -->")
HEADING = re.compile(r"<(h2|summary)>(.*?)</")


def render(name: str, **values: Any) -> str:
    """Returns the page of this template, with its list of contents; whatever is put into it is escaped."""
    loader = PackageLoader(__name__.rpartition(".")[0])
    environment = Environment(
        loader=loader,
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"embedded": _embedded, "in_words": in_words, "with_stderr": with_stderr}
    environment.tests["significant"] = is_significant
    environment.filters["csp_hash"] = lambda text: f"sha256-{base64.b64encode(sha256(text.encode()).digest()).decode()}"
    script = loader.get_source(environment, "hover.js")[0]
    return _with_contents(
        environment.get_template(name).render(values, contents=CONTENTS, hover_script=script, version=VERSION)
    )


def _embedded(png: bytes) -> str:
    """Returns the picture as a data URL, with 128 colours: a third of the bytes, with no visible difference."""
    smaller = io.BytesIO()
    with Image.open(io.BytesIO(png)) as image:
        image.convert("RGB").quantize(128).save(smaller, "png", optimize=True)
    return f"data:image/png;base64,{base64.b64encode(smaller.getvalue()).decode('ascii')}"


def _with_contents(page: str) -> str:
    """Returns the page with numbered headings, and a link to each where the template asks for them."""
    links: list[str] = []

    def numbered(heading: re.Match[str]) -> str:
        tag, words = heading.groups()
        links.append(f'<a href="#section-{len(links)}">{words}</a>')
        return f'<{tag} id="section-{len(links) - 1}">{words}</'

    page = HEADING.sub(numbered, page)
    return page.replace(CONTENTS, f'<nav aria-label="contents">{"".join(links)}</nav>')


def render_page(run: Run, rows: Sequence[Row], pictures: Sequence[Picture], analyses: Sequence[Any]) -> str:
    """Returns the page's HTML, with analyses of its checkpoints. Everything that comes from the run is escaped."""
    return render(
        "run.html",
        run=run,
        opening=[*opening(run), *(told for section in analyses for told in section.verdicts[-1:])],
        provenance=run.settings.get("provenance") or {},
        interventions=interventions_of_run(run),
        token_classes=token_classes(run),
        rows=rows,
        pictures=pictures,
        analyses=analyses,
        gaps=gaps(run),
        costs=probe_costs(run),
        samples=samples_over_time(run),
    )
