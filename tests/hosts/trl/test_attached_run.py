"""The one call around any trainer: the folder it leaves, however training ends, and the messages it prints."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import forks
import pytest
import yaml
from safetensors.torch import load_file, save_file
from since import since
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tqdm import tqdm
from trainers import FEW, differing, outcome, trainer_maker
from transformers import TrainerCallback
from transformers.integrations import integration_utils
from trl import GRPOTrainer

from rl_training import EffectiveSampleSizeProbe, Estimate, Probe, Reading, Records, attach, write_report
from rl_training.hosts.trl.announcements import hide_progress_bar
from rl_training.hosts.trl.members import METHODS
from rl_training.hosts.trl.output import end_request
from rl_training.hosts.trl.output.end_request import EndRequest
from rl_training.hosts.trl.settings.recorded import settings_of_trainer
from rl_training.hosts.trl.versions import TESTED
from rl_training.probes import InterventionsProbe, SimpleEntropyProbe
from rl_training.records.checkpoint_states import PROBE_STATES, read_notes
from rl_training.records.files.lock import locked
from rl_training.records.jsonl import read_estimates, read_metrics
from rl_training.records.made_by import is_of_attached_run

PLAIN: dict[str, Any] = {"trainer_class": GRPOTrainer, "use_cpu": True, "bf16": False, **FEW}
EIGHT = PLAIN | {"gradient_accumulation_steps": 8}
FILES = {"config.yaml", "logs/metrics.jsonl", "logs/probes.jsonl", "report/report.html"}


def files_in(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()} - {".lock", "logs/run_id"}


class Calling(TrainerCallback):
    """Calls a function at the end of each step."""

    def __init__(self, what: Callable[[], Any]) -> None:
        self.what = what

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.what()


class Raising(TrainerCallback):
    """Raises at the end of the first step."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def on_step_begin(self, args: Any, state: Any, *others: Any, **kwargs: Any) -> None:
        if state.global_step == 1:
            raise self.error


def test_settings_distinguish_reward_functions_of_the_same_name_by_their_source(make_trainer) -> None:
    """Otherwise a comparison would mistake runs with two rewards for runs with two seeds."""

    def scored(completions: list[str], **columns: Any) -> list[float]:
        return [float(len(completion)) for completion in completions]

    by_length = scored

    def scored(completions: list[str], **columns: Any) -> list[float]:
        return [float("7" in completion) for completion in completions]

    settings = []
    for reward in (by_length, by_length, scored):
        trainer = make_trainer(**PLAIN | {"reward": reward})
        trainer.create_optimizer()
        settings.append(settings_of_trainer(trainer, {})["data"])
    first, again, other = settings
    assert first == again
    assert {name for name in first if first[name] != other[name]} == {"rewards_source"}
    assert all(first["rewards_source"])


