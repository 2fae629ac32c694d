"""Tables as CSV for other programs. A spreadsheet runs no cell of them as a formula."""

from __future__ import annotations

from typing import Any

import pandas as pd

from rl_training.records.files.printable import printable

# Excel, LibreOffice and Google Sheets take a text with such a start for a formula, in some locales in full width. A
# leading apostrophe keeps it a text; numbers are not touched. See OWASP, "CSV Injection".
FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n", "\uff1d", "\uff0b", "\uff0d", "\uff20")


def as_csv(table: pd.DataFrame, missing: str = "") -> bytes:
    """Return a table as CSV in UTF-8, without its index. Texts stay texts in every spreadsheet.

    Args:
        missing: Text for nan.
    """
    safe = table.map(_as_text).rename(columns=_as_text)
    return safe.to_csv(index=False, na_rep=missing).encode()


def _as_text(cell: Any) -> Any:
    """Return a cell; if it is text, make it printable and put an apostrophe before anything that looks like a formula.

    >>> _as_text("=1+1"), _as_text("-5"), _as_text(-5), _as_text("a=b")
    ("'=1+1", "'-5", -5, 'a=b')
    """
    if not isinstance(cell, str):
        return cell
    return f"'{printable(cell)}" if cell.startswith(FORMULA) else printable(cell)
