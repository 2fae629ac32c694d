"""Generates the parts of the reference that would drift if written by hand: settings, help texts, interventions.

Sphinx calls `write_reference`; the pages in docs/reference include the results. `python docs/generate.py` writes the
generated texts that are kept in the repository: a tutorial as a notebook for Colab,
notebooks/attach_to_your_trainer.ipynb, and the list of optimizers in the page of limits.
"""

from __future__ import annotations

import importlib
import inspect
import json
import math
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import reasons

from rl_training.__main__ import COMMANDS
from rl_training.interventions.named import INTERVENTIONS, NEEDS
from rl_training.optim.supported import FORMULAS, list_names
from rl_training.probes import BUILT_IN

ROOT = Path(__file__).parents[1]
CONF = ROOT / "conf"
JOBS = ("train", "offline", "evaluate")  # named as their files in conf/
BLOB = "https://github.com/rl-training/rl-training/blob/main/docs"
INSTALL = '!pip install -q "rl-training[report] @ git+https://github.com/rl-training/rl-training"'
LINE = re.compile(r"^(?P<indent> *)(?P<key>[\w@/ ]+?):(?: (?P<value>[^#]*?))?(?: *# *(?P<comment>.*))?$")


def write_reference(folder: Path) -> None:
    """Write the generated parts whose text has changed, so that Sphinx reads only these again."""
    groups = sorted(path for path in CONF.iterdir() if path.is_dir() and path.name not in ("hydra", "experiment"))
    parts = {f"{job}.md": table(settings(CONF / f"{job}.yaml")) for job in JOBS}
    parts["groups.md"] = "\n\n".join(map(group_section, groups))
    parts["interventions.md"] = interventions()
    parts["probes.md"] = probes()
    parts["reasons.md"] = reasons.as_table()
    parts |= {f"help_{name}.txt": help_text(name) for name in COMMANDS}
    folder.mkdir(exist_ok=True)
    for name, text in parts.items():
        path = folder / name
        if not path.is_file() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")