class Moves(TrainerCallback):
    """Changes the working directory, as rewards do that run code."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        os.chdir(self.folder)


def test_two_lines_leave_records_settings_and_a_report_with_predictions(
    make_trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog
) -> None:
    monkeypatch.chdir(tmp_path)
    trainer = make_trainer(**EIGHT, hub_token="hf_secret_of_mine")
    trainer.add_callback(Moves(tmp_path.parent))
    with attach(trainer, "run") as attached:
        trainer.train()
    assert files_in(tmp_path / "run") == FILES
    assert attached.latest["delta_h/forward"].stderr > 0.0
    config = (tmp_path / "run" / "config.yaml").read_text()
    assert "hf_secret_of_mine" not in config
    settings = yaml.safe_load(config)
    assert settings["trainer"]["class"] == "GRPOTrainer"
    assert settings["batch"] == {"sequences_per_step": 32, "processes": 1}
    assert settings["data"]["columns"] == ["prompt", "answer"]
    assert settings["data"]["rewards"] == ["graded"]
    assert {*settings["probes"]} == {"simple", "ess"}
    assert {"commit", "working_folder_commit", "libraries"} <= settings["provenance"].keys()
    first, *_, last = caplog.messages
    assert first.startswith("rl-training 0.1.0 with trl ")
    assert "one process trains and writes run; probes: simple, ess. Probes measure 8 folds" in first
    assert last == f"training has finished after 2 steps; the report: {tmp_path / 'run' / 'report' / 'report.html'}"


def test_the_first_line_does_not_collide_with_the_progress_bar(capsys) -> None:
    with tqdm(total=3, file=sys.stderr), hide_progress_bar():
        print("rl-training", file=sys.stderr)
    (row,) = [row for row in capsys.readouterr().err.split("\n") if "rl-training" in row]
    *_, cleared, line = row.split("\r")
    assert (cleared.strip(), line) == ("", "rl-training")


def test_with_records_alone_the_first_line_names_the_records_folder(make_trainer, tmp_path: Path, caplog) -> None:
    """`rl-training train` passes records like this."""
    make_trainer(**FEW, probes=[EffectiveSampleSizeProbe()], records=Records(tmp_path / "logs"), max_steps=1).train()
    assert f"one process trains and writes {tmp_path / 'logs'}; probes: ess" in caplog.messages[0]


@pytest.mark.parametrize(
    ("error", "how"),
    [
        (KeyboardInterrupt, "training was interrupted after 1 step"),
        (RuntimeError, "training has failed after 1 step (RuntimeError)"),
    ],
)
@pytest.mark.parametrize("is_block", [True, False])
def test_a_users_error_in_the_block_is_raised_unchanged_after_the_report_is_written(
    make_trainer, tmp_path: Path, caplog, error: type[BaseException], how: str, is_block: bool
) -> None:
    trainer = make_trainer(**PLAIN)
    raised = error("of the user's")
    trainer.add_callback(Raising(raised))
    attached = attach(trainer, tmp_path / "run", "ess")
    with pytest.raises(error) as caught, attached if is_block else contextlib.nullcontext():
        trainer.train()
    line = f"{how}; the report: {tmp_path / 'run' / 'report' / 'report.html'}"
    assert caught.value is raised
    assert raised.__notes__ == [line]
    assert caplog.messages[-1] == line
    assert files_in(tmp_path / "run") == FILES
    assert METHODS.keys().isdisjoint(vars(trainer))  # no method is still wrapped


def test_the_last_line_after_ctrl_c_says_how_to_resume(make_trainer, tmp_path: Path, caplog) -> None:
    """It is the exception's note, which Python shows below the traceback."""
    saving = PLAIN | {"save_strategy": "steps", "save_steps": 1}
    trainer = make_trainer(**saving)
    (Path(trainer.args.output_dir) / "checkpoint-7").mkdir(parents=True)  # of an earlier training
    trainer.add_callback(Raising(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt) as ended, attach(trainer, tmp_path / "run", "ess"):
        trainer.train()
    (note,) = ended.value.__notes__
    checkpoint = str(Path(trainer.args.output_dir) / "checkpoint-1")
    call = f"trainer.train(resume_from_checkpoint={checkpoint!r})"
    assert note.endswith(f"report.html; to continue from step 1: {call}")
    again = make_trainer(**saving)
    with attach(again, tmp_path / "run", "ess") as attached:
        eval(call, {"trainer": again})
    assert [row["step"] for row in read_metrics(attached.folder / "logs")] == [1, 2]
    assert "to continue" not in caplog.messages[-1]  # it has finished


class Terminating(TrainerCallback):
    """Sends the process SIGTERM in the middle of its first step, or at the first batch of an evaluation."""

    def __init__(self, where: str = "a step") -> None:
        self.where = where

    def on_pre_optimizer_step(self, args: Any, state: Any, *others: Any, **kwargs: Any) -> None:
        if state.global_step == 0 and self.where != "an evaluation":
            os.kill(os.getpid(), signal.SIGTERM)

    def on_prediction_step(self, *others: Any, **kwargs: Any) -> None:
        print("a batch is evaluated", file=sys.stderr)
        if self.where == "an evaluation":
            os.kill(os.getpid(), signal.SIGTERM)


def call_from_a_later_handler() -> None:
    before: Any = signal.getsignal(signal.SIGTERM)
    signal.signal(signal.SIGTERM, lambda *of_signal: before(*of_signal))


class SetsHandler(TrainerCallback):
    """Sets a handler once training listens."""

    def on_step_begin(self, *others: Any, **kwargs: Any) -> None:
        call_from_a_later_handler()


def trained_until_told_to_end(folder: Path, where: str) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # undo what earlier tests have set
    os.dup2(os.open(folder / "stderr", os.O_WRONLY | os.O_CREAT), 2)
    logging.getLogger().addHandler(logging.StreamHandler())
    settings: dict[str, Any] = {"max_steps": 1 if where == "the last step" else 2}
    make = trainer_maker(folder)
    if where == "an evaluation":
        rows = make(**PLAIN).train_dataset.select(range(8))
        settings |= {"eval_strategy": "steps", "eval_steps": 1, "trainer_arguments": {"eval_dataset": rows}}
    trainer = make(**PLAIN, **settings)
    trainer.add_callback(Terminating(where))
    with attach(trainer, folder / "run", "ess", strict=False) as attached:
        if where == "a step behind a later handler":
            trainer.add_callback(SetsHandler())
        if where == "a step whose line fails":
            flush = attached._log.flush
            attached._log.flush = lambda: flush() if trainer.state.global_step == 0 else {}["line"]
        trainer.train()
        print("the block went on", file=sys.stderr)


@pytest.mark.parametrize(
    "where", ["a step", "a step behind a later handler", "a step whose line fails", "an evaluation", "the last step"]
)
def test_a_process_told_to_end_finishes_its_step_and_report_and_dies_by_that_signal(tmp_path: Path, where: str) -> None:
    """An evaluation is not finished. A line says if anything could not be written."""
    with pytest.raises(RuntimeError, match=f" -{signal.SIGTERM.value}$"):
        forks.in_fork(trained_until_told_to_end, tmp_path, where)
    said = (tmp_path / "stderr").read_text()
    assert said.count("SIGTERM: the report is written when this step ends") == 1
    assert "the block went on" not in said
    assert said.count("a batch is evaluated") == (where == "an evaluation")
    ended = "has finished" if where == "the last step" else "was told to end (SIGTERM)"
    (line,) = (line for line in said.splitlines() if line.endswith(f"; the report: {tmp_path}/run/report/report.html"))
    assert line.startswith(f"training {ended} after 1 step; ")
    assert ("in the records and the report (KeyError: 'line')" in said) == (where == "a step whose line fails")
    assert files_in(tmp_path / "run") >= FILES
    assert [(row["step"], "loss" in row) for row in read_metrics(tmp_path / "run" / "logs")] == [(1, True)]


def told_twice_to_end(folder: Path) -> None:
    def tell_again(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "os.rename" and str(arguments[1]).endswith("report.html"):
            os.kill(os.getpid(), signal.SIGTERM)

    end_request.ECHO_SECONDS = 0.0
    sys.addaudithook(tell_again)
    trained_until_told_to_end(folder, "a step")


def test_a_second_signal_leaves_a_folder_from_which_its_line_says_how_to_write_the_report(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=f" {128 + signal.SIGTERM.value}$"):
        forks.in_fork(told_twice_to_end, tmp_path)
    run = tmp_path / "run"
    assert (
        f"ended by SIGTERM before the report was written: rl-training report {run}" in (tmp_path / "stderr").read_text()
    )
    assert [row["step"] for row in read_metrics(run / "logs")] == [1]
    write_report(run)
    assert files_in(run) == FILES


def trained_by_two_until_one_is_told_to_end(rank: int, folder: Path, max_steps: int) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    trainer = trainer_maker(folder / str(rank))(**PLAIN, max_steps=max_steps)
    if rank == 1:
        trainer.add_callback(Terminating())
    with attach(trainer, folder / "run", "ess", strict=False):
        trainer.train()


def ends_of_two(folder: Path, *args: Any) -> list[tuple[int | None, bool]]:
    """Return the exit code of each process, the second one first, and whether there was a report when it ended."""
    ends = []
    for process in reversed(forks.begin_ranks(trained_by_two_until_one_is_told_to_end, (folder, *args), 2).processes):
        process.join()  # one after the other: the context would end the one when the other has ended
        ends.append((process.exitcode, (folder / "run" / "report" / "report.html").is_file()))
    return ends


@pytest.mark.parametrize("max_steps", [1, 2])
def test_a_signal_to_one_process_ends_all_of_them_after_the_same_step(tmp_path: Path, max_steps: int) -> None:
    """Otherwise the first process would wait in the next step, or later, for the one that has ended.

    None ends before the report is written: a launcher would then send the others a second signal.
    """
    assert forks.in_fork(ends_of_two, tmp_path, max_steps) == 2 * [(-signal.SIGTERM, True)]
    assert files_in(tmp_path / "run") == FILES
    assert [row["step"] for row in read_metrics(tmp_path / "run" / "logs")] == [1]


def told_to_end_after_listening() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    with EndRequest([signal.SIGTERM], "waiting", ends_forks=True).listening():
        if (child := os.fork()) == 0:
            os.kill(os.getpid(), signal.SIGTERM)
            os._exit(0)
        assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGTERM
        call_from_a_later_handler()
    os.kill(os.getpid(), signal.SIGTERM)


def test_a_fork_ends_at_once_and_so_does_a_process_that_trains_no_more(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=f" -{signal.SIGTERM.value}$"):
        forks.in_fork(told_to_end_after_listening)


def test_a_users_signal_handler_stays_and_training_goes_on_if_it_returns(make_trainer, tmp_path: Path, caplog) -> None:
    """In a thread, where Python forbids handlers, none is set."""
    seen: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda signum, frame: seen.append(signum))
    try:
        handler = signal.getsignal(signal.SIGTERM)
        trainer = make_trainer(**PLAIN)
        trainer.add_callback(Terminating())
        with attach(trainer, tmp_path / "run", "ess"):
            trainer.train()
        assert signal.getsignal(signal.SIGTERM) is handler
        assert seen == [signal.SIGTERM]
        page = tmp_path / "run" / "report" / "report.html"
        assert caplog.messages[-1] == f"training has finished after 2 steps; the report: {page}"
        waits = EndRequest([signal.SIGTERM], "waiting", ends_forks=True).listening()
        thread = threading.Thread(target=waits.__enter__)
        thread.start()
        thread.join()
        assert signal.getsignal(signal.SIGTERM) is handler
    finally:
        signal.signal(signal.SIGTERM, before)


def test_without_a_with_block_the_attachment_ends_with_the_training(make_trainer, tmp_path: Path) -> None:
    """A wrapper that the user has set since then stays."""
    trainer = make_trainer(**PLAIN)
    attached = attach(trainer, tmp_path / "run", "ess")
    ours, losses = trainer.compute_loss, []

    def theirs(*args: Any, **kwargs: Any) -> Any:
        losses.append(ours(*args, **kwargs))
        return losses[-1]

    trainer.compute_loss = theirs
    trainer.train()
    assert len(losses) == 4
    assert files_in(attached.folder) == FILES
    assert {name: vars(trainer)[name] for name in METHODS.keys() & vars(trainer)} == {"compute_loss": theirs}
    attach(trainer)
    with pytest.raises(ValueError, match=r"\bremove\(\)"):
        attach(trainer)


def test_an_error_before_training_leaves_no_folder(make_trainer, tmp_path: Path) -> None:
    with pytest.raises(NameError), attach(make_trainer(**PLAIN), tmp_path / "run"):
        raise NameError
    assert not (tmp_path / "run").exists()


# Ways to log trainings of four steps.
LOGGED: dict[str, dict[str, Any]] = {
    "the first step and the last": {"logging_first_step": True, "logging_steps": 4},
    "rollouts of two steps": {"steps_per_generation": 4, "logging_steps": 2},
    "epochs": {"logging_strategy": "epoch", "num_train_epochs": 2, "max_steps": -1},
}


def test_a_second_training_uses_the_next_free_folder_name_and_says_so(make_trainer, tmp_path: Path, caplog) -> None:
    """However they log, each has one line for each step, with TRL's metrics."""
    first = tmp_path / "run"
    four_prompts = make_trainer(**PLAIN).train_dataset.select(range(4))
    for number, (logged, settings) in enumerate(LOGGED.items(), start=1):
        trainer = make_trainer(**{**PLAIN, "max_steps": 4, "train_dataset": four_prompts, **settings})
        with attach(trainer, first, "ess") as attached:
            trainer.train()
        expected = first if number == 1 else tmp_path / f"run-{number}"
        assert attached.folder == expected
        assert files_in(expected) == FILES
        rows = read_metrics(expected / "logs")
        assert [row["step"] for row in rows] == [1, 2, 3, 4], logged
        for row in rows:
            assert {"reward", "entropy", "completions/mean_length", "num_tokens", "ess/importance"} <= row.keys(), (
                logged
            )
        at_log = [row["step"] for row in trainer.state.log_history if "loss" in row]
        assert [row["step"] for row in rows if "loss" in row] == at_log, logged
    assert f"{first} holds another training, so this one is written to {tmp_path / 'run-3'}" in caplog.messages


def test_two_trainings_in_one_block_leave_one_run_each(make_trainer, tmp_path: Path, caplog) -> None:
    """Also if a resumed training fails between them, once its checkpoint is loaded and before it begins."""

    class Refusing(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, *others: Any, **kwargs: Any) -> None:
            if state.global_step:
                raise LookupError

    trainer = make_trainer(**PLAIN | {"save_strategy": "steps", "save_steps": 1}, max_steps=1)
    trainer.add_callback(Refusing())
    with attach(trainer, tmp_path / "run", "simple") as attached:
        trainer.train()
        with pytest.raises(LookupError):
            trainer.train(resume_from_checkpoint=True)
        trainer.train()
    assert attached.folder == tmp_path / "run-2"
    for folder in (tmp_path / "run", tmp_path / "run-2"):
        assert files_in(folder) == FILES
        assert [row["step"] for row in read_metrics(folder / "logs")] == [1]
        assert f"training has finished after 1 step; the report: {folder / 'report/report.html'}" in caplog.messages
    assert "not measured" not in caplog.text  # at the first step of either training


def test_a_training_whose_error_is_caught_in_the_block_counts_as_unfinished(
    make_trainer, tmp_path: Path, caplog
) -> None:
    """Each is closed: folder and signal are free again, even if the last line can no longer be written."""
    before = signal.getsignal(signal.SIGTERM)

    class Interrupting(TrainerCallback):
        def on_step_end(self, *others: Any, **kwargs: Any) -> None:
            raise KeyboardInterrupt

    interrupting = Interrupting()
    trainer = make_trainer(**PLAIN, max_steps=2)
    trainer.add_callback(interrupting)
    attached = attach(trainer, tmp_path / "run", "ess").__enter__()
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    trainer.remove_callback(interrupting)
    trainer.train()
    attached._log.add({"late": 1.0})
    metrics = attached.folder / "logs" / "metrics.jsonl"
    metrics.unlink()
    metrics.mkdir()
    attached.__exit__(None, None, None)
    assert "; the records lack lines of step 2; " in caplog.messages[-1]
    assert signal.getsignal(signal.SIGTERM) is before
    with locked(attached.folder, "it is locked"):
        pass
    said = [line.partition(";")[0] for line in caplog.messages if line.startswith("training ")]
    assert said == ["training was interrupted after 1 step", "training has finished after 2 steps"]


def test_a_training_that_starts_on_leftover_responses_of_an_interrupted_one_warns(make_trainer, caplog) -> None:
    class Interrupting(TrainerCallback):
        def on_substep_end(self, *others: Any, **kwargs: Any) -> None:
            raise KeyboardInterrupt

    interrupting = Interrupting()
    trainer = make_trainer(**PLAIN, max_steps=1)
    trainer.add_callback(interrupting)
    with pytest.raises(KeyboardInterrupt), attach(trainer, probes="ess"):
        trainer.train()
    trainer.remove_callback(interrupting)
    assert "Make a new trainer" not in caplog.text
    with attach(trainer, probes="ess"):
        trainer.train()
    assert "this trainer's last training ended within a step" in caplog.text


def test_a_training_that_a_callback_ends_within_a_step_leaves_no_step_to_the_next_one(make_trainer) -> None:
    class Stopping(TrainerCallback):
        def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            control.should_training_stop = True

    trainer = make_trainer(**PLAIN, max_steps=1)
    trainer.add_callback(Stopping())
    with attach(trainer, probes=()) as attached:
        trainer.train()
        assert not attached.driver.has_step


def test_leftover_responses_that_the_previous_training_learned_from_count_as_reused(make_trainer, caplog) -> None:
    trainer = make_trainer(**PLAIN, max_steps=1, num_iterations=2)
    for expected in (False, True):
        with attach(trainer, probes="gns") as attached:
            trainer.train()
        assert (attached.latest["gns/trace_step"].code == "reused") == expected
        assert ("ended before it had used up its responses" in caplog.text) == expected


def test_a_folder_with_a_foreign_config_yaml_is_not_touched(make_trainer, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("mine: true\n")
    trainer = make_trainer(**PLAIN, max_steps=1)
    with attach(trainer, tmp_path, "ess") as attached:
        trainer.train()
    assert attached.folder == tmp_path.with_name(f"{tmp_path.name}-2")
    assert (tmp_path / "config.yaml").read_text() == "mine: true\n"


def test_a_resumed_training_continues_in_its_own_folder(make_trainer, tmp_path: Path) -> None:
    """Also if its folder is not the first of that name."""
    saving = PLAIN | {"save_strategy": "steps", "save_steps": 1, "save_total_limit": None}
    for steps in (1, 2):
        trainer = make_trainer(**saving, max_steps=steps)
        with attach(trainer, tmp_path / "run", "ess"):
            trainer.train()
    trainer = make_trainer(**saving, max_steps=3)
    shown: list[str] = []
    trainer.add_callback(Calling(lambda: shown.append(attached._repr_html_())))
    with attach(trainer, tmp_path / "run", "ess") as attached:
        for step in (2, 3):
            trainer.args.max_steps = step + 1
            trainer.train(resume_from_checkpoint=str(Path(trainer.args.output_dir) / f"checkpoint-{step}"))
    assert attached.folder == tmp_path / "run-2"
    assert [row["step"] for row in read_metrics(tmp_path / "run-2" / "logs")] == [1, 2, 3, 4]
    assert all("its report is written when training ends" in text for text in shown)  # not the earlier training's
    assert [row["step"] for row in read_metrics(tmp_path / "run" / "logs")] == [1]


def test_a_resumed_training_writes_to_the_folder_that_the_user_named_and_to_no_other_trainings(
    make_trainer, tmp_path: Path, caplog
) -> None:
    """Whatever its first folder is called now, and whatever stands in the notes of its checkpoint."""
    saving = PLAIN | {"save_strategy": "steps", "save_steps": 1, "save_total_limit": None}
    for name in ("mine", "unrelated"):
        trainer = make_trainer(**saving, max_steps=2)
        with attach(trainer, tmp_path / "runs" / name, "ess"):
            trainer.train()
        shutil.copytree(Path(trainer.args.output_dir) / "checkpoint-1", tmp_path / f"of_{name}" / "checkpoint-1")
    runs = tmp_path / "runs"
    (runs / "mine").rename(runs / "renamed")
    (runs / "unrelated").rename(runs / "mine")  # where another training's records now lie
    kept = {path: path.read_bytes() for path in (runs / "mine").rglob("*") if path.is_file()}

    def resumed(folder: Path, run: str | None, last_step: int) -> Path | None:
        trainer = make_trainer(**saving, max_steps=last_step)
        checkpoint = shutil.copytree(tmp_path / "of_mine" / "checkpoint-1", Path(tempfile.mkdtemp()) / "checkpoint-1")
        if run is not None:
            tensors = load_file(checkpoint / PROBE_STATES)
            save_file(tensors, checkpoint / PROBE_STATES, read_notes(checkpoint) | {"run": run})
        with attach(trainer, folder, "ess") as attached:
            trainer.train(resume_from_checkpoint=str(checkpoint))
        return attached.folder

    for folder, run, expected, steps in (
        (runs / "renamed", None, runs / "renamed", [1, 2, 3]),
        (runs / "mine", None, runs / "mine-2", [2, 3]),
        (runs / "mine", None, runs / "mine-2", [2]),
        (runs / "new", None, runs / "new", [2]),
        (runs / "other", "../renamed", runs / "other", [2]),
        (runs / "another", "mine", runs / "another", [2]),
    ):
        assert resumed(folder, run, steps[-1]) == expected
        assert [row["step"] for row in read_metrics(expected / "logs")] == steps
    assert {path: path.read_bytes() for path in (runs / "mine").rglob("*") if path.is_file()} == kept
    assert f"so those of this one begin anew in {runs / 'mine-2'}" in caplog.text


class Own(Probe):
    name = "own"

    def __init__(self, every: int = 1, layers: Any = (), hooks: Any = ()) -> None:
        super().__init__(every)
        self.layers = layers
        self.hooks = hooks

    def measure(self, ctx: Any, state: Any) -> Reading:
        return Reading(measured={"own/first": Estimate(1.0), "own/second": Estimate(2.0)})


def test_the_trainer_logs_core_estimates_and_the_records_hold_all_at_each_step(make_trainer, tmp_path: Path) -> None:
    """Whatever logging_steps is; TRL's default is 10. The settings hold the options of each probe as given."""
    trainer = make_trainer(**EIGHT, max_steps=2, logging_steps=2, report_to=["tensorboard"])
    (tmp_path / "my.py").write_text("def softer(loss, strength):\n    return loss.weights\n")
    which = ["psr", f"{tmp_path / 'my.py'}:softer"]
    simple = SimpleEntropyProbe(fold_dtype="float32")
    probes = [simple, InterventionsProbe(iter(which)), "measured", "gns", "ess", "sampler", "covariance"]
    probes.append(Own(layers=[0, ("first", None)], hooks=["first", [object()]]))
    with attach(trainer, tmp_path / "run", probes):
        trainer.train()
    assert is_of_attached_run(tmp_path / "run")
    settings = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["probes"]
    assert settings["interventions"]["which"] == which
    assert settings["simple"]["fold_dtype"] == "float32"
    assert settings["simple"]["error_decay"] == settings["measured"]["error_decay"] == 0.5
    own = {"class": "Own", "every": 1, "layers": [0, ["first", None]]}
    assert settings["own"] == own  # hooks have no text that another run could have too
    rows = read_metrics(tmp_path / "run" / "logs")
    estimated = {row["name"] for row in read_estimates(tmp_path / "run" / "logs")}
    ours = estimated | {f"{name}_se" for name in estimated} | {"probe_cost/fraction_of_step"}
    logged, _ = trainer.state.log_history
    shown = ours & logged.keys()
    assert len(shown) <= 15
    assert {"delta_h/forward", "delta_h/forward_se", "entropy/token", "delta_h/cumulative_predicted"} <= shown
    assert {"ess/advantage_fraction", "gns/batch_ratio", "measured/delta_h", "own/first"} <= shown
    assert "own/second" not in shown
    assert [row["step"] for row in rows] == [1, 2]
    for row in rows:
        assert {"reward", "own/second", "delta_h/forward"} <= row.keys()
    assert (rows[0]["reward"] + rows[1]["reward"]) / 2 == pytest.approx(logged["reward"])
    assert {"loss", "learning_rate"} <= rows[1].keys()
    (file,) = Path(trainer.args.output_dir).glob("runs/*/events*")
    events = EventAccumulator(str(file)).Reload().Tags()["scalars"]
    assert {name for name in events if not name.startswith("train/")} == shown
    sections = sorted({name.partition("/")[0] for name in events} - {"covariance"})
    assert sections[:2] == ["delta_h", "entropy"]  # TensorBoard opens the first sections
    assert integration_utils.rewrite_logs({"delta_h/forward": 0.0}) == {"train/delta_h/forward": 0.0}  # as before


def test_the_versions_called_tested_are_those_of_the_constraints_file() -> None:
    lines = (Path(__file__).parents[3] / "constraints.txt").read_text().splitlines()
    pinned = dict(line.split("==") for line in lines if "==" in line)
    assert {name: ".".join(pinned[name].split(".")[:2]) for name in TESTED} == TESTED


@pytest.mark.parametrize(
    "settings",
    [
        {"loss_type": "bnpo"},  # a mean over each microbatch's tokens
        pytest.param({"entropy_coef": 0.1}, marks=since("trl 1.8.0")),
        {"top_entropy_quantile": 0.5},
        {"steps_per_generation": 4},  # two steps train on each generation
    ],
    ids=str,
)
def test_where_row_order_changes_more_than_rounding_the_default_keeps_trls_order(make_trainer, settings: Any) -> None:
    expected, differs = outcome(make_trainer(**PLAIN, **settings)), []
    for chosen in ({}, {"whole_prompts": True}):
        trainer = make_trainer(**PLAIN, **settings)
        with attach(trainer, probes="ess", **chosen):
            differs.append(bool(differing(outcome(trainer), expected)))
    assert differs == [False, True]
