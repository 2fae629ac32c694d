"""Self-contained HTML pages: each is one file with its own scripts that loads nothing, and all content is escaped.

vl-convert runs in its own process: its threads do not survive a fork of a process that has used it, and its memory
should not add to the training's.
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
from rl_training.records.folder import cache_folder
from rl_training.records.pages.charts import Chart, template
from rl_training.records.pages.environment import ENVIRONMENT
from rl_training.records.pages.preview import preview
from rl_training.version import REPOSITORY, VERSION

# Placeholders, replaced after rendering:
CONTENTS = Markup("<!-- contents -->")
SCRIPTS = Markup("<!-- scripts -->")
HEADING = re.compile(r"<(h2|summary)>(.*?)</")
DOCS_PAGE = re.compile(r"\b(docs/[\w/]+\.md)\b")
VEGA_LITE = "6.1"  # one that vl-convert bundles; 6.4 breaks tooltips of points
KINDS = ("png", "svg")  # formats of pictures
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


def write_page(path: Path, name: str, beside: Mapping[str, bytes] | None = None, **values: Any) -> Path:
    """Write the page from a template, and the files `beside` it by name; return the page's path."""
    files = {path.with_name(file_name): content for file_name, content in (beside or {}).items()}
    write_atomically({**files, path: render(name, **values).encode()})
    return path


def render(name: str, script: str = "", **values: Any) -> str:
    """Return the page from a template, with its table of contents. All values are escaped.

    Args:
        script: A file of templates/ that the page runs instead of the chart libraries and page.js.
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
    """Return JSON that is safe inside a script element, since a name may contain "</script>"."""
    return Markup(json.dumps(all_printable(value), separators=(",", ":")).replace("<", "\\u003c"))


def _with_settings(text: str, settings: Sequence[str] = ()) -> Markup:
    """Return a text in which these settings are marked as code, and every page of the docs is a link.

    One click selects a setting.
    """
    if not settings:
        return _with_links(text)
    longest_first = "|".join(map(re.escape, sorted(settings, key=len, reverse=True)))
    parts = re.split(f"({longest_first})", text)  # every other part is a setting
    return Markup("").join(
        Markup("<code>{}</code>").format(part) if n % 2 else _with_links(part) for n, part in enumerate(parts)
    )


def _with_links(text: str) -> Markup:
    parts = DOCS_PAGE.split(text)  # every other part is a page
    link = Markup('<a class="see" href="{}/blob/main/{}">{}</a>')
    return Markup("").join(link.format(REPOSITORY, part, part) if n % 2 else part for n, part in enumerate(parts))


PAGES.filters["with_settings"] = _with_settings
PAGES.filters["preview"] = preview
PAGES.filters["as_json"] = _as_json
PAGES.globals["marks"] = STROKES


def _with_contents(page: str) -> str:
    """Return the page with numbered headings, and links to them where the template puts CONTENTS."""
    links: list[str] = []

    def numbered(heading: re.Match[str]) -> str:
        tag, words = heading.groups()
        links.append(f'<a href="#section-{len(links)}">{words}</a>')
        return f'<{tag} id="section-{len(links) - 1}">{words}</'

    page = HEADING.sub(numbered, page)
    return page.replace(CONTENTS, f'<nav aria-label="contents">{"".join(links)}</nav>')


def pictures(charts: Sequence[Chart], kind: str) -> dict[str, bytes]:
    """Return a picture of each chart that has data, on a white background, by file name.

    Args:
        kind: One of KINDS, or "" for no pictures.
    """
    if kind and kind not in KINDS:
        raise UserError(f"pictures={kind!r}: give {' or '.join(map(repr, KINDS))}")
    with_data = [chart for chart in charts if chart.series and kind]
    if not with_data:
        return {}
    specs = all_printable([chart.standalone() for chart in with_data])
    lines = _run(PICTURES, json.dumps([kind, specs])).splitlines()
    # Names of metrics contain slashes.
    names = (printable(f"{chart.name}.{kind}").replace("/", "_") for chart in with_data)
    return {name: base64.b64decode(line) for name, line in zip(names, lines, strict=True)}


def javascript() -> str:
    """Return the JavaScript of Vega, Vega-Lite and vega-embed from vl-convert, cached in the user's cache folder.

    Bundling takes vl-convert two seconds. A cache that cannot be read or written to, as in a full home, costs no more.
    """
    name = f"vega-lite-{VEGA_LITE}-{version('vl-convert-python')}.js"
    cached = cache_folder() / name
    try:
        return cached.read_text(encoding="utf-8")
    except OSError:
        text = _run(BUNDLE).replace("</script", "<\\/script")
        with suppress(UserError):
            write_atomically({cached: text.encode()})
        return text


def _run(program: str, text: str = "") -> str:
    command = [sys.executable, "-P", "-c", program, VEGA_LITE]  # -P: ignore a json.py in the working folder
    environment = {**os.environ, "PYTHONUTF8": "1"}
    result = subprocess.run(command, input=text, capture_output=True, encoding="utf-8", env=environment, check=False)
    if result.returncode:
        raise RuntimeError(f"vl-convert could not draw a chart: {' '.join(result.stderr.split())[-300:]}")
    return result.stdout
