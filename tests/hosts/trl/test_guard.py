"""A probe's error never ends training: it only ends measuring."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import forks
import pytest
import torch
from trainers import FEW, Outcome, differing, outcome, trainer_maker
from transformers import PrinterCallback, TrainerCallback
from trl import GRPOTrainer

from rl_training import Estimate, Probe, Reading, attach
from rl_training.engine.driver import StepDriver
from rl_training.engine.fold_recorder import FoldRecorder
from rl_training.hosts.trl import training_callback
from rl_training.hosts.trl.output import attached_run
from rl_training.hosts.trl.trainer_log import TrainerLog
from rl_training.records.failure import FAILURE_FILE
from rl_training.records.jsonl import read_estimates, read_metrics
from rl_training.records.report.opening import opening
from rl_training.records.table.reading import read_run
from rl_training.step.exchange import Exchange
from rl_training.step.needs import Need

PLAIN: dict[str, Any] = {"trainer_class": GRPOTrainer, "use_cpu": True, "bf16": False, **FEW, "max_steps": 3}


class Failing(Probe):
    """Fails in the middle of one of its hooks at step 2."""

    name = "failing"
    needs = Need.FOLD_GRADIENTS

    def __init__(self, hook: str) -> None:
        super().__init__()
        self.hook = hook

    def _at(self, hook: str, number: int) -> None:
        if number == 2 and hook == self.hook:
            raise KeyError("api_key=of-the-user")

    def init(self) -> dict[str, Any]:
        return {"number": 0}

    def measure(self, ctx: Any, state: Any) -> Reading:
        ctx.policy.sample(2, seed=1)
        self._at("measure", ctx.step.number)
        number = "no number" if self.hook == "state" else ctx.step.number
        return Reading(measured={"failing/number": Estimate(float(ctx.step.number))}, state={"number": number})

    def after_step(self, ctx: Any, reading: Reading) -> Reading:
        self._at("after_step", ctx.step.number)
        return reading


@functools.cache
def unmeasured() -> Outcome:
    """Return the outcome of the training without probes."""
    with tempfile.TemporaryDirectory() as folder, attach(trainer_maker(Path(folder))(**PLAIN), probes=()) as bare:
        return outcome(bare._trainer)


class FailingBackward(TrainerCallback):
    """Makes a gradient hook fail in the trainer's own backward, at the second microbatch of step 2."""

    def __init__(self) -> None:
        self.sent = 0

    def on_step_begin(self, args: Any, state: Any, *others: Any, **kwargs: Any) -> None:
        if state.global_step == 1:
            send = Exchange.send

            def failing_send(*args: Any) -> None:
                self.sent += 1
                if self.sent == 2:
                    Exchange.send = send  # type: ignore[method-assign]
                    raise KeyError("api_key=of-the-user")
                send(*args)

            Exchange.send = failing_send  # type: ignore[method-assign]


def fail_as(name: str) -> None:
    raise KeyError(f"password={name}")


class OddScores(tuple):
    """Scores that a loss can unpack, and whose number cannot be read."""

    def __len__(self) -> int:
        raise KeyError("api_key=of-the-user")


class WithOddScores(GRPOTrainer):
    """Its forward pass returns odd scores at step 2."""

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
        scores = super()._get_per_token_logps_and_entropies(*args, **kwargs)
        return OddScores(scores) if self.state.global_step == 1 else scores


def fail_at_step_two(driver: StepDriver) -> bool:
    assert driver._open_step is not None
    if driver._open_step.number == 2:
        raise KeyError("api_key=of-the-user")
    return True


