"""Pages: one HTML file each that fetches nothing. What draws its charts is in it, and everything is escaped."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Sequence
from hashlib import sha256
from importlib.resources import files
from typing import Any

from markupsafe import Markup

from rl_training.records.report.charts import Chart
from rl_training.records.report.charts import config as charts_config
from rl_training.records.report.findings import gaps, probe_costs, samples_over_time, token_classes
from rl_training.records.report.interventions import interventions_of_run
from rl_training.records.report.series import Run
from rl_training.records.report.summary import Row, opening, sampler_sentences, step_numbers
from rl_training.records.report.vega import javascript
from rl_training.records.report.words import ENVIRONMENT
from rl_training.version import VERSION

CONTENTS, SCRIPTS = Markup("<!-- contents -->"), Markup("<!-- scripts -->")  # filled in when the rest is there
HEADING = re.compile(r"<(h2|summary)>(.*?)</")
OF_THE_BATCH = ("noise_scale", "ess")  # charts that come after interventions
STROKES = {"circle": "●", "square": "■", "triangle": "▲", "triangle-down": "▼", "diamond": "◆", "": "—"}

PAGES = ENVIRONMENT.overlay(autoescape=True)


def render(name: str, script: str = "", **values: Any) -> str:
    """Returns the page of this template, with its list of contents; whatever is put into it is escaped.

    script  that it runs instead of what draws charts: a file of templates/
    """
    own = (files(__package__) / "templates" / (script or "page.js")).read_text(encoding="utf-8")
    scripts = [own] if script else [javascript(), own]
    shared = {
        "contents": CONTENTS, "scripts": SCRIPTS, "hashes": map(_csp_hash, scripts), "version": VERSION,
        "config": None if script else charts_config(with_legend=False), "reload": 0,
    }  # fmt: skip
    page = _with_contents(PAGES.get_template(name).render({**shared, **values}))
    return page.replace(SCRIPTS, "\n".join(f"<script>{text}</script>" for text in scripts))


def _csp_hash(text: str) -> str:
    return f"sha256-{base64.b64encode(sha256(text.encode()).digest()).decode()}"


def _as_json(value: Any) -> Markup:
    """Returns JSON that may stand in a script: a name in it may contain "</script>"."""
    return Markup(json.dumps(value, separators=(",", ":")).replace("<", "\\u003c"))


PAGES.filters["as_json"], PAGES.globals["marks"] = _as_json, STROKES


def _with_contents(page: str) -> str:
    """Returns the page with numbered headings, and a link to each where the template asks for them."""
    links: list[str] = []

    def numbered(heading: re.Match[str]) -> str:
        tag, words = heading.groups()
        links.append(f'<a href="#section-{len(links)}">{words}</a>')
        return f'<{tag} id="section-{len(links) - 1}">{words}</'

    page = HEADING.sub(numbered, page)
    return page.replace(CONTENTS, f'<nav aria-label="contents">{"".join(links)}</nav>')


def render_page(
    run: Run, rows: Sequence[Row], charts: Sequence[Chart], analyses: Sequence[Any], reload: int = 0
) -> str:
    """Returns the page's HTML, with analyses of its checkpoints. Everything that comes from the run is escaped.

    reload  seconds after which an open page loads itself again; 0: never
    """
    evaluated = {name: {metric: run.estimates(metric, name) for metric in run.names(name)} for name in run.evaluations}
    return render(
        "run.html",
        run=run,
        opening=[*opening(run), *(verdict for section in analyses for verdict in section.sentences[-1:])],
        provenance=run.settings.get("provenance") or {},
        interventions=interventions_of_run(run),
        step_numbers=step_numbers(run),
        sampler=sampler_sentences(run),
        token_classes=token_classes(run),
        rows=rows,
        charts=charts,
        of_the_batch=OF_THE_BATCH,
        reload=reload,
        analyses=analyses,
        evaluations=evaluated,
        gaps=gaps(run),
        costs=probe_costs(run),
        samples=samples_over_time(run),
    )
