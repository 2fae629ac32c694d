"""TRL's quickstart in 24 variants, with the two lines that attach probes: what it prints, measures and exits with.

    python benchmarks/quickstarts.py                  a table, in about ten minutes on two cores
    python benchmarks/quickstarts.py --only 3 --keep DIR

Each variant is a separate script, started as a user would start it. They differ in batch, accumulation, generations,
loss, processes and sequence order. Each trains the shipped model for three steps, otherwise with TRL's defaults.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import rl_training.job.silence  # noqa: F401

STEPS = 3
SCRIPT = """
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

from rl_training import attach
from rl_training.tasks.tiny import TINY_PATH

dataset = Dataset.from_dict({{"prompt": [f"{{a}}+{{b}}=?" for a in range(8) for b in range(10 - a)] * 4}})


def reward_num_unique_chars(completions, **kwargs):
    return [len(set(completion)) for completion in completions]


trainer = GRPOTrainer(
    model={model!r},
    reward_funcs=reward_num_unique_chars,
    args=GRPOConfig("state", {arguments}),
    train_dataset=dataset,
)
with attach(trainer, "run"{options}):
    trainer.train()
"""
# The same in every variant: a short training on a CPU.
COMMON: dict[str, Any] = {
    "max_steps": STEPS, "max_completion_length": 12, "use_cpu": True, "bf16": False, "report_to": [],
    "save_strategy": "no", "disable_tqdm": True, "ddp_find_unused_parameters": False,
}  # fmt: skip


@dataclass(frozen=True)
class Variant:
    """One variant of the quickstart."""

    batch: int  # sequences per microbatch
    accumulation: int  # microbatches per step, on each process
    generations: int = 8  # responses per prompt
    loss: str = "dapo"  # TRL's default
    processes: int = 1
    settings: dict[str, Any] = field(default_factory=dict)
    options: str = ""

    @property
    def prompts(self) -> int:
        """Prompts per step."""
        return self.batch * self.accumulation * self.processes // self.generations


VARIANTS = [
    Variant(8, 1),  # TRL's defaults
    Variant(8, 8),
    Variant(1, 64),
    Variant(64, 1),
    Variant(32, 2),
    Variant(16, 4),
    Variant(12, 6),  # a prompt and a half in each microbatch
    Variant(2, 32),
    Variant(8, 3),
    Variant(8, 4),
    Variant(16, 4, 4),
    Variant(8, 8, 2),
    Variant(4, 16, 16, "cispo"),
    Variant(8, 8, loss="grpo"),
    Variant(8, 8, loss="dr_grpo", settings={"scale_rewards": "none"}),
    Variant(8, 8, loss="bnpo"),
    Variant(64, 1, loss="bnpo"),
    Variant(8, 8, settings={"entropy_coef": 0.01}),
    Variant(8, 8, settings={"steps_per_generation": 16}),  # two steps train on each generation
    Variant(8, 8, settings={"steps_per_generation": 4}),  # two generations per step
    Variant(8, 8, settings={"num_iterations": 2}),
    Variant(8, 8, options=", whole_prompts=False"),
    Variant(8, 4, processes=2),
    Variant(32, 1, processes=2),
]


def script_of(variant: Variant, model: str) -> str:
    """Return the text of a variant's script."""
    settings = {
        "per_device_train_batch_size": variant.batch, "gradient_accumulation_steps": variant.accumulation,
        "num_generations": variant.generations, "loss_type": variant.loss, **COMMON, **variant.settings,
    }  # fmt: skip
    arguments = ", ".join(f"{name}={value!r}" for name, value in settings.items())
    return SCRIPT.format(model=model, arguments=arguments, options=variant.options)


def run(variant: Variant, folder: Path) -> dict[str, Any]:
    """Run a variant in a folder. Return its exit code, its first line, and what it measured and wrote."""
    from rl_training.tasks.tiny import TINY_PATH

    (folder / "script.py").write_text(script_of(variant, str(TINY_PATH)), encoding="utf-8")
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={variant.processes}"]
    words = [sys.executable, *(launcher if variant.processes > 1 else []), "script.py"]
    root = str(Path(__file__).parents[1])
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": root}
    ended = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    said = ended.stderr.splitlines()
    first = next((line for line in said if line.startswith("rl-training ")), "nothing")
    probes = folder / "run" / "logs" / "probes.jsonl"
    rows = [json.loads(line) for line in probes.read_text().splitlines()] if probes.is_file() else []
    forward = [row for row in rows if row["name"] == "delta_h/forward"]
    return {
        "exit": ended.returncode,
        "first": first.partition("; probes: simple, ess. ")[2] or first,
        "bars": sum(row["stderr"] is not None for row in forward),
        "cost": cost_in(folder / "run" / "logs" / "metrics.jsonl"),
        "reasons": sorted({row["reason"] for row in forward if row["value"] is None}),
        "report": (folder / "run" / "report" / "report.html").is_file(),
        "stderr": ended.stderr,
    }


def cost_in(log: Path) -> str:
    """Return the median share of a step's time spent in probes, without the first step."""
    lines = log.read_text(encoding="utf-8").splitlines() if log.is_file() else []
    shares = [json.loads(line).get("probe_cost/fraction_of_step") for line in lines][1:]
    known = [share for share in shares if share is not None]
    return f"{statistics.median(known):.0%}" if known else "–"


def describe(variant: Variant) -> str:
    others = ", ".join(f"{name}={value}" for name, value in variant.settings.items())
    return f"{variant.loss}{', ' * bool(others)}{others}{variant.options}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", type=int, nargs="+", help="numbers of variants, from 1")
    parser.add_argument("--keep", type=Path, help="folder to keep scripts and runs in")
    chosen = parser.parse_args()
    print(
        "| | batch × accumulation, generations | loss and settings | processes | prompts | steps with a bar | "
        "probes' share of a step | exit code | first line, after the versions |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for number, variant in enumerate(VARIANTS, start=1):
        if chosen.only and number not in chosen.only:
            continue
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch) if chosen.keep is None else chosen.keep / f"way_{number}"
            folder.mkdir(parents=True, exist_ok=True)
            outcome = run(variant, folder)
        ended = outcome["exit"] if outcome["report"] else f"{outcome['exit']}, no report"
        print(
            f"| {number} | {variant.batch} × {variant.accumulation}, {variant.generations} | {describe(variant)} | "
            f"{variant.processes} | "
            f"{variant.prompts} | {outcome['bars']} of {STEPS} | {outcome['cost']} | {ended} | {outcome['first']} |",
            flush=True,
        )
        for reason in outcome["reasons"]:
            print(f"  {reason}", file=sys.stderr)
        if outcome["exit"]:
            print(outcome["stderr"], file=sys.stderr)


if __name__ == "__main__":
    main()
