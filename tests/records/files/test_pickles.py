"""Files written by torch.save only yield tensors and numbers, and a checkpoint that contains more is refused."""

from __future__ import annotations

import enum
import itertools
import pickle
import sys
import types
from pathlib import Path

import numpy as np
import pytest
import torch
from foreign_runs import Canary, foreign_run
from safetensors.torch import save_file

from rl_training.records.checkpoint_flaws import find_flaw
from rl_training.records.files.pickles import OF_DEEPSPEED, STAGE, load_tensors


def test_shards_of_tensors_numbers_and_deepspeed_objects_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pickles may name DeepSpeed's three classes and its enumeration; none of them is instantiated or imported."""
    objects = {}
    for name in (*OF_DEEPSPEED, STAGE):
        module, _, kind = name.rpartition(".")
        for parent in itertools.accumulate(module.split("."), "{}.{}".format):
            monkeypatch.setitem(sys.modules, parent, sys.modules.get(parent) or types.ModuleType(parent))
        if name == STAGE:
            made, objects[kind] = (stage := enum.IntEnum(kind, {"two": 2}, module=module)), stage(2)
        else:
            made = type(kind, (), {"__module__": module})
            objects[kind] = made()
            objects[kind].cur_scale = 1.0
        monkeypatch.setattr(sys.modules[module], kind, made, raising=False)
    path = tmp_path / "shard.pt"
    shapes = {"w": torch.Size([2, 3])}
    torch.save({"weights": torch.ones(2, 3), "shapes": shapes, "step": 7, "objects": objects}, path)
    read = load_tensors(path)
    assert torch.equal(read["weights"], torch.ones(2, 3))
    assert (read["shapes"], read["step"], read["objects"]["ZeroStageEnum"]) == (shapes, 7, 2)
    assert not any(type(read["objects"][kind]) is type(made) for kind, made in objects.items())
    assert load_tensors(path, "meta")["weights"].is_meta


@pytest.mark.parametrize("inside", [dict, list, torch.Size])
def test_no_code_in_a_shard_is_run(tmp_path: Path, inside: type) -> None:
    """Neither an analysis nor DeepSpeed itself, which would build everything it names, loads it: it is refused."""
    canary, shard = tmp_path / "canary", tmp_path / "global_step1" / "rank_0_optim_states.pt"
    shard.parent.mkdir()
    if inside is torch.Size:  # a bare pickle, which torch.load also reads
        shard.write_bytes(pickle.dumps(Canary(canary)))
    else:
        torch.save({"a": Canary(canary)} if inside is dict else [torch.ones(1), Canary(canary)], shard)
    with pytest.raises(ValueError, match=rf"{shard} .*(builtins\.exec|tensors)"):
        load_tensors(shard)
    (tmp_path / "trainer_state.json").write_text('{"global_step": 1}')
    save_file({"w": torch.zeros(1)}, tmp_path / "model.safetensors")
    for name in ("scheduler.pt", "rng_state.pth"):
        torch.save({}, tmp_path / name)
    (tmp_path / "latest").write_text("global_step1")
    assert shard.name in find_flaw(tmp_path, "DeepSpeed")
    assert not canary.exists()


@pytest.mark.parametrize("name", ["optimizer.pt", "scheduler.pt", "rng_state.pth"])
def test_a_checkpoint_file_that_would_run_code_is_named(tmp_path: Path, name: str) -> None:
    run = foreign_run(tmp_path)
    checkpoint = run / "training_state" / "checkpoint-1"
    torch.save({"numpy": np.random.get_state(), "cpu": torch.random.get_rng_state()}, checkpoint / "rng_state.pth")
    assert not find_flaw(checkpoint)
    torch.save({"a": Canary(tmp_path / "canary")}, checkpoint / name)
    assert find_flaw(checkpoint).startswith(f"{checkpoint / name} holds objects that could run code")
    assert not (tmp_path / "canary").exists()


@pytest.mark.parametrize("name", ["../elsewhere", "/elsewhere", "..", "", "a/b", "a" * 2**21])
def test_a_shard_folder_outside_the_checkpoint_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "trainer_state.json").write_text('{"global_step": 1}')
    save_file({"w": torch.zeros(1)}, tmp_path / "model.safetensors")
    (tmp_path / "latest").write_text(name)
    assert "latest" in find_flaw(tmp_path, "DeepSpeed")
