"""Marks tests of what TRL itself does only since some version: `make compat` runs them with older ones too."""

from __future__ import annotations

import pytest

from rl_training.hosts.trl.versions import is_installed


def since(version: str) -> pytest.MarkDecorator:
    """Return a mark that skips a test with an older library, given as in "trl 1.9.0"."""
    return pytest.mark.skipif(not is_installed(version), reason=f"needs {version}")
