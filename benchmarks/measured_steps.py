"""Is what the probe `measured` says of each step right, for any optimizer? Against large samples of fresh responses.

    OMP_NUM_THREADS=1 python benchmarks/measured_steps.py [--conditions muon lion] [--steps 44] [--only-report]

Trains the default task with each optimizer, with the probe three times: from 1, 2 and all 8 responses of every prompt.
Around each step the truth: 2,048 fresh responses to random prompts, drawn before it and scored before it and after, by
the same weights of prefixes with the mean of all other responses as baseline. A table has coverage of the 95 %
intervals, the ratio of the sums, and the error of a single step beside that of `trapezoid`, where there is one.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import rl_training.job.silence  # noqa: F401

import torch
from default_task import default_trainer
from peft import LoraConfig
from torch import Tensor

from rl_training import Estimate, Probe
from rl_training.engine.batch import as_rollout
from rl_training.engine.step import Step
from rl_training.hosts.trl.policy import respond
from rl_training.mathematics.calibration import interval_covers
from rl_training.mathematics.looking_back import differences_before
from rl_training.probes import MeasuredStepProbe, SimpleEntropyProbe

SEQUENCES = 2048  # of the truth
SCORED = (1, 2, 8)  # responses of every prompt


class Lion(torch.optim.Optimizer):
    """Chen et al. 2023: the sign of an average of gradients; it has no formula in the engine."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                average = self.state[param].setdefault("average", torch.zeros_like(param))
                param.sub_(group["lr"] * torch.lerp(average, param.grad, 0.1).sign())
                average.lerp_(param.grad, 0.01)


