"""Does the order of corrections that one step predicts come true in whole runs? Registered before the runs were made.

    OMP_NUM_THREADS=1 python benchmarks/correction_order.py run FOLDER     trains every arm from every seed
    python benchmarks/correction_order.py table FOLDER                     prints what came out

correction_order_registered.json says what is compared, and how; `run` takes settings, arms and seeds from there. While
the run without a correction goes, the probe `interventions` predicts what each correction would do to reward and
entropy at that step. The truth is reward and entropy of the policies that were trained with each, on held-out prompts.
What is there is not made again. --small shrinks all, to see that it runs.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import rl_training.job.silence  # noqa: F401

import torch
from other_samplers import trainer_of

from rl_training import Probe
from rl_training.engine.step import Step
from rl_training.mathematics.running_pairs import RunningPair
from rl_training.probes import InterventionsProbe, SamplerProbe
from rl_training.tasks.arithmetic import arithmetic

REGISTERED = Path(__file__).with_name("correction_order_registered.json")
NONE = "none"


class Predicted(InterventionsProbe):
    """Keeps the means over the first steps of what each correction would do, and over all."""

    def __init__(self, which: list[str], every: int, early: int) -> None:
        super().__init__(which, every=every, num_folds=8, decay=1.0)
        self.early = early
        self.means: dict[str, dict[str, Any]] = {}

    def prepare(self, step: Step) -> None:
        super().prepare(step)
        self.means["early" if step.number <= self.early else "all"] = {
            each.name: _numbers(self.running[each.name]) for each in self.which if self.running[each.name].steps
        }


def _numbers(running: RunningPair) -> dict[str, Any]:
    """Returns the means of Δreward and ΔH, each with its standard error, and of how many steps they are."""
    mean = running.mean()
    errors = mean.covariance.diagonal().clamp(min=0.0).sqrt().tolist()
    values = mean.values.tolist()
    return {"delta_reward": [values[1], errors[1]], "delta_h": [values[0], errors[0]], "steps": running.steps}


class Divergence(SamplerProbe):
    """Keeps KL and effective sample size of every step."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[list[float]] = []

    def prepare(self, step: Step) -> None:
        super().prepare(step)
        self.rows.append([self._answers[f"sampler/{name}"].value for name in ("kl", "ess")])


def trained(plan: dict[str, Any], setting: dict[str, Any], arm: str, seed: int) -> dict[str, Any]:
    """Returns what a run with this correction comes to; of the one without also what is predicted of all others."""
    others = [name for name in plan["arms"] if name != NONE]
    predicted, divergence = Predicted(others, plan["measured_every"], plan["early"]), Divergence()
    probes: list[Probe] = [divergence, predicted] if arm == NONE else []
    with tempfile.TemporaryDirectory() as scratch:
        trainer = trainer_of(
            scratch, probes, plan["steps"], setting["sampler"], learning_rate=setting["learning_rate"], seed=seed,
            interventions=[] if arm == NONE else [arm], per_device_train_batch_size=32,
            gradient_accumulation_steps=plan["prompts"] * 8 // 32, num_generations_eval=4,
            per_device_eval_batch_size=512, eval_dataset=arithmetic(num_eval=plan["evaluation_prompts"]).eval_dataset,
        )  # fmt: skip
        trainer.train()
        rewards = [row["reward"] for row in trainer.state.log_history if "reward" in row]
        trainer.evaluate()
        final = trainer.state.log_history[-1]
    result = {"reward": final["eval_reward"], "entropy": final["eval_entropy"], "rewards": rewards}
    if arm == NONE:
        result |= {"predicted": predicted.means, "kl_and_ess": divergence.rows}
    return result


def file_of(folder: Path, setting: str, arm: str, seed: int) -> Path:
    return folder / f"{setting}-{arm.replace(':', '_')}-{seed}.json"


def run(plan: dict[str, Any], folder: Path) -> None:
    """Trains what is not there yet, a seed after another, so that what is there is a whole test of fewer seeds."""
    folder.mkdir(parents=True, exist_ok=True)
    for seed in plan["seeds"]:
        for name, setting in plan["settings"].items():
            for arm in plan["arms"]:
                file = file_of(folder, name, arm, seed)
                if not file.is_file():
                    start = time.perf_counter()
                    result = trained(plan, setting, arm, seed)
                    file.write_text(json.dumps(result), encoding="utf-8")
                    print(f"{file.stem}: reward {result['reward']:.3f}, entropy {result['entropy']:.4f}, "
                          f"{time.perf_counter() - start:.0f} s", flush=True)  # fmt: skip


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("part", choices=["run", "table"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--small", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    plan = json.loads(REGISTERED.read_text(encoding="utf-8"))
    if options.small:
        plan |= {"steps": 4, "early": 2, "seeds": [0]}
    run(plan, options.folder)
