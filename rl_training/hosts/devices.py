"""The devices on which probes cannot measure."""

from __future__ import annotations

import torch

from rl_training.errors import UserError


def refuse_devices_without_float64(device: torch.device, cpu: str = "") -> None:
    """Raise UserError for a device on which probes cannot sum in float64 and restore random streams.

    Args:
        device: The device.
        cpu: The setting of the trainer that trains on the CPU; "" if there is none.
    """
    if device.type in ("mps", "xpu"):
        raise UserError(
            "probes sum in float64 and restore the device's random stream, which they cannot on "
            f"{device.type.upper()}: train on a CUDA GPU or on the CPU{f' ({cpu})' * bool(cpu)}, or without probes"
        )
