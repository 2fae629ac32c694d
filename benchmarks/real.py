"""Do the predictions hold on a real language model? SmolLM2-135M-Instruct on three_words, on a CPU.

    python benchmarks/real.py train lora_0 [--steps 8]     a run of RUNS, by the product's own command
    python benchmarks/real.py attached attached --steps 4  the same sizes with trl.GRPOTrainer and `attach`
    python benchmarks/real.py truth lora_0 [--steps 8]     each step on fresh responses: real_truth.py
    python benchmarks/real.py branches lora_0 --at 4       one step from there with each intervention, and its truth
    python benchmarks/real.py draw lora_0 --at 0 8 16      reward and entropy of these states, on held-out prompts
    python benchmarks/real.py table                        of all runs there, and the picture of their states
    python benchmarks/real.py read hacks --at 12           twenty responses of a state

`python -m rl_training.job.fetch_smollm2` must have fetched the model. Every part goes on where it was stopped. What the
product said is read from the JSON of its records; what is true comes from code that shares no formula with it.

Registered before any of it was run, for half of a core and a hundred minutes: lora_0 for 12 steps (8 prompts × 8), then
8 × 4 as RUNS lists it, bounded_1e-3 and bounded_1e-6 for 5 steps, all_weights and random_reward for 4, lora_1 and
lora_2 as far as time goes; the truth of every step from 48 held-out prompts × 4 responses. To be told of each run: how
many 95 % intervals of forward, backward, trapezoid and measured held, sums beside the sum of the truth, the naive
product (delta_h/reuse) beside both, and the cost. Expected: intervals hold and are wide; forward does not know single
steps; the naive product is too large; under the bound both start rates come to the same KL a step by the fifth step;
with the random reward nothing is learned.

Registered next, before any of it was run, for 95 minutes of one shared core, in this order, until time is up:
1. autocast, lora_1 under bf16 autocast: 4 steps with truth. Told: each estimate beside fp32's, steps that the probes
   leave out, the time. Expected: intervals hold as in fp32, and the estimates of the first step agree to .03.
2. attached: 4 steps with truth under TRL's defaults (DAPO's loss, advantages divided by the group's deviation, a rate
   that falls to 0) but the sizes, the adapter and the rate, 2e-4. Expected: as in RUNS.
3. The interventions at two more states: after step 6 of lora_1 and after step 4 of lora_2, ΔH and Δreward. Expected:
   all but one of the 16 intervals hold; signs are right where an interval excludes 0.
4. hacks: 50 steps of all weights at 1e-4, 20 times the rate of all_weights, under autocast to save time and without
   probes; 20 responses each are read at steps 12, 25 and 50. Expected: reward above .8, plain sentences and no lists.
   (Changed before it was run, since the core is slower than was thought: 4 prompts × 4 responses a step, and before
   the second state of 3.)
5. 16 steps of lora_2, lora_1, lora_0_half (8 × 4, three seeds), all_weights and random_reward, without probes where the
   truth of the steps is known: held-out reward and entropy at steps 0, 8 and 16, with bars over prompts and over the
   seeds. Expected: reward rises by .2 to .3 and entropy falls by .4 to .8 with each seed; neither with random_reward.

Registered last, before any of it was run, for 90 minutes of two cores:
1. The runs of 5 above, 16 steps each; `simple` runs with the LoRA runs after all, since it hardly costs time there and
   its sum over 16 steps can be held against the states. Expected beside what 5 says: Σ forward holds the change of
   held-out entropy in at least three of the four LoRA runs, and the naive sum is too large by a fifth or more.
2. fixed_1e-3 and bounded_1e-3 for 16 steps, then bounded_1e-3_1, another seed. Expected: unbounded, reward is below .2
   or entropy below 1 by step 16; bounded, reward is at least that of the seeds at 1e-4, less their spread.

Registered for the present bound, before its runs: auto_1e-3 and auto_1e-5, target_kl_share=auto for 16 steps from rates
that differ by 100, without probes, on shared cores; states 8 and 16 drawn, twenty responses read. Expected: both starts
end within .1 of each other in reward, above .6, with less entropy than the share 2e-3 left (1.2 nats), and of one
mould.
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
from real_tables import AUTOCAST_FILE, FILE, draw_states, print_tables
from real_truth import MAX_TOKENS, RESPONSES, Sample, Truth, load
from transformers import PreTrainedModel

FOLDER = Path(__file__).parent
HALF = ["trainer.num_generations=4", "batch.sequences_per_step=32", "batch.microbatch_size=4"]
QUARTER = ["trainer.num_generations=4", "batch.sequences_per_step=16", "batch.microbatch_size=4"]
BOUND = [*HALF, "trainer.target_kl_share=2e-3"]
# What differs from experiment=smollm2, LoRA of rank 16 at 1e-4 with 8 prompts × 8 responses. HALF is 8 × 4,
# and QUARTER 4 × 4.
RUNS: dict[str, list[str]] = {
    "lora_0": ["seed=0"],
    "bounded_1e-3": [*BOUND, "trainer.learning_rate=1e-3"],
    "bounded_1e-3_1": [*BOUND, "trainer.learning_rate=1e-3", "seed=1"],
    "bounded_1e-6": [*BOUND, "trainer.learning_rate=1e-6"],
    "auto_1e-3": [*HALF, "trainer.target_kl_share=auto", "trainer.learning_rate=1e-3"],
    "auto_1e-5": [*HALF, "trainer.target_kl_share=auto", "trainer.learning_rate=1e-5"],
    "all_weights": [*HALF, "adapter=none", "trainer.learning_rate=5e-6"],
    "random_reward": [*HALF, "data._target_=random_reward.three_words_for_nothing"],
    "lora_1": [*HALF, "seed=1"],
    "lora_2": [*HALF, "seed=2"],
    "fixed_1e-3": [*HALF, "trainer.learning_rate=1e-3"],
    "lora_0_half": [*HALF, "seed=0"],
    "autocast": [*HALF, "seed=1", "trainer.bf16=true"],
    "hacks": [*QUARTER, "adapter=none", "trainer.learning_rate=1e-4", "trainer.bf16=true"],
    "attached": [],  # by the part of that name
}
INTERVENTIONS = ["bonus", "psr", "nsr", "lr"]
NUM_READ = 20  # responses that `read` shows, each to another prompt


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
        write_facts(run, began, resource.RUSAGE_CHILDREN)


def write_facts(run: Path, began: float, who: int) -> None:
    usage = resource.getrusage(who)
    facts = {"seconds": time.time() - began, "cpu_seconds": usage.ru_utime + usage.ru_stime,
             "peak_gb": usage.ru_maxrss * 1024 / 1e9}  # fmt: skip
    with (run / "facts.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps(facts) + "\n")


def train(run: Path, steps: int, save_every: int, probes: str | None) -> None:
    """Train one of RUNS up to this step; every checkpoint that is written stays, for the truth.

    Args:
        probes: what is chosen instead of the experiment's; training is bitwise the same with any.
    """
    command(run, ["experiment=smollm2", *RUNS[run.name], *([f"probe={probes}"] if probes else []),
                  f"trainer.max_steps={steps}", f"trainer.save_steps={save_every}", "trainer.save_total_limit=null",
                  "logger=none", "resume=auto"])  # fmt: skip


def train_attached(run: Path, steps: int) -> None:
    """Train with TRL's own trainer and two lines more, in this process."""
    from peft import LoraConfig
    from trl import GRPOConfig, GRPOTrainer

    from rl_training import attach
    from rl_training.models.smollm2 import load_smollm2
    from rl_training.tasks.three_words import three_words

    model, tokenizer = load_smollm2()
    task = three_words()
    config = GRPOConfig(
        str(run / "training_state"),
        learning_rate=2e-4,
        max_steps=steps,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=8,
        num_generations=4,
        max_completion_length=MAX_TOKENS,
        save_steps=1,
        logging_steps=1,
        bf16=False,
        use_cpu=True,
        report_to=[],
    )
    adapter = LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear", r=16, lora_alpha=32)
    trainer = GRPOTrainer(
        model, task.reward, config, train_dataset=task.train_dataset, processing_class=tokenizer, peft_config=adapter
    )
    began = time.time()
    with attach(trainer, run, ["simple", "measured", "ess"]):
        trainer.train()
    write_facts(run, began, resource.RUSAGE_SELF)


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


