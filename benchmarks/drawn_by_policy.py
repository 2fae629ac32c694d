"""Whether the policy drew its responses: how often honest runs raise an alarm, and in which step others are noticed.

    python benchmarks/drawn_by_policy.py honest [--runs 200] [--steps 40]
    python benchmarks/drawn_by_policy.py layouts [--runs 200] [--steps 40] [--prompts 4] [NAME ...]
    python benchmarks/drawn_by_policy.py cases [--steps 40] [NAME ...]

`honest` draws the responses of each run's steps from one policy, without training it, and tests them as probes do: one
response to each prompt. Policies, tasks, temperatures and batch sizes differ from run to run. In every fourth run a
known sampler draws, the same model with noise on its weights, and reports its log-probabilities.

`layouts` trains the tiny model in TRL, honestly, in layouts that differ in what is trained and how responses are used.

`cases` trains the tiny model in TRL with something wrong in its generation. It runs the probe `simple` at its defaults,
and with --measured the probe `measured` too. Each case ends at the step that is noticed.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import itertools
import math
import os
import random
import tempfile
import warnings
from collections.abc import Callable
from typing import Any

import rl_training.job.silence  # noqa: F401

import torch
from accelerate.utils.other import get_free_port
from peft import LoraConfig
from torch import Tensor
from transformers import LogitsProcessor, PrinterCallback, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from rl_training import DrGRPOConfig, DrGRPOTrainer, Rollout, attach
from rl_training.hosts.trl.buffer import FilteredBuffer
from rl_training.models.load import load_tiny
from rl_training.parallel.ranks import all_ranks
from rl_training.policy.rollout import take_rows
from rl_training.policy.scorer import Scorer
from rl_training.probes import MeasuredStepProbe, SimpleEntropyProbe
from rl_training.step.residual import MEAN, NOT_DRAWN, RUN, ResidualSums, ResidualTest
from rl_training.tasks.arithmetic import arithmetic
from rl_training.tasks.three_words import three_words

PROMPTS, G, LENGTH = 16, 4, 16
END_OF_THOUGHT = 4  # the token </think> of the tiny model


# --- honest runs ------------------------------------------------------------------------------------------------------


def draw(model: Any, prompts: list[str], length: int, temperature: float, mu: Any) -> Rollout:
    """Return a response of `mu` to each prompt, with its log-probabilities unless it is the model itself."""
    tokenizer = load_tiny()[1]
    encoded = tokenizer(prompts, return_tensors="pt", padding=True, padding_side="left")
    with torch.no_grad():
        tokens = mu.generate(
            **encoded, max_new_tokens=length, do_sample=True, temperature=temperature, top_k=0, top_p=1.0,
            pad_token_id=0, eos_token_id=1,
        )[:, encoded.input_ids.shape[1] :]  # fmt: skip
    is_end = (tokens == 1).long()
    there = (is_end.cumsum(dim=1) - is_end == 0).long()
    rollout = Rollout(
        encoded.input_ids, encoded.attention_mask, tokens, there, torch.zeros(len(tokens)), None,
        torch.arange(len(tokens)),
    )  # fmt: skip
    if mu is model:
        return rollout
    return Rollout(**{**vars(rollout), "sampling_logps": score(mu, rollout, temperature).logps})


def score(model: Any, rollout: Rollout, temperature: float) -> Any:
    return Scorer(model, temperature).score(rollout, torch.arange(rollout.num_sequences), graph=False, varentropy=True)


def changed(model: Any, deviation: float, sharpness: float) -> Any:
    """Return a copy with noise on its weights, relative to their mean size, and logits times `sharpness`."""
    other = copy.deepcopy(model)
    for param in other.parameters():
        param.data.add_(deviation * param.data.abs().mean() * torch.randn_like(param))
    other.get_output_embeddings().weight.data.mul_(sharpness)
    return other


def honest_run(seed: int, steps: int) -> tuple[str, float, bool]:
    """Return what was run, the largest |running sum| in standard errors, and whether there was an alarm."""
    torch.manual_seed(seed)
    pick = random.Random(seed)
    task, texts = pick.choice([("arithmetic", arithmetic), ("three words", three_words)])
    policy = changed(load_tiny()[0].float().eval(), pick.choice([0.0, 0.2, 0.5]), pick.choice([0.7, 1.0, 1.5, 3.0]))
    is_reported = seed % 4 == 0
    mu = changed(policy, 0.1, 1.0) if is_reported else policy
    rows, length, temperature = pick.choice([4, 8, 32]), pick.choice([4, 16, 24]), pick.choice([0.6, 1.0, 1.2])
    prompts = texts(num_train=256, num_eval=8).train_dataset["prompt"]
    pool = [prompt if isinstance(prompt, str) else prompt[-1]["content"] for prompt in prompts]
    rollout = draw(policy, [pick.choice(pool) for _ in range(steps * rows)], length, temperature, mu)
    scores = score(policy, rollout, temperature)
    test, extreme, alarm = ResidualTest(ResidualSums(), temperature), 0.0, False
    for step in torch.arange(steps * rows).split(rows):
        test.begin()
        logs = None
        if is_reported:
            sampled = take_rows(rollout, step).sampling_logps
            logs = (scores.logps[step] - sampled).double().masked_fill(scores.mask[step] == 0, 0.0)
        part = type(scores)(*(table[step] for table in vars(scores).values()))
        test.add(step, part, logs, False)
        alarm |= test.decide(all_ranks(), None, is_reported) is not None
        estimates = test.finish(was_taken=True)
        extreme = max(extreme, abs(estimates[RUN].value))
    what = f"{task}, {rows} × {length} tokens, T {temperature}, entropy {float(scores.entropies.mean()):.3f}"
    return what + ", reported" * is_reported, extreme, alarm


def honest(runs: int, steps: int) -> None:
    alarms, extremes = 0, []
    for seed in range(runs):
        what, extreme, alarm = honest_run(seed, steps)
        alarms, extremes = alarms + alarm, [*extremes, extreme]
        print(f"{seed:4d} {extreme:5.2f} {'ALARM' if alarm else '     '} {what}", flush=True)
    extremes.sort()
    print(f"{alarms} alarms in {runs} runs of {steps} steps; largest |running sum|: median {extremes[runs // 2]:.2f}, "
          f"95 % {extremes[int(0.95 * runs)]:.2f}, largest {extremes[-1]:.2f} standard errors")  # fmt: skip


# --- cases ------------------------------------------------------------------------------------------------------------


class Force(LogitsProcessor):
    """Forces the tokens that `choose` gives for (tokens so far, number of the new token); None forces nothing."""

    def __init__(self, choose: Callable[[Tensor, int], int | None]) -> None:
        self._choose, self._prompt = choose, 0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self._prompt = self._prompt or input_ids.shape[1]
        for row, ids in enumerate(input_ids):
            token = self._choose(ids[self._prompt :], input_ids.shape[1] - self._prompt)
            if token is not None:
                scores[row] = -torch.inf
                scores[row, token] = 0.0
        return scores


class Prefer(LogitsProcessor):
    """Adds a half to the logits of the digits."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        scores = scores.clone()
        scores[:, 9:19] += 0.5
        return scores


