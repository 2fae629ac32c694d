"""The optimizer's state in a checkpoint of DeepSpeed's ZeRO stages 1 and 2, put together from the ranks' shards.

`latest` names a folder with mp_rank_00_model_states.pt, whose param_shapes says which parameters lie in which group and
in which order, and a file per rank with its slice of every group: fp32 weights, exp_avg and exp_avg_sq. A group is the
ranks' slices one after another, with padding at the end, cut by these shapes.

That order is checked every time: the fp32 weights, assembled in the same way as the moments, must equal the model's
from model.safetensors (or the adapter's file), bit for bit.

Written against deepspeed 0.19. The files are pickles of DeepSpeed's own classes, so it has to be installed to read
them: load only checkpoints that you trust.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rl_training.extras import how_to_install

MOMENTS = ("exp_avg", "exp_avg_sq")


def load_shards(optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter], checkpoint: Path) -> None:
    """Gives torch's optimizer the hyperparameters and states that DeepSpeed's had in this checkpoint.

    parameters  by name, trainable, with the checkpoint's weights

    Raises ValueError when the shards are incomplete, of another optimizer, or give other weights.
    """
    if not importlib.util.find_spec("deepspeed"):
        raise ValueError(f"{checkpoint} was written by DeepSpeed, needed to read it: {how_to_install('deepspeed')}")
    folder = checkpoint / (checkpoint / "latest").read_text(encoding="utf-8").strip()
    shapes, ranks = _read(folder)
    groups = ranks[0]["optimizer_state_dict"]["base_optimizer_state"]["param_groups"]
    group_of = {param: group for group in optimizer.param_groups for param in group["params"]}
    for number, shapes_of_group in enumerate(shapes):
        weights = _assemble([_slices(rank, number)["weights"] for rank in ranks], shapes_of_group)
        moments = {key: _assemble([_slices(rank, number)[key] for rank in ranks], shapes_of_group) for key in MOMENTS}
        step = _slices(ranks[0], number)["step"]
        for name, weight in weights.items():
            param = parameters.get(name)
            if param is None or not torch.equal(weight.to(param), param.detach()):
                what = "is not trainable here" if param is None else "differs from the model's weight"
                raise ValueError(f"{folder}: {name}, joined from the ranks' shards, {what}: it is of another model")
            settings = {
                key: value for key, value in groups[number].items() if key in group_of[param] and key != "params"
            }
            group_of[param].update(settings)
            optimizer.state[param] = {
                "step": torch.tensor(float(step)),
                **{key: moments[key][name].clone().to(param.device) for key in MOMENTS},
            }
    missing = set(parameters) - {name for of_group in shapes for name in of_group}
    if missing:
        raise ValueError(f"{folder} holds no state of {min(missing)!r}: it is of another adapter or model")


def _read(folder: Path) -> tuple[Sequence[Mapping[str, torch.Size]], list[Any]]:
    """Returns the shapes by name of each group, and what each rank has written, in the order of ranks."""

    def rank_of(path: Path) -> int:
        return int(re.findall(r"rank_(\d+)", path.name)[0])

    model = folder / "mp_rank_00_model_states.pt"
    paths = sorted(folder.glob("*zero_pp_rank_*_optim_states.pt"), key=rank_of)  # 10 comes after 9
    if not model.is_file() or not paths:
        raise ValueError(f"{folder} has no {model.name if paths else 'optimizer shards'}: the checkpoint is incomplete")
    shapes = torch.load(model, map_location="cpu", weights_only=False)["param_shapes"]
    ranks = [torch.load(path, map_location="cpu", weights_only=False) for path in paths]
    counts = ranks[0]["optimizer_state_dict"]["partition_count"]
    if len(ranks) != max(counts if isinstance(counts, list) else [counts]):
        raise ValueError(f"{folder} has the shards of {len(ranks)} ranks of {counts}: the checkpoint is incomplete")
    if ranks[0]["optimizer_state_dict"]["zero_stage"] not in (1, 2):
        raise ValueError(f"{folder} was written by ZeRO-3, whose shards are not read: use ZeRO-1, ZeRO-2 or DDP")
    return shapes, ranks


def _slices(rank: Any, group: int) -> dict[str, Any]:
    """Returns a rank's slice of a group: weights, exp_avg, exp_avg_sq, and the number of steps."""
    state = rank["optimizer_state_dict"]
    of_group = state["base_optimizer_state"]["state"][group]
    return {"weights": state["single_partition_of_fp32_groups"][group], **of_group}


def _assemble(slices: Sequence[Tensor], shapes: Mapping[str, torch.Size]) -> dict[str, Tensor]:
    """Returns the parameters' pieces of the slices, one after another."""
    flat, start, pieces = torch.cat([part.reshape(-1) for part in slices]), 0, {}
    for name, shape in shapes.items():
        pieces[name] = flat[start : start + shape.numel()].view(shape)
        start += shape.numel()
    return pieces
