"""Modules import only downward, and each outside library only on the floors that may know it."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FLOORS = [
    {"types", "estimate", "gradients", "entropy", "adamw", "sgd", "folds", "updates",
     "entropy_gradients", "causes", "delta_h", "module_kinds", "trapezoid", "version", "importance", "calibration",
     "responses"},
    {"probes", "ground_truth", "buffer"},
    {
        "attach", "checkpoints", "dashboard", "host", "loggers", "models", "progress", "records", "refill", "report",
        "sampling", "tasks", "tiny", "trainer", "zero",
        "__init__",  # gathers the public names
    },
    {"build", "settings", "command_line"},
    {"train"},
]  # fmt: skip
LIBRARIES = [
    {"torch", "scipy"},
    {"torch"},
    {
        "torch", "scipy", "trl", "transformers", "accelerate", "peft", "datasets", "tokenizers", "safetensors", "tqdm",
        "rich", "matplotlib", "numpy", "jinja2", "math_verify", "sympy", "latex2sympy2_extended", "wandb", "trackio",
        "wandb_workspaces",
    },
    {"torch", "transformers", "accelerate", "hydra", "omegaconf"},
    {"hydra", "omegaconf"},
]  # fmt: skip
FILES = [*sorted((ROOT / "rl_training").rglob("*.py")), ROOT / "train.py"]


def module_of(path: Path) -> str:
    """Returns the name that stands on a floor: the module, or the package for a module inside one."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return parts[0] if len(parts) == 1 else parts[1]


def is_module(name: str) -> bool:
    """Returns whether rl_training.<name> is a module or package, and not a public name like DrGRPOTrainer."""
    path = ROOT / "rl_training" / name
    return path.is_dir() or path.with_suffix(".py").exists()


def floor_of(module: str) -> int:
    floors = [number for number, modules in enumerate(FLOORS) if module in modules]
    assert floors, f"{module} stands on no floor: add it to FLOORS"
    return floors[0]


def imports_of(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            module = node.module or ""
            names |= {f"{module}.{alias.name}" for alias in node.names} if module == "rl_training" else {module}
    return names


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_go_only_downward(path: Path) -> None:
    module, floor = module_of(path), floor_of(module_of(path))
    for name in imports_of(path):
        top, *rest = name.split(".")
        if top == "rl_training":
            if rest and is_module(rest[0]):
                assert floor_of(rest[0]) <= floor, f"{module} (floor {floor}) imports {name}"
        elif top not in sys.stdlib_module_names:
            assert top in LIBRARIES[floor], f"{module} (floor {floor}) imports {name}"


def test_probes_do_not_import_one_another() -> None:
    probes = {p.stem for p in (ROOT / "rl_training" / "probes").glob("*.py")} - {"__init__", "base"}
    for path in (ROOT / "rl_training" / "probes").glob("*.py"):
        if path.stem in probes:
            assert not {name for name in imports_of(path) if name.rsplit(".", 1)[-1] in probes}


def test_only_the_driver_and_the_host_name_private_members_of_the_trainer() -> None:
    named = {
        path.name for path in FILES if "_get_per_token_logps" in path.read_text() or "_buffered" in path.read_text()
    }
    assert named == {"attach.py", "host.py"}
