"""Settings of Sphinx: MyST pages, notebooks that are executed, and reference pages made from conf/ and the code."""

from __future__ import annotations

import os
import re
import sys
import textwrap
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent
sys.path[:0] = [str(DOCS), str(DOCS.parent)]
# Notebooks run commands of this environment, on one thread, offline and without progress bars.
os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
os.environ["PYTHONPATH"] = str(DOCS.parent)
os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
os.environ |= {"TQDM_DISABLE": "1", "COLUMNS": "110"}

from docutils import nodes  # noqa: E402
from generate import llms_txt, write_reference  # noqa: E402
from terms import FORWARD, anchor, meanings, split_at_terms  # noqa: E402

from rl_training.version import REPOSITORY, VERSION  # noqa: E402

project, author, release = "rl-training", "the rl-training authors", VERSION
copyright = author
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["reference/_generated"]

html_theme = "furo"
html_title = "rl-training"
html_static_path = ["_static"]
html_css_files = ["wide_tables.css"]

myst_enable_extensions = ["colon_fence", "linkify"]
myst_linkify_fuzzy_links = False
# Pages link to other files of the repository by relative paths. `link_files` turns them into repo:benchmarks/README.md.
myst_url_schemes = {"http": None, "https": None, "mailto": None, "repo": f"{REPOSITORY}/blob/main/{{{{path}}}}"}
myst_heading_anchors = 3
nb_execution_mode = "cache"
nb_execution_cache_path = str(DOCS.parent / "build" / "notebooks")
nb_execution_in_temp = True
nb_execution_raise_on_error = True
nb_execution_timeout = 600
nb_merge_streams = True
nb_output_stderr = "remove"  # warnings of libraries during their import

autodoc_typehints = "signature"
autodoc_preserve_defaults = True
napoleon_numpy_docstring = False
napoleon_use_param = False  # allows an entry for several names, as "*args, **kwargs: …"
napoleon_custom_sections = [("Attributes", "params_style")]  # a list like that of parameters
linkcheck_anchors = False
linkcheck_ignore = [f"{REPOSITORY}/.*"]  # new files are not in the repository yet
html_theme_options = {"source_repository": REPOSITORY, "source_branch": "main", "source_directory": "docs/"}

MEANINGS = meanings()
SECTION = re.compile(r"(Args|Attributes|Returns|Yields|Raises):\n")


def escape_docstring(
    app: object, what: str, name: str, obj: object, options: object, lines: list[str], *rest: object
) -> None:
    """Escape the text of a docstring, and mark its examples and tables as code, before napoleon reads its sections.

    Code is every paragraph with indented lines or `>>>` outside of a section.
    """
    written: list[str] = []
    in_section = False
    for block in re.split(r"\n\s*\n", "\n".join(lines).strip()):
        in_section = bool(SECTION.match(block)) or (in_section and block.startswith(" "))
        if not in_section and re.search(r"^(  |>>>)", block, re.MULTILINE):
            written += [".. code-block:: text", "", textwrap.indent(block, "    "), ""]
        else:
            written += [as_text(block), ""]
    lines[:] = "\n".join(written).splitlines()


def as_text(text: str) -> str:
    """Return a text as reStructuredText: `code` becomes ``code``, and special characters are escaped."""
    special = str.maketrans({character: f"\\{character}" for character in "\\*|_"})
    parts = re.split(r"`([^`]+)`", text)  # alternates text and code
    return "".join(f"``{part}``\\ " if i % 2 else part.translate(special) for i, part in enumerate(parts))


def without_bars(app: object, doctree: nodes.document) -> None:
    """Remove progress bars and DeepSpeed's line about loading from a tutorial's outputs, and then empty outputs."""
    for output in list(doctree.findall(nodes.literal_block)):
        if "output" in output["classes"]:
            lines = output.astext().splitlines()
            text = "\n".join(line for line in lines if not re.search(r"\d+%\||get_accelerator\]", line))
            output.children = [nodes.Text(text)]
            output.rawsource = text
            if not text.strip():
                output.parent.remove(output)


def link_terms(app: Any, doctree: nodes.document, page: str) -> None:
    """Link the first use of each of the glossary's terms on a page."""
    if app.builder.format != "html" or page in ("reference/glossary", "reference/api", "reference/settings"):
        return
    seen: set[str] = set()
    known = {anchor(term): term for term in MEANINGS}
    for node in list(doctree.findall(lambda node: isinstance(node, nodes.Text | nodes.literal | nodes.reference))):
        if isinstance(node, nodes.reference):  # a page's own link
            _, is_glossary, place = (node.get("refuri") or "").partition("glossary.html")
            seen |= {known[place[1:]]} if is_glossary and place[1:] in known else set()
        elif _is_prose(node):
            code = isinstance(node, nodes.literal)
            uses = "Forward and backward" if code and node.astext() in FORWARD - seen else ""
            pieces = [(node.astext(), uses)] if code else split_at_terms(node.astext(), seen)
            linked = [_term(app, page, node, text, term) if term else nodes.Text(text) for text, term in pieces]
            seen |= FORWARD if uses else set()
            if any(term for _, term in pieces):
                node.parent.replace(node, linked)


def _is_prose(node: nodes.Node) -> bool:
    """Return whether a node is text of a paragraph or a table, outside of links and code."""
    outside = (nodes.reference, nodes.title, nodes.literal, nodes.literal_block, nodes.raw, nodes.math)
    parent, is_inside = node.parent, False
    while parent is not None:
        if isinstance(parent, outside):
            return False
        is_inside = is_inside or isinstance(parent, nodes.paragraph | nodes.caption)
        parent = parent.parent
    return is_inside


def _term(app: Any, page: str, node: nodes.Node, text: str, term: str) -> nodes.reference:
    place = f"{app.builder.get_relative_uri(page, 'reference/glossary')}#{anchor(term)}".rstrip("#")
    inner = node.deepcopy() if isinstance(node, nodes.literal) else nodes.Text(text)
    return nodes.reference("", "", inner, internal=True, refuri=place, reftitle=MEANINGS[term], classes=["term"])


def write_index_for_programs(app: Any, exception: Exception | None) -> None:
    if exception is None and app.builder.name == "html":
        Path(app.outdir, "llms.txt").write_text(llms_txt(), encoding="utf-8")


def link_files(app: object, page: str, source: list[str]) -> None:
    """Turn a page's relative links to files that are not pages of the site into links to the repository."""
    folder = (DOCS / page).parent

    def absolute(match: re.Match[str]) -> str:
        path = Path(os.path.normpath(folder / match[1]))
        return match[0] if path.is_relative_to(DOCS) else f"](repo:{path.relative_to(DOCS.parent)}"

    source[0] = re.sub(r"\]\(((?:\.\./)+[^)#\s]*)", absolute, source[0])


def setup(app: Any) -> None:
    app.connect("source-read", link_files)
    app.connect("doctree-resolved", link_terms)
    app.connect("doctree-read", without_bars)
    app.connect("builder-inited", lambda _: write_reference(DOCS / "reference" / "_generated"))
    app.connect("autodoc-process-docstring", escape_docstring, priority=400)  # napoleon's is 500
    app.connect("build-finished", write_index_for_programs)