class Samples(dict[int, Sample]):
    """What the states of a run have drawn, by state, kept in a file of it.

    Args:
        autocast: as the run's training computes, under bf16 autocast, instead of in fp32.
    """

    def __init__(self, run: Path, autocast: bool = False) -> None:
        self.run = run
        self.truth = Truth(autocast)
        self.path = run / (AUTOCAST_FILE if autocast else FILE)
        super().__init__(torch.load(self.path, weights_only=False) if self.path.is_file() else {})

    def draw(self, state: int) -> Sample:
        """Return the responses that a state draws, once."""
        if state not in self:
            self[state] = self.truth.draw(self._load(checkpoint(self.run, state)), str(state), seed=1000 + state)
            self._keep()
            print(f"{self.run.name} {state}: reward {float(self[state].rewards.mean()):.3f}, {time.strftime('%T')}")
        return self[state]

    def score(self, drawn: int, name: str, weights: Path | None) -> None:
        """Score what a state has drawn with other weights, once."""
        sample = self.draw(drawn)
        if name not in sample.scores:
            sample.scores[name] = self.truth.score(self._load(weights), sample)
            self._keep()

    def _load(self, weights: Path | None) -> PreTrainedModel:
        return load(weights, merged=not self.truth.autocast)

    def _keep(self) -> None:
        torch.save(dict(self), self.path)


