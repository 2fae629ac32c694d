"""Are the first lines of a report right? Curves and trainings with a known story, and what the report says of them.

    python benchmarks/stories.py --seed 0 1 2                         curves with noise
    OMP_NUM_THREADS=1 python benchmarks/stories.py --out FOLDER       trainings: trains what is missing, then judges

A bad story, and one in which nothing moves, is told right if the report names it and does not say that there is nothing
to do; a healthy one if the report says that there is nothing to do, and names no change. Shapes, sizes, lengths and
noise of the curves are drawn anew with each seed. The trainings are plain trl.GRPOTrainer runs on three tasks, with
probes attached.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import math
import random
import re
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import rl_training.job.silence  # noqa: F401

import numpy as np
import torch
from default_task import in_a_fork
from faults_to_plant import SETTINGS
from trl import GRPOConfig, GRPOTrainer

from rl_training import Records, attach
from rl_training.models.load import load_tiny
from rl_training.records.report.opening import opening
from rl_training.records.table.reading import read_run
from rl_training.tasks.answers import only_answer
from rl_training.tasks.arithmetic import arithmetic

LENGTHS = (20, 30, 40, 100, 400, 2000)
GONE, LOSES, FALLS, STANDS = r"gone|almost gone", r"lost|gone", r"reward has fallen", r"reward has hardly risen"
GROUPS = ("bad", "healthy", "still")
Curve = Callable[[float], float]  # of the share of the run that has passed
Draw = np.random.Generator
BATCH = {"per_device_train_batch_size": 16, "gradient_accumulation_steps": 4}
TRAINER = {"class": "GRPOTrainer", "num_generations": 8, "learning_rate": 1e-5, "gradient_accumulation_steps": 8}


@dataclass(frozen=True)
class Story:
    """Curves of a run, and what the report must name; "" for a healthy run, in which there is nothing to do."""

    named: str
    entropy: Curve
    reward: Curve
    others: Mapping[str, Curve] = field(default_factory=dict)


# --- curves -----------------------------------------------------------------------------------------------------------


def drop(at: float, width: float = 0.02) -> Curve:
    """Return a curve from 1 to 0 around `at`."""
    return lambda u: 1 / (1 + math.exp(min((u - at) / width, 500.0)))


def saw(period: float, height: float) -> Curve:
    return lambda u: height * ((u / period) % 1.0 - 0.5)


def bad_stories(draw: Draw) -> dict[str, Story]:
    """Return a story of each kind in which something must be done; sizes are drawn."""
    h, r = draw.choice([0.1, 0.4, 1.0, 3.0]), draw.uniform(0.3, 0.65)
    left, at, early = draw.uniform(0.005, 0.04), draw.uniform(0.25, 0.8), draw.uniform(0.08, 0.3)
    far, pace = draw.uniform(0.2, 0.28), draw.uniform(2.5, 5.0)
    collapse: Curve = lambda u: h * (left + drop(at)(u))  # noqa: E731
    still: Curve = lambda u: h  # noqa: E731
    slow: Curve = lambda u: h * (1 - 0.6 * u)  # noqa: E731
    climb: Curve = lambda u: r + 0.2 * min(u / early, 1)  # noqa: E731
    return {
        "collapse, reward never moves": Story(GONE, collapse, lambda u: r),
        "collapse in the first steps": Story(GONE, lambda u: h * (left + drop(0.06)(u)), lambda u: r),
        "collapse, reward falls with it": Story(FALLS, collapse, lambda u: r * drop(at)(u)),
        "collapse, reward falls later": Story(FALLS, collapse, lambda u: r - far * (1 - drop(min(at + 0.1, 0.85))(u))),
        "slow loss": Story(LOSES, slow, lambda u: r),
        "loss after a rise": Story(LOSES, lambda u: h * math.exp(-pace * u), climb),
        "loss in teeth": Story(LOSES, lambda u: slow(u) + saw(0.125, 0.06 * h)(u), lambda u: r),
        "slow fall, entropy still": Story(FALLS, still, lambda u: r - far * u),
        "slow fall, entropy falls": Story(FALLS, slow, lambda u: r - far * u),
        "slow fall, entropy rises": Story(FALLS, lambda u: h * (1 + 2 * u), lambda u: r - far * u),
        "break, entropy still": Story(FALLS, still, lambda u: r - far * (1 - drop(at)(u))),
        "break, entropy erupts": Story(FALLS, lambda u: h * (1 + 5 * (1 - drop(at)(u))), lambda u: r * drop(at)(u)),
        "rise, then back": Story(FALLS, slow, lambda u: r + far * (min(u / 0.4, 1) - max((u - 0.5) / 0.5, 0))),
        "two phases: learns, then collapses": Story(
            FALLS, lambda u: h * (0.4 + 0.6 * math.exp(-4 * u)) * (left + drop(0.75)(u)),
            lambda u: r + 0.3 * min(u / 0.5, 1) - 0.5 * (1 - drop(0.8)(u)),
        ),
        "one reward falls": Story("correct", slow, lambda u: 0.4 + 0.3 * u, {
            "rewards/correct/mean": lambda u: r - far * u, "rewards/format/mean": lambda u: 0.1 + 0.7 * u}),
        "held-out falls": Story("held-out", slow, lambda u: r + 0.3 * u, {
            "eval_reward": lambda u: r + far * (min(u / 0.4, 1) - 1.3 * max((u - 0.4) / 0.6, 0))}),
    }  # fmt: skip


def healthy_stories(draw: Draw) -> dict[str, Story]:
    """Return a story of each kind in which there is nothing to do, or nothing moves; sizes are drawn."""
    h, r, at = draw.choice([0.1, 0.4, 1.0, 3.0]), draw.uniform(0.15, 0.4), draw.uniform(0.1, 0.5)
    gain, pace = draw.uniform(0.3, 0.5), draw.uniform(3.0, 8.0)
    still: Curve = lambda u: h  # noqa: E731
    spent: Curve = lambda u: h * (1 - 0.55 * u)  # noqa: E731
    rises: Curve = lambda u: r + gain * u  # noqa: E731
    return {
        "spends": Story("", spent, rises),
        "spends in proportion": Story("", lambda u: h * math.exp(-1.2 * u), rises),
        "learned": Story("", lambda u: h * (0.2 + 0.8 * math.exp(-4 * u)), lambda u: 0.9 - 0.5 * math.exp(-pace * u)),
        "solved": Story("", lambda u: h * (0.01 + math.exp(-5 * u)), lambda u: 0.99 - 0.6 * math.exp(-pace * u)),
        "stands": Story(STANDS, still, lambda u: r),
        "stands at 0": Story(STANDS, still, lambda u: 0.02),
        "rises, entropy still": Story("", still, rises),
        "rises, entropy rises": Story("", lambda u: h * (1 + 0.8 * u), rises),
        "warm-up": Story("", lambda u: h * (1 - 0.4 * max(u - at, 0)), lambda u: r + gain * max(u - at, 0) / (1 - at)),
        "rises late": Story("", lambda u: h * (1 - 0.5 * u), lambda u: r + gain * (1 - drop(0.8, 0.1)(u))),
        "fell at first": Story("", lambda u: h * (0.4 + 0.6 * math.exp(-8 * u)), rises),
        "rises in teeth": Story("", spent, lambda u: rises(u) + saw(0.1, 0.08)(u)),
        "entropy in teeth": Story(STANDS, lambda u: h + saw(0.2, 0.15 * h)(u), lambda u: r),
        "all rewards in teeth": Story(STANDS, still, lambda u: r + saw(0.15, 0.1)(u)),
        "two rewards rise": Story("", spent, rises, {
            "rewards/correct/mean": lambda u: r + 0.2 * u, "rewards/format/mean": lambda u: r + 0.6 * u}),
        "held-out rises less": Story("", spent, rises, {"eval_reward": lambda u: r + 0.4 * gain * u}),
    }  # fmt: skip


NOISES = ("white", "correlated", "spikes", "small batches")


def noise(kind: str, count: int, draw: Draw) -> np.ndarray:
    """Return noise with a standard deviation of 1; of spikes, one step in twenty is six times as far off."""
    values: np.ndarray = draw.normal(size=count)
    if kind == "correlated":
        for step in range(1, count):
            values[step] = 0.4 * values[step - 1] + math.sqrt(1 - 0.4**2) * values[step]
    return np.where(draw.random(count) < 0.05, 6.0, 1.0) * values if kind == "spikes" else values


def log_curves(folder: Path, story: Story, steps: int, kind: str, draw: Draw) -> None:
    """Write the records of a run that has this story."""
    of_reward, of_entropy = (0.08, 0.08) if kind == "small batches" else (0.025, 0.04)
    u = np.arange(1, steps + 1) / steps
    curves = {"reward": story.reward, **story.others}
    logged = {name: [curve(x) for x in u] + of_reward * noise(kind, steps, draw) for name, curve in curves.items()}
    logged = {name: np.clip(values, 0.0, 1.0) for name, values in logged.items()}
    levels = np.array([story.entropy(x) for x in u]) * np.exp(of_entropy * noise(kind, steps, draw))
    records = Records(folder / "logs")
    records.start(0, {"sequences_per_step": 128, "trainer": TRAINER})
    for n in range(steps):
        numbers = {name: float(values[n]) for name, values in logged.items()}
        records.write_metrics(n + 1, {**numbers, "entropy": float(levels[n]), "reward_std": 0.42,
                                      "frac_reward_zero_std": 0.3, "learning_rate": 1e-5})  # fmt: skip


def is_right(text: str, named: str) -> bool:
    nothing = re.search("nothing to do", text, re.IGNORECASE)
    if not named:
        return bool(nothing) and "To change" not in text
    return not nothing and bool(re.search(named, text, re.IGNORECASE))


def first_lines(folder: Path) -> str:
    first = opening(read_run(folder))
    return " ".join([first.sentence, first.advice.text, *map(str, first.findings)])


def judge_curves(seeds: list[int], lengths: list[int], verbose: bool) -> None:
    right, told, wrong = Counter[tuple[str, str]](), Counter[tuple[str, str]](), Counter[tuple[str, str]]()
    for seed in seeds:
        for steps in lengths:
            for kind in NOISES:
                if kind == "small batches" and steps < 100:
                    continue  # no one could tell
                draw = np.random.default_rng([seed, steps, NOISES.index(kind)])
                for group, stories in (("bad", bad_stories(draw)), ("healthy", healthy_stories(draw))):
                    for name, story in stories.items():
                        with tempfile.TemporaryDirectory() as folder:
                            log_curves(Path(folder), story, steps, kind, draw)
                            text = first_lines(Path(folder))
                        good, told_of = is_right(text, story.named), "still" if story.named == STANDS else group
                        for key in ((told_of, "all"), (told_of, f"{steps} steps"), (told_of, kind)):
                            told[key] += 1
                            right[key] += good
                        if not good:
                            wrong[told_of, name] += 1
                            if verbose:
                                print(f"{name} ({steps} steps, {kind}, seed {seed}): {text[:300]}", flush=True)
    print("| curves | bad: right | healthy: right | still: right |", "|---|---|---|---|", sep="\n")
    for part in ("all", *(f"{steps} steps" for steps in lengths), *NOISES):
        cells = [f"{right[group, part]} of {told[group, part]}" for group in GROUPS]
        print(f"| {part} | {' | '.join(cells)} |")
    print("wrong:", ", ".join(f"{name} {count}" for (_, name), count in wrong.most_common()) or "none")


# --- trainings --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Training:
    """A training: what the report must name ("" if it is healthy), and how it differs from the default one."""

    named: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    operands: tuple[int, int] = (3, 7)
    rewards: Callable[[], list[Callable[..., list[float]]]] = lambda: [exact]


def exact(completions: list[str], answer: list[str], **columns: Any) -> list[float]:
    return [float(only_answer(text) == right) for text, right in zip(completions, answer, strict=True)]


def brief(completions: list[str], **columns: Any) -> list[float]:  # a loophole: it pays for answers without work
    return [float(text.startswith("</think>")) for text in completions]


def closed(completions: list[str], **columns: Any) -> list[float]:
    return [float("</answer>" in text) for text in completions]


def shuffled(completions: list[str], answer: list[str], **columns: Any) -> list[float]:
    return random.sample(exact(completions, answer), len(completions))


def missing(completions: list[str], **columns: Any) -> list[float]:
    return [math.nan] * len(completions)


def constant(completions: list[str], **columns: Any) -> list[float]:
    return [1.0] * len(completions)


def later(call: int) -> list[Callable[..., list[float]]]:
    """Return a reward function whose service goes down at a call."""
    calls = itertools.count(1)

    def service(completions: list[str], answer: list[str], **columns: Any) -> list[float]:
        return exact(completions, answer) if next(calls) < call else [0.0] * len(completions)

    return [service]


SHORT, LONG = (3, 4), (8, 9)
HACK = {"reward_weights": [0.3, 1.0]}
TRAININGS: dict[str, Training] = {
    "rate 3e-3": Training(FALLS, {"learning_rate": 3e-3, "max_steps": 60}),
    "rate 3e-2, long chains": Training(FALLS + "|gone", {"learning_rate": 3e-2, "max_steps": 20}, LONG),
    "rate 1e-3, long chains": Training(LOSES, {"learning_rate": 1e-3, "max_steps": 100}, LONG),
    "loophole": Training("exact", {**HACK, "max_steps": 60}, rewards=lambda: [exact, brief]),
    "entropy bonus 3": Training("entropy_coef", {"entropy_coef": 3.0, "max_steps": 60}),
    "rewards shuffled": Training("order", {"max_steps": 60}, rewards=lambda: [shuffled]),
    "weight decay 300": Training("weight_decay", {"weight_decay": 300.0, "max_steps": 40}),
    "nan rewards": Training("nan", {"max_steps": 20}, rewards=lambda: [missing]),
    "constant reward": Training("same", {"max_steps": 20}, SHORT, rewards=lambda: [constant]),
    "rate 0": Training("learning rate is 0", {"learning_rate": 0.0, "max_steps": 20}),
    "service down late": Training("reward (has )?(fallen|jumped)", {"max_steps": 80}, SHORT, rewards=lambda: later(60)),
    "default": Training("", {"max_steps": 60}),
    "20 steps": Training("", {"max_steps": 20, "learning_rate": 1e-4}),
    "400 steps, short chains": Training("", {"max_steps": 400, "learning_rate": 1e-4}, SHORT),
    "200 steps, rate 1e-4": Training("", {"max_steps": 200, "learning_rate": 1e-4}),
    "rate 1e-5": Training("", {"max_steps": 60, "learning_rate": 1e-5}),
    "long chains, rate 1e-4": Training(STANDS, {"max_steps": 100, "learning_rate": 1e-4}, LONG),
    "cosine": Training("", {"max_steps": 40, "lr_scheduler_type": "cosine", "learning_rate": 5e-4}),
    "beta .01": Training("", {"max_steps": 40, "beta": 0.01}),
    "two honest rewards": Training("", {"max_steps": 60}, rewards=lambda: [exact, closed]),
    "4 prompts": Training("", {"max_steps": 60, "gradient_accumulation_steps": 2, "learning_rate": 1e-4}, SHORT),
}  # fmt: skip


def train(training: Training, folder: Path) -> None:
    """Train, and leave the records in `folder`."""
    torch.manual_seed(0)
    random.seed(0)
    model, tokenizer = load_tiny()
    low, high = training.operands
    task = arithmetic(num_train=4096, num_eval=8, min_operands=low, max_operands=high)
    length = {"max_completion_length": {SHORT: 28, LONG: 48}.get(training.operands, 40)}
    args = GRPOConfig(output_dir=str(folder / "state"), seed=0, **{**SETTINGS, **BATCH, **length, **training.settings})
    trainer = GRPOTrainer(model, training.rewards(), args, train_dataset=task.train_dataset, processing_class=tokenizer)
    with attach(trainer, Records(folder / "logs"), ["simple", "measured", "gns"], whole_prompts=True):
        trainer.train()
    (folder / "done").touch()


def judge_trainings(out: Path, names: list[str]) -> None:
    """Train what is missing, and print what the reports say."""
    print("| training | steps | first line | right |", "|---|---|---|---|", sep="\n")
    for name, training in TRAININGS.items():
        folder = out / re.sub(r"\W+", "_", name)
        if names and name not in names:
            continue
        if not (folder / "done").exists():
            in_a_fork(folder, functools.partial(train, training, folder))
        text = first_lines(folder)
        first = opening(read_run(folder))
        print(f"| {name} | {training.settings['max_steps']} | {first.sentence} {first.advice.text} | "
              f"{'yes' if is_right(text, training.named) else 'no'} |", flush=True)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, nargs="+", default=[0], help="of the curves")
    parser.add_argument("--steps", type=int, nargs="+", default=LENGTHS, help="of the curves")
    parser.add_argument("--out", type=Path, help="where the records of trainings go; without it only curves are judged")
    parser.add_argument("--only", nargs="+", default=[], help="names of trainings")
    parser.add_argument("--verbose", action="store_true", help="print what is said of curves that are told wrong")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    if chosen.out:
        judge_trainings(chosen.out, chosen.only)
    else:
        judge_curves(chosen.seed, chosen.steps, chosen.verbose)


if __name__ == "__main__":
    main()
