"""Mask tokens and passwords in everything that a command writes or prints, because folders and dashboards are shared.

    without_secrets(settings)   nested settings, for records and dashboards; each text in them through _mask_setting
    mask_arguments(words)       a command line; each word through _mask_argument
    mask_line(text, known)      a line for people that may quote settings and their values; through _mask_named_values

A setting's text is an override KEY=VALUE (_mask_argument) or a value (_mask_value). A value that looks like a line, as
JSON or an address does, is masked as a line, any other by its form alone. All of them end in mask_forms.

Secrets are recognized by the name of the setting (secret_names.py) and by their form (secret_forms.py). Below the name
of a secret everything is one: in nested settings, in lists, in pairs (NAME, VALUE) and in {name: NAME, value: VALUE}.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rl_training.records.files.secret_forms import MASK, mask_forms, secrets_of_form
from rl_training.records.files.secret_names import is_secret

SETTING = re.compile(r"[+~]{0,2}[\w.@/-]+=")  # the start of an override KEY=VALUE
# What precedes a value in a line: --NAME, NAME=, "NAME":, NAME: within braces, and the HTTP header Authorization:.
NAMED = re.compile(
    r"""(?<!\S)--(?P<flag>[\w.-]+)[= ]|(?<![\w/])(?P<set>[\w.@-]+)=(?!=)|"""
    r"""(?P<quote>['"])(?P<quoted>[\w.-]+)(?P=quote)\s*[:=]\s*|(?<=[{,\[])\s*(?P<braced>[\w.-]+):\s*|"""
    r"""(?P<header>[Aa]uthorization):\s*"""
)
VALUE = re.compile(
    r""""(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*'|[\[{][^\]}]*[\]}]|(?:(?:Bearer|Basic|Token)\s+)?[^\s,;&}\]'"]+?(?=:?(?:[\s,;&}\]'"]|$))"""
)
LIKE_A_LINE = re.compile(r"""['"]?([\[{]|[A-Za-z][A-Za-z0-9+.-]*://)""")  # a value that may contain names
# Keys of {name: …, value: …}:
LABELS = {"name", "key", "header", "field"}
VALUES = {"value", "val", "content", "default"}
# What names the next element:
FLAG = re.compile(r"--?[A-Za-z][\w.-]*")
PAIR_NAME = re.compile(r"[A-Za-z][\w.-]*")
MIN_SECRET_LENGTH = 6  # of a secret that is searched for by value: a shorter one would match parts of other words


def without_secrets(node: Any, name: str = "", is_below: bool = False) -> Any:
    """Return nested settings, or the setting called `name`, with every secret masked; true, false and null are kept.

    Args:
        node: The settings.
        name: Their dotted name.
        is_below: Whether they lie below the name of a secret.
    """
    if isinstance(node, Mapping):
        is_below = is_below or (bool(name) and is_secret(name))
        labels = {value for key, value in node.items() if str(key).lower() in LABELS and isinstance(value, str)}
        is_labelled = any(map(is_secret, labels))
        return {
            mask_forms(key) if isinstance(key, str) else key: without_secrets(
                value, f"{name}.{key}" if name else str(key), is_below or (is_labelled and str(key).lower() in VALUES)
            )
            for key, value in node.items()
        }
    if isinstance(node, list | tuple | set | frozenset):
        values = _elements_without_secrets(list(node), name, is_below)
        return type(node)(values) if type(node) in (list, tuple, set, frozenset) else values
    if node is None or isinstance(node, bool) or name.endswith("._target_"):
        return node
    if isinstance(node, str | int | float) and (is_below or is_secret(name, node)):
        return MASK
    return _mask_setting(node) if isinstance(node, str) else node


def _elements_without_secrets(nodes: list[Any], name: str, is_below: bool) -> list[Any]:
    """Return the elements of a list with secrets masked: those after a secret's name in a pair, and after a flag."""
    elements = []
    for previous, node in zip([None, *nodes], nodes, strict=False):
        is_named = isinstance(previous, str) and (
            FLAG.fullmatch(previous) or (len(nodes) == 2 and PAIR_NAME.fullmatch(previous))
        )
        follows_name = bool(is_named) and is_secret(str(previous).lstrip("-"), node if isinstance(node, str) else "")
        elements.append(without_secrets(node, name, is_below or follows_name))
    return elements


def without_masks(node: Any) -> Any:
    """Return nested settings without masked ones, so that defaults replace the values that nobody knows."""
    if isinstance(node, Mapping):
        return {key: without_masks(value) for key, value in node.items() if value != MASK}
    return [without_masks(value) for value in node if value != MASK] if isinstance(node, list) else node


def _mask_setting(text: str) -> str:
    """Return a setting's text with secrets masked in addresses and in overrides KEY=VALUE.

    Any other text, such as a prompt, is needed unchanged.
    """
    return _mask_argument(text) if SETTING.match(text) else _mask_value(text)


def _mask_argument(word: str) -> str:
    """Return one word of a command line with its secrets masked."""
    if not SETTING.match(word.lstrip("-")):
        return mask_forms(_mask_value(word))
    key, equals, value = word.partition("=")
    if equals and is_secret(key.lstrip("+~-"), value):
        return f"{key}={MASK}"
    return mask_forms(f"{key}{equals}{_mask_value(value)}")  # the word itself may be a connection string


def _mask_value(text: str) -> str:
    return _mask_named_values(text) if LIKE_A_LINE.match(text) else mask_forms(text)


def mask_arguments(words: Sequence[str]) -> list[str]:
    """Return a command line with its secrets masked, including those that follow a flag (--token SECRET)."""
    flagged = ["", *words][: len(words)]
    return [
        MASK if flag.startswith("--") and "=" not in flag and is_secret(flag.lstrip("-")) else _mask_argument(word)
        for flag, word in zip(flagged, words, strict=True)
    ]


def mask_line(text: str, known: Sequence[str] = ()) -> str:
    """Return a text for people with secrets masked: those in `known`, and values that follow the name of a secret."""
    for secret in sorted(known, key=len, reverse=True):
        text = text.replace(secret, MASK)
    return _mask_named_values(text)


def secrets_in(words: Sequence[str], environment: Mapping[str, str]) -> list[str]:
    """Return the values of the secrets in a command line and an environment, for `mask_line`."""
    secrets = [value for name, value in environment.items() if is_secret(name, value) and not os.path.exists(value)]
    for word, masked in zip(words, mask_arguments(words), strict=True):
        if masked == MASK:  # the value of the flag before it
            secrets.append(word)
        elif masked != word:
            value = word.partition("=")[2]
            secrets += [value] * masked.endswith(f"={MASK}") + _secrets_named(word) + secrets_of_form(value)
    bare = (value.strip("'\"") for value in secrets)
    return [value for value in dict.fromkeys(bare) if len(value) >= MIN_SECRET_LENGTH]


def _mask_named_values(text: str) -> str:
    parts = []
    last_end = 0
    for start, end in _places_of_secrets(text):
        parts += [text[last_end:start], MASK]
        last_end = end
    return mask_forms("".join([*parts, text[last_end:]]))


def _secrets_named(text: str) -> list[str]:
    values = [text[start:end] for start, end in _places_of_secrets(text)]
    return [*values, *secrets_of_form(text)]


def _places_of_secrets(text: str) -> Iterator[tuple[int, int]]:
    """Yield (start, end) of each value that follows the name of a secret."""
    last_end = 0
    for name in NAMED.finditer(text):
        value = VALUE.match(text, name.end())
        if name.start() >= last_end and value and is_secret(name[name.lastgroup or 0], value[0].strip("'\"")):
            last_end = value.end()
            yield value.span()
