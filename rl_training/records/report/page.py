"""The report's page: one HTML file that fetches nothing. Pictures are embedded, and everything is escaped."""

from __future__ import annotations

import base64
from collections.abc import Sequence

from jinja2 import Environment, StrictUndefined

from rl_training.records.report.drawing import Picture
from rl_training.records.report.series import Run, gaps, probe_costs
from rl_training.records.report.summary import Row
from rl_training.version import VERSION

# The policy in the first lines makes the browser hold what the docstring says.
TEMPLATE = """\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{ run.name }} – rl_training report</title>
<style>
body { max-width: 54rem; margin: 2.5rem auto; padding: 0 1.2rem; background: #fff; color: #1a1a1a;
       font: 16px/1.55 system-ui, sans-serif; }
h1 { font-size: 1.6rem; margin-bottom: 0.2rem; overflow-wrap: anywhere; }
h2 { font-size: 1.15rem; margin-top: 2.6rem; }
p.below, figcaption, footer, td.note { color: #595959; }
p.below { margin-top: 0; }
table { border-collapse: collapse; width: 100%; font-size: 0.93rem; font-variant-numeric: tabular-nums; }
th, td { padding: 0.36rem 1.1rem 0.36rem 0; text-align: left; vertical-align: top; border-bottom: 1px solid #e6e6e6; }
td.value { font-weight: 600; white-space: nowrap; }
td { overflow-wrap: break-word; }
figure { margin: 0; }
img { display: block; width: 100%; height: auto; }
figcaption { font-size: 0.93rem; margin-top: 0.4rem; }
.missing { font-size: 0.93rem; color: #8a3c00; }
pre { padding: 1rem; background: #f6f6f6; overflow-x: auto; font-size: 0.85rem; line-height: 1.45; }
code { font-size: 0.9em; }
summary { cursor: pointer; margin-top: 2.6rem; font-size: 1.15rem; font-weight: 600; }
footer { margin-top: 3rem; font-size: 0.85rem; }
</style>
</head>
<body>
<h1>{{ run.name }}</h1>
<p class="below">What the probes said of the policy's entropy, and what happened.</p>
<table>
{% for row in rows %}
<tr><td>{{ row.label }}</td><td class="value">{{ row.value }}</td><td class="note">{{ row.note }}</td></tr>
{% endfor %}
</table>
{% for picture in pictures %}
<h2>{{ picture.title }}</h2>
<figure>
<img alt="{{ picture.title }}" src="data:image/png;base64,{{ base64(picture.png) }}">
<figcaption>{{ picture.caption }}</figcaption>
</figure>
{% for reason in picture.missing %}
<p class="missing">Missing: {{ reason }}</p>
{% endfor %}
{% endfor %}
<h2>What is missing, and why</h2>
{% if gaps %}
<table>
<tr><th>missing</th><th>of</th><th>why</th><th>first step</th><th>steps</th></tr>
{% for gap in gaps %}
<tr><td>{{ gap.what }}</td>
<td>{% for name in gap.names %}<code>{{ name }}</code>{{ "" if loop.last else ", " }}{% endfor %}</td>
<td>{{ gap.reason }}</td><td>{{ gap.first_step }}</td><td>{{ gap.num_steps }}</td></tr>
{% endfor %}
</table>
{% elif run.estimates %}
<p>Nothing: every estimate has its value and its error bar.</p>
{% else %}
<p>No probe measured anything in this run: logs/probes.jsonl is missing or empty. Choose a probe to see more here.</p>
{% endif %}
<h2>What the probes cost</h2>
{% if costs %}
<table>
<tr><th></th><th>median</th><th>largest</th><th>steps</th></tr>
{% for name, median, largest, steps in costs %}
<tr><td><code>{{ name }}</code></td><td>{{ "%.3g"|format(median) }}</td><td>{{ "%.3g"|format(largest) }}</td>
<td>{{ steps }}</td></tr>
{% endfor %}
</table>
{% else %}
<p>No probe was timed.</p>
{% endif %}
{% if run.config is not none %}
<details><summary>config.yaml</summary><pre>{{ run.config }}</pre></details>
{% else %}
<p class="missing">The run folder holds no config.yaml: how this run was configured is not known here.</p>
{% endif %}
<footer>rl_training {{ version }}. Every number is from logs/metrics.jsonl and logs/probes.jsonl of the run.</footer>
</body>
</html>
"""


def render_page(run: Run, rows: Sequence[Row], pictures: Sequence[Picture]) -> str:
    """Returns the page's HTML. Everything that comes from the run is escaped."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(TEMPLATE).render(
        run=run,
        rows=rows,
        pictures=pictures,
        gaps=gaps(run),
        costs=probe_costs(run),
        version=VERSION,
        base64=lambda data: base64.b64encode(data).decode("ascii"),
    )
