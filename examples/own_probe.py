"""A probe of one's own, with an error bar, and a chart of what it measured.

python examples/own_probe.py          # the chart: runs/own_probe/length.png
"""

import matplotlib.pyplot as plt
import torch
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

from rl_training import Probe, Reading, attach
from rl_training.models.load import TINY_PATH
from rl_training.records import probes
from rl_training.statistics.jackknife import estimates_over_units

ROWS = [{"prompt": f"{a}+{b}=?<think>"} for a in range(1, 9) for b in range(1, 10 - a)]


class LengthProbe(Probe):
    """Measures the mean number of tokens of a response, over all processes. The error bar is over prompts."""

    name = "length"

    def measure(self, ctx, state):
        batch = ctx.step.batch
        lengths = batch.scores.mask.sum(dim=1).double()
        sums = batch.sum_by_prompt(torch.stack([lengths, torch.ones_like(lengths)], dim=1))  # a row for each prompt
        return Reading(measured=estimates_over_units(["length/mean"], mean_length, sums, ctx.ranks.reduce))


def mean_length(sums):
    """Tokens divided by responses: called with all prompts, and without each of them."""
    return sums[..., :1] / sums[..., 1:]


def few_characters(completions, **kwargs):
    """0 for an empty completion, -1 for one of forty characters."""
    return [-len(text) / 40 for text in completions]


if __name__ == "__main__":
    args = GRPOConfig(
        "runs/own_probe/state", learning_rate=1e-3, max_steps=2, per_device_train_batch_size=8,
        gradient_accumulation_steps=8, max_completion_length=24, use_cpu=True, bf16=False, report_to=[],
    )  # fmt: skip
    trainer = GRPOTrainer(str(TINY_PATH), few_characters, args, train_dataset=Dataset.from_list(ROWS))
    with attach(trainer, "runs/own_probe", ["ess", LengthProbe()]) as attached:
        trainer.train()
    rows = probes(attached.folder).query("name == 'length/mean'")
    plt.errorbar(rows["step"], rows["value"], rows["half_width"], marker="o", capsize=3)
    plt.xlabel("step")
    plt.ylabel("tokens in a response, 95 % intervals over prompts")
    plt.savefig(attached.folder / "length.png")
