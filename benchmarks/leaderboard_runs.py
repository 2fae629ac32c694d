"""The runs of the leaderboard: which there are, which are held out, and what is kept of each step.

A run is a file FOLDER/runs/NAME.pt, written when it has ended. What predictors and forecasters see of a step is a
`StepFacts`; with it lies, at some steps, the truth that they are held against.
"""

from __future__ import annotations

import tempfile
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from default_task import Progress, default_trainer
from peft import LoraConfig
from predictors import StepFacts
from torch import Tensor
from tqdm import tqdm
from trl import GRPOTrainer

from rl_training import Estimate, Probe
from rl_training.engine.batch import Rollout
from rl_training.engine.probe import Need
from rl_training.engine.step import Step
from rl_training.hosts.trl.policy import as_rollout, respond
from rl_training.mathematics.importance import (
    MIN_ESS_SHARE,
    change_terms,
    importance_weights,
    replicates_of_terms,
    sequence_totals,
)
from rl_training.mathematics.jackknife import JackknifeUnits
from rl_training.mathematics.per_decision import per_decision_change
from rl_training.mathematics.scores import Scores
from rl_training.mathematics.vectors import dot
from rl_training.probes.ground_truth import evaluation_change
from rl_training.tasks.arithmetic import arithmetic
from rl_training.tasks.reasoning_gym import answered_examples, reasoning_gym
from rl_training.tasks.task import Task
from rl_training.tasks.tiny import TINY_PATH, build_model, build_tokenizer, warm_start

STEPS = 75
TRUTH, OTHERS, BLOCK = 256, 128, 16  # fresh sequences of the truth; others for deltaH1, in blocks
SHORT_SUMS = {"min_terms": 2, "max_terms": 3, "max_digits": 1}
SHORT_WORDS = {"min_word_len": 3, "max_word_len": 5}
SHORTEST_WORDS = {"min_word_len": 3, "max_word_len": 4}


@dataclass(frozen=True)
class Setting:
    """A task, with the most tokens of a response, the steps from one truth to the next, and the model."""

    task: Callable[[], Task]
    tokens: int
    every: int  # short responses cost less
    gym: tuple[str, dict[str, Any]] | None = None  # whose answers the model is warmed up on; None: the embedded one


TASKS = {
    "chains": Setting(arithmetic, 36, 5),
    "long_chains": Setting(lambda: arithmetic(min_operands=8, max_operands=9), 48, 5),
    "sums": Setting(lambda: reasoning_gym("chain_sum", 1024, 1, settings=SHORT_SUMS), 10, 2, ("chain_sum", SHORT_SUMS)),
    "words": Setting(
        lambda: reasoning_gym("spell_backward", 512, 1, settings=SHORTEST_WORDS), 10, 2, ("spell_backward", SHORT_WORDS)
    ),
}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adamw_3e-4": {"learning_rate": 3e-4},
    "adamw_1e-3": {"learning_rate": 1e-3},
    "lora_2e-3": {"learning_rate": 2e-3, "lora": True},
    "sgd_0.1": {"learning_rate": 0.1, "optim": "sgd"},
}
SEEDS = range(4)


@dataclass(frozen=True)
class Run:
    """One run, by its name alone."""

    task: str
    optimizer: str
    seed: int

    @property
    def name(self) -> str:
        return f"{self.task}-{self.optimizer}-{self.seed}"

    @property
    def held_out(self) -> bool:
        """Whether nothing may be chosen by this run: two of three are, by a checksum of the name."""
        return zlib.crc32(self.name.encode()) % 3 != 0


# Seeds first, so that whatever is there has all tasks and optimizers.
RUNS = [Run(task, optimizer, seed) for seed, task, optimizer in product(SEEDS, TASKS, OPTIMIZERS)]


