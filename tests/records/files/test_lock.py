"""A folder is locked by one process and is free as soon as that process has ended in any way."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import logging
import os
from pathlib import Path

import pytest
from endings import hold

from rl_training.errors import UserError
from rl_training.evaluation.workers import run_in_process
from rl_training.records.files.lock import LOCK, locked


def test_an_unwritable_folder_is_named_with_the_fix(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    told = pytest.raises(UserError, match=r"file/evaluations/\.lock .*output=FOLDER")
    with told, locked(tmp_path / "file" / "evaluations", "give output=FOLDER"):
        pass


def test_a_second_locker_is_told_who_holds_the_lock_and_a_killed_one_releases_it(tmp_path: Path) -> None:
    other = pytest.raises(ValueError, match=rf"this very process {os.getpid()}\b.*\b{os.uname().nodename}\b.*: end ")
    with locked(tmp_path, ""), other, locked(tmp_path, ""):
        pass
    assert "SIGKILL" in run_in_process(functools.partial(hold, tmp_path), lambda _: None)
    with locked(tmp_path, ""):
        assert f"process {os.getpid()} on" in (tmp_path / LOCK).read_text(encoding="utf-8")


def test_a_fork_that_outlives_the_locker_does_not_hold_the_lock(tmp_path: Path) -> None:
    """For example a data loader's worker, which inherits all open files."""
    (started, says_started), (may_end, says_may_end) = os.pipe(), os.pipe()
    with locked(tmp_path, ""):
        fork = os.fork()
        if fork == 0:
            os.close(says_may_end)
            os.write(says_started, b".")
            os.read(may_end, 1)  # wait until the other end is closed
            os._exit(0)
        os.read(started, 1)
    with locked(tmp_path, ""):
        os.close(says_may_end)
    assert os.waitpid(fork, 0)[1] == 0
    for end in (started, says_started, may_end):
        os.close(end)


def test_a_fork_that_leaves_the_lock_context_closes_no_other_file(tmp_path: Path) -> None:
    """Its next file gets the descriptor number that the lock's had."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(locked(tmp_path, ""))
        fork = os.fork()
        if fork == 0:
            try:
                descriptor = os.open(os.devnull, os.O_RDONLY)
                stack.close()
                os.fstat(descriptor)
                os._exit(0)
            finally:
                os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(fork, 0)[1]) == 0


def test_a_file_system_without_locks_is_reported_once_and_tolerated(tmp_path, monkeypatch, caplog) -> None:
    def refuse(file: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with caplog.at_level(logging.WARNING), locked(tmp_path, ""):
        pass
    (said,) = caplog.messages
    assert said.startswith(f"{tmp_path} lies on a file system without locks (No locks available)")


def test_a_link_in_place_of_the_lock_file_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").write_text("kept", encoding="utf-8")
    (tmp_path / LOCK).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UserError, match=LOCK), locked(tmp_path, ""):
        pass
    assert (tmp_path / "elsewhere").read_text(encoding="utf-8") == "kept"
