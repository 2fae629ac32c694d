"""`pip install rl-training` gives a wheel that runs in any folder, and says which extra is missing.

The wheel is installed in a new environment, which uses this environment's libraries instead of downloading them again.
"""

from __future__ import annotations

import configparser
import json
import os
import re
import shutil
import site
import subprocess
import sys
import zipfile
from pathlib import Path

import forks
import pytest
from configs import QUICK, assert_silent
from imports import imported_with

from rl_training.errors import EXTRA_OF
from rl_training.version import VERSION

ROOT = Path(__file__).parents[2]
SOURCES = ("rl_training", "conf", "launch", "probe_configs")
BUILT_FROM = ("setup.py", "setup.cfg", "pyproject.toml", "README.md", "LICENSE")
CORE = {"torch", "transformers", "trl", "accelerate", "numpy", "scipy", "safetensors", "yaml", "tqdm"}
# By import name: the distribution that provides it under a different name.
DISTRIBUTIONS = {"hydra": "hydra-core", "yaml": "pyyaml", "vllm": "trl", "vl_convert": "vl-convert-python"}
# Each command, and each of its processes, runs in a fork of one process that has done the slow imports.
COMMANDS = """
import gc, json, multiprocessing, os, sys
import rl_training.__main__, rl_training.job.silence, rl_training.job.run.training
import rl_training.job.evaluation.run_checkpoints
gc.freeze()  # what no fork has to walk through
fork = multiprocessing.get_context("fork")
multiprocessing.get_context = lambda kind=None: fork
assert rl_training.__file__.startswith(sys.prefix), rl_training.__file__
for words in json.loads(sys.argv[1]):
    if os.fork() == 0:
        sys.argv = ["rl-training", *words]
        rl_training.__main__.main()
        os._exit(0)
    assert os.wait()[1] == 0, words
from rl_training import OfflineEntropyProbe
from rl_training.job.configuration.shipped import PROBE_CONFIGS
OfflineEntropyProbe.from_config_file(PROBE_CONFIGS / "quick_test.yaml").run_mixed_probe("run")
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel from a copy of this checkout, because an existing build folder may contain deleted files."""
    copy = tmp_path_factory.mktemp("copy")
    for name in SOURCES:
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in BUILT_FROM:
        shutil.copyfile(ROOT / name, copy / name)
    _pip("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(copy / "dist"), str(copy))
    (built,) = (copy / "dist").glob("*.whl")
    return built


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a new environment and install the wheel in it."""
    folder = tmp_path_factory.mktemp("environment") / "env"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    _pip("--python", str(folder / "bin" / "python"), "install", "--no-deps", str(wheel))
    (packages / "libraries.pth").write_text("\n".join(site.getsitepackages()))  # only now: they have an rl-training too
    return folder


def _pip(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments]
    subprocess.run(command, env=_elsewhere(), check=True)


def _elsewhere() -> dict[str, str]:
    return {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}


def test_the_wheel_holds_every_package_file_and_the_bundled_folders(wheel: Path) -> None:
    there = set(zipfile.ZipFile(wheel).namelist())
    files = [path for name in SOURCES for path in (ROOT / name).rglob("*") if path.is_file()]
    names = {str(path.relative_to(ROOT)) for path in files if "__pycache__" not in path.parts}
    inside = {name if name.startswith("rl_training/") else f"rl_training/{name}" for name in names}
    assert len(inside) > 200
    assert {name for name in there if ".dist-info/" not in name} == inside


def test_the_wheels_description_links_to_files_of_the_repository(wheel: Path) -> None:
    """The README's links are relative, so that they work in a clone; PyPI shows it elsewhere."""
    files = zipfile.ZipFile(wheel)
    (metadata,) = (files.read(name).decode() for name in files.namelist() if name.endswith("METADATA"))
    targets = re.findall(r"\]\(([^)]+)\)|^\[[\w-]+\]: (\S+)", metadata, re.MULTILINE)
    assert len(targets) > 10
    assert [target for target in map("".join, targets) if not target.startswith(("https://", "#"))] == []
    repository = re.findall(r"https://github.com/rl-training/rl-training/(blob|raw)/main/([^)#\s]+)", metadata)
    assert len(repository) > 10
    assert [(kind, name) for kind, name in repository if not (ROOT / name).is_file()] == []
    assert {name.endswith(".png") for kind, name in repository if kind == "raw"} == {True}
    assert not any(name.endswith(".png") for kind, name in repository if kind == "blob")


def test_a_run_is_trained_evaluated_reported_and_analyzed_without_a_checkout(environment: Path, tmp_path: Path) -> None:
    commands = [
        ["train", "probe=simple", *QUICK, "trainer.max_steps=2", "trainer.save_steps=2", "run_dir=run"],
        ["evaluate", "run=run", "evaluation.fraction=0.01", "evaluation.responses_per_prompt=2"],
        ["report", "run"],
    ]
    run = [environment / "bin" / "python", "-c", COMMANDS, json.dumps(commands)]
    ended = subprocess.run(run, cwd=tmp_path, env=_elsewhere(), capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert_silent(ended.stdout + ended.stderr)  # imports are silent too
    results = json.loads((tmp_path / "run/offline/mixed_probe/checkpoint-2/result.json").read_text())["results"]
    assert abs(results["deltaH1"] - results["deltaH_true"]) < 6 * results["paired_error_se"]
    assert (tmp_path / "run/evaluations/arithmetic/consolidated_metrics.csv").is_file()
    assert "<img" in (tmp_path / "run/report/report.html").read_text()
    assert {path.name for path in tmp_path.iterdir()} == {"run"}


def test_the_command_copies_the_bundled_files(environment: Path, tmp_path: Path) -> None:
    def said(*arguments: str) -> str:
        command = [environment / "bin" / "rl-training", *arguments]
        ended = subprocess.run(command, cwd=tmp_path, env=_elsewhere(), capture_output=True, text=True)
        return ended.stdout + ended.stderr

    assert re.findall(r"^  ([a-z-]+) ", said(), re.MULTILINE) == [
        "train", "analyze", "evaluate", "attach", "report", "kernel", "dashboard", "config", "launch-file",
        "rl-training",
    ]  # fmt: skip
    assert said("launch-file", "zero2").split() == ["launch/zero2.yaml"]  # the YAML file names launch/zero2.json
    assert {path.name for path in (tmp_path / "launch").iterdir()} == {"zero2.yaml", "zero2.json"}
    assert said("launch-file", "sync.sh").split() == ["launch/sync.sh"]
    said("config", "--copy", "mine")
    assert "name a new folder" in said("config", "--copy", "mine")
    train = tmp_path / "mine" / "train.yaml"
    train.write_text(train.read_text().replace("seed: 0", "seed: 7"))
    (tmp_path / "mine" / "probe" / "own.yaml").write_text((tmp_path / "mine" / "probe" / "ess.yaml").read_text())
    composed = said("train", "--config-dir", "mine", "probe=own", "--cfg", "job")
    assert "\nseed: 7" in f"\n{composed}"  # the user's file takes precedence
    assert "EffectiveSampleSizeProbe" in composed  # and may add a choice
    assert ", none, own, " in said("train", "--config-dir", "mine", "probe=o", "--cfg", "job")


def test_version_changelog_and_citation_agree() -> None:
    citation, changelog = ((ROOT / name).read_text(encoding="utf-8") for name in ("CITATION.cff", "CHANGELOG.md"))
    assert re.findall(r"^version: (.+)$", citation, re.MULTILINE) == [VERSION]
    assert re.findall(r"^## ([\d.]+)", changelog, re.MULTILINE)[0] == VERSION


# --- extras -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("module", "at_most"),
    [
        ("hosts.trl", set()),  # from rl_training import attach
        ("hosts.trl.attachment", CORE),  # calling attach
        ("hosts.trl.trainer", CORE),
        ("hosts.plain.measured_loop", CORE - {"trl", "accelerate"}),
        ("probes", CORE - {"trl", "accelerate", "transformers"}),
        ("records.writer", CORE - {"trl", "accelerate", "transformers", "torch"}),
        ("job.errors", set()),  # and with it every command's --help
    ],
)
def test_modules_import_only_libraries_that_are_installed_without_extras(module: str, at_most: set[str]) -> None:
    assert imported_with(f"rl_training.{module}") <= at_most


def requirements_of(extra: str) -> set[str]:
    """Return the distributions in setup.cfg for an extra ("" for the core), including those of extras it refers to."""
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    lines = setup["options.extras_require"][extra] if extra else setup["options"]["install_requires"]
    requirements: set[str] = set()
    for line in filter(None, lines.splitlines()):
        name, others = re.match(r"([\w-]+)(?:\[([\w,-]+)\])?", line).groups()  # type: ignore[union-attr]
        requirements |= set().union(*map(requirements_of, others.split(","))) if name == "rl-training" else {name}
    return requirements


def test_the_core_requirements_are_what_attach_needs() -> None:
    undeclared = {"requests"}  # TRL's trainer imports it, and TRL lists it in an extra only
    assert requirements_of("") == {DISTRIBUTIONS.get(library, library) for library in CORE} | undeclared


def test_the_demo_installs_nothing_that_only_tests_or_rare_settings_need() -> None:
    rules = (ROOT / "Makefile").read_text(encoding="utf-8").split("\n\n")
    [rule] = [rule for rule in rules if "\n$(VENV)/installed:" in rule]
    extras = re.findall(r"'\.\[(.*)\]'", rule)
    assert extras == ["train"]
    assert not requirements_of("train") & {"deepspeed", "bitsandbytes", "pytest", "ruff", "wandb", "gguf"}
    assert "deepspeed" not in (ROOT / "launch" / "cpu.yaml").read_text(encoding="utf-8").lower()


@pytest.mark.parametrize(("library", "extra"), EXTRA_OF.items())
def test_the_extra_named_in_a_message_installs_the_library(library: str, extra: str) -> None:
    assert DISTRIBUTIONS.get(library, library.replace("_", "-")) in requirements_of(extra)


@pytest.mark.parametrize(
    ("without", "program", "line"),
    [
        ("hydra", "main('train')", "error: hydra is not installed: pip install 'rl-training[train]'"),
        ("omegaconf", "main('evaluate')", "error: omegaconf is not installed: pip install 'rl-training[train]'"),
        ("jinja2", "main('report', 'r')", "error: jinja2 is not installed: pip install 'rl-training[report]'"),
        ("pandas", "records.metrics", "FoundError: pandas is not installed: pip install 'rl-training[report]'"),
        ("hydra", "api.OfflineEntropyProbe", "FoundError: hydra is not installed: pip install 'rl-training[train]'"),
    ],
)  # fmt: skip
def test_a_missing_extra_is_reported_in_one_line_with_the_install_command(
    tmp_path: Path, without: str, program: str, line: str
) -> None:
    (tmp_path / "r" / "logs").mkdir(parents=True)
    (tmp_path / "r" / "logs" / "metrics.jsonl").write_text('{"step": 1, "reward": 0.5}\n', encoding="utf-8")
    script = tmp_path / "script.py"
    script.write_text(
        f"import os, sys\nos.chdir({str(tmp_path)!r})\n"
        "for name in [name for name in sys.modules if name.startswith('rl_training')]: del sys.modules[name]\n"
        f"sys.modules[{without!r}] = None\n"  # as if it were not installed and our package not imported yet
        "import rl_training as api, rl_training.records as records\n"
        "from rl_training.__main__ import main as command\n"
        "def main(*words): sys.argv = ['rl-training', *words]; command()\n" + program,
        encoding="utf-8",
    )
    ended = forks.run(str(script))
    assert ended.stderr.splitlines()[-1].endswith(line)
    if line.startswith("error"):
        assert ended.returncode == 2
        assert ended.stderr.count("\n") == 1
