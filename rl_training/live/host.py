"""What the host does: facts of TRL, Transformers and accelerate, read and written in one place.

Together with attach.py, policy.py and sampling.py the only file that names their internals. Written against trl 1.16
and transformers 5.23. What DeepSpeed keeps elsewhere than torch does is read in zero.py.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor
from transformers import TrainerCallback
from trl import GRPOTrainer

from rl_training.mathematics.scores import Scores
from rl_training.step.loss_weights import LossWeights
from rl_training.step.rollout import Rollout, in_one_width, join_rollouts
from rl_training.step.types import Microbatch

# Keys that ride along in TRL's batch dictionaries.
ROLLOUT_ROW = "rollout_row"  # the row before TRL's shuffle
REWARD = "rollout_reward"


# What makes a loss Dr-GRPO's: no division by a group's standard deviation or a length, no term and no mask beside.
DR_GRPO: dict[str, Any] = {
    "loss_type": "dr_grpo",
    "scale_rewards": "none",
    "beta": 0.0,
    "importance_sampling_level": "token",
    "entropy_coef": 0.0,
    "use_adaptive_entropy": False,
    "top_entropy_quantile": 1.0,
    "delta": None,
    "off_policy_mask_threshold": None,
}


def is_dr_grpo(trainer: GRPOTrainer) -> bool:
    """Returns whether the loss is Dr-GRPO's and nothing else's."""
    return all(getattr(trainer.args, name) == value for name, value in DR_GRPO.items())


def steps_per_rollout(trainer: GRPOTrainer) -> int:
    """Returns how many optimizer steps lie between two step ends at which a rollout is used up.

    Off these ends TRL holds sampled sequences that it does not save: training cannot be resumed exactly from there.
    """
    microbatches = trainer.args.steps_per_generation * trainer.num_iterations
    accumulation = trainer.args.gradient_accumulation_steps
    return math.lcm(microbatches, accumulation) // accumulation


def in_whole_prompt_order(buffered: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns TRL's buffered microbatches with their sequences back in rollout order, where prompts are contiguous.

    TRL shuffles a generation batch before it splits it. Undoing that leaves its use of the random stream as it is.
    """
    order = torch.cat([batch[ROLLOUT_ROW] for batch in buffered]).argsort().split(len(buffered[0][ROLLOUT_ROW]))

    def pick(values: list[Any], rows: Tensor) -> Any:
        if isinstance(values[0], Tensor) and values[0].ndim > 0:
            return torch.cat(values)[rows]
        if isinstance(values[0], list):
            joined = [item for part in values for item in part]
            return [joined[i] for i in rows]
        return values[0]  # one value for the whole generation batch

    return [{key: pick([batch[key] for batch in buffered], rows) for key in buffered[0]} for rows in order]


def read_rollout(inputs: Mapping[str, Any], first_prompt: int, responses_per_prompt: int, on_policy: bool) -> Rollout:
    """Returns the sequences of one of TRL's batch dictionaries. Its prompts are numbered from `first_prompt`."""
    return Rollout(
        prompt_ids=inputs["prompt_ids"],
        prompt_mask=inputs["prompt_mask"],
        completion_ids=inputs["completion_ids"],
        completion_mask=inputs["completion_mask"],
        advantages=inputs["advantages"],
        rewards=inputs.get(REWARD),
        prompt_index=first_prompt + inputs[ROLLOUT_ROW] // responses_per_prompt,
        sampling_logps=inputs.get("old_per_token_logps"),
        on_policy=on_policy,
    )


def join_microbatches(
    microbatches: Sequence[Microbatch], loss_weights: Sequence[Mapping[str, Tensor]]
) -> tuple[Rollout, Scores, LossWeights]:
    """Returns sequences, scores and loss weights of a whole step, padded to one width: it may hold several rollouts."""
    scores = [m.scores for m in microbatches if m.scores is not None]
    assert len(scores) == len(microbatches)
    rollout = join_rollouts([m.rollout for m in microbatches])
    joined = Scores(
        logps=in_one_width([s.logps for s in scores]),
        entropies=in_one_width([s.entropies for s in scores]),
        mask=rollout.completion_mask,
    )
    entropies = None
    if any("entropies" in weights for weights in loss_weights):
        parts = [weights.get("entropies", torch.zeros_like(weights["logps"])) for weights in loss_weights]
        entropies = in_one_width(parts)
    return rollout, joined, LossWeights(in_one_width([weights["logps"] for weights in loss_weights]), entropies)


def sum_over_ranks(trainer: GRPOTrainer, tensor: Tensor) -> Tensor:
    """Returns the sum of a small tensor over the ranks. A collective."""
    if trainer.accelerator.num_processes == 1:
        return tensor
    return trainer.accelerator.reduce(tensor, reduction="sum")


def stand_in_front_of(
    owner: GRPOTrainer | TrainerCallback, name: str, method: Callable[..., Any], undo: ExitStack
) -> None:
    """Makes owner.<name>(...) call method(original, ...), until `undo` is closed."""
    before = vars(owner).get(name)  # somebody else may already stand there
    setattr(owner, name, functools.partial(method, getattr(owner, name)))
    if before is None:
        undo.callback(delattr, owner, name)
    else:
        undo.callback(setattr, owner, name, before)
