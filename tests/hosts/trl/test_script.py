"""A script around `attach`: the arguments it may pass, Ctrl-C, and several processes that run its last line."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import forks
import pytest
from hydra.utils import instantiate
from omegaconf import OmegaConf
from trainers import FEW, trainer_maker
from trl import GRPOTrainer

from rl_training import Records, SimpleEntropyProbe, attach, measured_loop, print_summary, write_report
from rl_training.probes import BUILT_IN
from rl_training.records import metrics
from rl_training.records.jsonl import read_estimates

PLAIN: dict[str, Any] = {"trainer_class": GRPOTrainer, "use_cpu": True, "bf16": False, **FEW}


def test_attach_accepts_one_probe_name_and_records_alone(make_trainer, tmp_path: Path) -> None:
    trainer = make_trainer(**PLAIN, max_steps=1)
    with attach(trainer, Records(tmp_path / "logs"), "ess"):
        trainer.train()
    assert {row["probe"] for row in read_estimates(tmp_path / "logs")} >= {"ess"}
    assert [path.name for path in tmp_path.glob("*.yaml")] == []


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            {"probes": SimpleEntropyProbe},
            "rl_training.Probe",
        ),
        ({"probes": "entropy"}, "'entropy' "),
        ({"probes": None}, "None "),
        ({"folder": True}, "folder=True: "),
        ({"folder": [SimpleEntropyProbe()]}, "attach(trainer, FOLDER, probes=...)"),
        ({"metrics": "few"}, "metrics='few': "),
    ],
)
def test_invalid_arguments_of_attach_are_reported_in_one_line(make_trainer, given: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        attach(make_trainer(**PLAIN), **given)


def test_probes_by_name_have_the_defaults_of_the_command_line() -> None:
    conf = Path(__file__).parents[3] / "conf" / "probe"
    for name, probe in BUILT_IN.items():
        options = OmegaConf.load(conf / f"{name}.yaml")[name]
        by_command, by_name = (vars(made) for made in (instantiate(options), probe()))
        assert [key for key in by_name if is_plain(by_name[key]) and by_name[key] != by_command[key]] == [], name


def is_plain(value: Any) -> bool:
    return isinstance(value, str | int | float | list | tuple | None) and value == value  # not nan


def test_a_probe_among_callbacks_is_refused_with_the_attach_call_to_use(make_trainer) -> None:
    place = re.escape("attach(trainer, FOLDER, [SimpleEntropyProbe(...)])")
    with pytest.raises(AttributeError, match=place):
        make_trainer(**PLAIN, trainer_arguments={"callbacks": [SimpleEntropyProbe()]})
    trainer = make_trainer(**PLAIN)
    trainer.add_callback(SimpleEntropyProbe)
    with pytest.raises(AttributeError, match=place):
        trainer.train()


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda trainer: attach(trainer, "run", "simpel"), "simple?"),
        (lambda trainer: attach(trainer, "run", "simple,ess"), "['simple', 'ess']"),
        (lambda trainer: attach(trainer, "run", target_kl=2e-3), "attach(target_kl=...): "),
        (lambda trainer: attach(trainer, "run", target_kl=2e-3), "target_kl_share?"),
        (lambda trainer: attach("run", trainer), "attach(trainer, 'run')"),
        (lambda trainer: attach("run"), "str: attach(trainer, FOLDER)"),
        (lambda trainer: SimpleEntropyProbe(evry=5), "SimpleEntropyProbe(evry=...): "),
        (lambda trainer: measured_loop(None, None, "ess", response_per_prompt=4), "responses_per_prompt?"),
    ],
)  # fmt: skip
def test_a_mistaken_name_is_answered_with_the_one_that_was_meant(make_trainer, call: Any, said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)) as raised:
        call(make_trainer(**PLAIN))
    assert len(str(raised.value).splitlines()) == 1


def test_a_block_in_which_nothing_is_trained_says_so(make_trainer, tmp_path: Path, caplog) -> None:
    trainer = make_trainer(**PLAIN, max_steps=1)
    with attach(trainer, tmp_path / "run", "ess"):
        trainer.train()
    assert "nothing was trained" not in caplog.text
    with attach(make_trainer(**PLAIN), tmp_path / "run", "ess"):
        pass
    assert caplog.messages[-1].startswith("nothing was trained inside of this `with attach(...)`")
    assert not (tmp_path / "run-2").exists()


def test_a_folder_that_holds_several_runs_is_named_with_them(tmp_path: Path) -> None:
    for number in range(7):
        Records(tmp_path / f"run_{number}" / "logs").write_metrics(1, {"reward": 0.5})
    listed = ", ".join(str(tmp_path / f"run_{number}") for number in range(5))
    for read in (metrics, write_report):
        with pytest.raises(ValueError, match=rf"^{re.escape(str(tmp_path))} .*{re.escape(listed)} .*\b2\b"):
            read(tmp_path)


@pytest.mark.parametrize("steps", [0, 1])
def test_ctrl_c_ends_the_block_and_says_where_the_report_is(make_trainer, tmp_path: Path, steps: int) -> None:
    trainer, logs = make_trainer(**PLAIN, max_steps=2), tmp_path / "my_run" / "logs"
    forward = trainer.model.forward

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        if trainer.state.global_step == steps:
            raise KeyboardInterrupt
        return forward(*args, **kwargs)

    trainer.model.forward = interrupted
    with pytest.raises(KeyboardInterrupt) as ended, attach(trainer, Records(logs), "ess"):
        trainer.train()
    (note,) = ended.value.__notes__
    if steps:
        assert note == (
            f"what was measured until then is in {logs}; the report of it: rl-training report {logs.parent}, or "
            f"write_report('{logs.parent}')"
        )
        assert {row["step"] for row in read_estimates(logs)} == {1}
        assert write_report(logs.parent).is_file()
    else:
        assert note == f"interrupted before a step was logged: {logs} holds no numbers"
    trainer.model.forward = forward
    trainer.train()  # like a trainer that was never measured


def quickstart(rank: int, folder: Path) -> None:
    """Run the README's lines, as each process of a launch does."""
    trainer = trainer_maker(folder / str(rank))(**PLAIN, max_steps=1)
    with attach(trainer, folder / "run") as attached:
        trainer.train()
    assert attached.folder == folder / "run"
    trainer = trainer_maker(folder / str(rank))(**PLAIN, max_steps=1)
    with attach(trainer, folder / "run") as attached:
        trainer.train()
    assert attached.folder == folder / "run-2"  # on all processes
    print_summary(folder / "run")


def test_only_one_of_two_processes_writes_the_report_of_the_quickstart(tmp_path: Path) -> None:
    forks.start_ranks(quickstart, (tmp_path,), 2)
    for run in ("run", "run-2"):
        assert sorted(path.name for path in (tmp_path / run / "report").iterdir()) == ["report.html"]
        assert {row["world_size"] for row in read_estimates(tmp_path / run / "logs")} == {2}


def test_advice_to_train_without_probes_covers_scripts_and_commands(make_trainer) -> None:
    trainer = make_trainer(**PLAIN)
    trainer.args.fp16 = True
    with pytest.raises(ValueError, match=r"no attach\b.*\bprobe=none\b"):
        attach(trainer, probes=[SimpleEntropyProbe()])
