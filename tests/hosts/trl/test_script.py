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

from rl_training import Records, SimpleEntropyProbe, attach, print_summary, write_report
from rl_training.probes import BUILT_IN
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
            "is no probe: give the name of one, such as 'simple', or an object of rl_training.Probe",
        ),
        ({"probes": "entropy"}, "'entropy' names no probe: there are simple, interventions, measured"),
        ({"probes": None}, "None is no probe"),
        ({"folder": True}, "folder=True: give a folder, such as 'runs/my_run', or Records(FOLDER)"),
        ({"folder": [SimpleEntropyProbe()]}, "probes go by name, attach(trainer, FOLDER, probes=...)"),
        ({"metrics": "few"}, "metrics='few': give 'core', at most 15 numbers, or 'all'"),
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
    place = re.escape("is a probe, not a callback: use attach(trainer, FOLDER, [SimpleEntropyProbe(...)])")
    with pytest.raises(ValueError, match=place):
        make_trainer(**PLAIN, trainer_arguments={"callbacks": [SimpleEntropyProbe()]})
    trainer = make_trainer(**PLAIN)
    trainer.add_callback(SimpleEntropyProbe)
    with pytest.raises(ValueError, match=place):
        trainer.train()


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
    with pytest.raises(ValueError, match=re.escape("or train without probes (no attach; probe=none)")):
        attach(trainer, probes=[SimpleEntropyProbe()])
