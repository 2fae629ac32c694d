"""A row of the summary table."""

from __future__ import annotations

from typing import NamedTuple

from rl_training.version import REPOSITORY


class Link(NamedTuple):
    """Where a row of the summary sends the reader: a page of the documentation, or a section of the report."""

    text: str
    address: str


class Row(NamedTuple):
    """A row of the summary. If `value` is MISSING, `note` says why."""

    label: str
    value: str
    note: str = ""
    see: Link | None = None
    quotes: bool = False  # whether the note quotes a response, in which nothing is a link
    settings: tuple[str, ...] = ()  # the parts of the note that can be pasted


def how_to(name: str) -> Link:
    """Return the link to a how-to of the documentation."""
    path = f"docs/how_to/{name}.md"
    return Link(path, f"{REPOSITORY}/blob/main/{path}")
