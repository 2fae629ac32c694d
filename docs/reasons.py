"""Lists the reasons why a number is nan, as the calls of Unavailable in the sources have them.

    python docs/reasons.py WORDS

prints those whose code or text has these words, or that a report's sentence is made from: what to do, and the function,
the file and the nearest condition that decide it. The page docs/reference/reasons.md has all of them.
"""

from __future__ import annotations

import ast
import re
import sys
from dataclasses import dataclass
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "rl_training"


@dataclass(frozen=True)
class Place:
    """A function that gives a reason."""

    function: str  # with its class
    file: str  # in rl_training/
    condition: str  # the nearest one around it in the sources: "if …" or "unless …"; "" if there is none

    def __str__(self) -> str:
        return f"`{self.function}` in `{self.file}`" + (f" {self.condition}" if self.condition else "")


@dataclass(frozen=True)
class Reason:
    """A reason as the sources have it, with … for what is filled in."""

    code: str
    message: str
    fix: str
    places: tuple[Place, ...]


class _Finder(ast.NodeVisitor):
    """Collects the reasons that a module makes and those that its functions give, each with what is around it."""

    def __init__(self, file: str) -> None:
        self.made: list[tuple[ast.Call, str | Place]] = []  # with the constant of the module, or the function's place
        self.given: list[tuple[str, Place]] = []  # names that functions read
        self.imported: dict[str, tuple[str, str]] = {}  # module and name there
        self._file = file
        self._scope: tuple[str, ...] = ()
        self._place: Place | None = None
        self._constant = ""

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        self.imported |= {alias.asname or alias.name: (node.module or "", alias.name) for alias in node.names}

    def visit_ClassDef(self, node: ast.ClassDef | ast.FunctionDef) -> None:
        scope, place = self._scope, self._place
        self._scope = (*scope, node.name)
        if isinstance(node, ast.FunctionDef):
            self._place = Place(".".join(self._scope), self._file, "")
        self.generic_visit(node)
        self._scope, self._place = scope, place

    visit_FunctionDef = visit_ClassDef

    def visit_If(self, node: ast.If | ast.IfExp) -> None:
        place = self._place
        self.visit(node.test)
        for word, branch in (("if", node.body), ("unless", node.orelse)):
            if place:
                self._place = Place(place.function, place.file, f"{word} `{ast.unparse(node.test)}`")
            for part in branch if isinstance(branch, list) else [branch]:
                self.visit(part)
        self._place = place

    visit_IfExp = visit_If

    def visit_Assign(self, node: ast.Assign | ast.AnnAssign) -> None:
        target = node.targets[0] if isinstance(node, ast.Assign) else node.target
        if not self._scope:
            self._constant = getattr(target, "id", "")
        self.generic_visit(node)

    visit_AnnAssign = visit_Assign

    def visit_Compare(self, node: ast.Compare) -> None:
        """Leave out reasons that are only compared with others."""

    def visit_Name(self, node: ast.Name) -> None:
        if self._place and node.id.isupper():
            self.given.append((node.id, self._place))

    def visit_Call(self, node: ast.Call) -> None:
        if getattr(node.func, "id", "") == "Unavailable":
            self.made.append((node, self._place or self._constant))
        self.generic_visit(node)


def read_reasons() -> list[Reason]:
    """Return all reasons, in the order of their codes."""
    finders = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        finder = _Finder(str(path.relative_to(PACKAGE)))
        finder.visit(ast.parse(path.read_text(encoding="utf-8")))
        finders[".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)] = finder
    users: dict[tuple[str, str], list[Place]] = {}  # by module and constant
    for module, finder in finders.items():
        for name, place in finder.given:
            users.setdefault(finder.imported.get(name, (module, name)), []).append(place)
    reasons = []
    for module, finder in finders.items():
        for call, where in finder.made:
            given = dict(zip(("code", "message", "fix"), call.args, strict=False))
            given |= {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg}
            code, message, fix = (text_of(given.get(part)) for part in ("code", "message", "fix"))
            places = users.get((module, where), []) if isinstance(where, str) else [where]
            if code.isidentifier():
                reasons.append(Reason(code, message, fix, tuple(dict.fromkeys(places))))
    return sorted(reasons, key=lambda reason: reason.code)


def text_of(node: ast.expr | None) -> str:
    """Return a text that the sources hold, with … for what is filled in; "" if it is no text."""
    parts = node.values if isinstance(node, ast.JoinedStr) else [node]
    text = "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in parts if part is not None)
    return re.sub(r"\{[^}]*\}", "…", text) if isinstance(node, ast.Constant | ast.JoinedStr) else ""


def as_table() -> str:
    """Return all reasons as a Markdown table."""
    lines = ["| code | reason | what to do | decided by, in `rl_training/` |", "|---" * 4 + "|"]
    for reason in read_reasons():
        message, fix = (
            text.replace("|", "\\|").replace("*", "\\*").replace("<", "&lt;") for text in (reason.message, reason.fix)
        )
        places = "; ".join(map(str, reason.places)).replace("|", "\\|")
        lines.append(f"| `{reason.code}` | {message} | {fix} | {places} |")
    return "\n".join(lines)


def as_text(words: str) -> str:
    """Return, a few lines each, the reasons with these words, or whose message the words contain, filled in.

    If there is none, those with the rarest of the words, since users tell a reason in words of their own.
    """
    reasons = read_reasons()
    texts = [f"{reason.code} {reason.message} {reason.fix}".lower() for reason in reasons]
    messages = [re.escape(reason.message).replace("…", ".+") for reason in reasons]
    chosen = [
        reason
        for reason, text, message in zip(reasons, texts, messages, strict=True)
        if words.lower() in text or re.search(message, words)
    ]
    if not chosen:
        by_word = {
            word: [reason for reason, text in zip(reasons, texts, strict=True) if re.search(rf"\b{word}", text)]
            for word in re.findall(r"\w{4,}", words.lower())
        }
        chosen = min(filter(None, by_word.values()), key=len, default=[])
    return "\n".join(map(_as_paragraph, chosen))


def _as_paragraph(reason: Reason) -> str:
    fix = [f"    what to do: {reason.fix}"] if reason.fix else []
    places = [f"    {place}".replace("`", "") for place in reason.places]
    return "\n".join([f"{reason.code}: {reason.message}", *fix, *places])


if __name__ == "__main__":
    none = "none has any of these words. Those of interventions are in interventions/named.py"
    print(as_text(" ".join(sys.argv[1:])) or none)
