"""The process that evaluates text from a model: what it refuses, what a text may cost, and how it starts and ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rl_training.errors import UserError
from rl_training.tasks import guarded_worker
from rl_training.tasks.guarded_worker import GuardedWorker

ENDLESS = "9" * 10  # 9 to the power of that
RIGHT = ("power", "2"), "9"  # 81 is 0b1010001


@pytest.fixture(scope="module")
def kept() -> Iterator[GuardedWorker]:
    """Yield a worker shared by the tests that do not end it."""
    worker = GuardedWorker("careless_check", "install it")
    yield worker
    worker.close()


@pytest.fixture
def worker() -> Iterator[GuardedWorker]:
    """Yield a new worker for one test."""
    worker = GuardedWorker("careless_check", "install it")
    yield worker
    worker.close()


# What a text may do, and what it may cost.


def test_code_built_from_text_is_not_run(kept: GuardedWorker, tmp_path: Path) -> None:
    code = f"open({str(tmp_path / 'canary')!r}, 'w')"
    for text in ("1 + 1", code, f"(lambda: {code})()", f'f"{{{code}}}"'):
        answers = [kept.ask((way, text), 5.0) for way in ("eval", "exec", "compiled")]
        assert answers == ["refused: code made from text is not run here"] * 3
    assert list(tmp_path.iterdir()) == []


LINUX = pytest.mark.skipif(sys.platform != "linux", reason="the memory limit and /proc are Linux's")


@pytest.mark.parametrize("way", ["power", pytest.param("bytes", marks=LINUX)])
def test_an_endless_or_too_large_question_has_no_answer_and_the_next_one_has(kept: GuardedWorker, way: str) -> None:
    kept.start()
    started = time.monotonic()
    assert kept.ask((way, ENDLESS), 0.1) is None
    assert kept.ask(RIGHT[0], 5.0) == RIGHT[1]
    assert time.monotonic() - started < 10.0


@pytest.mark.parametrize("deadline", [0.2, 20.0])
def test_a_hostile_batch_ends_within_the_time_budget(kept: GuardedWorker, deadline: float) -> None:
    kept.start()
    questions = [("power", f"{ENDLESS}{n}") for n in range(40)] * 2
    started = time.monotonic()
    answers = kept.ask_all(questions, deadline_seconds=deadline, budget_seconds=0.2)
    assert time.monotonic() - started < 5.0  # without the budget it would be 8 s of deadlines, or 20 s for one
    assert answers == dict.fromkeys(questions)


def test_equal_questions_are_asked_once(kept: GuardedWorker) -> None:
    started = time.monotonic()
    answers = kept.ask_all([("power", ENDLESS)] * 100 + [RIGHT[0]], deadline_seconds=0.1, budget_seconds=20.0)
    assert answers == {("power", ENDLESS): None, RIGHT[0]: RIGHT[1]}
    assert time.monotonic() - started < 8.0


def test_no_question_starts_no_process(worker: GuardedWorker) -> None:
    assert worker.ask_all([], 1.0, 1.0) == {}
    assert worker.pid is None


@LINUX
def test_the_memory_of_the_process_is_limited(kept: GuardedWorker) -> None:
    kept.start()
    limits = Path(f"/proc/{kept.pid}/limits").read_text()
    (line,) = [line for line in limits.splitlines() if line.startswith("Max address space")]
    assert line.split()[3] == str(guarded_worker._MAX_WORKER_BYTES)


def test_printed_output_is_not_a_reply_and_no_training_library_is_imported(kept: GuardedWorker) -> None:
    assert kept.ask(("imported", ""), 5.0) == ""
    assert kept.ask(("imported", "\ud800\n\x00" + "9" * 10**6), 5.0) == ""


# The life of the process.


def _running(of: str, number: int) -> list[str]:
    """Return the states of processes chosen by -p PID or -s SESSION, without zombies, which init may reap late."""
    states = subprocess.run(["ps", "-o", "stat=", of, str(number)], capture_output=True, text=True, check=False)
    return [state for state in states.stdout.split() if not state.startswith("Z")]


SCRIPT = """
from rl_training.tasks.guarded_worker import GuardedWorker
worker = GuardedWorker("careless_check", "install it")
"""


def _python(script: str) -> subprocess.Popen[bytes]:
    path = os.pathsep.join(sys.path)
    return subprocess.Popen(
        [sys.executable, "-c", SCRIPT + script],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": path},
        start_new_session=True,
    )


def test_no_process_is_left_when_the_trainer_exits() -> None:
    with _python("assert worker.ask(('power', '2'), 5.0) == '9'; print(worker.pid)") as trainer:
        assert trainer.stdout is not None
        pid = int(trainer.stdout.readline())
        assert trainer.wait(20) == 0
    end = time.monotonic() + 20.0
    while _running("-p", pid) or _running("-s", trainer.pid):
        assert time.monotonic() < end
        time.sleep(0.05)


def test_no_process_is_left_when_the_trainer_is_killed_during_a_check() -> None:
    with _python(f"worker.start(); print(flush=True); worker.ask(('power', '{ENDLESS}'), 0.5)") as trainer:
        assert trainer.stdout is not None
        trainer.stdout.readline()
        end = time.monotonic() + 20.0
        while len(_running("-s", trainer.pid)) < 3:  # the trainer, the worker, and its child: the check has begun
            assert time.monotonic() < end
        trainer.kill()
    while _running("-s", trainer.pid):
        assert time.monotonic() < end
        time.sleep(0.05)


def test_a_forked_child_starts_its_own_process_and_does_not_touch_the_parents(worker: GuardedWorker) -> None:
    assert worker.ask(RIGHT[0], 5.0) == RIGHT[1]
    pid = worker.pid
    child = os.fork()
    if child == 0:
        apart = worker.ask(RIGHT[0], 5.0) == RIGHT[1] and worker.pid != pid
        worker.close()
        os._exit(0 if apart else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert worker.ask(RIGHT[0], 5.0) == RIGHT[1]
    assert worker.pid == pid


def test_a_process_that_died_between_checks_is_restarted(worker: GuardedWorker) -> None:
    pid = worker.start().pid
    os.kill(pid, signal.SIGKILL)
    while _running("-p", pid):
        time.sleep(0.01)
    assert worker.ask(RIGHT[0], 5.0) == RIGHT[1]
    assert worker.pid != pid


def test_a_late_reply_to_an_interrupted_question_is_not_used_for_the_next(worker: GuardedWorker) -> None:
    def interrupt(signum: int, frame: object) -> None:
        raise KeyboardInterrupt

    worker.start()
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        with pytest.raises(KeyboardInterrupt):
            worker.ask(("power", ENDLESS), 2.0)
    finally:
        signal.signal(signal.SIGALRM, before)
    answers = worker.ask_all([RIGHT[0], ("power", "3")], 5.0, 20.0)
    assert list(answers.values()) == [RIGHT[1], "12"]  # 729 is 0b1011011001


def test_a_module_that_cannot_be_imported_is_an_error_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_check.py").write_text("raise ImportError('no antlr here')\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UserError, match=r"no antlr here.*install it"):
        GuardedWorker("broken_check", "install it").ask(("power", "2"), 5.0)