def measure(run: Path, steps: int, autocast: bool) -> None:
    """Draw at every second state of a run up to this step, and score with its neighbours."""
    samples = Samples(run, autocast)
    for step in range(1, steps + 1):
        drawn = step - step % 2
        other = 2 * step - 1 - drawn
        samples.score(drawn, str(other), checkpoint(run, other))


def measure_branches(run: Path, state: int) -> None:
    """Draw at a state and score with what each intervention has made of it."""
    samples = Samples(run)
    for weights in sorted((run / f"from_{state}").glob("*/training_state/checkpoint-*")):
        samples.score(state, weights.parents[1].name, weights)


def read(run: Path, state: int) -> None:
    """Print NUM_READ responses of a state, with their rewards."""
    sample = torch.load(run / FILE, weights_only=False)[state]
    for place in range(0, NUM_READ * RESPONSES, RESPONSES):
        print(f"{float(sample.rewards[place]):.2f}  {sample.texts[place]!r}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["train", "attached", "truth", "branches", "draw", "table", "read"])
    parser.add_argument("run", nargs="?", choices=RUNS, default="lora_0")
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--save-every", type=int, default=1, help="steps; `truth` needs every checkpoint")
    parser.add_argument("--probe", help="what is measured, none for instance, instead of what the experiment says")
    parser.add_argument("--autocast", action="store_true", help="the truth of the policy under bf16 autocast")
    parser.add_argument("--at", type=int, nargs="+", default=[4], help="states: steps after which they are")
    parser.add_argument("--output", type=Path, default=Path("runs/real"))
    options = parser.parse_args()
    output = options.output.resolve()
    run = output / options.run
    if options.part == "train":
        train(run, options.steps, options.save_every, options.probe)
    elif options.part == "attached":
        train_attached(run, options.steps)
    elif options.part == "truth":
        measure(run, options.steps, options.autocast)
    elif options.part == "table":
        runs = [output / name for name in RUNS if (output / name / FILE).is_file()]
        print_tables(runs)
        draw_states(runs, output / "real.png")
    else:
        for state in options.at:
            if options.part == "branches":
                branches(run, state)
                measure_branches(run, state)
            elif options.part == "draw":
                Samples(run).draw(state)
            else:
                read(run, state)


if __name__ == "__main__":
    main()
