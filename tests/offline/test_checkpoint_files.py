"""DeepSpeed's optimizer shards are joined in the order of the model's weights, or refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from analyzed_runs import altered, restored_at
from torch import Tensor

from rl_training.offline.restored import RestoredTrainer


def write_shards(folder: Path, restored: RestoredTrainer, ranks: int, swap: bool) -> dict[str, Tensor]:
    """Write a checkpoint's optimizer as ZeRO does: two groups, one slice of each per rank. Return exp_avg by name."""
    parameters, generator = restored.parameters, torch.Generator().manual_seed(0)
    groups = [[n for n in parameters if "bias" not in n and "norm" not in n]]
    groups.append([n for n in parameters if n not in groups[0]])
    exp_avg = {n: torch.randn(p.shape, generator=generator) for n, p in parameters.items()}
    states: list[dict[str, Any]] = [{"single_partition_of_fp32_groups": [], "state": {}} for _ in range(ranks)]
    for number, names in enumerate(groups):
        order = [names[1], names[0], *names[2:]] if swap else names
        flat = {
            "weights": torch.cat([parameters[n].detach().flatten() for n in order]),
            "exp_avg": torch.cat([exp_avg[n].flatten() for n in order]),
        }
        padding = -len(flat["weights"]) % ranks
        cut = {key: torch.nn.functional.pad(value, (0, padding)).chunk(ranks) for key, value in flat.items()}
        for rank, state in enumerate(states):
            state["single_partition_of_fp32_groups"].append(cut["weights"][rank])
            moments = {"exp_avg": cut["exp_avg"][rank], "exp_avg_sq": cut["exp_avg"][rank].square(), "step": 7}
            state["state"][number] = moments
    shards = folder / "global_step1"
    shards.mkdir()
    (folder / "latest").write_text("global_step1")
    (folder / "optimizer.pt").unlink()
    shapes = [{n: parameters[n].shape for n in names} for names in groups]
    torch.save({"param_shapes": shapes}, shards / "mp_rank_00_model_states.pt")
    for rank, state in enumerate(states):
        hyper = [{"lr": 5e-4, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": decay} for decay in (0.1, 0.0)]
        of_rank = {
            "single_partition_of_fp32_groups": state["single_partition_of_fp32_groups"],
            "base_optimizer_state": {"state": state["state"], "param_groups": hyper},
            "partition_count": [ranks, ranks],
            "zero_stage": 2,
        }
        torch.save({"optimizer_state_dict": of_rank}, shards / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
    return exp_avg


def test_moments_and_settings_are_joined_from_the_shards_of_ranks(run, tmp_path, restored) -> None:
    given: dict[str, Tensor] = {}
    copy = altered(run, tmp_path, lambda folder: given.update(write_shards(folder, restored, 12, swap=False)))
    states = restored_at(copy, 1).optimizer.states
    assert states is not None
    assert all(torch.equal(state.exp_avg, given[name].flatten()) for name, state in states.items())  # type: ignore[union-attr]
    assert {(state.lr, state.step) for state in states.values()} == {(5e-4, 7)}  # type: ignore[union-attr]
    for name, state in states.items():  # each group of parameters has its own settings
        assert state.weight_decay == (0.0 if "bias" in name or "norm" in name else 0.1), name


def test_shards_in_another_order_are_refused_because_their_weights_do_not_match(run, tmp_path, restored) -> None:
    copy = altered(run, tmp_path, lambda folder: write_shards(folder, restored, 2, swap=True))
    with pytest.raises(ValueError, match=r"checkpoint-1/global_step1: model\.\S+, .* differs"):
        restored_at(copy, 1)


def test_missing_shards_are_refused(run: Path, tmp_path: Path, restored: RestoredTrainer) -> None:

    def lose_one(folder: Path) -> None:
        write_shards(folder, restored, 3, swap=False)
        next((folder / "global_step1").glob("*rank_1_*")).unlink()

    with pytest.raises(ValueError, match=r"global_step1 .*\b2\b"):
        restored_at(altered(run, tmp_path, lose_one), 1)
