"""CI runs only reviewed code: no tags that can move, no unneeded permissions, no package index except PyPI."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.y*ml"))


def workflow(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    return content


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_every_action_is_pinned_to_a_commit_with_a_version_comment(path: Path) -> None:
    used = [line.strip() for line in path.read_text(encoding="utf-8").splitlines() if "uses:" in line]
    assert used
    for line in used:
        assert re.fullmatch(r"- uses: [\w./-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", line), line


def test_each_action_has_one_version_in_all_workflows() -> None:
    versions: dict[str, set[str]] = {}
    for path in WORKFLOWS:
        for action, version in re.findall(r"uses: ([\w./-]+)@(.*)", path.read_text(encoding="utf-8")):
            versions.setdefault(action, set()).add(version)
    assert {action: numbers for action, numbers in versions.items() if len(numbers) > 1} == {}


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_workflows_have_read_permission_and_only_publishing_has_more(path: Path) -> None:
    content = workflow(path)
    assert content["permissions"] in ({}, {"contents": "read"})
    more = {name: job["permissions"] for name, job in content["jobs"].items() if "permissions" in job}
    assert more == ({"build": {"contents": "read"}, "publish": {"id-token": "write"}} if "publish" in more else {})
    for job in content["jobs"].values():
        for step in job["steps"]:
            if step.get("uses", "").startswith("actions/checkout@"):
                assert step["with"]["persist-credentials"] is False


def test_no_package_is_installed_from_an_index_other_than_pypi() -> None:
    documents = [*WORKFLOWS, ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *ROOT.glob("constraints*.txt")]
    asking = [
        path.name for path in documents if re.search("extra.index", path.read_text(encoding="utf-8"), re.IGNORECASE)
    ]
    assert asking == []
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8").replace("\\\n", " ")
    with_index = [line for line in makefile.splitlines() if "index-url" in line and not line.startswith("#")]
    assert len(with_index) == 2  # torch as pinned, and the newest one for make compat
    assert all("--no-deps" in line for line in with_index)
    assert "'^torch=='" in with_index[0]
    assert with_index[1].endswith(" torch)")


def test_the_weekly_workflow_runs_every_version_that_make_compat_runs() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    (versions,) = re.findall(r"^TRLS \?= (.*)$", makefile, re.MULTILINE)
    content = workflow(ROOT / ".github/workflows/compat.yaml")
    assert content["jobs"]["compat"]["strategy"]["matrix"]["trl"] == versions.split()
    assert content[True]["schedule"]  # YAML 1.1 reads the key `on` as true
    (whole,) = re.findall(r"^WHOLE := ([\d. ]+)", makefile, re.MULTILINE)
    assert {*whole.split()} < {*versions.split()}


def test_the_files_with_which_the_tests_begin_exist() -> None:
    conftest = (ROOT / "tests/conftest.py").read_text(encoding="utf-8")
    (listed,) = re.findall(r"^LONG = (\[.*?\])", conftest, re.MULTILINE | re.DOTALL)
    first = ast.literal_eval(listed)
    assert {*first} <= {path.stem for path in (ROOT / "tests").rglob("test_*.py")}
    assert len(first) == len({*first})
