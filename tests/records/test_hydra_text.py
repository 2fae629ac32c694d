"""The texts that reports tell a user to type: Hydra must read them as what is meant."""

from __future__ import annotations

import shlex

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from rl_training.records.hydra_text import quote_list, quote_override, quote_value

TEXTS = [
    "runs/run_1/training_state/checkpoint-5", "/data/a", "../a", "./a", "läufe/run_1", "a b\\c", 'x"y', 'x\\"y', "a\\",
    "my runs/a b", "5", "1e-3", ".5", "-1", "nan", "Null", "True", "", "a,b", "[a]", "{a:b}", "a=b", "lr:0.5",
    "mis:0.5,2", "a%b", "tüv", "~a", "+a", "a:", ":a", "a'b", "a$b", "a(b)", "file.py:name",
]  # fmt: skip


def read(override: str) -> object:
    parsed = OverridesParser.create().parse_override(override)
    assert not parsed.is_sweep_override(), override
    return parsed.value()


@pytest.mark.parametrize("text", TEXTS)
def test_hydra_reads_a_quoted_value_as_the_same_text(text):
    assert read(f"run_dir={quote_value(text)}") == text
    assert read(shlex.split(quote_override("run_dir", text))[0]) == text


def test_hydra_reads_a_quoted_list_as_the_same_texts():
    assert read(f"intervention={quote_list(TEXTS)}") == TEXTS
