"""Refuse an adapter whose patterns of module names never end, or take more memory than there is.

PEFT matches `target_modules` and its like as regular expressions against the name of every module. One such as
`(([a-z]+)*)*x` takes longer than anybody waits. So they are tried in a process of their own first, for a limited time.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from rl_training.errors import UserError

MAX_SECONDS = 5.0  # for all patterns together: ordinary ones take a millisecond
PLAIN = set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_.-")  # no pattern: PEFT compares such names
# Names of modules as models have them. An endless pattern is endless for names of this form, whatever the model.
TYPICAL = (
    "model.layers.27.self_attn.q_proj", "model.layers.27.mlp.down_proj", "model.embed_tokens", "lm_head",
    "model.language_model.layers.27.mlp.experts.127.gate_up_proj", "transformer.h.11.attn.c_attn",
    "model.layers.27.post_attention_layernorm", "base_model.model.model.layers.27.self_attn.rotary_emb",
    "vision_tower.encoder.layers.23.self_attention.dense_h_to_4h", "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa!",
)  # fmt: skip
# Reads [patterns, names] from stdin, and matches them in the ways that PEFT does. Prints a line when a pattern is done.
TRIAL = """
import json, re, sys
patterns, names = json.load(sys.stdin)
for pattern in patterns:
    for expression in (pattern, rf"(.*\\.)?({pattern})$", rf"(^|.*\\.){pattern}($|\\..*)"):
        try:
            compiled = re.compile(expression)
        except (re.error, RecursionError, OverflowError):
            continue
        for name in names:
            compiled.fullmatch(name), compiled.match(name)
    print(flush=True)
"""
# Settings of PEFT whose texts, and those whose keys, are patterns.
TEXTS = ("target_modules", "exclude_modules", "modules_to_save", "layers_pattern", "target_parameters")
KEYS = ("rank_pattern", "alpha_pattern")


def refuse_endless_patterns(adapter: Any, where: str, names: Iterable[str] = ()) -> None:
    """Raise UserError if a pattern of module names in an adapter's settings takes too long, or cannot be matched.

    Args:
        adapter: The settings: a mapping, or an object with them as attributes. Anything else has none.
        where: What holds them, for the error.
        names: Names of the model's modules, which are tried too.
    """
    settings = adapter if isinstance(adapter, Mapping) else getattr(adapter, "__dict__", {})
    patterns = [pattern for pattern in _patterns_in(settings) if not PLAIN.issuperset(pattern)]
    unfit, why = _first_unfit(patterns, sorted({*TYPICAL, *names})) if patterns else ("", "")
    if why:
        raise UserError(
            f"{where}: the pattern {unfit[:200]!r} of module names {why}: give names of modules, such as "
            "target_modules=[q_proj,v_proj], or all-linear"
        )


def _patterns_in(settings: Mapping[str, Any]) -> Iterator[str]:
    for name in TEXTS:
        value = settings.get(name)
        yield from (text for text in ([value] if isinstance(value, str) else value or ()) if isinstance(text, str))
    for name in KEYS:
        yield from (key for key in settings.get(name) or () if isinstance(key, str))


def _first_unfit(patterns: list[str], names: list[str]) -> tuple[str, str]:
    """Return the first pattern that is not matched with all names, and why not; ("", "") if all are."""
    command = [sys.executable, "-I", "-S", "-c", TRIAL]
    given = json.dumps([patterns, names]).encode()
    try:
        subprocess.run(command, input=given, timeout=MAX_SECONDS, capture_output=True, check=True)
    except subprocess.TimeoutExpired as error:
        done = error.stdout
        why = f"takes over {MAX_SECONDS:.0f} s to match"
    except subprocess.CalledProcessError as error:  # it ran out of memory, or of its stack
        done = error.stdout
        why = "cannot be matched"
    else:
        return "", ""
    return patterns[min(len((done or b"").splitlines()), len(patterns) - 1)], why
