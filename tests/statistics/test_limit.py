"""A Limit is a text for people to read and a code for tests to compare."""

from __future__ import annotations

import copy
import json
import pickle

from rl_training.statistics.estimate import Estimate
from rl_training.statistics.limit import Limit
from rl_training.step import limits

MIXED = Limit("mixed_prompts", "prompts lie in several folds", fix="whole_prompts=True")


def test_a_limit_is_written_as_its_message_and_its_fix() -> None:
    assert json.loads(json.dumps({"reason": MIXED})) == {"reason": "prompts lie in several folds: whole_prompts=True"}
    assert f"no prediction: {MIXED.with_fix('')}" == "no prediction: prompts lie in several folds"


def test_copies_and_pickles_of_a_limit_keep_code_and_fix() -> None:
    for same in (copy.deepcopy(MIXED), pickle.loads(pickle.dumps(MIXED))):
        assert (same, same.code, same.fix) == (MIXED, MIXED.code, MIXED.fix)


def test_an_estimate_has_the_code_of_its_limit_and_none_with_free_text() -> None:
    assert Estimate.missing(MIXED).code == "mixed_prompts"
    assert Estimate.missing(MIXED.prefixed("step 3")).code == "mixed_prompts"
    assert Estimate.missing("no reference model").code == ""


def test_codes_are_identifiers_and_almost_all_unique() -> None:
    """Only limits with one cause, detected in two places, share a code."""
    named = {name: limit for name, limit in vars(limits).items() if isinstance(limit, Limit)}
    assert len(named) > 20
    assert all(limit.code.isidentifier() and limit.code.islower() for limit in named.values())
    by_code: dict[str, list[str]] = {}
    for name, limit in named.items():
        by_code.setdefault(limit.code, []).append(name)
    assert {code for code, names in by_code.items() if len(names) > 1} == {"edited_weights"}
