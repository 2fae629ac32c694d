"""rl-training try RUN: branches of every candidate and seed from a checkpoint, evaluated, compared, one verdict.

Each branch is what a user would type, `rl-training train branch=… intervention=…` and `rl-training evaluate …`, run by
Hydra's launchers (trial_branches.py). What is finished is not run again, so a trial that was killed goes on by the same
command. Halving stops the worse half of the candidates half-way, by their paired differences to plain.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import math
import os
import re
import shlex
import signal
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd
from omegaconf import DictConfig
from tqdm import tqdm

from rl_training.interventions.named import interventions_to_train
from rl_training.job.run_settings import checkpoint_in_a_run, load_settings, with_changes
from rl_training.job.trial_results import (
    PLAIN,
    Candidate,
    against_plain,
    candidates,
    foretold,
    in_words,
    to_stop,
    values_of,
    verdict,
)
from rl_training.records.atomic_write import write_atomically
from rl_training.records.checkpoints import steps_taken, what_is_wrong_with
from rl_training.records.evaluated import EVALUATIONS, locked, read_step
from rl_training.records.folder import CONFIG_FILE, LOGS_FOLDER, TRAINING_STATE
from rl_training.records.jsonl import METRICS_FILE, read_metrics
from rl_training.records.report.interventions import as_list, preferred
from rl_training.records.report.page import write_page
from rl_training.records.report.series import read_run

PAGE, RESULT = "try.html", "result.json"
LOOK = 3.0  # seconds between two looks at the logs of all branches, for the bar


@dataclass(frozen=True)
class Trial:
    """What is tried: from a checkpoint of a run, with these candidates and the settings of conf/try.yaml."""

    checkpoint: Path
    candidates: tuple[str, ...]  # without plain
    cfg: DictConfig
    words: tuple[str, ...]  # settings of the run, for all branches
    launcher: tuple[str, ...]  # words for Hydra

    @property
    def run(self) -> Path:
        return self.checkpoint.parents[1]

    @property
    def start(self) -> int:
        return steps_taken(self.checkpoint)

    @cached_property
    def settings(self) -> DictConfig:
        return load_settings(self.run / CONFIG_FILE)

    @property
    def folder(self) -> Path:
        return Path(self.cfg.output or self.run / "try" / self.checkpoint.name)

    @property
    def seeds(self) -> list[int]:
        return [self.settings.seed + 1 + number for number in range(self.cfg.seeds)]

    @property
    def stages(self) -> list[int]:
        """The steps of branches after which candidates are compared: each but the last stops the worse half."""
        halvings = max(0, math.ceil(math.log2(max(len(self.candidates), 1))) - 1) if self.cfg.halving else 0
        if self.settings.trainer.get("lr_scheduler_type", "linear") != "constant":
            halvings = 0  # a schedule knows its end from the start
        return sorted({max(1, self.cfg.steps >> part) for part in range(halvings + 1)})

    @property
    def evaluation(self) -> str:
        size = self.cfg.evaluation
        return f"try_{size.fraction:g}x{size.responses_per_prompt}"


@dataclass(frozen=True)
class Branch:
    """A branch of a trial: a candidate, a seed, and the number of steps that it is to take."""

    trial: Trial
    name: str
    seed: int
    steps: int

    @property
    def folder(self) -> Path:
        return self.trial.folder / as_folder(self.name) / f"seed_{self.seed}"

    @property
    def end(self) -> int:
        return self.trial.start + self.steps

    @property
    def is_finished(self) -> bool:
        return read_step(self.folder / EVALUATIONS / self.trial.evaluation, self.end) is not None

    def values(self) -> pd.DataFrame:
        return values_of(self.folder / EVALUATIONS / self.trial.evaluation, self.end)

    def commands(self) -> list[list[str]]:
        """Returns what is left to be run, as words behind rl-training."""
        last = self.folder / TRAINING_STATE / f"checkpoint-{self.end}"
        evaluation = self.trial.cfg.evaluation
        evaluate = ["evaluate", f"run={self.folder}", f"checkpoints=[{last}]", "evaluation.kl=false",
                    f"evaluation.name={self.trial.evaluation}", f"evaluation.fraction={evaluation.fraction}",
                    f"evaluation.responses_per_prompt={evaluation.responses_per_prompt}", "evaluation.greedy=false",
                    ]  # fmt: skip
        if last.is_dir() and not what_is_wrong_with(last):
            return [evaluate]
        with_own = [*_listed(self.trial.settings.get("intervention")), *([] if self.name == PLAIN else [self.name])]
        train = ["train", f"branch={self.trial.checkpoint}", f"run_dir={self.folder}", "resume=auto",
                 f"seed={self.seed}", f"trainer.max_steps={self.end}", "trainer.save_total_limit=1", "probe=none",
                 "logger=none", "trainer.disable_tqdm=true", "trainer.save_strategy=steps", "alert.below=null",
                 "alert.stop=false", *self.trial.words]  # fmt: skip
        train += [f"intervention={as_list(with_own)}"] * bool(with_own)
        return [train, evaluate]

    def steps_done(self) -> int:
        """Returns how many of its steps are taken, as far as its log says."""
        rows = read_metrics(self.folder / LOGS_FOLDER) if (self.folder / LOGS_FOLDER / METRICS_FILE).is_file() else []
        return min(max((int(row["step"]) for row in rows), default=self.trial.start) - self.trial.start, self.steps)

    def reason(self) -> str:
        """Returns the last words of its commands."""
        log = Path(f"{self.folder}.log")
        said = log.read_text(encoding="utf-8", errors="replace").splitlines() if log.is_file() else []
        return next((line for line in reversed(said) if line.strip()), "it has not begun")


def read_trial(cfg: DictConfig, words: Sequence[str], launcher: Sequence[str]) -> Trial:
    """Returns the trial that was asked for. ValueError for whatever the user got wrong."""
    checkpoint, given = checkpoint_in_a_run("run", cfg.run), cfg.interventions
    names = preferred(read_run(checkpoint.parents[1])) if given == "auto" else _listed(given)
    if not names:
        raise ValueError(
            "interventions=auto takes what the run's report prefers, and it prefers none: give "
            "'interventions=[psr,bonus]', or train with 'probe=[simple,interventions]'"
        )
    if len(set(names)) < len(names) or PLAIN in names:
        raise ValueError(f"interventions={given}: name each once; plain is always among them")
    settings = load_settings(checkpoint.parents[1] / CONFIG_FILE)
    with_changes(settings, words, f"the run in {checkpoint.parents[1]}")  # what each branch would refuse
    for name in names:
        interventions_to_train([*_listed(settings.get("intervention")), name])
    kind = cfg.launcher or ("joblib" if cfg.jobs > 1 else "basic")
    plugin = kind.partition("_")[0]
    if kind != "basic" and importlib.util.find_spec(f"hydra_plugins.hydra_{plugin}_launcher") is None:
        raise ValueError(f"launcher={kind} is not installed: pip install 'rl-training[{plugin}]'")
    chosen = [f"hydra/launcher={kind}", *([f"hydra.launcher.n_jobs={cfg.jobs}"] * (kind == "joblib"))]
    chosen += ["hydra.launcher.timeout_min=1440"] * (plugin == "submitit")
    return Trial(checkpoint, tuple(names), cfg, tuple(words), (*chosen, *launcher))


def as_folder(name: str) -> str:
    return re.sub(r"[^\w.,=+-]+", "_", name)


def _listed(names: Any) -> list[str]:
    return [names] if isinstance(names, str) else list(names or [])


def decide(trial: Trial) -> int:
    """Runs what is missing of a trial, writes its page, prints its verdict, and returns the exit code."""
    with locked(trial.folder):
        print(forecast(trial), flush=True)
        alive, stopped = list(trial.candidates), []
        for steps in trial.stages:
            branches = [Branch(trial, name, seed, steps) for name in (PLAIN, *alive) for seed in trial.seeds]
            if missing := [branch for branch in branches if not branch.is_finished]:
                run_wave(trial, missing)
            found = compare(branches, len(trial.candidates))
            if steps < trial.stages[-1]:
                worse = to_stop(found)
                stopped += worse
                alive = [name for name in alive if name not in {each.name for each in worse}]
        failed = {
            f"{branch.name}, seed {branch.seed}": branch.reason() for branch in branches if not branch.is_finished
        }
        print(conclude(trial, [*found, *stopped], failed))
        return 1 if failed else 0


def run_wave(trial: Trial, branches: Sequence[Branch]) -> None:
    """Trains and evaluates these branches by Hydra's launcher, with a bar of all steps; failed ones leave their log."""
    wave = trial.folder / "wave.json"
    launch = shlex.split(trial.cfg.launch or "")
    jobs = [
        {"folder": str(branch.folder.resolve()), "commands": branch.commands(), "launch": launch} for branch in branches
    ]
    write_atomically({wave: json.dumps(jobs, indent=1).encode()})
    numbers = ",".join(map(str, range(len(jobs))))
    words = ["-m", f'wave="{wave.resolve()}"', f"number={numbers}", *trial.launcher]
    program = [sys.executable, "-m", "rl_training.job.trial_branches", *words]
    with open(trial.folder / "launcher.log", "ab") as log:
        process = subprocess.Popen(program, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
        total, every = sum(branch.steps for branch in branches), 0.2 if sys.stderr.isatty() else 30.0
        try:
            with tqdm(total=total, unit="step", mininterval=every, maxinterval=every) as bar:
                while process.poll() is None:
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        process.wait(timeout=LOOK)
                    done = sum(branch.is_finished for branch in branches)
                    bar.set_description(f"{done} of {len(branches)} branches", refresh=False)
                    bar.update(sum(branch.steps_done() for branch in branches) - bar.n)
        finally:
            if process.poll() is None:  # an error or a signal: the branches write a checkpoint
                os.killpg(process.pid, signal.SIGTERM)
                process.wait()


def compare(branches: Sequence[Branch], comparisons: int) -> list[Candidate]:
    """Returns the candidates that have finished branches, over the seeds at which plain has finished too."""
    values: dict[str, dict[int, Any]] = {}
    for branch in branches:
        by_seed = values.setdefault(branch.name, {})
        if branch.is_finished:
            by_seed[branch.seed] = branch.values()
    return candidates(values, branches[0].steps, comparisons)


def forecast(trial: Trial) -> str:
    """Returns how many branches there will be, how long they take by the run's own speed, and their memory and disk."""
    rows = [row for row in read_metrics(trial.run / LOGS_FOLDER) if "step_time" in row]
    own = [row["step_time"] * (1 - row.get("probe_cost/fraction_of_step", 0.0)) for row in rows]  # without its probes
    seconds = statistics.median(own or [math.nan])
    stages, alive, steps = trial.stages, len(trial.candidates), 0
    for before, stage in zip((0, *stages), stages, strict=False):
        steps += (alive + 1) * trial.cfg.seeds * (stage - before)
        alive = (alive + 1) // 2 if stage < stages[-1] else alive
    size = sum(path.stat().st_size for path in trial.checkpoint.iterdir() if path.is_file()) / 1e9
    branches = (len(trial.candidates) + 1) * trial.cfg.seeds
    return (
        f"From step {trial.start} of {trial.run.name}: {', '.join((PLAIN, *trial.candidates))}\n"
        f"{branches} branches, {steps} steps: about {seconds * steps / trial.cfg.jobs / 60:.1f} min of training, "
        f"{trial.cfg.jobs} at once, and the evaluations\n"
        f"{size:.2g} GB of weights and optimizer for each at once, {branches * size:.2g} GB on disk"
    )


def conclude(trial: Trial, found: Sequence[Candidate], failed: Mapping[str, str]) -> str:
    """Writes the page and result.json, and returns what is printed: table, what was stopped, what failed, verdict."""
    sentence, best = verdict(found)
    go_on = shlex.join(
        ["rl-training", "train", f"branch={trial.checkpoint}", f"run_dir={trial.run}_{as_folder(best.name)}",
         f"intervention={as_list([*_listed(trial.settings.get('intervention')), best.name])}", "additional_steps=100"]
    ) if best else ""  # fmt: skip
    predicted = {each.name: foretold(trial.run / LOGS_FOLDER, each.name) for each in found}
    content = {
        "checkpoint": str(trial.checkpoint), "verdict": sentence, "choice": best.name if best else PLAIN,
        "go_on": go_on, "failed": dict(failed),
        "candidates": [
            {"name": each.name, "steps": each.step, "seeds": each.seeds, "stopped": each.stopped, "means": each.means,
             "predicted": predicted[each.name],
             "differences": {name: [e.value, e.stderr, *e.ends()] for name, e in each.differences.items()}}
            for each in found
        ],
    }  # fmt: skip
    result = {RESULT: json.dumps(content, indent=1).encode()}
    write_page(trial.folder / PAGE, "try.html", result, trial=trial, found=found, failed=failed, sentence=sentence,
               go_on=go_on, predicted=predicted, charts=[against_plain(found)] if found else [],
               in_words=in_words)  # fmt: skip
    lines = [f"{'against plain':14}" + "".join(f"{name:>13}" for name in (found[0].means if found else ()))]
    for each in found:  # 80 columns
        cells = "".join(f"{in_words(difference).replace(' ', ''):>13}" for difference in each.differences.values())
        lines += [f"{each.name:14}{cells}", *([f"  stopped {each.stopped}"] if each.stopped else [])]
    lines += [f"{name} failed: {reason}" for name, reason in failed.items()]
    return "\n".join([*lines, sentence, *([f"Go on: {go_on}"] if go_on else []), f"Page: {trial.folder / PAGE}"])