class Forbid(LogitsProcessor):
    """Forbids to end the thought within the first eight tokens of a response."""

    def __init__(self) -> None:
        self._prompt = 0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self._prompt = self._prompt or input_ids.shape[1]
        scores = scores.clone()
        if input_ids.shape[1] < self._prompt + 8:
            scores[:, END_OF_THOUGHT] = -torch.inf
        return scores


def budget(ids: Tensor, number: int) -> int | None:
    return END_OF_THOUGHT if number == 6 and END_OF_THOUGHT not in ids.tolist() else None


def hint(ids: Tensor, number: int) -> int | None:
    return 10 + number if number < 2 else None  # "12"


def with_processor(make: Callable[[], LogitsProcessor]) -> Callable[[Any], Any]:
    """Return a change of a trainer: its model generates with a processor."""

    def change(trainer: Any) -> None:
        original = trainer.model.generate
        trainer.model.generate = lambda *args, **kwargs: original(*args, **kwargs, logits_processor=[make()])

    return change


class OtherWeights(GRPOTrainer):
    """Generates with other weights, and puts its own back."""

    def other(self, name: str, weight: Tensor) -> Tensor:
        raise NotImplementedError

    def _generate(self, prompts: Any) -> Any:
        weights = {name: param.detach().clone() for name, param in self.model.named_parameters()}
        for name, param in self.model.named_parameters():
            param.data.copy_(self.other(name, weights[name]))
        try:
            return super()._generate(prompts)
        finally:
            for name, param in self.model.named_parameters():
                param.data.copy_(weights[name])


class Noisy(OtherWeights):
    def other(self, name: str, weight: Tensor) -> Tensor:
        return weight + 0.3 * weight.abs().mean() * torch.randn(weight.shape, generator=self.noise)

    def _generate(self, prompts: Any) -> Any:
        self.noise = torch.Generator().manual_seed(self.state.global_step)
        return super()._generate(prompts)


class Averaged(OtherWeights):
    def other(self, name: str, weight: Tensor) -> Tensor:
        self.average = getattr(self, "average", {})
        self.average[name] = self.average.get(name, weight).lerp(weight, 0.1)
        return self.average[name]


