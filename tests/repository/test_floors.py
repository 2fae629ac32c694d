"""Modules import only from lower layers, and external libraries only in the layers that may use them.

A module's folder is its layer. What the host of any loop needs can be imported without TRL.
"""

from __future__ import annotations

import ast
import graphlib
import re
import sys
from pathlib import Path

import pytest
from imports import imported_with

import rl_training
from rl_training.hosts.trl.members import METHODS, TRAINER_ATTRIBUTES
from rl_training.vocabulary import BUILT_IN_NAMES

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "rl_training"
# What each layer may import in addition to itself. Records and probes do not import each other. An offline analysis
# measures on a trainer that does not train, so offline imports hosts, but hosts do not import offline.
STEP = {"statistics", "parallel", "policy", "optim", "step"}
MEASURED = {*STEP, "entropy", "engine", "interventions", "probes"}
BELOW = {
    "statistics": set(),
    "parallel": {"statistics"},
    "policy": {"statistics", "parallel"},
    "optim": {"statistics", "parallel", "policy"},
    "step": STEP - {"step"},
    "entropy": STEP,
    "engine": {*STEP, "entropy"},
    "interventions": {*STEP, "entropy", "engine"},
    "probes": MEASURED - {"probes"},
    "records": {"statistics", "parallel"},
    "tasks": set(),
    "models": {"statistics", "parallel", "records"},  # it reads the files of checkpoints
    "evaluation": {"statistics", "parallel", "policy", "tasks"},
    "hosts": {*MEASURED, "records"},
    "offline": {*MEASURED, "records", "hosts"},
    "job": {*MEASURED, "records", "hosts", "offline", "tasks", "models", "evaluation"},
}
# Libraries of a particular loop. Modules directly in hosts/ serve any loop and must not import them.
LOOPS = {"trl", "accelerate", "deepspeed"}
LIBRARIES = {
    "statistics": {"torch", "numpy", "scipy"},
    "parallel": {"torch"},
    "policy": {"torch", "numpy"},
    "optim": {"torch"},
    "step": {"torch"},
    "entropy": {"torch"},
    "engine": {"torch"},
    "interventions": {"torch", "scipy"},
    "probes": {"torch"},
    "records": {
        "torch", "safetensors", "rich", "numpy", "jinja2", "markupsafe", "wandb",
        "wandb_workspaces", "pandas", "scipy", "yaml",
    },
    "evaluation": {"torch", "transformers", "numpy", "scipy"},
    "hosts": {"torch", "numpy"},
    "hosts/trl": {"torch", "transformers", "numpy", "tqdm", *LOOPS},  # deepspeed only while it trains
    "hosts/verl": {"torch", "tensordict", "verl", "ray", "hydra", "omegaconf"},
    "offline": {"torch", "transformers", "safetensors", "numpy", "scipy", "tqdm", "rich", "yaml", "pandas"},
    "tasks": {"datasets", "reasoning_gym"},
    "models": {"torch", "transformers", "tokenizers", "tqdm"},
    "job": {
        "torch", "transformers", "accelerate", "hydra", "omegaconf", "yaml", "tqdm", "wandb", "trackio", "tensorboard",
        "PIL", "pandas", "numpy", "scipy", "peft",
    },
}  # fmt: skip
TOP = {
    "__init__",
    "__main__",
    "attach",
    "errors",
    "options",
    "verl_plugin",
    "version",
    "vocabulary",
}
PACKAGES = sorted(path.parent for path in PACKAGE.rglob("__init__.py"))
FILES = [*sorted(PACKAGE.rglob("*.py")), *(ROOT / f"{command}.py" for command in ("train", "offline", "evaluate"))]


def layer_of(path: Path) -> str:
    """Return a module's folder, or "" for commands, which are above all layers."""
    parts = path.relative_to(ROOT).parts
    return parts[1] if len(parts) > 2 and path.name != "__main__.py" else ""


