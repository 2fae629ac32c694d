"""What bf16 autocast leaves of an adapter's first steps, and where the rest is lost.

    python benchmarks/real_rounding.py runs/real/autocast --at 1

Responses that the first policy has drawn (`real.py truth autocast`) are scored with a later state under bf16 autocast:

    as peft trains        each layer adds the adapter's output to its own in bf16
    added in fp32         the same, but for that addition
    merged                the adapter is added to the weights in fp32, which autocast then rounds

Printed is the change of log-probabilities and of entropy since the first state, beside that in fp32: of the former the
slope of a straight line through 0, of the latter the mean over tokens.
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

PROMPTS = 12  # of those that the sample has


def forward_added_in_fp32(self: Linear, x: Tensor) -> Tensor:
    """Return what peft's layer does, with the adapter's output added in fp32."""
    name = self.active_adapters[0]
    with torch.autocast("cpu", enabled=False):
        added = self.lora_B[name](self.lora_A[name](x.float())) * self.scaling[name]
    return self.base_layer(x).float() + added


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--at", type=int, default=1, help="state: the steps after which it is")
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