def rollout_function(temperature: float, is_reported: bool) -> Callable[..., dict[str, Any]]:
    """Return a rollout_func that samples with the trainer's model, at another temperature."""

    def roll_out(prompts: list[str], trainer: Any) -> dict[str, Any]:
        encoded = load_tiny()[1](prompts, return_tensors="pt", padding=True, padding_side="left")
        with torch.no_grad():
            tokens = trainer.model.generate(
                **encoded, max_new_tokens=LENGTH, do_sample=True, temperature=temperature, top_k=0, top_p=1.0,
                pad_token_id=0, eos_token_id=1,
            )[:, encoded.input_ids.shape[1] :]  # fmt: skip
        is_end = (tokens == 1).long()
        there = is_end.cumsum(dim=1) - is_end == 0
        raw = None
        if is_reported:  # as vLLM: log-probabilities at temperature 1
            rollout = Rollout(
                encoded.input_ids, encoded.attention_mask, tokens, there.long(), torch.zeros(len(tokens)), None,
                torch.arange(len(tokens)),
            )  # fmt: skip
            logps = score(trainer.model, rollout, 1.0).logps
            raw = [row[mask[: len(row)]].tolist() for row, mask in zip(logps, there, strict=True)]
        prompt_ids = [ids[mask.bool()].tolist() for ids, mask in zip(*encoded.values(), strict=True)]
        completion_ids = [row[mask].tolist() for row, mask in zip(tokens, there, strict=True)]
        return {"prompt_ids": prompt_ids, "completion_ids": completion_ids, "logprobs": raw}

    return roll_out


def nothing(trainer: Any) -> None:
    """Leave the trainer alone."""


# Name → trainer's class, settings, arguments, and a change of the trainer.
CASES: dict[str, tuple[type[GRPOTrainer], dict[str, Any], dict[str, Any], Callable[[Any], Any]]] = {
    "nothing wrong": (GRPOTrainer, {}, {}, nothing),
    "a budget that closes the thought": (GRPOTrainer, {}, {}, with_processor(lambda: Force(budget))),
    "a hint of two tokens": (GRPOTrainer, {}, {}, with_processor(lambda: Force(hint))),
    "a processor: no end of the thought before token 9": (GRPOTrainer, {}, {}, with_processor(Forbid)),
    "a processor: digits + .5": (GRPOTrainer, {}, {}, with_processor(Prefer)),
    "rollout_func under gradient checkpointing": (
        GRPOTrainer, {"gradient_checkpointing": True}, {"rollout_func": rollout_function(1.0, False)}, nothing,
    ),
    "noise on the weights": (Noisy, {}, {}, nothing),
    "averaged weights, learning rate 3e-3": (Averaged, {"learning_rate": 3e-3}, {}, nothing),
    "temperature .9": (GRPOTrainer, {}, {"rollout_func": rollout_function(0.9, False)}, nothing),
    "temperature .7": (GRPOTrainer, {}, {"rollout_func": rollout_function(0.7, False)}, nothing),
    "temperature .7, raw log-probabilities": (GRPOTrainer, {}, {"rollout_func": rollout_function(0.7, True)}, nothing),
}  # fmt: skip


class StopWhenNoticed(TrainerCallback):
    """Ends the training at the step that is noticed, and keeps the largest |running sum| in standard errors."""

    def __init__(self, latest: Any) -> None:
        self.latest, self.extreme = latest, 0.0

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if math.isfinite(self.latest[RUN].value):
            self.extreme = max(self.extreme, abs(self.latest[RUN].value))
        if self.latest[MEAN].code == NOT_DRAWN.code:
            control.should_training_stop = True


def make_trainer(
    trainer_class: type[GRPOTrainer], folder: str, steps: int, seed: int, prompts: int, settings: Any, arguments: Any
) -> GRPOTrainer:
    task = arithmetic(num_train=256, num_eval=8)
    config_class = DrGRPOConfig if issubclass(trainer_class, DrGRPOTrainer) else GRPOConfig
    config = config_class(
        folder, **{
            "per_device_train_batch_size": 2 * G, "gradient_accumulation_steps": prompts // 2,
            "num_generations": G, "max_completion_length": LENGTH, "max_steps": steps, "learning_rate": 1e-4,
            "lr_scheduler_type": "constant", "save_strategy": "no", "report_to": [], "use_cpu": True,
            "bf16": False, "loss_type": "dr_grpo", "scale_rewards": "none", "seed": seed, "disable_tqdm": True,
            "gradient_checkpointing": False, **settings,
        },
    )  # fmt: skip
    trainer = trainer_class(
        load_tiny()[0].float(), task.reward, config, train_dataset=task.train_dataset,
        processing_class=load_tiny()[1], **arguments,
    )  # fmt: skip
    trainer.remove_callback(PrinterCallback)
    return trainer