def libraries_of(path: Path) -> set[str]:
    """Return the external libraries that a module may import. Only a loop's host may import that loop's libraries."""
    host = "/".join(path.relative_to(PACKAGE).parts[:2])
    return LIBRARIES[host if host in LIBRARIES else layer_of(path)]


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


def test_every_module_belongs_to_a_layer() -> None:
    assert {p.name for p in PACKAGE.iterdir() if p.is_dir() and p.name != "__pycache__"} == set(BELOW)
    assert {p.stem for p in PACKAGE.glob("*.py")} == TOP


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_go_only_downward(path: Path) -> None:
    layer = layer_of(path)
    for name in imports_of(path):
        top, *rest = name.split(".")
        if top == "rl_training":
            if layer and rest[0] not in TOP:
                assert rest[0] in BELOW[layer] | {layer}, f"{layer} imports {name}"
        elif layer and top not in sys.stdlib_module_names:
            assert top in libraries_of(path), f"{layer} imports {name}"


def imported_objects(path: Path) -> set[str]:
    """Return the full names of what a file imports with `from`: of modules, and of what modules define."""
    nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    return {f"{node.module}.{alias.name}" for node in nodes if isinstance(node, ast.ImportFrom) for alias in node.names}


def imports_between_parts(folder: Path) -> dict[str, set[str]]:
    """Return what each module or package of a folder imports of the others; commands are left out."""
    start = ".".join(folder.relative_to(ROOT).parts) + "."
    imports: dict[str, set[str]] = {}
    for path in folder.rglob("*.py"):
        part = path.relative_to(folder).with_suffix("").parts[0]
        if path.stem == "__main__" or part == "__init__":
            continue
        others = {name.removeprefix(start).split(".")[0] for name in imported_objects(path) if name.startswith(start)}
        imports.setdefault(part, set()).update(others - {part})
    return imports


