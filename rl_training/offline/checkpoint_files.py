"""Reads a checkpoint's files: checks that its weights fit the model, and loads DeepSpeed's optimizer shards.

The check is needed because PEFT silently ignores the weights of another adapter.

Under ZeRO stages 1 and 2 the optimizer's state is sharded over the ranks. `latest` names a folder that has

    mp_rank_00_model_states.pt   param_shapes: which parameters each group has, in which order
    one file per rank            its slice of every group: fp32 weights, exp_avg and exp_avg_sq

Concatenating the ranks' slices gives a group, with padding at the end. The shapes cut it into parameters.

That order is verified on every load: the fp32 weights, assembled in the same way as the moments, must equal the model's
weights from model.safetensors (or the adapter's file) bit for bit.

Written against deepspeed 0.19, which need not be installed: the files are pickles, of which only tensors and numbers
are read.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from rl_training.errors import UserError
from rl_training.records.checkpoint_flaws import deepspeed_folder
from rl_training.records.checkpoint_states import NOT_WEIGHTS
from rl_training.records.files.pickles import load_tensors
from rl_training.records.folder import ADAPTER_WEIGHTS_FILE

MOMENTS = ("exp_avg", "exp_avg_sq")


def refuse_other_weights(model: nn.Module, checkpoint: Path) -> None:
    """Guard G1: raise a UserError unless the checkpoint's weights and the model's trainable ones match.

    Names and shapes are compared. PEFT would silently skip weights of another adapter or another shape.
    """
    has_adapter = hasattr(model, "peft_config")
    is_adapter = (checkpoint / ADAPTER_WEIGHTS_FILE).is_file()
    if has_adapter != is_adapter:
        way = "adapter=lora (or qlora)" if is_adapter else "adapter=none"
        raise UserError(
            f"{checkpoint} holds {'an adapter' if is_adapter else 'all weights'}, and the model "
            f"{'has none' if is_adapter else 'has an adapter'}: use {way}"
        )
    settings = "adapter.r and adapter.target_modules as in its adapter_config.json" if is_adapter else "the run's model"
    shapes = {_without_adapter_name(name): tuple(value.shape) for name, value in model.state_dict().items()}
    stored = _shapes_in(checkpoint, is_adapter)
    for name, shape in stored.items():
        if shapes.get(name) != shape:
            model_shape = shapes.get(name, "does not exist")
            raise UserError(
                f"{checkpoint}: {name} has the shape {shape}, but {model_shape} in this model: set {settings}"
            )
    trained = {_without_adapter_name(name) for name, param in model.named_parameters() if param.requires_grad}
    if (is_adapter or not trained) and stored.keys() - trained:
        raise UserError(
            f"{format_sample(stored.keys() - trained)} is not trainable: another adapter is active, or it is "
            "frozen; load an adapter with is_trainable=True, and leave it active and unmerged"
        )
    if trained - stored.keys():
        raise UserError(
            f"{format_sample(trained - stored.keys())} is trainable, and {checkpoint} does not hold it: set the "
            "adapter's target_modules, or the model, as the run had them"
        )


def _shapes_in(checkpoint: Path, is_adapter: bool) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a checkpoint's weights by name, or of its adapter's weights if `is_adapter`."""
    shapes = dict[str, tuple[int, ...]]()
    for path in checkpoint.glob(ADAPTER_WEIGHTS_FILE if is_adapter else "*.safetensors"):
        if not path.name.startswith(NOT_WEIGHTS):
            with safe_open(path, framework="pt") as file:
                shapes |= {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118, not a dictionary
    return shapes


def _without_adapter_name(name: str) -> str:
    return name.replace(".default.", ".")


def format_sample(names: Iterable[str]) -> str:
    """Return the first of these names in alphabetical order, and how many more there are."""
    first, *others = sorted(names)
    return f"{first!r}" + (f" (and {len(others)} more)" if others else "")


# --- the optimizer in shards ------------------------------------------------------------------------------------------


def load_shards(optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter], checkpoint: Path) -> None:
    """Load hyperparameters and state from the shards of DeepSpeed's optimizer into a torch optimizer.

    Args:
        parameters: The trainable parameters by name, with the checkpoint's weights already loaded.

    Raises:
        UserError: The shards are incomplete, were written by ZeRO-3, or belong to other weights.
    """
    folder = checkpoint / deepspeed_folder(checkpoint)
    shapes, ranks = _read(folder)
    groups = ranks[0]["base_optimizer_state"]["param_groups"]
    group_of = {param: group for group in optimizer.param_groups for param in group["params"]}
    for number, shapes_of_group in enumerate(shapes):
        slices = [
            {"weights": state["single_partition_of_fp32_groups"][number]}
            | state["base_optimizer_state"]["state"][number]
            for state in ranks
        ]
        assembled = {key: _assemble([shard[key] for shard in slices], shapes_of_group) for key in ("weights", *MOMENTS)}
        for name, weight in assembled["weights"].items():
            param = parameters.get(name)
            if param is None or not torch.equal(weight.to(param), param.detach()):
                what = "is not trainable here" if param is None else "differs from the model's weight"
                raise UserError(f"{folder}: {name}, joined from the ranks' shards, {what}: it belongs to another model")
            group_of[param].update({k: v for k, v in groups[number].items() if k in group_of[param] and k != "params"})
            optimizer.state[param] = {
                "step": torch.tensor(float(slices[0]["step"])),
                **{key: assembled[key][name].clone().to(param.device) for key in MOMENTS},
            }
    missing = set(parameters) - {name for names in shapes for name in names}
    if missing:
        raise UserError(f"{folder} holds no state of {min(missing)!r}: it belongs to another adapter or model")


def _read(folder: Path) -> tuple[Sequence[Mapping[str, torch.Size]], list[Any]]:
    """Return each group's parameter shapes by name, and every rank's optimizer state, in the order of ranks."""

    def rank_of(path: Path) -> int:
        return int(re.findall(r"rank_(\d+)", path.name)[0])

    model = folder / "mp_rank_00_model_states.pt"
    paths = sorted(folder.glob("*zero_pp_rank_*_optim_states.pt"), key=rank_of)  # as numbers: 10 after 9
    if not model.is_file() or not paths:
        raise UserError(f"{folder} has no {model.name if paths else 'optimizer shards'}: the checkpoint is incomplete")
    shapes = load_tensors(model)["param_shapes"]
    ranks = [load_tensors(path)["optimizer_state_dict"] for path in paths]
    counts = ranks[0]["partition_count"]
    if len(ranks) != max(counts if isinstance(counts, list) else [counts]):
        raise UserError(f"{folder} has the shards of {len(ranks)} ranks of {counts}: the checkpoint is incomplete")
    if ranks[0]["zero_stage"] not in (1, 2):
        raise UserError(f"{folder} was written by ZeRO-3, whose shards are not read: use ZeRO-1, ZeRO-2 or DDP")
    return shapes, ranks


def _assemble(slices: Sequence[Tensor], shapes: Mapping[str, torch.Size]) -> dict[str, Tensor]:
    """Concatenate the ranks' slices of a group, and return the piece of each parameter by name."""
    flat = torch.cat([part.reshape(-1) for part in slices])
    sizes = [shape.numel() for shape in shapes.values()]
    pieces = flat[: sum(sizes)].split(sizes)  # the rest is padding
    return {name: piece.view(shape) for (name, shape), piece in zip(shapes.items(), pieces, strict=True)}