class LeaderboardProbe(Probe):
    """Keeps what predictors may see of each step, and at some the truth."""

    name = "leaderboard"
    needs = Need.ENTROPY_ROWS

    def __init__(self, every: int, seed: int) -> None:
        super().__init__()
        self._truth_every, self._seed = every, seed
        self._buffer: tuple[Rollout, Scores] | None = None
        self.steps: list[dict[str, Any]] = []
        self.trainer: GRPOTrainer | None = None

    def prepare(self, step: Step) -> None:
        seconds = {"start": time.perf_counter()}
        change = step.entropy_change
        names = ("entropy", "forward", "backward", "reuse")
        products = {name: change.quantities[name].estimates(change.sums.num_folds)[0] for name in names}
        update = change.update
        assert update is not None
        rate = float(next(iter(step.optimizer.states.values())).lr)
        products["sgd"] = Estimate(-rate * change.clip * float(dot(change.gradient_of(slice(None)), change.gradient)))
        seconds["engine"] = time.perf_counter() - seconds.pop("start")
        self._buffer = None
        if step.number % self._truth_every == 0:
            products["deltaH1"] = self._of_others(step)
            self._buffer = self._sample_and_score(step)
        self.steps.append({
            "facts": StepFacts(rate, step.batch.rollout.advantages, *next_token_sums(step), products),
            "seconds": seconds,
            "truth": None,
        })  # fmt: skip

    def after_step(self, step: Step) -> None:
        if self._buffer is not None:
            fresh, before = self._buffer
            self.steps[-1]["truth"] = self._measured(step, before, scores_at_once(step, fresh))

    def reads_new_weights(self) -> bool:
        return self._buffer is not None

    def results(self) -> dict[str, Estimate]:
        return {"leaderboard/steps": Estimate(float(len(self.steps)))}

    def _sample_and_score(self, step: Step) -> tuple[Rollout, Scores]:
        fresh = self._sample(TRUTH, (self._seed << 32) + step.number)
        return fresh, scores_at_once(step, fresh)

    def _sample(self, number: int, seed: int) -> Rollout:
        """Returns what `policy.sample` does, but in one batch: so many rows at once cost little more than a few."""
        assert self.trainer is not None
        prompts = self.trainer.train_dataset["prompt"]
        asked = [prompts[row] for row in np.random.default_rng([seed, 0]).integers(len(prompts), size=number).tolist()]
        return as_rollout(self.trainer, *respond(self.trainer, asked, seed), range(number))

    def _measured(self, step: Step, before: Scores, after: Scores) -> Estimate:
        """Returns the change of token entropy, as probes/ground_truth.py measures it."""
        totals = sequence_totals(before)
        ess = importance_weights(totals, sequence_totals(after)).ess
        if ess < MIN_ESS_SHARE * TRUTH:  # then two samples with the same random numbers, pair by pair
            anew = sequence_totals(self._sample_and_score(step)[1])
            change = replicates_of_terms(change_terms(totals, anew, torch.ones_like(totals[:, 0])))
        else:
            change = per_decision_change(before, after)
        return Estimate(float(change.value[0]), float(change.stderr[0]), TRUTH, detail={"ess": ess})

    def _of_others(self, step: Step) -> Estimate:
        """Returns X_E · δθ of an evaluation buffer that the truth does not see."""
        start = time.perf_counter()
        buffer = self._sample(OTHERS, (1 << 40) + (self._seed << 32) + step.number)
        blocks = JackknifeUnits.of_rows(buffer.prompt_index).in_blocks(BLOCK)
        said = evaluation_change(step, buffer, scores_at_once(step, buffer), blocks, ("token",))
        detail: dict[str, str | float] = {"seconds": time.perf_counter() - start}
        return Estimate(float(said.value[0]), float(said.stderr[0]), len(said.without), detail=detail)


def scores_at_once(step: Step, rollout: Rollout) -> Scores:
    """Returns the scores of all rows in one forward pass: the model is tiny."""
    with step.policy.measuring(), torch.no_grad():
        return step.policy.scorer.score(rollout, torch.arange(rollout.num_sequences), graph=False)


def next_token_sums(step: Step) -> tuple[Tensor, ...]:
    """Returns the mask of the batch's tokens and, at each, log p of the token, H, Σ p² and Σ p² log p: (B, T) each."""
    rollout = step.batch.rollout
    ids = torch.cat([rollout.prompt_ids, rollout.completion_ids], dim=1)
    attended = torch.cat([rollout.prompt_mask, rollout.token_mask], dim=1)
    with step.policy.measuring(), torch.no_grad():
        logits = step.policy.model(input_ids=ids, attention_mask=attended).logits
        logps = (logits[:, -rollout.completion_ids.shape[1] - 1 : -1] / step.policy.scorer.temperature).log_softmax(-1)
    p = logps.exp()
    sampled = logps.gather(-1, rollout.completion_ids.unsqueeze(-1)).squeeze(-1)
    squares = p.square()
    sums = sampled, -(p * logps).sum(-1), squares.sum(-1), (squares * logps).sum(-1)
    return rollout.completion_mask.bool(), *sums


def model_of(folder: Path, setting: Setting) -> Path:
    """Returns the folder of the model that half knows a task; it is made the first time, in 15 seconds."""
    if setting.gym is None:
        return TINY_PATH
    task, settings = setting.gym
    path = folder / "models" / task
    if not (path / "config.json").exists():
        tokenizer = build_tokenizer()
        model = build_model(tokenizer, seed=0)
        warm_start(model, tokenizer, answered_examples(task, 0, settings))
        tokenizer.save_pretrained(path)
        model.save_pretrained(path)
    return path


def make(folder: Path, run: Run, steps: int, bar: tqdm) -> dict[str, Any]:
    """Returns what is kept of a run: its steps in their order, and the seconds of the whole."""
    setting, settings = TASKS[run.task], dict(OPTIMIZERS[run.optimizer])
    lora = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    probe = LeaderboardProbe(setting.every, run.seed)
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as scratch:
        trainer = default_trainer(
            scratch, [probe], steps, seed=run.seed, task=setting.task(), model_folder=model_of(folder, setting),
            peft_config=lora if settings.pop("lora", False) else None, max_completion_length=setting.tokens,
            per_device_train_batch_size=8, logging_steps=steps, **settings,
        )  # fmt: skip
        probe.trainer = trainer
        trainer.add_callback(Progress(bar))
        trainer.train()
    return {"name": run.name, "steps": probe.steps, "seconds": time.perf_counter() - start}
