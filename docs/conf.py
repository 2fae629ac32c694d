"""Sphinx's settings: MyST pages, notebooks that are executed, and reference pages written from conf/ and the code."""

from __future__ import annotations

import os
import re
import sys
import textwrap
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent
sys.path[:0] = [str(DOCS), str(DOCS.parent)]
# Notebooks call commands of this environment, on one thread, without a hub and without progress bars.
os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
os.environ["PYTHONPATH"] = str(DOCS.parent)
os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
os.environ |= {"TQDM_DISABLE": "1", "COLUMNS": "110"}

from docutils import nodes  # noqa: E402
from generate import write_reference  # noqa: E402

from rl_training.version import VERSION  # noqa: E402

project, author, release = "rl-training", "the rl-training authors", VERSION
copyright = author
extensions = ["myst_nb", "sphinx.ext.autodoc"]
exclude_patterns = ["reference/_generated"]

html_theme = "furo"
html_title = "rl-training"
html_static_path = ["_static"]
html_css_files = ["wide_tables.css"]

myst_enable_extensions = ["colon_fence", "linkify"]
myst_linkify_fuzzy_links = False
REPOSITORY = "https://github.com/rl-training/rl-training"
# [text](repo:benchmarks/README.md): a file of the repository that is no page of the site.
myst_url_schemes = {"http": None, "https": None, "mailto": None, "repo": f"{REPOSITORY}/blob/main/{{{{path}}}}"}
myst_heading_anchors = 3
nb_execution_mode = "cache"
nb_execution_cache_path = str(DOCS.parent / "build" / "notebooks")
nb_execution_in_temp = True
nb_execution_raise_on_error = True
nb_execution_timeout = 600
nb_merge_streams = True
nb_output_stderr = "remove"  # what libraries warn of while they are imported

autodoc_typehints = "signature"
autodoc_preserve_defaults = True
linkcheck_anchors = False
linkcheck_ignore = [f"{REPOSITORY}/.*"]  # what is changed here is not there yet
html_theme_options = {"source_repository": REPOSITORY, "source_branch": "main", "source_directory": "docs/"}

LISTS = ("Args", "Attributes", "Raises")  # sections of a docstring that describe names one by one


def as_restructured_text(
    app: object, what: str, name: str, obj: object, options: object, lines: list[str], *rest: object
) -> None:
    """Turn a docstring into what Sphinx reads: parameters become a list, what is indented otherwise stays as it is.

    Parameters are the lines `name: what it is` under "Args:", or `name   what it is`.
    """
    written: list[str] = []
    for block in re.split(r"\n\s*\n", "\n".join(lines).strip()):
        is_list = re.match(r"\w+ {2,}\S", block)
        if re.match(r"(Args|Attributes|Returns|Yields|Raises):\n", block):
            written += [*section(block), ""]
        elif not is_list and re.search(r"^(  |>>>)", block, re.MULTILINE):
            written += [".. code-block:: text", "", *(f"    {line}" for line in block.splitlines()), ""]
        elif is_list:
            for line in block.splitlines():
                if start := re.match(r"(\w+) {2,}(\S.*)$", line):
                    written += [f"``{start[1]}``", f"    {as_text(start[2])}"]
                elif line.startswith("   "):
                    written.append(f"    {as_text(line.strip())}")
                else:
                    written += ["", as_text(line)]
            written.append("")
        else:
            written += [*as_text(block).splitlines(), ""]
    lines[:] = written


def section(block: str) -> list[str]:
    """Return a section of a docstring in Google's style: its title, and a list or a paragraph."""
    title, _, body = block.partition(":\n")
    written = [f"**{title}**", ""]
    for line in textwrap.dedent(body).splitlines():
        item = re.match(r"([*\w]+(?:, [*\w]+)*): ?(.*)", line) if title in LISTS else None
        if item:
            names = ", ".join(f"``{name}``" for name in item[1].split(", "))
            written += [names, f"    {as_text(item[2])}"]
        else:
            written.append(f"{'    ' * (title in LISTS)}{as_text(line.strip())}")
    return written


def as_text(text: str) -> str:
    """Return a text for reStructuredText: `code` as ``code``, and no other character means anything."""
    special = str.maketrans({character: f"\\{character}" for character in "\\*|_"})
    parts = re.split(r"`([^`]+)`", text)  # in turn text and code
    return "".join(f"``{part}``\\ " if i % 2 else part.translate(special) for i, part in enumerate(parts))


def without_bars(app: object, doctree: nodes.document) -> None:
    """Leave progress bars and DeepSpeed's line on loading out of a tutorial's outputs, and outputs without any text."""
    for output in list(doctree.findall(nodes.literal_block)):
        if "output" in output["classes"]:
            lines = output.astext().splitlines()
            text = "\n".join(line for line in lines if not re.search(r"\d+%\||get_accelerator\]", line))
            output.children = [nodes.Text(text)]
            output.rawsource = text
            if not text.strip():
                output.parent.remove(output)


def setup(app: Any) -> None:
    app.connect("doctree-read", without_bars)
    app.connect("builder-inited", lambda _: write_reference(DOCS / "reference" / "_generated"))
    app.connect("autodoc-process-docstring", as_restructured_text)
