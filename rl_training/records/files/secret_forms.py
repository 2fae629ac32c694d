"""Recognize secrets by their form, whatever their setting is called.

The forms, which `mask_forms` masks:

    hf_…, sk-…, ghp_…, AKIA…, eyJ….eyJ….…        tokens with the prefix of their service; PEM private keys
    Bearer …, Basic …                            values of the header Authorization
    https://USER:PASSWORD@host, ?key=…, &sig=…   addresses; https://hooks.host/SECRET, which anyone may write to
    Server=host;Password=…, host=h password=…    connection strings
"""

from __future__ import annotations

import re

from rl_training.records.files.secret_names import is_secret

MASK = "***"
TOKENS = re.compile(
    r"\bhf_[A-Za-z0-9]{16,}|\bsk-(?=[\w-]*\d)[\w-]{12,}|\b[srp]k_(?:live|test)_\w{8,}|\bgh[pousr]_[A-Za-z0-9]{12,}|"
    r"\bgithub_pat_\w{12,}|\bglpat-[\w-]{12,}|\bxox[abeprs]-[\w-]{8,}|\b(?:AKIA|ASIA)[A-Z0-9]{12,}|\bAIza[\w-]{20,}|"
    r"\bya29\.[\w-]{12,}|\beyJ[\w-]{5,}\.[\w-]{5,}\.[\w-]*|\bnpm_[A-Za-z0-9]{20,}|\bpypi-[\w-]{20,}|\bgsk_\w{16,}|"
    r"\br8_\w{16,}|\bSG\.[\w-]{10,}\.[\w-]{10,}|\bdop_v1_\w{16,}|\bnvapi-[\w-]{12,}|\bxai-(?=[\w-]*\d)[\w-]{16,}|"
    r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)",
    re.DOTALL,
)
# Prose may hold "Bearer bonds" and "Basic arithmetic", so within a text a digit must follow.
HEADER = re.compile(r"\b((?:Bearer|Basic)\s+)(?=[\w.~+/=-]*\d)([\w.~+/=-]{6,})")
HEADER_ALONE = re.compile(r"((?:Bearer|bearer)\s+|(?:Basic|Token)\s+(?=\S*[\d=]))(\S+)")
ADDRESS = re.compile(r"\b([A-Za-z][A-Za-z0-9+.-]*://)([^\s/?#]+|[^\s/:@?#]*:(?!\d+(?:/|$))[^\s@]+)@")
PARAMETER = re.compile(r"(?<=[?&;])(?P<name>[\w.-]+)=(?P<value>[^&\s;'\"]+)")  # of an address
OPENS = {"key", "sig", "signature", "code", "auth"}  # parameters of addresses that are secrets by themselves
HOOK = re.compile(  # an address that anyone who knows it may write to
    r"\b(https?://(?:hooks\.[\w.:-]+|[\w.-]+\.webhook\.office\.com|[\w.-]+/(?:[\w.-]+/)*webhooks?|api\.telegram\.org/bot)/?)"
    r"([^\s'\",}\]]+)",
    re.IGNORECASE,
)
FIELD_NAME = re.compile(r"\s*[A-Za-z][\w .-]*")  # of a connection string


def mask_forms(text: str) -> str:
    """Return a text with everything masked that has the form of a secret."""
    if HEADER_ALONE.fullmatch(text):
        return HEADER_ALONE.sub(rf"\1{MASK}", text)
    text = ADDRESS.sub(rf"\1{MASK}@", _mask_fields(text))
    text = HOOK.sub(rf"\1{MASK}", PARAMETER.sub(_mask_parameter, text) if "?" in text else text)
    return TOKENS.sub(MASK, HEADER.sub(rf"\1{MASK}", text))


def secrets_of_form(text: str) -> list[str]:
    """Return the secrets in a text that are recognized by their form, to mask them elsewhere too."""
    alone = HEADER_ALONE.fullmatch(text)
    headers = [match[2] for match in ([alone] if alone else HEADER.finditer(text))]
    users = [match[2] for match in ADDRESS.finditer(text)]
    hooks = [match[2] for match in HOOK.finditer(text)]
    tokens = [match[0] for match in TOKENS.finditer(text)]
    return [*tokens, *hooks, *headers, *users, *(user.partition(":")[2] for user in users)]


def _mask_parameter(match: re.Match[str]) -> str:
    name = match["name"]
    words = re.split(r"[-_.]", name.lower())
    return f"{name}={MASK}" if words[-1] in OPENS or is_secret(name) else match[0]


def _mask_fields(text: str) -> str:
    """Mask the values of secret names in a connection string, and return any other text unchanged."""
    separator = ";" if ";" in text else " "
    fields = [field.partition("=") for field in text.split(separator)]
    names = [name for name, equals, _ in fields if equals and FIELD_NAME.fullmatch(name)]
    if len(names) < 2 or len(names) < len([name for name, _, _ in fields if name.strip()]):
        return text
    return separator.join(f"{name}{equals}{_masked_field(name, value)}" for name, equals, value in fields)


def _masked_field(name: str, value: str) -> str:
    return MASK if value.strip() and is_secret(name.strip().replace(" ", "_"), value.strip()) else value
