"""Tokens and passwords among settings: masked in everything a run writes, because run folders are shared."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

SECRETS = ("token", "password", "secret", "api_key")  # how the names of secret settings end
OF_TOKENIZERS = ("eos_", "pad_", "bos_")
MASK = "***"


def without_secrets(node: Any, name: str = "") -> Any:
    """Returns a setting, of this name, or a nested mapping of settings, with tokens and passwords masked."""
    if isinstance(node, Mapping):
        return {key: without_secrets(value, str(key)) for key, value in node.items()}
    is_secret = isinstance(node, str) and any(name == word or name.endswith(f"_{word}") for word in SECRETS)
    return MASK if is_secret and not name.startswith(OF_TOKENIZERS) else node
