"""An atomic write goes to its own path, whatever is there already and whoever writes concurrently."""

from __future__ import annotations

import threading
from pathlib import Path

from rl_training.records.files.atomic_write import write_atomically


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
