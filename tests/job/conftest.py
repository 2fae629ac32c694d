"""Shared by tests of the job: a user's module in one test is not mistaken for that of another."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def forgotten_task() -> Iterator[None]:
    """Forget the module that a test wrote and imported, because another test's has the same name."""
    yield
    sys.modules.pop("a_task_of_mine", None)
