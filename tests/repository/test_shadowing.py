"""A user's file that shadows a package is named in one line. Other import errors are not blamed on shadowing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from rl_training.errors import explain_shadowing

OTHERS = {"six.py": "six", "dateutil/__init__.py": "dateutil", "random.py": "random"}


@pytest.mark.parametrize("file", OTHERS)
def test_a_file_that_shadows_a_package_is_named_in_the_error_line(tmp_path: Path, file: str) -> None:
    shadow = tmp_path / file
    shadow.parent.mkdir(exist_ok=True)
    shadow.write_text("# mine\n", encoding="utf-8")
    script = tmp_path / "mine.py"
    script.write_text("from rl_training.records import metrics\nmetrics('nowhere')\n", encoding="utf-8")
    ended = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, cwd="/", timeout=120)
    said = (
        f"UserError: {shadow} was imported in the place of the module {OTHERS[file]} that others need: rename this file"
    )
    assert ended.stderr.strip().splitlines()[-1].endswith(said), ended.stderr


def test_an_import_error_raised_in_a_users_file_is_not_shadowing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "of_mine.py").write_text("raise ImportError('no six in of_mine')\n", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ImportError) as caught:
        __import__("of_mine")
    assert explain_shadowing(caught.value) == ""


def test_a_circular_exception_chain_is_followed_once() -> None:
    cause, consequence = KeyError("six"), ValueError("of six")
    consequence.__cause__ = cause
    cause.__context__ = consequence
    assert explain_shadowing(cause) == ""


def test_a_package_is_not_reported_as_shadowing_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """For example our package in its own checkout, which is on the path twice."""
    checkout = str(Path(__file__).parents[2])
    monkeypatch.setattr(sys, "path", [checkout, *sys.path, checkout])
    assert explain_shadowing(AttributeError("module 'rl_training' has no attribute 'x'")) == ""
    monkeypatch.setattr(sys, "path", [str(Path(subprocess.__file__).parent), *sys.path])
    assert explain_shadowing(AttributeError("module 'random' has no attribute 'x'")) == ""