def muon(parameters: Sequence[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.Muon([param for param in parameters if param.ndim == 2], lr=2e-3)


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "muon": muon,
    "adafactor": lambda parameters: torch.optim.Adafactor(parameters, lr=3e-3),
    "lion": lambda parameters: Lion(parameters, lr=1e-4),
}
SETTINGS: dict[str, dict[str, Any]] = {
    "adamw 3e-4": {},
    "adamw 1e-3": {"learning_rate": 1e-3},
    "sgd": {"optim": "sgd", "learning_rate": 0.05},
    "lora": {"learning_rate": 2e-3, "peft_config": LoraConfig(r=16, target_modules="all-linear")},
}


class Scored(MeasuredStepProbe):
    """The probe under a name of its own."""

    def __init__(self, responses: int) -> None:
        super().__init__(responses)
        self.name = f"measured {responses}"


class Truth(Probe):
    """Measures each step on fresh responses, and keeps what the other probes say of it."""

    name = "truth"

    def __init__(self, trainer: Callable[[], Any], seed: int) -> None:
        super().__init__()
        self.trainer, self.seed = trainer, seed
        self.rows: dict[int, dict[str, Any]] = {}

    def prepare(self, step: Step) -> None:
        trainer, drawn = self.trainer(), torch.Generator().manual_seed((self.seed << 20) + step.number)
        rows = torch.randint(len(trainer.train_dataset), (SEQUENCES,), generator=drawn).tolist()
        prompts = [trainer.train_dataset[row]["prompt"] for row in rows]
        ids = respond(trainer, prompts, self.seed, step.number)
        self._rollout = as_rollout(*ids, range(SEQUENCES), trainer._tokenizer.pad_token_id)
        self._before = step.policy.score_rollout(self._rollout)

    def after_step(self, step: Step) -> None:
        after, every = step.policy.score_rollout(self._rollout), torch.arange(SEQUENCES)
        nothing = torch.zeros(SEQUENCES), torch.zeros_like(self._before.logps)
        terms = differences_before(self._before, after, every, torch.zeros_like(every), *nothing)
        mask = self._before.mask.double()
        length = float(mask.sum()) / SEQUENCES
        level = float((self._before.entropies.double() * mask).nan_to_num().sum() / mask.sum())
        entropy, longer = (float(x) for x in terms[:, :2].mean(dim=0))
        value = (level * length + entropy) / (length + longer) - level
        each = (terms[:, 0] - (level + value) * terms[:, 1]) / (length + longer)
        stderrs = each.std() / math.sqrt(SEQUENCES), terms[:, 1].std() / math.sqrt(SEQUENCES)
        self.rows[step.number] = {"h": [value, float(stderrs[0])], "t": [longer, float(stderrs[1])]}
        self._answers = {"truth": Estimate(value)}


def train(condition: str, seed: int, steps: int) -> list[dict[str, Any]]:
    """Returns a row for each step: the truth, and what each probe says of it."""
    settings = dict(SETTINGS.get(condition, {}))
    measured: list[Probe] = [Scored(responses) for responses in SCORED]
    truth = Truth(lambda: trainer, seed)
    said: dict[int, dict[str, list[float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        beside = [SimpleEntropyProbe()] if condition.startswith("adamw") else []
        trainer = default_trainer(folder, [*measured, *beside, truth], steps + 1, seed=seed, **settings)
        trainer.attachment._policy._batch_size = 256  # of forward passes: large ones are faster here
        if condition in OPTIMIZERS:
            trainer.optimizer = OPTIMIZERS[condition]([p for p in trainer.model.parameters() if p.requires_grad])
        finish = trainer.attachment.driver.finish

        def keep() -> Any:
            answers = finish()
            for probe, estimates in answers.items():
                for name, e in estimates.items():
                    if name.split("/")[-1] in ("delta_h", "delta_length", "trapezoid") and e.about_step:
                        row = [e.value, e.stderr, e.num_samples]
                        said.setdefault(e.about_step, {})[f"{probe} {name.split('/')[-1]}"] = row
            return answers

        trainer.attachment.driver.finish = keep
        trainer.train()
    return [truth.rows[step] | said[step] | {"step": step, "condition": condition} for step in range(1, steps + 1)]


def report(rows: Sequence[dict[str, Any]]) -> None:
    print("| optimizer | Σ truth | probe | steps | coverage | Σ / Σ truth | error of a step, 1e-3 | of `trapezoid` |")
    print("|---|---|---|---|---|---|---|---|")
    for condition in [*dict.fromkeys(row["condition"] for row in rows), None]:
        own = [row for row in rows if condition in (None, row["condition"])]
        for what, unit in (("delta_h", "h"), ("delta_length", "t")):
            for count in SCORED:
                name = f"measured {count} {what}"
                print("|", " | ".join([condition or "all", *cells(own, name, unit)]), "|")


def cells(rows: Sequence[dict[str, Any]], name: str, unit: str) -> list[str]:
    known = [row for row in rows if math.isfinite(row[name][0])]
    errors = [row[name][0] - row[unit][0] for row in known]
    held = [
        interval_covers(error, row[name][1], int(row[name][2]), row[unit][1])
        for error, row in zip(errors, known, strict=True)
    ]
    total, predicted = (sum(row[key][0] for row in known) for key in (unit, name))
    stderr = math.hypot(*(row[key][1] for row in known for key in (unit, name))) / abs(total)
    others = [row["simple trapezoid"][0] - row[unit][0] for row in known if "simple trapezoid" in row and unit == "h"]
    noise = statistics.fmean(row[unit][1] ** 2 for row in known)
    scatter = [
        f"{1e3 * math.sqrt(max(statistics.fmean(x * x for x in values) - noise, 0.0)):.3f}" if values else ""
        for values in (errors, [x for x in others if math.isfinite(x)])
    ]
    ratio = f"{predicted / total:.3f} ± {stderr:.3f}"
    return [f"{total:+.4f}", f"`{name}`", str(len(known)), f"{statistics.fmean(held):.3f}", ratio, *scatter]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    conditions = [*SETTINGS, *OPTIMIZERS]
    parser.add_argument("--conditions", nargs="+", choices=conditions, default=conditions)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--steps", type=int, default=44)
    parser.add_argument("--output", type=Path, default=Path("runs/measured_steps.jsonl"))
    parser.add_argument("--only-report", action="store_true")
    options = parser.parse_args()
    options.output.parent.mkdir(parents=True, exist_ok=True)
    for seed, condition in [(s, c) for s in options.seeds for c in options.conditions if not options.only_report]:
        rows = train(condition, seed, options.steps)
        with options.output.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
    report([json.loads(line) for line in options.output.read_text("utf-8").splitlines()])


if __name__ == "__main__":
    main()
