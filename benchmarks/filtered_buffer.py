"""Does buffer=filtered learn more from a generated token? Held-out reward of plain and filtered training.

    OMP_NUM_THREADS=1 python benchmarks/filtered_buffer.py [--seeds 0 1 2] [--tokens 1000000] [--sequences 256]
                                                           [--train-prompts 4096] [--runs plain filtered ...]

trains the default task until so many completion tokens are generated, once per seed and run, and asks eight times on
the way for the mean reward of fresh responses, at temperature 1, to held-out prompts. A run is `plain`, `filtered`, or
`filtered` with options: `filtered:max_attempts=1,floor=0.5`. Every run is written to --keep as it ends, and taken from
there when asked for again.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import rl_training.job.silence  # noqa: F401

from default_task import default_trainer
from transformers import TrainerCallback

from rl_training.hosts.trl.buffer import FilteredBuffer
from rl_training.tasks.arithmetic import arithmetic

NUM_POINTS = 8
RESPONSES = 4  # to each held-out prompt


class AtTokens(TrainerCallback):
    """Evaluates each time that another share of the token budget is generated, and ends training at the last."""

    def __init__(self, budget: int) -> None:
        self.budget, self.tokens = budget, 0.0
        self.points: list[dict[str, float]] = []
        self.steps: list[dict[str, float]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **kwargs: Any) -> Any:
        if "eval_reward" in logs:
            self.points.append({"tokens": self.tokens, "step": state.global_step, "reward": logs["eval_reward"]})
        elif "loss" in logs:
            sequences = args.per_device_train_batch_size * args.gradient_accumulation_steps
            self.tokens += logs.get("buffer/generated_tokens", sequences * logs["completions/mean_length"])
            mixed = logs.get("buffer/acceptance", 1 - logs["frac_reward_zero_std"])
            self.steps.append(
                {"tokens": self.tokens, "mixed": mixed, "filled": logs.get("buffer/filled", mixed),
                 "attempts": logs.get("buffer/attempts", 1), "reward": logs["reward"]}
            )  # fmt: skip
            control.should_evaluate = self.tokens >= len(self.points) * self.budget / NUM_POINTS
            control.should_training_stop = self.tokens >= self.budget
        return control


def train(run: str, seed: int, tokens: int, sequences: int, prompts: int, learning_rate: float) -> dict[str, Any]:
    """Returns the evaluations (the first before training) and the steps of one training."""
    kind, _, options = run.partition(":")
    settings: dict[str, Any] = {}
    if kind == "filtered":
        given = dict(option.split("=") for option in options.split(",") if option)
        settings["buffer"] = FilteredBuffer(seed=seed, **{key: json.loads(value) for key, value in given.items()})
    watch = AtTokens(tokens)
    with tempfile.TemporaryDirectory() as folder:
        trainer = default_trainer(
            folder,
            [],
            max_steps=100_000,
            seed=seed,
            learning_rate=learning_rate,
            gradient_accumulation_steps=sequences // 32,
            train_dataset=arithmetic(num_train=prompts).train_dataset,
            eval_dataset=arithmetic().eval_dataset,
            per_device_eval_batch_size=256,
            num_generations_eval=RESPONSES,
            **settings,
        )
        trainer.add_callback(watch)
        trainer.evaluate()
        trainer.train()
    return {"points": watch.points, "steps": watch.steps}


def mean(values: Sequence[float]) -> str:
    """Returns the mean over seeds with its standard error."""
    error = f" ± {statistics.stdev(values) / len(values) ** 0.5:.3f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.3f}{error}"


def header(tokens: int) -> str:
    points = [f"{tokens * (k + 1) // NUM_POINTS // 1000}k" for k in range(NUM_POINTS)]
    cells = ["run", "seeds", "steps", *points, "mean of all", "of the last half", "accepted", "filled", "attempts"]
    return f"| {' | '.join(cells)} |\n{'|---' * len(cells)}|"


def describe(run: str, trained: Sequence[dict[str, Any]]) -> str:
    """Returns the row of a run: held-out reward at each point; what was accepted in the first and last quarter."""
    rewards = [[point["reward"] for point in t["points"]][1 : NUM_POINTS + 1] for t in trained]
    ends = []
    for key in ("mixed", "filled", "attempts"):
        quarters = [(t["steps"][: len(t["steps"]) // 4], t["steps"][-(len(t["steps"]) // 4) :]) for t in trained]
        first, last = (statistics.fmean(step[key] for pair in quarters for step in pair[end]) for end in (0, 1))
        ends.append(f"{first:.2f} → {last:.2f}")
    cells = [
        f"`{run}`",
        str(len(trained)),
        f"{statistics.fmean(t['points'][-1]['step'] for t in trained):.0f}",
        *(mean(at_point) for at_point in zip(*rewards, strict=True)),
        mean([statistics.fmean(r) for r in rewards]),
        mean([statistics.fmean(r[NUM_POINTS // 2 :]) for r in rewards]),
        *ends,
    ]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--tokens", type=int, default=1_000_000)
    parser.add_argument("--sequences", type=int, default=256)
    parser.add_argument("--train-prompts", type=int, default=4096)
    parser.add_argument("--learning-rate", type=float, default=3e-4)
    parser.add_argument("--runs", nargs="+", default=["plain", "filtered"], metavar="RUN")
    parser.add_argument("--keep", type=Path, default=Path("runs/filtered_buffer"))
    args = parser.parse_args()
    args.keep.mkdir(parents=True, exist_ok=True)
    print(header(args.tokens))
    for run in args.runs:
        trained = []
        for seed in args.seeds:
            settings = (args.tokens, args.sequences, args.train_prompts, args.learning_rate)
            file = args.keep / f"{'_'.join(map(str, (run, seed, *settings)))}.json"
            if not file.exists():
                file.write_text(json.dumps(train(run, seed, *settings)))
            trained.append(json.loads(file.read_text()))
        print(describe(run, trained), flush=True)


if __name__ == "__main__":
    main()