def run_case(name: str, steps: int, seed: int, prompts: int, measured: bool) -> str:
    """Return in which step a case is noticed, and the evidence."""
    trainer_class, settings, arguments, change = CASES[name]
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(trainer_class, folder, steps, seed, prompts, settings, arguments)
        change(trainer)
        with attach(trainer, None, [SimpleEntropyProbe(), *[MeasuredStepProbe()] * measured]) as attachment:
            trainer.add_callback(StopWhenNoticed(attachment.latest))
            trainer.train()
            mean, run = attachment.latest[MEAN], attachment.latest[RUN]
    step = str(trainer.state.global_step) if mean.code == NOT_DRAWN.code else f"not in {steps}"
    return f"step {step}: run {run.value:+.1f} standard errors, last step {mean.value:+.3f} ± {mean.stderr:.3f}"


def cases(names: list[str], steps: int, seeds: int, prompts: int, measured: bool) -> None:
    for name in names or CASES:
        for seed in range(seeds):
            print(f"{name}: {run_case(name, steps, seed, prompts, measured)}", flush=True)


# --- honest trainings -------------------------------------------------------------------------------------------------

SHORT = {"max_completion_length": 8}
IN_A_ROW = 4  # trainings of a layout in the same processes
LORA = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")


def layout_probes() -> list[Any]:
    return [SimpleEntropyProbe(), MeasuredStepProbe()]


# Name → number of processes, trainer's class, settings, arguments.
LAYOUTS: dict[str, tuple[int, type[GRPOTrainer], dict[str, Any], Callable[[], dict[str, Any]]]] = {
    "two processes": (2, GRPOTrainer, {"gradient_accumulation_steps": 1}, dict),
    "LoRA": (1, GRPOTrainer, {"learning_rate": 3e-3}, lambda: {"peft_config": LORA}),
    "clipped": (1, GRPOTrainer, {"learning_rate": 1e-3, "max_grad_norm": 0.05}, dict),
    "SGD": (1, GRPOTrainer, {"optim": "sgd", "learning_rate": 0.1}, dict),
    "reuse": (1, GRPOTrainer, {"num_iterations": 2}, dict),
    "filtered": (1, DrGRPOTrainer, {}, lambda: {"buffer": FilteredBuffer(), "probes": layout_probes()}),
}  # fmt: skip


def train_layout(rank: int, name: str, seeds: range, steps: int, prompts: int, port: int) -> None:
    """Train as one of a layout's processes, and print a line for each seed."""
    processes, trainer_class, settings, arguments = LAYOUTS[name]
    if processes > 1:
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(processes),
                       "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}  # fmt: skip
    for seed in seeds:
        with tempfile.TemporaryDirectory() as folder:
            trainer = make_trainer(trainer_class, folder, steps, seed, prompts, SHORT | settings, arguments())
            is_attached = isinstance(trainer, DrGRPOTrainer)
            attachment = trainer.attachment if is_attached else attach(trainer, None, layout_probes())
            with contextlib.nullcontext() if is_attached else attachment:
                trainer.add_callback(noted := StopWhenNoticed(attachment.latest))
                trainer.train()
        if rank == 0:
            is_alarm = attachment.latest[MEAN].code == NOT_DRAWN.code
            step = trainer.state.global_step
            print(f"{name}, seed {seed}: {noted.extreme:5.2f}{' ALARM' * is_alarm}, step {step}", flush=True)
    os._exit(0)


def layouts(names: list[str], runs: int, steps: int, prompts: int) -> None:
    """Train the layouts in turns, so that a run that is ended early has trained all of them."""
    chosen = names or [*LAYOUTS]
    for first, name in itertools.product(range(0, math.ceil(runs / len(chosen)), IN_A_ROW), chosen):
        first += 1000 * [*LAYOUTS].index(name)
        arguments = name, range(first, first + IN_A_ROW), steps, prompts, get_free_port()
        torch.multiprocessing.start_processes(train_layout, arguments, nprocs=LAYOUTS[name][0], start_method="fork")


def main() -> None:
    warnings.filterwarnings("ignore")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["honest", "layouts", "cases"])
    parser.add_argument("names", nargs="*", help="names of layouts or cases; all if none is given")
    parser.add_argument("--runs", type=int, default=200, help="honest runs")
    parser.add_argument("--steps", type=int, default=40, help="steps of a run")
    parser.add_argument("--seeds", type=int, default=1, help="runs of each case")
    parser.add_argument("--prompts", type=int, default=PROMPTS, help="prompts of a step, on each process")
    parser.add_argument("--measured", action="store_true", help="add the probe measured to the cases")
    arguments = parser.parse_intermixed_args()
    if arguments.what == "honest":
        honest(arguments.runs, arguments.steps)
    elif arguments.what == "layouts":
        layouts(arguments.names, arguments.runs, arguments.steps, arguments.prompts)
    else:
        cases(arguments.names, arguments.steps, arguments.seeds, arguments.prompts, arguments.measured)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
