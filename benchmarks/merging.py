"""What is left of frozen weights after TRL has merged an adapter into them for vLLM and taken it out, step after step.

    OMP_NUM_THREADS=1 python benchmarks/merging.py [--steps 100]

One linear layer of Qwen2.5-1.5B's hidden size with random weights, a LoRA of rank 16 whose B walks at Adam's pace, and
peft's merge and unmerge after each step. For each kind of weights: how far they have moved, as a share of the adapter's
norm, and how much of the adapter the merged weights hold in bf16, which vLLM computes in (projected on the adapter).
"""

from __future__ import annotations

import argparse

import rl_training.job.silence  # noqa: F401

import bitsandbytes
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

SIZE, SCALE, LEARNING_RATE = 1536, 0.03, 1e-5


class OneLayer(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        weight = (SCALE * torch.randn(SIZE, SIZE)).bfloat16()
        self.is_loaded_in_4bit = kind == "nf4"  # what peft asks
        if kind == "nf4":
            self.layer = bitsandbytes.nn.Linear4bit(SIZE, SIZE, bias=False, quant_type="nf4")
            self.layer.weight = bitsandbytes.nn.Params4bit(weight, requires_grad=False, quant_type="nf4")
            self.to("cpu")  # quantises
        else:
            self.layer = nn.Linear(SIZE, SIZE, bias=False, dtype=getattr(torch, kind))
            self.layer.weight.data.copy_(weight)


def values(layer: nn.Module) -> Tensor:
    """Returns the weights of an adapted layer as they count, fp32."""
    weight = layer.base_layer.weight
    if isinstance(weight, bitsandbytes.nn.Params4bit):
        return bitsandbytes.functional.dequantize_4bit(weight.data, weight.quant_state).float()
    return weight.data.float().clone()


def wear(kind: str, steps: int) -> None:
    torch.manual_seed(0)
    model = get_peft_model(OneLayer(kind), LoraConfig(r=16, lora_alpha=32, target_modules=["layer"]))
    layer = model.base_model.model.layer
    start = values(layer)
    for step in range(1, steps + 1):
        up = layer.lora_B["default"].weight
        up.data += LEARNING_RATE * torch.randn_like(up)
        adapter = layer.get_delta_weight("default").float()
        model.merge_adapter()
        held = values(layer).bfloat16().float() - start
        model.unmerge_adapter()
        if step in (1, 10, steps):
            moved = float((values(layer) - start).norm() / adapter.norm())
            share = float((held * adapter).sum() / adapter.square().sum())
            print(f"{kind:9} after {step:3} steps: moved by {moved:.2g} of the adapter, which is held to {share:.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    options = parser.parse_args()
    for kind in ("float32", "bfloat16"):
        wear(kind, options.steps)
    wear("nf4", steps=1)  # seconds a step, and the first says it all


if __name__ == "__main__":
    main()
