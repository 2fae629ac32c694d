"""Pages: one HTML file each that fetches nothing. What draws its charts is in it, and everything is escaped.

vl-convert has a process of its own: its threads do not survive a fork of the process that has used it, and its memory
is not the training's.
"""

from __future__ import annotations

import base64
import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from hashlib import sha256
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from typing import Any

from markupsafe import Markup

from rl_training.errors import UserError
from rl_training.records.files.atomic_write import write_atomically
from rl_training.records.files.printable import all_printable, printable
from rl_training.records.report.charts import Chart, template
from rl_training.records.report.environment import ENVIRONMENT
from rl_training.version import VERSION

CONTENTS, SCRIPTS = Markup("<!-- contents -->"), Markup("<!-- scripts -->")  # filled in when the rest is there
HEADING = re.compile(r"<(h2|summary)>(.*?)</")
VEGA_LITE = "6.1"  # of those that vl-convert has; 6.4 loses what a pointed-at point says
KINDS = ("png", "svg")  # of pictures
PICTURES = """
import base64, json, sys, vl_convert
kind, specs = json.load(sys.stdin)
for spec in specs:
    if kind == "png":
        drawn = vl_convert.vegalite_to_png(spec, vl_version=sys.argv[1], scale=2)
    else:
        drawn = vl_convert.vegalite_to_svg(spec, vl_version=sys.argv[1]).encode()
    print(base64.b64encode(drawn).decode())
"""
BUNDLE = "import sys, vl_convert; sys.stdout.write(vl_convert.javascript_bundle(None, sys.argv[1]))"
STROKES = {"circle": "●", "square": "■", "triangle": "▲", "triangle-down": "▼", "diamond": "◆", "": "—"}

PAGES = ENVIRONMENT.overlay(autoescape=True)


def write_page(page: Path, name: str, beside: Mapping[str, bytes] | None = None, **values: Any) -> Path:
    """Return the path of the page that it wrote of this template, with the files `beside` it, by their names."""
    files = {page.with_name(file_name): content for file_name, content in (beside or {}).items()}
    write_atomically({**files, page: render(name, **values).encode()})
    return page


def render(name: str, script: str = "", **values: Any) -> str:
    """Return the page of this template, with its list of contents; whatever is put into it is escaped.

    script  that it runs instead of what draws charts: a file of templates/
    """
    script_text = (files(__package__) / "templates" / (script or "page.js")).read_text(encoding="utf-8")
    scripts = [script_text] if script else [javascript(), script_text]
    shared = {
        "contents": CONTENTS, "scripts": SCRIPTS, "hashes": map(_csp_hash, scripts), "version": VERSION,
        "config": None if script else template("style.yaml"), "reload": 0,
    }  # fmt: skip
    page = _with_contents(printable(PAGES.get_template(name).render({**shared, **values})))
    return page.replace(SCRIPTS, "\n".join(f"<script>{text}</script>" for text in scripts))


def _csp_hash(text: str) -> str:
    return f"sha256-{base64.b64encode(sha256(text.encode()).digest()).decode()}"


def _as_json(value: Any) -> Markup:
    """Return JSON that may stand in a script: a name in it may contain "</script>"."""
    return Markup(json.dumps(all_printable(value), separators=(",", ":")).replace("<", "\\u003c"))


PAGES.filters["as_json"], PAGES.globals["marks"] = _as_json, STROKES


def _with_contents(page: str) -> str:
    """Return the page with numbered headings, and a link to each where the template asks for them."""
    links: list[str] = []

    def numbered(heading: re.Match[str]) -> str:
        tag, words = heading.groups()
        links.append(f'<a href="#section-{len(links)}">{words}</a>')
        return f'<{tag} id="section-{len(links) - 1}">{words}</'

    page = HEADING.sub(numbered, page)
    return page.replace(CONTENTS, f'<nav aria-label="contents">{"".join(links)}</nav>')


def pictures(charts: Sequence[Chart], kind: str) -> dict[str, bytes]:
    """Return a picture of each chart that has something to draw, black on white, by the name of its file.

    kind  one of KINDS; "": none
    """
    if kind and kind not in KINDS:
        raise UserError(f"pictures={kind!r}: give {' or '.join(map(repr, KINDS))}")
    drawn = [chart for chart in charts if chart.series and kind]
    if not drawn:
        return {}
    specs = all_printable([chart.standalone() for chart in drawn])
    lines = _run(PICTURES, json.dumps([kind, specs])).splitlines()
    names = (printable(f"{chart.name}.{kind}").replace("/", "_") for chart in drawn)  # some are metrics
    return {name: base64.b64decode(line) for name, line in zip(names, lines, strict=True)}


def javascript() -> str:
    """Return the JavaScript of Vega, Vega-Lite and vega-embed, which vl-convert holds; kept in the user's cache.

    Putting it together takes vl-convert two seconds.
    """
    name = f"vega-lite-{VEGA_LITE}-{version('vl-convert-python')}.js"
    kept = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rl-training" / name
    if not kept.is_file():
        text = _run(BUNDLE).replace("</script", "<\\/script")
        with suppress(OSError):
            kept.parent.mkdir(parents=True, exist_ok=True)
            write_atomically({kept: text.encode()})
        return text
    return kept.read_text(encoding="utf-8")


def _run(program: str, text: str = "") -> str:
    command = [sys.executable, "-P", "-c", program, VEGA_LITE]  # -P: a json.py of the working folder is not imported
    environment = {**os.environ, "PYTHONUTF8": "1"}
    ended = subprocess.run(command, input=text, capture_output=True, encoding="utf-8", env=environment, check=False)
    if ended.returncode:
        raise RuntimeError(f"vl-convert could not draw a chart: {' '.join(ended.stderr.split())[-300:]}")
    return ended.stdout