@pytest.mark.parametrize("hook", ["measure", "after_step", "backward", "forward pass", "needs scores"])
def test_an_error_in_a_probe_ends_measuring_and_training_goes_on_bitwise(
    make_trainer, tmp_path: Path, caplog, monkeypatch, hook: str
) -> None:
    expected = unmeasured()
    trainer = make_trainer(**PLAIN | {"trainer_class": WithOddScores if hook == "forward pass" else GRPOTrainer})
    if hook == "backward":
        trainer.add_callback(FailingBackward())
    if hook == "needs scores":
        monkeypatch.setattr(StepDriver, "needs_scores", property(fail_at_step_two))
    with attach(trainer, tmp_path / "run", [Failing(hook), "simple"], strict=False) as attached:
        assert differing(outcome(attached._trainer), expected) == []
        assert not any(p._backward_hooks for p in attached._trainer.model.parameters())
    logs = tmp_path / "run" / "logs"
    whose = "probe failing, " if hook in ("measure", "after_step") else ""
    why = f"measuring ended at step 2 by an error ({whose}KeyError: 'api_key=***'), and training went on"
    text = (logs / FAILURE_FILE).read_text()
    assert text.startswith(f"{why} without it\n")
    assert "Traceback" in text
    assert "of-the-user" not in text
    rows = [row for row in read_estimates(logs) if row["name"] in ("failing/number", "delta_h/forward")]
    assert [(row["step"], row["value"] == row["value"]) for row in rows if row["probe"] == "failing"] == [
        (1, True), (2, False), (3, False),
    ]  # fmt: skip
    assert {row["reason"] for row in rows if row["step"] > 1} == {attached.latest["failing/number"].reason}
    assert [row["step"] for row in read_metrics(logs)] == [1, 2, 3]
    said = [line for line in caplog.messages if "measuring ended" in line]
    assert len(said) == 2
    assert said[1].startswith("training has finished after 3 steps; measuring ended at step 2")
    assert said[1].endswith(str(tmp_path / "run" / "report" / "report.html"))
    headline = opening(read_run(tmp_path / "run")).headline
    assert headline.startswith(f"Measuring ended at step 2 by an error ({whose}KeyError")


@pytest.mark.parametrize("place", ["a probe's first state", "the buffers of gradients", "the settings"])
def test_an_error_while_measuring_begins_ends_measuring_and_not_training(
    make_trainer, tmp_path: Path, caplog, monkeypatch, place: str
) -> None:
    """As where the buffers do not fit into memory. Training goes on bitwise, and its own numbers are recorded."""
    expected = unmeasured()
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise error

    if place == "the buffers of gradients":
        monkeypatch.setattr(FoldRecorder, "__init__", fail)
    if place == "the settings":
        monkeypatch.setattr(training_callback, "settings_of_trainer", fail)
    probes = [Failing(""), "simple"]
    with attach(make_trainer(**PLAIN), tmp_path / "run", probes, strict=False) as attached:
        if place == "a probe's first state":
            monkeypatch.setattr(Failing, "init", fail)
        assert differing(outcome(attached._trainer), expected) == []
        assert not any(p._backward_hooks for p in attached._trainer.model.parameters())
    logs = tmp_path / "run" / "logs"
    assert [row["step"] for row in read_metrics(logs)] == [1, 2, 3]
    rows = read_estimates(logs)
    assert {row["step"] for row in rows} == {1, 2, 3}
    assert all("measuring ended before its first step by an error" in row["reason"] for row in rows)
    assert "OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB" in (logs / FAILURE_FILE).read_text()
    assert caplog.messages[-1].startswith("training has finished after 3 steps; measuring ended before its first step")
    assert opening(read_run(tmp_path / "run")).headline.startswith("Measuring ended before its first step by an error")
    with pytest.raises(torch.OutOfMemoryError), attach(make_trainer(**PLAIN), probes=probes, strict=True) as strict:
        strict._trainer.train()


def test_a_log_whose_numbers_cannot_be_chosen_is_printed_whole(make_trainer, monkeypatch, capsys) -> None:
    trainer = make_trainer(**PLAIN | {"max_steps": 2})
    trainer.add_callback(PrinterCallback())
    monkeypatch.setattr(TrainerLog, "_only_core", lambda self, logs: fail_as("core"))
    with attach(trainer, probes="simple", strict=False):
        trainer.train()
    printed = [line for line in capsys.readouterr().out.splitlines() if "'loss'" in line]
    assert ["delta_h/forward" in line for line in printed] == [True, False]


def test_an_error_in_one_training_does_not_end_measuring_in_the_next_one_of_its_block(make_trainer, tmp_path) -> None:
    failing = Failing("measure")
    with attach(make_trainer(**PLAIN), tmp_path / "run", failing, strict=False) as attached:
        attached._trainer.train()
        failing.hook = ""
        attached._trainer.train()
    numbers = [row["value"] for row in read_estimates(tmp_path / "run-2" / "logs") if row["probe"] == "failing"]
    assert numbers == [1.0, 2.0, 3.0]
    assert not (tmp_path / "run-2" / "logs" / FAILURE_FILE).exists()
    for name, says_so in (("run", True), ("run-2", False)):
        assert opening(read_run(tmp_path / name)).headline.startswith("Measuring ended at step 2") == says_so


