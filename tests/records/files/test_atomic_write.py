"""An atomic write goes to its own path, whatever is there already and whoever writes concurrently."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import forks
import pytest

from rl_training.records.files.atomic_write import SCRATCH, write_atomically


def test_a_planted_link_cannot_redirect_a_write(tmp_path: Path) -> None:
    """Links at the page's own path, and at a temporary name that could be guessed."""
    letter = tmp_path / "letter"
    letter.write_text("mine")
    page = tmp_path / "run" / "report.html"
    page.parent.mkdir()
    for name in ("report.html", "report.html.tmp"):
        (page.parent / name).symlink_to(letter)
    write_atomically({page: b"a page"})
    assert letter.read_text() == "mine"
    assert not page.is_symlink()
    assert page.read_bytes() == b"a page"


def test_two_writers_of_one_file_do_not_mix(tmp_path: Path) -> None:
    page, failed = tmp_path / "report.html", []

    def write(letter: bytes) -> None:
        try:
            for _ in range(50):
                write_atomically({page: letter * 100_000})
        except OSError as error:  # one writer has moved the other's file away
            failed.append(error)

    threads = [threading.Thread(target=write, args=(letter,)) for letter in (b"a", b"b")]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        if page.is_file():
            assert page.read_bytes() in (b"a" * 100_000, b"b" * 100_000)
    assert failed == []
    assert list(tmp_path.iterdir()) == [page]


def killed_while_it_writes(page: Path) -> None:
    def parts() -> Iterator[bytes]:
        yield b"half a "
        os.kill(os.getpid(), signal.SIGKILL)

    write_atomically({page: parts()})


def test_the_temporary_file_of_a_killed_write_is_removed_by_the_next_write_into_its_folder(tmp_path: Path) -> None:
    """Whatever it writes. One that is still being written stays, and so does anything that only looks like one."""
    page, other, kept = tmp_path / "report.html", tmp_path / "other.csv", tmp_path / ".report.html.tmp"
    kept.write_text("mine")
    with pytest.raises(RuntimeError, match=f"it ended with -{signal.SIGKILL.value}"):
        forks.in_fork(killed_while_it_writes, page)
    (left,) = set(tmp_path.iterdir()) - {kept}
    assert SCRATCH.fullmatch(left.name)

    def parts() -> Iterator[bytes]:
        yield b"a "
        write_atomically({other: b"1"})  # while the page is being written
        yield b"page"

    write_atomically({page: parts()})
    assert set(tmp_path.iterdir()) == {page, other, kept}
    assert page.read_bytes() == b"a page"


def test_a_failed_write_leaves_no_temporary_file_and_keeps_the_old_content(tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    write_atomically({page: b"old"})

    def parts() -> Iterator[bytes]:
        yield b"new"
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_atomically({tmp_path / "other": b"1", page: parts()})
    assert [*tmp_path.iterdir()] == [page]
    assert page.read_bytes() == b"old"
