"""What tests of the job share: a user's module of one test is not that of another."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def forgotten_task() -> Iterator[None]:
    """Forget the module that a test has written and imported: another test's has the same name."""
    yield
    sys.modules.pop("a_task_of_mine", None)