@pytest.mark.parametrize("folder", PACKAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_no_two_parts_of_a_package_need_each_other(folder: Path) -> None:
    """Neither directly nor through others: they have an order. Imports inside functions count."""
    list(graphlib.TopologicalSorter(imports_between_parts(folder)).static_order())


def test_import_permissions_of_layers_are_transitive() -> None:
    for layer, below in BELOW.items():
        for lower in below:
            assert BELOW[lower] < below, f"what {lower} may import, {layer} may too, and more"


def test_job_packages_import_only_earlier_stages() -> None:
    commands = ["fetch_smollm2", "make_tiny", "commands"]
    order = ["silence", "errors", "configuration", "objects", "evaluation", "run", "api", *commands]
    for path in (PACKAGE / "job").glob("[!_]*"):
        files = [path] if path.is_file() else path.glob("*.py")
        imported = {name for file in files for name in imports_of(file) if name.startswith("rl_training.job.")}
        allowed = order[: order.index(path.stem) + path.is_dir()]
        assert {name.split(".")[2] for name in imported} <= {*allowed}, path


def test_an_unknown_attribute_is_reported_as_missing_from_the_package() -> None:
    with pytest.raises(AttributeError, match=r"^module 'rl_training' has no attribute 'MissingProbe'$"):
        _ = rl_training.MissingProbe


def test_probes_do_not_import_one_another() -> None:
    files = {path.stem: path for path in (PACKAGE / "probes").glob("*.py") if path.stem != "__init__"}
    probes = {stem for stem, path in files.items() if "(Probe):" in path.read_text(encoding="utf-8")}
    assert probes == {*BUILT_IN_NAMES}
    for path in files.values():
        assert not {name for name in imports_of(path) if name.rsplit(".", 1)[-1] in probes}


def test_probes_get_gradients_and_predictions_only_through_their_context() -> None:
    """From entropy they import formulas on numbers and names, but nothing that computes gradients or communicates."""
    formulas = {"attribution", "data", "per_decision", "weights"}
    backwards = {"catching", "exchange", "fold_reduction", "passes"}
    for path in (PACKAGE / "probes").glob("*.py"):
        for name in imports_of(path):
            _, layer, *module = name.split(".") if name.startswith("rl_training.") else ("", "")
            assert layer != "optim", f"{path.name} imports {name}"
            assert layer != "step" or not {*module} & backwards, f"{path.name} imports {name}"
            assert layer != "entropy" or not module or module[0] in formulas, f"{path.name} imports {name}"


def test_the_docstring_of_a_package_names_each_of_its_files_and_no_other() -> None:
    for package in PACKAGE.rglob("__init__.py"):
        docstring = ast.get_docstring(ast.parse(package.read_text(encoding="utf-8"))) or ""
        named = set(re.findall(r"\b[a-z0-9_]+\.py\b", docstring))
        here = {path.name for path in package.parent.glob("*.py") if not path.name.startswith("__")}
        assert here <= named, f"{package.relative_to(ROOT)} does not name {here - named}"
        for name in named:
            assert list(package.parent.rglob(name)), f"{package.relative_to(ROOT)} names {name}"


def test_folders_of_tests_mirror_the_package() -> None:
    """Except for the tests of the repository itself and what tests share."""
    tests = ROOT / "tests"
    folders = {path.parent.relative_to(tests).as_posix() for path in tests.rglob("test_*.py")} - {"repository"}
    assert len(folders) > 20
    assert {folder for folder in folders if not (PACKAGE / folder).is_dir()} == set()


def test_the_libraries_of_a_loop_are_imported_only_by_its_host() -> None:
    """These are hosts/trl, and the commands that build a trainer or count processes."""
    importing = {path: {name.partition(".")[0] for name in imports_of(path)} & LOOPS for path in FILES}
    folders = {path.relative_to(ROOT).parent.as_posix() for path, names in importing.items() if names}
    elsewhere = {folder for folder in folders if not f"{folder}/".startswith("rl_training/hosts/trl/")}
    assert elsewhere == {"rl_training/job/evaluation", "rl_training/job/objects", "rl_training/job/run"}


def test_host_independent_modules_import_neither_trl_nor_transformers() -> None:
    """So can the modules that write and read records. Only pages import jinja2."""
    layers = (*MEASURED, "records", "hosts", "hosts/plain")
    files = [path for layer in layers for path in (PACKAGE / layer).glob("*.py")]
    assert "jinja2" in imported_with("rl_training.records.report")
    assert "trl" in imported_with("rl_training.job.run.training")
    for path in files:
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        assert not imported_with(module) & {*LOOPS, "transformers", "peft", "jinja2"}, module


@pytest.mark.parametrize("layer", sorted({*BELOW} - STEP - {"entropy", "engine", "probes"}))
def test_refusals_raise_user_errors(layer: str) -> None:
    """A command shows any other error with a traceback. ValueErrors in lower layers are about misuse of a function."""
    for path in (PACKAGE / layer).rglob("*.py"):
        raised = (node.exc for node in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(node, ast.Raise))
        names = {call.func.id for call in raised if isinstance(call, ast.Call) and isinstance(call.func, ast.Name)}
        assert not names & {"ValueError", "OSError", "FileNotFoundError", "ImportError"}, path


def private_members_named_in(path: Path) -> set[str]:
    """Return the private names `_name` in expressions `x._name` where x is not self. `os._exit` is public."""
    return {
        node.attr
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute)
        and node.attr.startswith("_")
        and not node.attr.startswith("__")
        and not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls", "torch", "os"))
    }


def test_private_library_members_are_used_only_if_listed_in_the_table() -> None:
    table = {*METHODS, *TRAINER_ATTRIBUTES}
    files = [path for path in FILES if layer_of(path) == "hosts" and path.name != "sharding.py"]
    files = [path for path in files if path.parent.name != "verl"]  # it supports only one minor version of verl
    named = set().union(*map(private_members_named_in, files))
    assert named <= table, f"add to hosts/trl/members.py: {named - table}"
