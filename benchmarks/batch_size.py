"""Which batch learns most from the same sequences, and did the noise scale say so?

    OMP_NUM_THREADS=1 python benchmarks/batch_size.py FOLDER [--factors 0.5 1 2 4] [--rates 1.5e-4 3e-4] [--seeds 0 1]

Trains the default task on so many sequences, in steps of 32 prompts x 8 responses times a factor, at several learning
rates; then asks for the mean reward of fresh responses to held-out prompts, halfway and at the end. The probe `gns`
goes along. Each run is kept in FOLDER as it ends, and the table is of all that is there.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

import rl_training.job.silence  # noqa: F401

from default_task import default_trainer
from tqdm import tqdm
from transformers import TrainerCallback

from rl_training import Estimate
from rl_training.probes import GradientNoiseScaleProbe
from rl_training.tasks.arithmetic import arithmetic

PROMPTS, RESPONSES = 32, 8
SCALE = "gns/noise_scale_prompts"


class NoiseScale(GradientNoiseScaleProbe):
    """The probe, with its answers at each step kept."""

    def __init__(self) -> None:
        super().__init__()
        self.all: list[dict[str, tuple[float, float]]] = []

    def results(self) -> dict[str, Estimate]:
        answers = super().results()
        self.all.append({name: (e.value, e.stderr) for name, e in answers.items()})
        return answers


class Rewards(TrainerCallback):
    """Evaluates halfway and at the end, and keeps the rewards of all steps."""

    def __init__(self, steps: int) -> None:
        self.at = {steps // 2, steps}
        self.held_out: list[float] = []
        self.training: list[float] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **kwargs: Any) -> Any:
        if "eval_reward" in logs:
            self.held_out.append(logs["eval_reward"])
        elif "reward" in logs:
            self.training.append(logs["reward"])
            control.should_evaluate = state.global_step in self.at
        return control


def train(factor: float, rate: float, seed: int, sequences: int) -> dict[str, Any]:
    """Returns the rewards of a run, and what `gns` said at each of its steps."""
    accumulation = int(8 * factor)
    steps = sequences // (accumulation * 32)
    probe, watch = NoiseScale(), Rewards(steps)
    with tempfile.TemporaryDirectory() as folder:
        trainer = default_trainer(
            folder,
            [probe],
            steps,
            learning_rate=rate,
            seed=seed,
            gradient_accumulation_steps=accumulation,
            eval_dataset=arithmetic().eval_dataset,
            per_device_eval_batch_size=256,
            num_generations_eval=2,
            logging_steps=1,
        )
        trainer.add_callback(watch)
        trainer.train()
    return {"factor": factor, "rate": rate, "seed": seed, "sequences": sequences, "steps": steps,
            "held_out": watch.held_out, "training": watch.training, "gns": probe.all}  # fmt: skip


def rows(runs: list[dict[str, Any]]) -> list[str]:
    """Returns a row for each batch and rate, with the mean over seeds."""
    lines = []
    for factor, rate in sorted({(run["factor"], run["rate"]) for run in runs}):
        group = [run for run in runs if (run["factor"], run["rate"]) == (factor, rate)]
        half, end = (statistics.fmean(run["held_out"][which] for run in group) for which in (0, 1))
        cells = [f"{factor:g} × {PROMPTS}", f"{rate:g}", str(len(group)), str(group[0]["steps"])]
        lines.append(f"| {' | '.join([*cells, f'{half:.3f}', f'{end:.3f}', _noise_scale(group[0])])} |")
    return lines


def _noise_scale(run: dict[str, Any]) -> str:
    value, low, high = (run["gns"][-1][f"{SCALE}{end}"][0] for end in ("", "_low", "_high"))
    return f"{value:.0f} ({low:.0f} – {high:.0f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where runs are kept")
    parser.add_argument("--factors", type=float, nargs="+", default=[0.5, 1, 2, 4])
    parser.add_argument("--rates", type=float, nargs="*", default=[1.5e-4, 3e-4, 6e-4], help="none: only the table")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--sequences", type=int, default=5120)
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    todo = [(f, rate, seed) for seed in options.seeds for rate in options.rates for f in options.factors]
    for factor, rate, seed in tqdm(todo, unit="run"):
        path = options.folder / f"{factor:g}-{rate:g}-{seed}-{options.sequences}.json"
        if not path.exists():
            path.write_text(json.dumps(train(factor, rate, seed, options.sequences)))
    runs = [json.loads(path.read_text()) for path in sorted(options.folder.glob("*.json"))]
    titles = ("prompts a step", "learning rate", "seeds", "steps", "reward halfway", "at the end", "noise scale")
    print(f"| {' | '.join(titles)} |\n|{'---|' * 7}")
    print("\n".join(rows(runs)))


if __name__ == "__main__":
    main()
