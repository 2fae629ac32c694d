"""How much of an adapter's first steps survives bf16 autocast, and where the rest is lost.

    python benchmarks/real_rounding.py runs/real/autocast --at 1

Takes responses drawn from the first policy (`real.py truth autocast`), and scores them with a later state under bf16
autocast in three ways:

    as peft trains        each layer adds the adapter's output to its own output in bf16
    added in fp32         the same, but with this addition in fp32
    merged                the adapter is added to the weights in fp32, and autocast then rounds the weights

Prints for each way, and for fp32, the change since the first state. For log-probabilities: the slope of a straight line
through 0 against the change in fp32. For entropy: the mean change over tokens.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import rl_training.job.silence  # noqa: F401

import real_truth
import torch
from peft.tuners.lora.layer import Linear
from real_tables import FILE
from real_truth import RESPONSES, Sample, Truth, load
from torch import Tensor

PROMPTS = 12  # the first of those in the sample


def forward_added_in_fp32(self: Linear, x: Tensor) -> Tensor:
    """Compute peft's layer, but add the adapter's output in fp32."""
    name = self.active_adapters[0]
    with torch.autocast("cpu", enabled=False):
        added = self.lora_B[name](self.lora_A[name](x.float())) * self.scaling[name]
    return self.base_layer(x).float() + added


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--at", type=int, default=1, help="score the state after this many steps")
    options = parser.parse_args()
    checkpoint = options.run / "training_state" / f"checkpoint-{options.at}"
    real_truth.PROMPTS = PROMPTS
    drawn = torch.load(options.run / FILE, weights_only=False)[0]
    sample = Sample(drawn.tokens[: PROMPTS * RESPONSES], drawn.mask[: PROMPTS * RESPONSES])
    exact, rounded = Truth(), Truth(autocast=True)
    ways = {
        "fp32": (exact.score(load(None), sample), exact.score(load(checkpoint), sample)),
        "as peft trains": (rounded.score(load(None), sample), rounded.score(load(checkpoint, merged=False), sample)),
    }
    before = ways["as peft trains"][0]
    ways["merged"] = (before, rounded.score(load(checkpoint), sample))
    Linear.forward = forward_added_in_fp32
    ways["added in fp32"] = (before, rounded.score(load(checkpoint, merged=False), sample))
    changes = {
        way: [(after - first)[sample.mask].double() for first, after in zip(*states, strict=True)]
        for way, states in ways.items()
    }
    wanted = changes["fp32"][1]
    for way, (entropies, logps) in changes.items():
        slope = float(logps @ wanted / (wanted @ wanted))
        print(f"| {way} | {slope:.2f} | {float(entropies.mean()):+.4f} |")


if __name__ == "__main__":
    main()
