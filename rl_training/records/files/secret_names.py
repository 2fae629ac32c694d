"""Recognize a setting that holds a secret by its name: hub_token, OPENAI_API_KEY, db_pass, connection_string."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

# Words that mark a secret anywhere in a name. Everything nested below such a name is secret too.
ALWAYS = {"secret", "secrets", "password", "passwords", "passwd", "passphrase", "passcode", "pwd", "credential",
          "credentials", "creds", "apikey", "apikeys", "authorization", "bearer", "jwt", "jwts", "webhook", "webhooks",
          "oauth", "otp", "totp", "sas", "csrf", "xsrf", "mnemonic", "dsn", "sid", "kubeconfig", "netrc"}  # fmt: skip
LAST = {"auth", "cookie", "cookies", "cred", "pat", "pin", "pw", "session", "sess"}  # only at the end of a name
ENDINGS = ("password", "passwd", "passphrase", "passcode", "secret", "apikey", "oauth", "sessid", "sessionid",
           "authkey", "connstr", "connectionstring", "credentials", "cookie")  # fmt: skip
# Pairs of adjacent words that mean a secret anywhere in a name.
PAIRS = {("connection", "string"), ("conn", "string"), ("conn", "str"), ("connection", "str"), ("session", "id"),
         ("session", "data"), ("session", "state"), ("pass", "phrase"), ("pass", "code"), ("pass", "word"),
         ("seed", "phrase"), ("recovery", "phrase"), ("recovery", "code"), ("recovery", "codes"), ("backup", "code"),
         ("backup", "codes"), ("mfa", "code"), ("auth", "header"), ("auth", "headers"), ("auth", "code"),
         ("auth", "string"), ("auth", "data"), ("authorization", "code"), ("verification", "code"), ("o", "auth"),
         ("service", "account"), ("private", "pem")}  # fmt: skip
# Words before "key" or "keys" that make it a key to something, anywhere in a name.
OF_KEYS = {"access", "account", "admin", "anthropic", "api", "app", "auth", "aws", "azure", "client", "cohere", "comet",
           "deepseek", "deploy", "encryption", "gcp", "gemini", "github", "google", "gpg", "groq", "hf", "hmac", "host",
           "hub", "judge", "license", "master", "mistral", "openai", "openrouter", "private", "replicate", "root",
           "rsa", "secret", "server", "service", "session", "shared", "signing", "ssh", "ssl", "storage", "stripe",
           "subscription", "together", "tls", "wandb"}  # fmt: skip
# Words before a final "key" that make it a key of data: a column, a field, an entry. Any other "…_key" is a secret.
OF_DATA = {"answer", "arrow", "audio", "batch", "cache", "chosen", "column", "completion", "config", "content",
           "data", "dataset", "dict", "feature", "field", "first", "fn", "foreign", "group", "hot",
           "id", "image", "images", "index", "input", "inputs", "item", "join", "json", "key", "label",
           "labels", "last", "lookup", "map", "mask", "message", "messages", "meta", "metric", "model",
           "name", "num", "order", "output", "partition", "past", "primary", "prompt", "prompts",
           "public", "query", "question", "rejected", "response", "responses", "reward", "role", "row",
           "score", "sort", "sorting", "source", "split", "state", "step", "system", "tag", "target",
           "task", "text", "thinking", "tool", "tools", "type", "unique", "value", "video"}  # fmt: skip
# Words before a final "pass" that make it a pass over something, and words that merely end in "pass".
OF_PASSES = {"backward", "band", "each", "first", "forward", "full", "high", "last", "low", "max", "min", "multi",
             "next", "num", "one", "per", "second", "single", "third", "two"}  # fmt: skip
NO_PASSWORDS = {"bypass", "compass", "encompass", "overpass", "surpass", "trespass", "underpass"}
# Words before "token" that make it one of a vocabulary, or a count of tokens.
OF_VOCABULARY = {"eos", "bos", "pad", "unk", "mask", "sep", "cls", "image", "video", "audio", "special", "start", "end",
                 "stop", "think", "prefix", "suffix", "begin", "first", "last", "next", "new", "sub", "per", "max",
                 "min", "num", "boi", "eoi", "fake", "tool"}  # fmt: skip
TOKENS_OF_ACCESS = ("access", "api", "auth", "bearer", "hf", "hub", "refresh", "session")  # words before "tokens"
WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
IN_VOCABULARY = re.compile(r"<.*>|\[.*\]", re.DOTALL)  # a special token, as tokenizers write it


def is_secret(name: str, value: Any = "") -> bool:
    """Return whether the setting with this dotted name holds a secret. Names of tokenizers and of counts do not.

    >>> [is_secret(name) for name in ("hub_token", "HF_TOKEN", "apiKey", "http.auth", "secrets.mine", "db_pass")]
    [True, True, True, True, True, True]
    >>> [is_secret(name) for name in ("tokenizer", "max_tokens", "eos_token", "pad_token_id", "author", "sort_key")]
    [False, False, False, False, False, False]
    """
    *above, last = [_words(part) for part in re.split(r"[./@]", name)]
    if any(_says_so(words) or words[-1] in LAST for words in (*above, last)):
        return True
    if not isinstance(value, str) or IN_VOCABULARY.fullmatch(value):
        return False
    is_key_of_parent = last == ["key"] and bool(above) and above[-1][-1] in OF_KEYS
    return is_key_of_parent or _is_key(last) or _is_password(last) or _is_token(last)


def _words(name: str) -> list[str]:
    """Return the lower-case words of a name without a final number: token_2 is one token of several."""
    words = [word.lower() for word in WORD.findall(name)]
    while len(words) > 1 and words[-1].isdecimal():
        words.pop()
    return words or [""]


def _says_so(words: Sequence[str]) -> bool:
    pairs = list(pairwise(words))
    is_key = any(kind in OF_KEYS and key in ("key", "keys") for kind, key in pairs)
    return is_key or not PAIRS.isdisjoint(pairs) or any(word in ALWAYS or word.endswith(ENDINGS) for word in words)


def _is_key(words: Sequence[str]) -> bool:
    *kinds, last = words
    if last == "key":
        return bool(kinds) and kinds[-1] not in OF_DATA
    return last.endswith("key") and last.removesuffix("key") in OF_KEYS


def _is_password(words: Sequence[str]) -> bool:
    *kinds, last = words
    if last == "pass":
        return not kinds or kinds[-1] not in OF_PASSES
    return last.endswith("pass") and last not in NO_PASSWORDS


def _is_token(words: Sequence[str]) -> bool:
    *kinds, last = words
    if last == "tokens":
        return bool(kinds) and kinds[-1] in TOKENS_OF_ACCESS
    if last == "token":
        return not OF_VOCABULARY & set(kinds)
    return last.endswith("token") and last.removesuffix("token") not in OF_VOCABULARY
