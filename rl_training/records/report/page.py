"""The report's page: one HTML file that fetches nothing. What draws its charts is in it, and everything is escaped."""

from __future__ import annotations

import base64
import json
import math
import re
from collections import namedtuple
from collections.abc import Mapping, Sequence
from hashlib import sha256
from typing import Any

import pandas as pd
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from rl_training.mathematics.welch import is_significant
from rl_training.records.folder import LOGS_FOLDER
from rl_training.records.jsonl import iterate_rollouts
from rl_training.records.report.charts import Chart
from rl_training.records.report.charts import config as charts_config
from rl_training.records.report.interventions import interventions_of_run
from rl_training.records.report.series import Run
from rl_training.records.report.summary import Row, opening
from rl_training.records.report.vega import javascript
from rl_training.records.report.words import in_words, milli
from rl_training.version import VERSION

CONTENTS, SCRIPTS = Markup("<!-- contents -->"), Markup("<!-- scripts -->")  # filled in when the rest is there
TOKEN_CLASS = re.compile(r"^tokens/([^/]+)/([^/]+)/mean_delta_h$")
KINDS = {"entropy": "entropy at the token", "position": "place in its response"}
STEPS = 5  # of which sequences are shown, from the first recorded one to the last
OF_A_STEP = 3  # sequences shown, of different prompts
HEADING = re.compile(r"<(h2|summary)>(.*?)</")
OF_THE_BATCH = ("noise_scale", "ess")  # charts that come after interventions
STROKES = {"circle": "●", "square": "■", "triangle": "▲", "triangle-down": "▼", "diamond": "◆", "": "—"}


def render(name: str, **values: Any) -> str:
    """Returns the page of this template, with its list of contents; whatever is put into it is escaped."""
    loader = PackageLoader(__name__.rpartition(".")[0])
    environment = Environment(
        loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {"in_words": in_words, "as_json": _as_json}
    environment.globals["marks"] = STROKES
    environment.tests["significant"] = is_significant
    scripts = [javascript(), loader.get_source(environment, "page.js")[0]]
    shared = {
        "contents": CONTENTS, "scripts": SCRIPTS, "hashes": map(_csp_hash, scripts), "version": VERSION,
        "config": charts_config(with_legend=False), "reload": 0,
    }  # fmt: skip
    page = _with_contents(environment.get_template(name).render({**shared, **values}))
    return page.replace(SCRIPTS, "\n".join(f"<script>{script}</script>" for script in scripts))


def _csp_hash(text: str) -> str:
    return f"sha256-{base64.b64encode(sha256(text.encode()).digest()).decode()}"


def _as_json(value: Any) -> Markup:
    """Returns JSON that may stand in a script: a name in it may contain "</script>"."""
    return Markup(json.dumps(value, separators=(",", ":")).replace("<", "\\u003c"))


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
    return render(
        "run.html",
        run=run,
        opening=[*opening(run), *(verdict for section in analyses for verdict in section.verdicts[-1:])],
        provenance=run.settings.get("provenance") or {},
        interventions=interventions_of_run(run),
        token_classes=token_classes(run),
        rows=rows,
        charts=charts,
        of_the_batch=OF_THE_BATCH,
        reload=reload,
        analyses=analyses,
        gaps=gaps(run),
        costs=probe_costs(run),
        samples=samples_over_time(run),
    )


def token_classes(run: Run) -> tuple[list[list[str]], int]:
    """Returns a row for each class that has tokens, with the last running means; and how many steps these are of."""
    rows, steps = [], 0
    for kind, name in (match.groups() for match in map(TOKEN_CLASS.match, run.estimates) if match):
        metric = f"tokens/{kind}/{name}"
        changes, shares = run.known(f"{metric}/mean_delta_h"), run.measured(f"{metric}/share_of_tokens")
        last = max(changes, default=0)
        share = shares[last].value if changes else 0.0
        if share > 0:
            steps = run.measured_steps(f"{metric}/mean_delta_h")
            rows.append([KINDS.get(kind, f"its {kind}"), name.replace("_", " "), f"{share:.1%}", milli(changes[last])])
    return rows, steps


def samples_over_time(run: Run) -> list[Mapping[str, Any]]:
    """Returns the first responses to the first prompts of a few recorded steps; none where none were recorded."""
    found: dict[int, dict[int, Mapping[str, Any]]] = {}
    for row in iterate_rollouts(run.folder / LOGS_FOLDER):
        rows = found.setdefault(int(row["step"]), {})
        if len(rows) < OF_A_STEP:
            rows.setdefault(int(row["prompt_index"]), row)
    steps = sorted(found)
    if len(steps) > STEPS:
        steps = [steps[round(i * (len(steps) - 1) / (STEPS - 1))] for i in range(STEPS)]
    return [row for step in steps for row in found[step].values()]


# Why estimates, or only their error bars ("value" or "error bar"), are missing: one per reason.
Gap = namedtuple("Gap", ["reason", "what", "names", "first_step", "num_steps"])


def gaps(run: Run) -> list[Gap]:
    """Returns the reasons of whatever is nan in probes.jsonl, each once, in the order of their first steps."""
    rows = [
        (e.reason, "value" if math.isnan(e.value) else "error bar", name, step)
        for name, measurements in run.estimates.items()
        for step, e in measurements.items()
        if e.reason and not math.isfinite(e.value + e.stderr)  # else it is a remark
    ]
    found = pd.DataFrame(rows, columns=["reason", "what", "name", "step"]).groupby(["reason", "what"], sort=False)
    listed = [
        Gap(str(reason), str(what), list(rows["name"].unique()), int(rows["step"].min()), rows["step"].nunique())
        for (reason, what), rows in found
    ]
    return sorted(listed, key=lambda gap: gap.first_step)


def probe_costs(run: Run) -> list[tuple[str, float, float, int]]:
    """Returns (name, mean, largest, number) of each `probe_cost/` metric at the steps that were measured."""
    costs = pd.DataFrame(run.metrics).filter(regex="^probe_cost/").apply(pd.to_numeric, errors="coerce")
    return [(str(name), cost.mean(), cost.max(), int(cost.count())) for name, cost in costs.items() if cost.count()]
