"""Training on several processes with DDP and FSDP2: unchanged by probes, with the estimates of a single process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import forks
import layouts
import pytest
import torch
from same_estimates import above_limit, differences

from rl_training.probes.gns import SPLIT

Found = dict[str, Any]
ONE = {"one": {}, "one_lora": {"lora": True, "few": True}, "one_sampler": {"sampler": True},
       "one_prompts": {"microbatch": 4, "few": True}, "one_row": {"row": True, "few": True},
       "one_shuffled": {"shuffled": True, "few": True}}  # fmt: skip
HALF = {"microbatch": 4, "num_folds": 4}
LAST = {"sync": "last"} | HALF  # a fold is one microbatch of both processes
TWO: dict[str, dict[str, Any]] = {
    "ddp_groups": {"kind": "ddp", "checkpointing": True},  # a fold is one microbatch of one process
    "ddp_shuffled": {"kind": "ddp", "shuffled": True, "few": True},  # a fold is one prompt of one process
    "ddp_last_sampler": {"kind": "ddp", "sampler": True} | LAST,
    "fsdp2_sampler": {"kind": "fsdp2", "sampler": True, "keep_gathered": True} | HALF,
    "fsdp2_groups_lora": {
        "kind": "fsdp2", "reshard": False, "lora": True, "checkpointing": True, "sync": "last", "few": True,
    },
    "fsdp2_prompts": {"kind": "fsdp2", "num_folds": 8, "few": True},  # two prompts share a microbatch
    "fsdp2_row": {"kind": "fsdp2", "row": True, "few": True},  # the second process holds nothing
}  # fmt: skip
NUMERICS = {"fsdp2_numerics": {"kind": "fsdp2", "reshard": False, "numerics": True}}
FOUR: dict[str, dict[str, Any]] = {
    "fsdp2_four": {"kind": "fsdp2", "few": True} | LAST,  # a fold is one microbatch of two of the four processes
    # A fold is both microbatches of a process, over which its prompts are spread.
    "ddp_four": {"kind": "ddp", "shuffled": True, "few": True} | LAST,
}
CASES = dict.fromkeys(TWO, 2) | dict.fromkeys(FOUR, 4)
every_case = pytest.mark.parametrize("name", CASES)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], list[Found]]:
    """Return a function that loads each process's results of a case, by name and number of processes."""
    folder: Path = tmp_path_factory.mktemp("layouts")
    for world, cases in ((1, ONE), (2, TWO | NUMERICS), (4, FOUR)):
        bare = {f"{name}_bare": case | {"probes": False} for name, case in cases.items() if world == 2}
        forks.start_ranks(layouts.worker, (folder, cases | bare), world)

    def load(name: str, world: int) -> list[Found]:
        return [torch.load(folder / f"{name}_{world}_{rank}.pt", weights_only=False) for rank in range(world)]

    return load


@pytest.mark.parametrize("name", TWO | NUMERICS)
def test_training_is_bitwise_the_same_with_and_without_probes(trained, name: str) -> None:
    """Compares each process's weights, optimizer states and random number generator."""
    digests = [[rank["digest"] for rank in trained(case, 2)] for case in (name, f"{name}_bare")]
    assert digests[0] == digests[1]


@every_case
def test_all_processes_compute_the_same_estimates(trained, name: str) -> None:
    first, *rest = (repr(rank["estimates"]) for rank in trained(name, CASES[name]))
    assert all(estimates == first for estimates in rest)


@every_case
def test_estimates_equal_those_of_one_process_with_the_same_folds(trained, name: str) -> None:
    """To 1e-10 of an estimate or its error. Parts of ΔH, which cancel, to 1e-10 of the whole.

    Recomputed folds agree to 1e-6: they are scored without training's padding, and the model's position table is fp32.
    """
    tolerance = 1e-6 if "prompts" in name else 1e-10
    single = next((case for case in ONE if case[4:] and case[4:] in name), "one")
    (reference,) = trained(single, 1)
    # If shuffled, the prompts of a process share microbatches, which differ if the process has different prompts.
    same_microbatches = not {"microbatch", "shuffled"} & (ONE[single] | (TWO | FOUR)[name]).keys()
    rows_of_runs = [by_step_and_name(reference), by_step_and_name(trained(name, CASES[name])[0])]
    if "few" in (TWO | FOUR)[name]:  # the single process may have run probes that this case leaves out
        left_out = ("tokens/", "top_token/", "measured/", "sampler/", "intervention/bonus", "intervention/nsr", *SPLIT)
        rows_of_runs[0] = {
            key: row
            for key, row in rows_of_runs[0].items()
            if not key[1].startswith(left_out) or key[1].startswith("sampler/residual")  # which every probe has
        }
    if not same_microbatches:  # a bonus's weights depend on the tokens in each microbatch
        rows_of_runs = [{key: row for key, row in rows.items() if "bonus" not in key[1]} for rows in rows_of_runs]
    off = differences(*rows_of_runs)
    assert len(off) > 40  # something is measured
    assert above_limit(off, tolerance) == {}


def test_process_groups_are_released_after_training_and_made_only_where_needed(trained) -> None:
    for name in TWO:
        (_, after), (during, _) = (trained(case, 2)[0]["groups"] for case in (name, f"{name}_bare"))
        assert after == during
    assert len(set(trained("fsdp2_numerics", 2)[0]["groups"])) == 1  # its probes send no gradients


def by_step_and_name(trace: Found) -> dict[tuple[int, str], tuple[float, float]]:
    return {(step, name): row[:2] for step, rows in enumerate(trace["estimates"]) for name, row in rows.items()}


def test_a_pass_over_folds_of_processes_serves_all_folds_at_once(trained) -> None:
    """Two steps send two microbatches' gradients, the same recomputed by a check, and two entropy gradients."""
    num_bytes = sum(param.nbytes for param in layouts.model_of(layouts.OPTIONS).parameters())
    assert trained("ddp_four", 4)[0]["sent"] == 2 * (2 + 2 + 2) * num_bytes


def test_kept_gathered_weights_are_gathered_once_for_all_folds(trained) -> None:
    """Once for each of the three modules that FSDP2 shards, for four folds."""
    assert set(trained("fsdp2_sampler", 2)[0]["gathers"]) == {3}


def test_with_fsdp2_probes_send_only_gradients_of_a_subset_of_processes(trained) -> None:
    """With the same folds, DDP sends all of them.

    The rest is sent by gns, which splits single-process prompts, and by the sampler probe.
    """
    reduced, sent = (trained(name, 2)[0]["sent"] for name in ("fsdp2_sampler", "ddp_last_sampler"))
    assert 0 < reduced < 0.5 * sent
