"""Training on several processes under DDP and FSDP2: the same with probes, and measured as on a single process."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import forks
import layouts
import pytest
import torch

Found = dict[str, Any]
ONE = {"one": {}, "one_lora": {"lora": True}}
LAST = {"microbatch": 4, "sync": "last"}  # a microbatch of both processes is a fold
TWO: dict[str, dict[str, Any]] = {
    "ddp_groups": {"kind": "ddp", "checkpointing": True},  # a microbatch of each process is
    "ddp_last": {"kind": "ddp"} | LAST,
    "fsdp2": {"kind": "fsdp2", "microbatch": 4},
    "fsdp2_groups_lora": {"kind": "fsdp2", "reshard": False, "lora": True, "checkpointing": True, "sync": "last"},
    "fsdp2_slices": {"kind": "fsdp2", "microbatch": 16, "num_folds": 8},
}
FOUR = {"fsdp2_four": {"kind": "fsdp2"} | LAST}  # a microbatch of two of the four processes is a fold
CASES = dict.fromkeys(TWO, 2) | dict.fromkeys(FOUR, 4)
every_case = pytest.mark.parametrize("name", CASES)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], list[Found]]:
    """Returns what each of so many processes has of a case."""
    folder: Path = tmp_path_factory.mktemp("layouts")
    for world, cases in ((1, ONE), (2, TWO), (4, FOUR)):
        bare = {f"{name}_bare": case | {"probes": False} for name, case in cases.items() if world > 1}
        forks.start_ranks(layouts.worker, (folder, cases | bare), world)

    def found(name: str, world: int) -> list[Found]:
        return [torch.load(folder / f"{name}_{world}_{rank}.pt", weights_only=False) for rank in range(world)]

    return found


@every_case
def test_training_is_bitwise_the_same_with_and_without_probes(trained, name: str) -> None:
    """Of each process: its weights, the optimizer's states and the random numbers that come next."""
    digests = [[found["digest"] for found in trained(case, CASES[name])] for case in (name, f"{name}_bare")]
    assert digests[0] == digests[1]


@every_case
def test_all_processes_have_the_same_estimates(trained, name: str) -> None:
    first, *others = (repr(found["estimates"]) for found in trained(name, CASES[name]))
    assert all(other == first for other in others)


@every_case
def test_estimates_are_those_of_one_process_with_the_same_folds(trained, name: str) -> None:
    """To 1e-10 of an estimate or its error; parts of ΔH, which cancel, to that of the whole.

    Slices are scored without the padding of training's forward pass, and the model's table of positions is fp32: 1e-6.
    """
    tolerance = 1e-6 if "slices" in name else 1e-10
    (one,) = trained("one_lora" if "lora" in name else "one", 1)
    same_microbatches = (TWO | FOUR)[name].get("microbatch", layouts.FOLD) == layouts.FOLD
    for found, expected in zip(trained(name, CASES[name])[0]["estimates"], one["estimates"], strict=True):
        assert found.keys() == expected.keys()
        for key in expected:
            if "bonus" in key and not same_microbatches:
                continue  # its weights depend on the tokens of a microbatch
            if key == "step/formula_error":
                continue  # rounding alone
            whole = f"delta_h/forward{'_sequence' * key.endswith('_sequence')}"
            scale = expected[whole if key.startswith("delta_h/") and key.count("/") == 2 else key][:2]
            for got, value in zip(found[key][:2], expected[key][:2], strict=True):
                assert math.isnan(got) == math.isnan(value), (key, found[key], expected[key])
                limit = tolerance * max((abs(x) for x in scale if math.isfinite(x)), default=0.0)
                assert math.isnan(value) or got == value or abs(got - value) <= limit, (key, got, value)
    assert sum(math.isfinite(value) for value, _, _ in one["estimates"][-1].values()) > 40  # something is measured
