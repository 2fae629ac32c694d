"""An Unavailable is a text for people to read and a code for tests to compare."""

from __future__ import annotations

import ast
import copy
import json
import pickle
from collections import Counter
from pathlib import Path

import rl_training
from rl_training.statistics.estimate import Estimate
from rl_training.statistics.unavailable import Unavailable

PACKAGE = Path(rl_training.__file__).parent
MIXED = Unavailable("mixed_prompts", "prompts lie in several folds", fix="whole_prompts=True")


def test_a_reason_is_written_as_its_message_and_its_fix() -> None:
    assert json.loads(json.dumps({"reason": MIXED})) == {"reason": "prompts lie in several folds: whole_prompts=True"}
    assert f"no prediction: {MIXED.with_fix('')}" == "no prediction: prompts lie in several folds"


def test_copies_and_pickles_of_a_reason_keep_code_and_fix() -> None:
    for same in (copy.deepcopy(MIXED), pickle.loads(pickle.dumps(MIXED))):
        assert (same, same.code, same.fix) == (MIXED, MIXED.code, MIXED.fix)


def test_an_estimate_has_the_code_of_its_reason_and_none_with_free_text() -> None:
    assert Estimate.missing(MIXED).code == "mixed_prompts"
    assert Estimate.missing(MIXED.prefixed("step 3")).code == "mixed_prompts"
    assert Estimate.missing("no reference model").code == ""


def test_each_code_of_the_package_is_an_identifier_and_stands_for_one_reason() -> None:
    codes = []
    for path in PACKAGE.rglob("*.py"):
        calls = [node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.Call)]
        codes += [
            call.args[0].value
            for call in calls
            if getattr(call.func, "id", "") == "Unavailable" and isinstance(call.args[0], ast.Constant)
        ]
    assert len(codes) > 90
    assert all(code.isidentifier() and code.islower() for code in codes)
    assert [code for code, count in Counter(codes).items() if count > 1] == []
