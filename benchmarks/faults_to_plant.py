"""What planted_faults.py plants into short trainings, and healthy ones for comparison: rewards, models, samplers."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from trl import GRPOTrainer

from rl_training.models.load import load_tiny
from rl_training.tasks.answers import only_answer

SETTINGS: dict[str, Any] = {
    "max_steps": 32, "per_device_train_batch_size": 16, "gradient_accumulation_steps": 8, "num_generations": 8,
    "max_completion_length": 40, "learning_rate": 3e-4, "lr_scheduler_type": "constant", "logging_steps": 1,
    "save_strategy": "no", "report_to": [], "disable_tqdm": True, "use_cpu": True, "bf16": False,
    "gradient_checkpointing": False,
}  # fmt: skip

Texts = list[str]
Grades = list[float]


# --- rewards, as users write them -------------------------------------------------------------------------------------


def exact(completions: Texts, answer: Texts, **columns: Any) -> Grades:
    return [float(only_answer(text) == right) for text, right in zip(completions, answer, strict=True)]


def text_against_number(completions: Texts, answer: Texts, **columns: Any) -> Grades:  # "6" == 6 is False
    return [float(only_answer(text) == int(right)) for text, right in zip(completions, answer, strict=True)]


def truth_of_a_text(completions: Texts, answer: Texts, **columns: Any) -> Grades:  # "wrong" is true
    verdicts = ["right" if grade else "wrong" for grade in exact(completions, answer)]
    return [1.0 if verdict else 0.0 for verdict in verdicts]


def wants_three_steps(completions: Texts, answer: Texts, **columns: Any) -> Grades:  # the model writes fewer
    grades = exact(completions, answer)
    return [grade * (text.count("=") >= 9) for grade, text in zip(grades, completions, strict=True)]


def any_answer(completions: Texts, **columns: Any) -> Grades:  # checks the format, not the result
    return [float(only_answer(text) is not None) for text in completions]


def in_the_order_of_their_end(completions: Texts, answer: Texts, **columns: Any) -> Grades:  # as from a worker pool
    return random.sample(exact(completions, answer), len(completions))


def likes_length(completions: Texts, answer: Texts, **columns: Any) -> Grades:
    return [grade + 0.03 * len(text) for grade, text in zip(exact(completions, answer), completions, strict=True)]


class ChangesAt:
    """A reward that changes at a given call, as if a service went down or the grader was replaced."""

    __name__ = "service"

    def __init__(self, call: int, later: Callable[..., Grades]) -> None:
        self.left, self.later = call, later

    def __call__(self, completions: Texts, **columns: Any) -> Grades:
        self.left -= 1
        return exact(completions, **columns) if self.left > 0 else self.later(completions, **columns)


def unanswered(completions: Texts, **columns: Any) -> Grades:
    return [0.0] * len(completions)


# --- models and samplers ----------------------------------------------------------------------------------------------


def in_bf16(model: nn.Module) -> None:
    model.bfloat16()


def all_but_a_norm_frozen(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        parameter.requires_grad = name.endswith("model.norm.weight")


class Engine:
    """A `rollout_func` that samples with its own settings and weights, and returns the log-probabilities it used."""

    def __init__(self, lag: int = 0, **sampling: Any) -> None:
        self.lag, self.sampling = lag, {"temperature": 1.0, "top_p": 1.0, "top_k": 0, **sampling}
        self.model = load_tiny()[0].eval()
        self.weights: list[dict[str, Any]] = []

    def __call__(self, prompts: Texts, trainer: GRPOTrainer) -> dict[str, Any]:
        tokenizer = trainer.processing_class
        self.weights = [*self.weights, copy.deepcopy(trainer.model.state_dict())][-self.lag - 1 :]
        self.model.load_state_dict(self.weights[0])
        inputs = tokenizer(prompts, return_tensors="pt", padding=True, padding_side="left")
        with torch.no_grad():
            generated = self.model.generate(
                input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"], do_sample=True,
                max_new_tokens=trainer.max_completion_length, pad_token_id=tokenizer.pad_token_id, output_scores=True,
                return_dict_in_generate=True, **self.sampling,
            )  # fmt: skip
        said = generated.sequences[:, inputs["input_ids"].shape[1] :]
        logps = torch.stack(generated.scores, 1).float().log_softmax(-1).gather(-1, said[..., None])[..., 0]
        ids = [row.tolist() for row in said]
        ends = [row.index(tokenizer.eos_token_id) + 1 if tokenizer.eos_token_id in row else len(row) for row in ids]
        masks = inputs["attention_mask"].bool()
        return {
            "prompt_ids": [row[mask].tolist() for row, mask in zip(inputs["input_ids"], masks, strict=True)],
            "completion_ids": [row[:end] for row, end in zip(ids, ends, strict=True)],
            "logprobs": [row[:end].tolist() for row, end in zip(logps, ends, strict=True)],
        }


# --- what is planted --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Planted:
    """A training: how it differs from the default one, and the report lines of which at least one must appear."""

    names: tuple[str, ...] = ()  # report lines that name the fault; empty for a healthy training
    settings: dict[str, Any] = field(default_factory=dict)
    operands: tuple[int, int] = (3, 7)
    reward: Callable[..., Grades] = exact
    from_step_17: Callable[..., Grades] | None = None
    change: Callable[[nn.Module], None] | None = None
    end_token: int | None = None
    engine: Callable[[], Engine] | None = None
    optimizer: Callable[[Any], torch.optim.Optimizer] | None = None


LONG: dict[str, Any] = {"operands": (8, 9)}
NO_WARMUP_ENDS = {"lr_scheduler_type": "constant_with_warmup", "warmup_steps": 1_000_000}
FEW_PROMPTS = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 2, "learning_rate": 1e-3}
NOTHING_MOVES, SAMPLER, TOO_LARGE = ("no_step",), ("sampler",), ("large_step", "sampler")
FAULTS = {
    "text against number": Planted(("equal",), reward=text_against_number),
    "truth of a text": Planted(("equal",), reward=truth_of_a_text),
    "out of reach": Planted(("equal", "unmixed"), reward=wants_three_steps),
    "only the format is checked": Planted(("equal", "unmixed"), reward=any_answer),
    "cut off at 4 tokens": Planted(("equal", "endless", "cut_off"), {"max_completion_length": 4}),
    "end token not known": Planted(("endless",), end_token=7),
    "rate 3e-7": Planted(NOTHING_MOVES, {"learning_rate": 3e-7}),
    "warm-up without end": Planted(NOTHING_MOVES, NO_WARMUP_ENDS),
    "frozen but for a norm": Planted(NOTHING_MOVES, change=all_but_a_norm_frozen),
    "bf16 weights": Planted(NOTHING_MOVES, {"learning_rate": 1e-5}, change=in_bf16),
    "SGD, clipped": Planted(NOTHING_MOVES, {"optim": "sgd", "learning_rate": 0.1, "max_grad_norm": 1e-3}),
    "rate 3e-2": Planted(("large_step",), {"learning_rate": 3e-2}),
    "long chains, rate 3e-3": Planted(("large_step",), {"learning_rate": 3e-3}, **LONG),
    "8 steps a rollout": Planted(TOO_LARGE, {"num_iterations": 8, "learning_rate": 1e-3, "max_steps": 48}),
    "top_p .7": Planted(SAMPLER, {"top_p": 0.7}),
    "top_p .8 of an engine": Planted(SAMPLER, engine=lambda: Engine(top_p=0.8)),
    "temperature .5 of the sampler": Planted(SAMPLER, {"generation_kwargs": {"temperature": 0.5}}),
    "weights 8 rollouts old": Planted(SAMPLER, {"learning_rate": 6e-4}, engine=lambda: Engine(lag=8)),
    "two prompts a step": Planted(("noise",), {**FEW_PROMPTS, "max_steps": 60}),
    "rewards in another order": Planted(("noise",), reward=in_the_order_of_their_end),
    "service down at step 17": Planted(("jump", "equal"), from_step_17=unanswered),
    "another grader at step 17": Planted(("jump",), from_step_17=any_answer),
    "reward likes length": Planted(("length",), reward=likes_length),
    "beta 5": Planted(("reference",), {"beta": 5.0}),
    "entropy bonus 3": Planted(("bonus",), {"entropy_coef": 3.0}),
}
HEALTHY = {
    "default": Planted(),
    "rate 1e-4": Planted(settings={"learning_rate": 1e-4}),
    "rate 6e-4": Planted(settings={"learning_rate": 6e-4}),
    "cosine": Planted(settings={"lr_scheduler_type": "cosine", "learning_rate": 5e-4}),
    "dr_grpo": Planted(settings={"loss_type": "dr_grpo", "scale_rewards": "none"}),
    "8 prompts": Planted(settings={"per_device_train_batch_size": 8}),
    "5 to 7 operands": Planted(operands=(5, 7)),
    "long chains": Planted(settings={"max_completion_length": 48}, **LONG),
    "beta .01": Planted(settings={"beta": 0.01}),
    "entropy bonus .001": Planted(settings={"entropy_coef": 0.001}),
    "2 steps a rollout": Planted(settings={"num_iterations": 2}),
    "weights 1 rollout old": Planted(engine=lambda: Engine(lag=1)),
}
