"""Links the first use of each of the glossary's terms on a page to the glossary, with the meaning as a tooltip.

conf.py passes it the text of each page in reading order. Words that are also plain English (kept, lost, gone) are not
looked for: where they are meant in the glossary's sense, a page links them itself.
"""

from __future__ import annotations

import re
from pathlib import Path

GLOSSARY = Path(__file__).parent / "reference" / "glossary.md"
FORWARD = {"forward", "backward", "delta_h/forward", "delta_h/backward"}  # as code
USES = {  # by term: how texts use it
    "±": "±",
    "Bounded step": "bounded steps?",
    "Collapse": "collapsed?",
    "Coverage": "coverage",
    "Default task": "default task",
    "Effective sample size": "effective sample sizes?",
    "Entropy gradient": "entropy gradients?",
    "Entropy": "entropy",  # after the longer term
    "Fold": "folds?",
    "Intervention": "interventions?",
    "Naive product": "naive product",
    "Noise scale": "noise scale",
    "Per token, per sequence": "per (?:token|sequence)",
    "Plain": "plain (?:steps?|runs?|training)",
    "Price": "prices?",
    "Probe": "probes?",
    "PSR, NSR": "PSR|NSR",
    "Regret": "regrets?",
    "Sampler and trainer": "samplers?",
    "Trapezoid": "trapezoids?",
    "Truth": "truth",
}
PATTERN = re.compile(rf"(?<![\w/:.-])(?:{'|'.join(USES.values())})(?![\w/:-])", re.IGNORECASE)


def meanings() -> dict[str, str]:
    """Return each term's entry without markup and without links in parentheses, by term."""
    entries = [entry.partition("\n") for entry in GLOSSARY.read_text(encoding="utf-8").split("\n## ")[1:]]
    plain = {term: re.sub(r" \(\[[^]]*\]\([^)]*\)\)", "", entry) for term, _, entry in entries}
    return {term: " ".join(re.sub(r"\[([^]]*)\]\([^)]*\)|[`*]", r"\1", entry).split()) for term, entry in plain.items()}


def anchor(term: str) -> str:
    """Return the anchor of a term's heading, as Markdown makes it."""
    return re.sub(r"[^\w\- ]", "", term.lower()).replace(" ", "-")


def term_of(use: str) -> str:
    """Return the term that a piece of text uses."""
    return next(term for term, pattern in USES.items() if re.fullmatch(pattern, use, re.IGNORECASE))


def split_at_terms(text: str, seen: set[str]) -> list[tuple[str, str]]:
    """Split a text at the first use of each term that is not in `seen`, to which they are added.

    Returns:
        Pieces of the text with the term that each uses, "" for none.

    >>> split_at_terms("A fold, and folds of samplers.", set())
    [('A ', ''), ('fold', 'Fold'), (', and folds of ', ''), ('samplers', 'Sampler and trainer'), ('.', '')]
    """
    pieces, end = [], 0
    for use in PATTERN.finditer(text):
        term = term_of(use[0])
        if term not in seen:
            seen.add(term)
            pieces += [(text[end : use.start()], ""), (use[0], term)]
            end = use.end()
    return [piece for piece in [*pieces, (text[end:], "")] if piece[0]]
