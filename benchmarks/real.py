"""Do the predictions hold on a real language model? SmolLM2-135M-Instruct on three_words, on a CPU.

    python benchmarks/real.py train lora_0 [--steps 8]     a run of RUNS, by the product's own command
    python benchmarks/real.py truth lora_0                 each step on fresh responses: real_truth.py
    python benchmarks/real.py branches lora_0 --state 4    one step from there with each intervention
    python benchmarks/real.py table                        of all runs there

`python -m rl_training.tasks.smollm2` must have fetched the model. Every part goes on where it was stopped. What the
product said is read from the JSON of its records; what is true comes from code that shares no formula with it.

Registered before any of it was run, for half of a core and a hundred minutes: lora_0 for 12 steps (8 prompts × 8), then
8 × 4 as RUNS lists it, bounded_1e-3 and bounded_1e-6 for 5 steps, all_weights and random_reward for 4, lora_1 and
lora_2 as far as time goes; the truth of every step from 48 held-out prompts × 4 responses. To be told of each run: how
many 95 % intervals of forward, backward, trapezoid and measured held, sums beside the sum of the truth, the naive
product (delta_h/reuse) beside both, and the cost. Expected: intervals hold and are wide; forward does not know single
steps; the naive product is too large; under the bound both start rates come to the same KL a step by the fifth step;
with the random reward nothing is learned.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import rl_training.job.silence  # noqa: F401

import torch
from real_tables import print_tables
from real_truth import Sample, Truth, load

FOLDER = Path(__file__).parent
HALF = ["trainer.num_generations=4", "batch.sequences_per_step=32", "batch.microbatch_size=4"]
BOUND = [*HALF, "trainer.target_kl_share=2e-3"]
# What differs from experiment=smollm2, which is LoRA of rank 16 at 1e-4 with 8 prompts × 8 responses. HALF is 8 × 4.
RUNS: dict[str, list[str]] = {
    "lora_0": ["seed=0"],
    "bounded_1e-3": [*BOUND, "trainer.learning_rate=1e-3"],
    "bounded_1e-6": [*BOUND, "trainer.learning_rate=1e-6"],
    "all_weights": [*HALF, "adapter=none", "trainer.learning_rate=5e-6"],
    "random_reward": [*HALF, "data._target_=random_reward.three_words_for_nothing"],
    "lora_1": [*HALF, "seed=1"],
    "lora_2": [*HALF, "seed=2"],
    "fixed_1e-3": [*HALF, "trainer.learning_rate=1e-3"],
}
INTERVENTIONS = ["bonus", "psr", "nsr", "lr"]


def checkpoint(run: Path, state: int) -> Path | None:
    return run / "training_state" / f"checkpoint-{state}" if state else None


def command(run: Path, words: Sequence[str]) -> None:
    """Run rl-training train in a process of its own, and write down what it took."""
    began = time.time()
    env = os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONPATH": f"{FOLDER.parent}{os.pathsep}{FOLDER}"}
    program = [sys.executable, "-m", "rl_training", "train"]
    try:
        subprocess.run([*program, *words, f"run_dir={run}"], env=env, check=True, cwd=FOLDER)
    finally:  # a run that is stopped goes on the next time
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        facts = {"seconds": time.time() - began, "cpu_seconds": usage.ru_utime + usage.ru_stime,
                 "peak_gb": usage.ru_maxrss * 1024 / 1e9}  # fmt: skip
        with (run / "facts.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(facts) + "\n")


def train(run: Path, steps: int) -> None:
    """Train one of RUNS up to this step; every checkpoint stays, for the truth."""
    command(run, ["experiment=smollm2", *RUNS[run.name], f"trainer.max_steps={steps}", "trainer.save_steps=1",
                  "trainer.save_total_limit=null", "logger=none", "resume=auto"])  # fmt: skip


def branches(run: Path, state: int) -> None:
    """Make the step after a state once more with each of INTERVENTIONS, the plain one with their predictions."""
    source = f"branch={checkpoint(run, state)}"
    for name in ["plain", *INTERVENTIONS]:
        branch = run / f"from_{state}" / name
        if not (branch / "facts.jsonl").is_file():
            probes = ["probe=[simple,interventions]", "probes.interventions.every=1",
                      f"probes.interventions.which=[{','.join(INTERVENTIONS)}]"]  # fmt: skip
            words = probes if name == "plain" else ["probe=none", f"intervention={name}"]
            command(branch, [source, "additional_steps=1", "trainer.save_steps=1", *words])


def measure(run: Path) -> None:
    """Draw at every second checkpoint of a run, score with its neighbours, and keep that in truth.pt."""
    path = run / "truth.pt"
    samples: dict[int, Sample] = torch.load(path, weights_only=False) if path.is_file() else {}
    truth = Truth()
    states = sorted(int(folder.name.split("-")[1]) for folder in (run / "training_state").glob("checkpoint-*"))
    for drawn in range(0, states[-1] + 1, 2):
        near = [state for state in (drawn - 1, drawn + 1) if 0 <= state <= states[-1]]
        sample = samples.get(drawn)
        if sample is None:
            sample = samples[drawn] = truth.draw(load(checkpoint(run, drawn)), str(drawn), seed=1000 + drawn)
        for state in near:
            if str(state) not in sample.scores:
                sample.scores[str(state)] = truth.score(load(checkpoint(run, state)), sample)
        for branch in sorted((run / f"from_{drawn}").glob("*/training_state/checkpoint-*")):
            name = branch.parents[1].name
            if name not in sample.scores:
                sample.scores[name] = truth.score(load(branch), sample)
        torch.save(samples, path)
        print(f"{run.name} {drawn}: reward {float(sample.rewards.mean()):.3f}, {time.strftime('%T')}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["train", "truth", "branches", "table"])
    parser.add_argument("run", nargs="?", choices=RUNS, default="lora_0")
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--state", type=int, default=4, help="even: the step after which `branches` branch off")
    parser.add_argument("--output", type=Path, default=Path("runs/real"))
    options = parser.parse_args()
    output = options.output.resolve()
    run = output / options.run
    if options.part == "train":
        train(run, options.steps)
    elif options.part == "truth":
        measure(run)
    elif options.part == "branches":
        branches(run, options.state)
    else:
        print_tables([output / name for name in RUNS if (output / name / "truth.pt").is_file()])


if __name__ == "__main__":
    main()
