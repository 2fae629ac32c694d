"""Mask tokens and passwords in everything that a command writes or prints, because folders and dashboards are shared.

    without_secrets(settings)   nested settings, for records and dashboards
    mask_words(words)           a command line
    mask_line(text, known)      a line for people that may quote settings and their values

Secrets are recognized by the name of the setting (`is_secret`), or as part of an address: https://USER:PASSWORD@host,
https://hooks.host/SECRET.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

MASK = "***"
# Words that mark a secret anywhere in a name. Everything nested below such a name is secret too.
ALWAYS = {"secret", "secrets", "password", "passwords", "passwd", "passphrase", "pwd", "credential", "credentials",
          "apikey", "apikeys", "authorization", "bearer", "jwt", "jwts", "webhook", "webhooks"}  # fmt: skip
LAST = {"auth", "cookie", "cookies", "pat", "pin", "pw"}  # words that do so only at the end of a name
# Words before "key" that make it a key to something.
OF_KEYS = {"access", "account", "api", "auth", "aws", "azure", "deploy", "encryption", "gcp", "github", "hf", "hub",
           "license", "master", "openai", "private", "secret", "service", "session", "shared", "signing", "ssh",
           "storage", "wandb"}  # fmt: skip
# Words before "token" that make it one of a vocabulary, or a count of tokens.
OF_VOCABULARY = {"eos", "bos", "pad", "unk", "mask", "sep", "cls", "image", "video", "audio", "special", "start", "end",
                 "stop", "think", "prefix", "suffix", "begin", "first", "last", "next", "new", "sub", "per", "max",
                 "min", "num", "boi", "eoi", "fake", "tool"}  # fmt: skip
TOKENS_OF_ACCESS = ("access", "api", "auth", "bearer", "hf", "hub", "refresh", "session")  # words before "tokens"
WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
IN_VOCABULARY = re.compile(r"<.*>|\[.*\]", re.DOTALL)  # a special token, as tokenizers write it

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
ADDRESS = re.compile(r"\b([A-Za-z][A-Za-z0-9+.-]*://)([^\s/?#]+)@")
SIGNED = re.compile(r"(?<=[?&])((?:[\w-]*-)?(?:sig|signature)=)[^&\s]+", re.IGNORECASE)  # signature in an address
HOOK = re.compile(  # an address that anyone who knows it may write to
    r"\b(https?://(?:hooks\.[\w.:-]+|[\w.-]+\.webhook\.office\.com|[\w.-]+/(?:[\w.-]+/)*webhooks?|api\.telegram\.org/bot)/?)"
    r"([^\s'\",}\]]+)",
    re.IGNORECASE,
)
MIN_SECRET_LENGTH = 6  # of a secret that is searched for by value: a shorter one would match parts of other words


def is_secret(name: str, value: Any = "") -> bool:
    """Return whether the setting with this dotted name holds a secret. Names of tokenizers and of counts do not.

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
    """Return the lower-case words of a name without a final number: token_2 is one token of several."""
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
    """Return nested settings, or the setting called `name`, with every secret masked; true, false and null are kept."""
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
    """Return nested settings without masked ones, so that defaults replace the values that nobody knows."""
    if isinstance(node, Mapping):
        return {key: without_masks(value) for key, value in node.items() if value != MASK}
    return [without_masks(value) for value in node if value != MASK] if isinstance(node, list) else node


def _mask_setting(text: str) -> str:
    """Return a setting's text with secrets masked in addresses and in overrides KEY=VALUE.

    Any other text, such as a prompt, is needed unchanged.
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
    """Return a command line with its secrets masked, including those that follow a flag (--token SECRET)."""
    flagged = ["", *words][: len(words)]
    return [
        MASK if flag.startswith("--") and "=" not in flag and is_secret(flag.lstrip("-")) else mask_word(word)
        for flag, word in zip(flagged, words, strict=True)
    ]


def mask_line(text: str, known: Sequence[str] = ()) -> str:
    """Return a text for people with secrets masked: those in `known`, and values that follow the name of a secret."""
    for secret in sorted(known, key=len, reverse=True):
        text = text.replace(secret, MASK)
    return _mask_named(text)


def secrets_in(words: Sequence[str], environment: Mapping[str, str]) -> list[str]:
    """Return the values of the secrets in a command line and an environment, for `mask_line`."""
    secrets = [value for name, value in environment.items() if is_secret(name, value) and not os.path.exists(value)]
    for word, masked in zip(words, mask_words(words), strict=True):
        if masked == MASK:  # the value of the flag before it
            secrets.append(word)
        elif masked != word:
            secrets += [word.partition("=")[2]] * masked.endswith(f"={MASK}") + _secrets_named(word)
    bare = (value.strip("'\"") for value in secrets)
    return [value for value in dict.fromkeys(bare) if len(value) >= MIN_SECRET_LENGTH]


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
    """Yield (start, end) of each value that follows the name of a secret."""
    done = 0
    for name in NAMED.finditer(text):
        value = VALUE.match(text, name.end())
        if name.start() >= done and value and is_secret(name[name.lastgroup or 0], value[0].strip("'\"")):
            done = value.end()
            yield value.span()