def test_a_training_whose_folder_cannot_be_claimed_writes_nothing_and_goes_on(
    make_trainer, tmp_path: Path, monkeypatch, caplog
) -> None:
    """The folder that the attachment names is the first training's, and no longer locked."""
    with attach(make_trainer(**PLAIN), tmp_path / "run", "ess", strict=False) as attached:
        trainer = attached._trainer
        trainer.train()
        written_at = (tmp_path / "run" / "config.yaml").stat().st_mtime_ns
        monkeypatch.setattr(attached_run, "claim_folder", lambda *args: fail_as("claim"))
        trainer.args.max_steps = 1
        trainer.train()
        assert "report is written when training ends" in attached._repr_html_()  # not the first training's report
    assert (tmp_path / "run" / "config.yaml").stat().st_mtime_ns == written_at
    assert len(read_metrics(tmp_path / "run" / "logs")) == 3
    assert trainer.state.global_step == 1
    assert caplog.messages[-1].startswith("measuring ended before its first step by an error (KeyError")


def test_probe_states_that_cannot_be_saved_or_loaded_prevent_neither_a_checkpoint_nor_resuming_from_it(
    make_trainer, tmp_path: Path, monkeypatch
) -> None:
    trainer = make_trainer(**PLAIN | {"save_strategy": "steps", "save_steps": 2})
    with attach(trainer, probes=Failing("state"), strict=False):
        trainer.train()
    later = make_trainer(**PLAIN | {"max_steps": 4})
    with attach(later, tmp_path / "run", Failing(""), strict=False):
        monkeypatch.setattr(Failing, "init", lambda self: fail_as("init"))
        later.train(resume_from_checkpoint=True)
    assert later.state.global_step == 4
    logs = tmp_path / "run" / "logs"
    assert (logs / FAILURE_FILE).read_text().startswith("measuring ended before its first step by an error (probe fail")
    assert [row["step"] for row in read_metrics(logs)] == [4]
    assert {row["reason"][:15] for row in read_estimates(logs)} == {"measuring ended"}


class Diverges(GRPOTrainer):
    """Its loss fails at the second microbatch, while gradients of the first are watched."""

    num_losses = 0
    breaks: Any = None  # called before it fails

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        self.num_losses += 1
        if self.num_losses == 2:
            self.breaks()
            raise ValueError("of the user")
        return super().compute_loss(*args, **kwargs)


@pytest.mark.parametrize("strict", [False, True])
def test_a_training_that_fails_raises_its_own_error_even_if_measuring_fails_because_of_it(
    make_trainer, monkeypatch, strict: bool
) -> None:
    def breaks() -> None:
        for name in ("drop_backward", "fail_step", "close"):
            monkeypatch.setattr(StepDriver, name, lambda driver, name=name: fail_as(name))

    trainer = make_trainer(**PLAIN | {"trainer_class": Diverges})
    trainer.breaks = breaks
    attach(trainer, probes=Failing(""), strict=strict)
    with pytest.raises(ValueError, match="of the user") as raised:
        trainer.train()
    assert raised.value.__notes__ == ["measuring failed after this error (KeyError: 'password=***')"] * 3
    assert not {"train", "compute_loss"} & vars(trainer).keys()


def test_a_stop_iteration_of_a_reward_function_is_no_error_of_the_measuring(make_trainer) -> None:
    def reward(completions: list[str], **columns: Any) -> list[float]:
        return [next(iter(()))]

    trainer = make_trainer(**PLAIN | {"reward": reward})
    attach(trainer, probes=["ess"])
    with pytest.raises(StopIteration) as raised:
        trainer.train()
    assert ["reward function reward failed" in note for note in raised.value.__notes__] == [True]


def test_what_cannot_be_removed_after_a_training_does_not_end_the_script_that_goes_on_to_save_it(
    make_trainer, monkeypatch, caplog
) -> None:
    def failing_once_trained(method: Callable[[StepDriver], None]) -> Callable[[StepDriver], None]:
        return lambda driver: method(driver) if trainer.state.global_step == 0 else fail_as("removing")

    for name in ("end", "close"):
        monkeypatch.setattr(StepDriver, name, failing_once_trained(getattr(StepDriver, name)))
    trainer = make_trainer(**PLAIN | {"max_steps": 1})
    attach(trainer, probes=Failing(""), strict=False)
    trainer.train()
    attach(trainer, probes=Failing(""), strict=False).remove()
    assert not {"train", "compute_loss"} & vars(trainer).keys()
    said = [line for line in caplog.messages if "after measuring ended" in line or "measuring ended at" in line]
    assert said[0].startswith("measuring ended at step 1 by an error (KeyError")
    assert said[1].startswith("step 1: another error after measuring ended (KeyError")


