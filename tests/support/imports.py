"""Which libraries an import of a package module brings in, determined from its source and that of its imports."""

from __future__ import annotations

import ast
import functools
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


@functools.cache
def imported_at_once(path: Path) -> set[str]:
    """Return what a module imports at import time, without imports inside functions or only for type checking."""
    names: set[str] = set()
    statements = list(ast.parse(path.read_text(encoding="utf-8")).body)
    for node in statements:  # grows
        if isinstance(node, ast.If) and ast.unparse(node.test) != "TYPE_CHECKING":
            statements += node.body + node.orelse
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


def imported_with(module: str) -> set[str]:
    """Return the third-party libraries that are imported along with a module of this package."""
    libraries: set[str] = set()
    modules = [module]
    for name in modules:  # grows
        parts = name.split(".")
        above = [".".join(parts[:count]) for count in range(1, len(parts))]
        file = ROOT.joinpath(*parts).with_suffix(".py")
        file = file if file.exists() else ROOT.joinpath(*parts, "__init__.py")
        names_at_once = imported_at_once(file) if file.exists() else set()  # else it is a name in the module above
        libraries |= {other.partition(".")[0] for other in names_at_once if not other.startswith("rl_training")}
        modules += {*above, *(other for other in names_at_once if other.startswith("rl_training"))} - {*modules}
    return libraries - set(sys.stdlib_module_names)