def help_text(name: str) -> str:
    """Return the --help text of a command of this checkout."""
    command = [sys.executable, "-m", "rl_training", name, "--help"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout.decode()


def group_section(folder: Path) -> str:
    """Return the section for a group of conf/: its options with their settings."""
    options = sorted(folder.glob("*.yaml"))
    return "\n\n".join([f"### {folder.name}", *(option_text(folder.name, path) for path in options)])


def option_text(group: str, path: Path) -> str:
    """Return the description of a group's option, and the table of its settings."""
    text = path.read_text(encoding="utf-8")
    package = re.search(r"^# @package (\S+)", text, re.MULTILINE)
    prefix = {"_global_": ""}.get(package.group(1), f"{package.group(1)}.") if package else f"{group}."
    rows = settings(path, prefix)
    heading = f"**`{group}={path.stem}`**"
    return "\n\n".join(filter(None, [f"{heading}: {opening(text)}" if opening(text) else heading, table(rows)]))


def opening(text: str) -> str:
    """Return the comment at the top of a file of conf/, as one paragraph."""
    lines = []
    for line in text.splitlines():
        if not line.startswith("#"):
            break
        if not line.startswith("# @package") and not line.startswith("#   "):
            lines.append(line.lstrip("# "))
    return " ".join(filter(None, lines))


def settings(path: Path, prefix: str = "") -> list[tuple[str, str, str]]:
    """Return (name, default, description) of each setting in a file of conf/.

    The description is the comment next to the key or above it. Without a comment, it is that of the parameter in the
    docstring of the `_target_`.
    """
    lines = path.read_text(encoding="utf-8").splitlines()
    parents: list[tuple[int, str]] = []
    rows: dict[str, tuple[str, str]] = {}
    above: list[str] = []
    described: dict[str, str] = {}
    for line in lines[next((i for i, line in enumerate(lines) if not line.startswith("#")), 0) :]:
        found = LINE.match(line)
        if not found:
            above = [*above, line.lstrip("# ")] if line.startswith("#") else []
            continue
        indent, key = len(found["indent"]), found["key"]
        parents = [parent for parent in parents if parent[0] < indent]
        name = prefix + ".".join([*(name for _, name in parents), key])
        value, comment = (found["value"] or "").strip(), found["comment"] or " ".join(above)
        above = []
        if key == "_target_":
            described = {f"{name.removesuffix('_target_')}{k}": v for k, v in parameters(value).items()}
        elif value:
            rows[name] = value, comment or described.get(name, "")
        else:
            parents.append((indent, key))
            if comment:
                rows[name] = "", comment
    return [(n, *row) for n, row in rows.items() if not n.startswith(("hydra", "defaults", "override"))]


def parameters(target: str) -> dict[str, str]:
    """Return the descriptions of parameters under "Args:" in the docstring of `module.name`, by parameter."""
    module, name = target.rsplit(".", 1)
    try:
        doc = inspect.getdoc(getattr(importlib.import_module(module), name)) or ""
    except ImportError:  # the module belongs to an extra that is not installed
        return {}
    section = re.search(r"^Args:\n((?: .*\n?|\n)*)", doc, re.MULTILINE)
    entries = re.findall(r"^(\w+): (.*(?:\n +.*)*)", textwrap.dedent(section[1]), re.MULTILINE) if section else []
    return {name: " ".join(what.split()).removesuffix(".") for name, what in entries}


def probes() -> str:
    """Return the directives that show the docstring of each probe."""
    return "\n".join(["```{eval-rst}", *(f".. autoclass:: rl_training.{p.__name__}" for p in BUILT_IN.values()), "```"])


SOURCES = {"lr": "the optimizer's own", "max_grad_norm": "Pascanu et al. 2013, arXiv 1211.5063"}  # without a function


def interventions() -> str:
    """Return the table of all interventions, from named.py and docstrings, and the reasons why one is unavailable."""
    lines = ["| name | what it does | strength | no effect | needs | setting of TRL | source |", "|---" * 7 + "|"]
    for name, known in INTERVENTIONS.items():
        doc = (inspect.getdoc(known.function) if known.function else None) or f"The optimizer's own `{known.trl}`."
        bounds = f"above {known.low:g}" + ("" if math.isinf(known.high) else f", at most {known.high:g}")
        nothing = ["on-policy"] if known.nothing_on_policy else []
        nothing += [f"at {known.neutral_strength:g}, which is refused"] if known.neutral_strength is not None else []
        cells = [
            f"`{name}`",
            doc.splitlines()[0].replace("|", "\\|"),
            "none" if math.isnan(known.strength) else f"{known.strength:g} ({bounds})",
            "; ".join(nothing),
            ", ".join(need.replace("_", " ") for need in known.needs),
            f"`{known.trl}`" if known.trl else "",
            SOURCES.get(name) or doc.partition("Source: ")[2].rstrip("."),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    reasons = [f"- **{need.replace('_', ' ')}**: {why}." for need, why in NEEDS.items()]
    return "\n".join([*lines, "", "The reason given if a need is not met:", "", *reasons])


def table(rows: list[tuple[str, str, str]]) -> str:
    """Return a Markdown table of settings."""
    if not rows:
        return ""

    def cell(text: str) -> str:
        return text.replace("|", "\\|").replace("*", "\\*").replace("<", "&lt;")

    lines = [
        f"| `{name}` | {f'`{value}`' if value else ''} | {cell(capitalized(what))} |".replace("||", "| |")
        for name, value, what in rows
    ]
    return "\n".join(["| setting | default | description |", "|---|---|---|", *lines])


def capitalized(description: str) -> str:
    """Capitalize a description, unless it begins with a value: `null: …`, `core | all`, `nf4 for …`."""
    return re.sub(r"^[a-z](?=[a-z]* (?!\|))", lambda first: first[0].upper(), description)


def pages_of_the_index() -> list[tuple[str, list[str]]]:
    """Return the captions of the site's table of contents, each with the names of its pages, as `how_to/install`."""
    index = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    trees = re.findall(r"^:caption: (.*)\n\n((?:\S+\n)+)```", index, re.MULTILINE)
    return [(caption, names.split()) for caption, names in trees]


def llms_txt() -> str:
    """Return the index of the site for programs (llmstxt.org): each page with its title and its first sentence."""
    lines = [title_and_opening("index")[1].join(["# rl-training\n\n> ", "\n"])]
    for caption, names in pages_of_the_index():
        lines.append(f"## {caption}\n")
        for name in names:
            title, sentence = title_and_opening(name)
            lines.append(f"- [{title}]({name}.html): {sentence}")
        lines.append("")
    return "\n".join(lines)


def title_and_opening(name: str) -> tuple[str, str]:
    """Return the title of a page, and its first sentence of text, without links."""
    text = (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8")
    title, _, rest = text.partition("# ")[2].partition("\n")
    paragraphs = [" ".join(part.split()) for part in re.sub(r"^```.*?^```", "", rest, flags=re.M | re.S).split("\n\n")]
    opening = next(part for part in paragraphs if part and not re.match(r"[!#|`\[{]|\*[A-Z]", part))
    plain = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", opening).removeprefix("**What you see.** ").replace("**", "")
    return title, re.split(r"(?<=[.?])\s", plain)[0]


def as_notebook(page: Path) -> str:
    """Return a tutorial as a notebook that first installs the package. Relative links become absolute."""
    text = page.read_text(encoding="utf-8").split("---\n", 2)[2]  # after the front matter
    parts = re.split(
        r"^```\{code-cell\} python\n(.*?)^```\n", text, flags=re.MULTILINE | re.DOTALL
    )  # alternates text and code
    cells = [("code", INSTALL)]
    for i, part in enumerate(parts):
        source = re.sub(r"^:tags:.*\n+", "", part) if i % 2 else re.sub(r"\]\(\.\./", f"]({BLOB}/", part)
        source = re.sub(r"^\[This page as a notebook\].*\n+", "", source, flags=re.MULTILINE)
        if source.strip():
            cells.append(("code" if i % 2 else "markdown", source.strip()))
    written = [
        {"cell_type": kind, "id": f"cell-{number}", "metadata": {}, "source": source.splitlines(keepends=True)}
        | ({"execution_count": None, "outputs": []} if kind == "code" else {})
        for number, (kind, source) in enumerate(cells)
    ]
    kernel = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
    content = {"cells": written, "metadata": kernel, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(content, indent=1, ensure_ascii=False) + "\n"


def with_optimizers(page: str) -> str:
    """Return a page with the optimizers that have a formula listed between <!-- optimizers --> and <!-- end -->."""
    names = list_names([formula.optimizer for formula in FORMULAS])
    return re.sub("(<!-- optimizers -->).*?(<!-- end -->)", rf"\g<1>{names}\g<2>", page, flags=re.DOTALL)


def kept() -> dict[Path, str]:
    """Return the generated text of each file that is kept in the repository."""
    tutorial = "attach_to_your_trainer"
    limits = ROOT / "docs" / "reference" / "limits.md"
    texts = {limits: with_optimizers(limits.read_text(encoding="utf-8"))}
    texts[ROOT / "notebooks" / f"{tutorial}.ipynb"] = as_notebook(ROOT / "docs" / "tutorials" / f"{tutorial}.md")
    return texts


if __name__ == "__main__":
    for path, text in kept().items():
        path.write_text(text, encoding="utf-8")