def test_a_probes_error_is_raised_in_strict_mode_or_where_training_depends_on_it(make_trainer) -> None:
    for hook, options in (
        ("measure", {"strict": True}), ("backward", {"strict": True}),
        ("measure", {"strict": False, "target_kl_share": 2e-3}),
    ):  # fmt: skip
        trainer = make_trainer(**PLAIN)
        if hook == "backward":
            trainer.add_callback(FailingBackward())
        with pytest.raises(KeyError), attach(trainer, probes=Failing(hook), **options):
            trainer.train()


def of_two(rank: int, folder: Path) -> None:
    ends = "and the others cannot be told, so training ends"
    for hook, expected in (
        ("measure", f"a probe has failed on this process, {ends}"),
        ("backward", f"measuring has failed within this process's backward, {ends}"),
    ):
        trainer = trainer_maker(folder / str(rank))(**PLAIN)
        if hook == "backward":
            trainer.add_callback(FailingBackward())
        with pytest.raises(KeyError) as raised, attach(trainer, probes=Failing(hook), strict=False):
            trainer.train()
        assert raised.value.__notes__ == [expected]


def test_with_several_processes_a_probes_error_is_raised_with_the_reason(tmp_path: Path) -> None:
    forks.start_ranks(of_two, (tmp_path,), 2)


class Full(TrainerCallback):
    """Puts folders in the place of the records' files during step 2, like a disk that is full for a while."""

    def __init__(self, logs: Path) -> None:
        self.files = [logs / "probes.jsonl", logs / "metrics.jsonl"]

    def on_step_begin(self, args: Any, state: Any, *others: Any, **kwargs: Any) -> None:
        for file in self.files if state.global_step == 1 else ():
            file.rename(file.with_suffix(".kept"))
            file.mkdir()
        for file in self.files if state.global_step == 2 else ():
            file.rmdir()
            file.with_suffix(".kept").rename(file)


@pytest.mark.parametrize("logging_steps", [1, 3])
def test_records_that_cannot_be_written_for_a_while_lack_these_lines_and_end_neither_measuring_nor_training(
    make_trainer, tmp_path: Path, caplog, logging_steps: int
) -> None:
    """The line of a step that the trainer does not log is written when the next one begins."""
    trainer, logs = make_trainer(**PLAIN | {"logging_steps": logging_steps}), tmp_path / "run" / "logs"
    with attach(trainer, tmp_path / "run", ["ess", "gns"], strict=True) as attached:
        trainer.add_callback(Full(logs))
        trainer.train()
    assert trainer.state.global_step == 3
    assert [row["step"] for row in read_metrics(logs)] == [1, 3]
    estimates = read_estimates(logs)
    assert {(row["step"], row["probe"]) for row in estimates if row["probe"] != "engine"} == {
        (step, probe) for step in (1, 3) for probe in ("ess", "gns")
    }
    assert [row["value"] for row in estimates if row["name"] == "ess/importance"][-1] == (
        attached.latest["ess/importance"].value
    )
    told = [line for line in caplog.messages if "cannot be written" in line]
    assert len(told) == 1
    assert told[0].startswith(f"step 2: {logs / 'probes.jsonl'} cannot be written (Is a directory)")
    assert caplog.messages[-1].startswith("training has finished after 3 steps; the records lack lines of step 2; the")
    assert not (logs / FAILURE_FILE).exists()


def test_the_report_of_a_run_with_too_few_prompts_names_the_fix_below_the_verdict(make_trainer, tmp_path: Path) -> None:
    """As with TRL's defaults, whose steps have one prompt."""
    few = PLAIN | {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 1}
    trainer = make_trainer(**few)
    with attach(trainer, tmp_path / "run"):
        trainer.train()
    first = opening(read_run(tmp_path / "run"))
    assert first.further[0].startswith("No step has a prediction: a step has only one fold")
    assert "gradient_accumulation_steps=8 in GRPOConfig (8 times as many responses a step)" in first.further[0]
    assert first.advice.text.startswith("About entropy there is nothing to do")
