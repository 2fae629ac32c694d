"""Masks tokens and passwords in everything that a command writes or prints: folders, dashboards and lines are shared.

    without_secrets(settings)   nested settings, for records and dashboards
    mask_words(words)           a command line
    mask_line(text, known)      a line for people, where settings and their values may be quoted

What is secret is known by the name of the setting (`is_secret`), or is a part of an address: https://USER:PASSWORD@host,
https://hooks.host/SECRET.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

MASK = "***"
# Words that make a name that of a secret wherever they stand in it; what lies below such a name is secret too.
ALWAYS = {"secret", "secrets", "password", "passwords", "passwd", "passphrase", "pwd", "credential", "credentials",
          "apikey", "apikeys", "authorization", "bearer", "jwt", "jwts", "webhook", "webhooks"}  # fmt: skip
LAST = {"auth", "cookie", "cookies", "pat", "pin", "pw"}  # those that do at its end
# What a key is called that opens something.
OF_KEYS = {"access", "account", "api", "auth", "aws", "azure", "deploy", "encryption", "gcp", "github", "hf", "hub",
           "license", "master", "openai", "private", "secret", "service", "session", "shared", "signing", "ssh",
           "storage", "wandb"}  # fmt: skip
# What a token is called that is one of a vocabulary, or one of many.
OF_VOCABULARY = {"eos", "bos", "pad", "unk", "mask", "sep", "cls", "image", "video", "audio", "special", "start", "end",
                 "stop", "think", "prefix", "suffix", "begin", "first", "last", "next", "new", "sub", "per", "max",
                 "min", "num", "boi", "eoi", "fake", "tool"}  # fmt: skip
TOKENS_OF_ACCESS = ("access", "api", "auth", "bearer", "hf", "hub", "refresh", "session")  # in the plural
WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
IN_VOCABULARY = re.compile(r"<.*>|\[.*\]", re.DOTALL)  # a special token as tokenizers write it

SETTING = re.compile(r"[+~]{0,2}[\w.@/-]+=")  # how an override begins
# What stands before a value in a line: NAME=, "NAME": and, in braces, NAME: and the header Authorization: of requests.
NAMED = re.compile(
    r"""(?<!\S)--(?P<flag>[\w.-]+)[= ]|(?<![\w/])(?P<set>[\w.@-]+)=(?!=)|"""
    r"""(?P<quote>['"])(?P<quoted>[\w.-]+)(?P=quote)\s*[:=]\s*|(?<=[{,\[])\s*(?P<braced>[\w.-]+):\s*|"""
    r"""(?P<header>[Aa]uthorization):\s*"""
)
VALUE = re.compile(
    r""""(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*'|[\[{][^\]}]*[\]}]|(?:(?:Bearer|Basic|Token)\s+)?[^\s,;&}\]'"]+?(?=:?(?:[\s,;&}\]'"]|$))"""
)
LIKE_A_LINE = re.compile(r"""['"]?([\[{]|[A-Za-z][A-Za-z0-9+.-]*://)""")  # a value in which names stand
ADDRESS = re.compile(r"\b([A-Za-z][A-Za-z0-9+.-]*://)([^\s/?#]+)@")
SIGNED = re.compile(r"(?<=[?&])((?:[\w-]*-)?(?:sig|signature)=)[^&\s]+", re.IGNORECASE)  # in an address
HOOK = re.compile(  # an address to which whoever knows it may write
    r"\b(https?://(?:hooks\.[\w.:-]+|[\w.-]+\.webhook\.office\.com|[\w.-]+/(?:[\w.-]+/)*webhooks?|api\.telegram\.org/bot)/?)"
    r"([^\s'\",}\]]+)",
    re.IGNORECASE,
)
SHORTEST = 6  # of a secret that is looked for by its value: a shorter one would be found in other words


def is_secret(name: str, value: Any = "") -> bool:
    """Return whether a setting of this dotted name holds a secret; whole names of tokenizers and counts do not.

    >>> [is_secret(name) for name in ("hub_token", "HF_TOKEN", "apiKey", "http.auth", "secrets.mine")]
    [True, True, True, True, True]
    >>> [is_secret(name) for name in ("tokenizer", "max_tokens", "eos_token", "pad_token_id", "author", "sort_key")]
    [False, False, False, False, False, False]
    """
    *above, last = [_words(part) for part in re.split(r"[./@]", name)]
    if last == ["pass"] or any(_says_so(words) or words[-1] in LAST for words in (*above, last)):
        return True
    is_word_of_a_vocabulary = isinstance(value, str) and IN_VOCABULARY.fullmatch(value)
    return isinstance(value, str) and not is_word_of_a_vocabulary and _is_token(last)


def _words(name: str) -> list[str]:
    """Return the words of a name in small letters, without the number at its end: token_2 is one token of several."""
    words = [word.lower() for word in WORD.findall(name)]
    while len(words) > 1 and words[-1].isdecimal():
        words.pop()
    return words or [""]


def _says_so(words: Sequence[str]) -> bool:
    is_key = any(kind in OF_KEYS and key in ("key", "keys") for kind, key in pairwise(words))
    return is_key or any(word in ALWAYS or word.endswith(("password", "passwd", "secret", "apikey")) for word in words)


def _is_token(words: Sequence[str]) -> bool:
    kinds, last = words[:-1], words[-1]
    if last == "tokens":
        return bool(kinds) and kinds[-1] in TOKENS_OF_ACCESS
    if last == "token":
        return not OF_VOCABULARY & set(kinds)
    return last.endswith("token") and last.removesuffix("token") not in OF_VOCABULARY


def without_secrets(node: Any, name: str = "") -> Any:
    """Return a setting, of this name, or nested settings, with every secret masked; true, false and null stay."""
    if isinstance(node, Mapping):
        return {key: without_secrets(value, f"{name}.{key}" if name else str(key)) for key, value in node.items()}
    if isinstance(node, list | tuple):
        return type(node)([without_secrets(value, name) for value in node]) if type(node) in (list, tuple) else node
    if node is None or isinstance(node, bool) or name.endswith("._target_"):
        return node
    if isinstance(node, str | int | float) and is_secret(name, node):
        return MASK
    return _mask_setting(node) if isinstance(node, str) else node


def without_masks(node: Any) -> Any:
    """Return nested settings without those that are masked: of a setting that nobody knows, the default is taken."""
    if isinstance(node, Mapping):
        return {key: without_masks(value) for key, value in node.items() if value != MASK}
    return [without_masks(value) for value in node if value != MASK] if isinstance(node, list) else node


def _mask_setting(text: str) -> str:
    """Return a text among settings with its secrets masked: an address's user, the value of an override KEY=VALUE.

    Any other text, a prompt for example, is needed as it is.
    """
    return mask_word(text) if SETTING.match(text) else _mask_value(text)


def mask_word(word: str) -> str:
    """Return one word of a command line with its secrets masked."""
    key, equals, value = word.partition("=") if SETTING.match(word.lstrip("-")) else ("", "", word)
    is_masked = bool(equals) and is_secret(key.lstrip("+~-"), value)
    return f"{key}{equals}{MASK if is_masked else _mask_value(value)}"


def _mask_value(text: str) -> str:
    return _mask_named(text) if LIKE_A_LINE.match(text) else _mask_addresses(text)


def mask_words(words: Sequence[str]) -> list[str]:
    """Return a command line with its secrets masked, those behind a flag (--token SECRET) too."""
    flagged = ["", *words][: len(words)]
    return [
        MASK if flag.startswith("--") and "=" not in flag and is_secret(flag.lstrip("-")) else mask_word(word)
        for flag, word in zip(flagged, words, strict=True)
    ]


def mask_line(text: str, known: Sequence[str] = ()) -> str:
    """Return a text for people with secrets masked: those that are `known`, and those that stand behind their names."""
    for secret in sorted(known, key=len, reverse=True):
        text = text.replace(secret, MASK)
    return _mask_named(text)


def secrets_in(words: Sequence[str], environment: Mapping[str, str]) -> list[str]:
    """Return the secrets of a command line and of an environment, by their values, for `mask_line`."""
    secrets = [value for name, value in environment.items() if is_secret(name, value) and not os.path.exists(value)]
    for word, masked in zip(words, mask_words(words), strict=True):
        if masked == MASK:  # of the flag before it
            secrets.append(word)
        elif masked != word:
            secrets += [word.partition("=")[2]] * masked.endswith(f"={MASK}") + _secrets_named(word)
    bare = (value.strip("'\"") for value in secrets)
    return [value for value in dict.fromkeys(bare) if len(value) >= SHORTEST]


def _mask_addresses(text: str) -> str:
    return HOOK.sub(rf"\1{MASK}", SIGNED.sub(rf"\1{MASK}", ADDRESS.sub(rf"\1{MASK}@", text)))


def _mask_named(text: str) -> str:
    parts, done = [], 0
    for start, end in _places_of_secrets(text):
        parts += [text[done:start], MASK]
        done = end
    return _mask_addresses("".join([*parts, text[done:]]))


def _secrets_named(text: str) -> list[str]:
    named = [text[start:end] for start, end in _places_of_secrets(text)]
    users = [address[2] for address in ADDRESS.finditer(text)]
    hooks = [hook[2] for hook in HOOK.finditer(text)]
    return [*named, *hooks, *users, *(user.partition(":")[2] for user in users)]


def _places_of_secrets(text: str) -> Iterator[tuple[int, int]]:
    """Yield where each value stands whose name is that of a secret."""
    done = 0
    for name in NAMED.finditer(text):
        value = VALUE.match(text, name.end())
        if name.start() >= done and value and is_secret(name[name.lastgroup or 0], value[0].strip("'\"")):
            done = value.end()
            yield value.span()
