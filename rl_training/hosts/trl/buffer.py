"""FilteredBuffer chooses a rollout's prompts by the rewards of their responses so far.

A prompt whose responses all get the same reward has zero advantage and contributes no gradient. Two remedies:

    rejection   such a prompt is replaced by another one, until the rollout is full or `max_attempts` generations were
                made (refill.py)
    weights     a prompt is drawn in proportion to   floor + (1 - floor) 4 E[p (1 - p)],   at most 1

p is the chance that the present policy answers the prompt right, and p (1 - p) the variance of a 0/1 reward. The
posterior of p is Beta(a, b), so that E[p (1 - p)] = a b / ((a + b) (a + b + 1)), with

    a = 2 m + successes,  b = 2 (1 - m) + failures

of the prompt's responses, m being the success rate of all responses. A prompt not yet asked thus gets the average
weight, less than that of one known to lie near 1/2; after 8 right answers of 8 it is drawn a third as often as after 4.
Because the policy changes, a response counts half after `half_life` rollouts.

Rewards need not be 0 and 1: each is scaled linearly from the lowest (0) to the highest (1) reward seen so far. While
all rewards are equal, all prompts are drawn with equal weight.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Sized

import torch
from torch import Tensor
from trl import GRPOTrainer

PRIOR_RESPONSES = 2.0  # weight of the prior, the success rate of all prompts, in responses: as wide as a uniform p


def prompt_weights(successes: Tensor, responses: Tensor, floor: float) -> Tensor:
    """Returns the weights (N,) with which N prompts are drawn, from their successes and responses (N,) so far.

    Before any response, with floor 0.1, all are 0.1 + 0.9 * 4 * 1/6 = 0.7.
    """
    mean = successes.sum() / responses.sum() if responses.any() else 0.5
    a = PRIOR_RESPONSES * mean + successes
    b = PRIOR_RESPONSES * (1 - mean) + responses - successes
    return floor + (1 - floor) * 4 * a * b / ((a + b) * (a + b + 1))


def are_mixed(rewards: Tensor) -> Tensor:
    """Returns which of the groups (…, responses) of rewards are not all the same, up to rounding."""
    return ~torch.isclose(rewards.amin(dim=-1), rewards.amax(dim=-1))


class FilteredBuffer:
    """The prompts of a training set with what their responses earned. It draws the same on every process.

    max_attempts  most generations for one rollout, the first included; with 1 nothing is refilled
    floor         the least weight, of 1; with 1 all prompts are drawn alike
    half_life     rollouts after which a reward counts half
    """

    def __init__(self, max_attempts: int = 2, floor: float = 0.1, half_life: float = 50.0, seed: int = 0) -> None:
        if type(max_attempts) is not int or max_attempts < 1:
            raise ValueError(f"buffer.max_attempts={max_attempts} must be a whole number, at least 1")
        if type(floor) not in (int, float) or not 0 < floor <= 1:
            raise ValueError(f"buffer.floor={floor} must be a number above 0 (or prompts die out) and at most 1")
        if type(half_life) not in (int, float) or not half_life > 0:
            raise ValueError(f"buffer.half_life={half_life} must be a number above 0; .inf forgets nothing")
        self.max_attempts = max_attempts
        self.floor = floor
        self.half_life = half_life
        self.seed = seed
        self.start(num_prompts=0)

    def start(self, num_prompts: int) -> None:
        """Forgets everything: a training set of this many prompts, of which nothing is known."""
        self._generator = torch.Generator().manual_seed(self.seed)
        self._responses = torch.zeros(num_prompts, dtype=torch.float64)
        self._reward_sums = torch.zeros(num_prompts, dtype=torch.float64)
        self._range = torch.tensor([torch.inf, -torch.inf], dtype=torch.float64)  # of all rewards seen

    @property
    def num_prompts(self) -> int:
        return len(self._responses)

    def weights(self) -> Tensor:
        """Returns the weights (N,) of all prompts."""
        low, high = self._range.tolist()
        if high <= low or torch.isclose(*self._range):
            return torch.ones_like(self._responses)
        successes = (self._reward_sums - self._responses * low) / (high - low)
        successes = successes.clamp(min=0.0).minimum(self._responses)  # rounding
        return prompt_weights(successes, self._responses, self.floor)

    def draw(self, num: int, tried: Sequence[int]) -> list[int]:
        """Returns `num` different prompts, none of those already tried."""
        weights = self.weights()
        weights[list(tried)] = 0.0
        return torch.multinomial(weights, num, generator=self._generator).tolist()

    def forget(self) -> None:
        """Discounts past rewards. Call it once per rollout."""
        decay = 0.5 ** (1 / self.half_life)
        self._responses *= decay
        self._reward_sums *= decay

    def learn(self, prompts: Sequence[int], rewards: Tensor) -> None:
        """Takes in the rewards (prompts, responses) of what was generated, on all processes."""
        rewards = rewards.double().cpu()
        self._responses[list(prompts)] += rewards.shape[1]
        self._reward_sums[list(prompts)] += rewards.sum(dim=1)
        self._range[0] = min(self._range[0], rewards.min())
        self._range[1] = max(self._range[1], rewards.max())

    def state_dict(self) -> dict[str, Tensor]:
        return {
            "generator": self._generator.get_state(),
            "responses": self._responses.clone(),
            "reward_sums": self._reward_sums.clone(),
            "range": self._range.clone(),
        }

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Continues from a state. ValueError when it belongs to a training set of another length."""
        if len(state["responses"]) != self.num_prompts:
            raise ValueError(
                f"the checkpoint's buffer knows {len(state['responses'])} prompts and the training set has "
                f"{self.num_prompts}: resume with the training set that it was written with, or start a new run from "
                "its weights (model=hub model.name=CHECKPOINT)"
            )
        self._generator.set_state(state["generator"])
        self._responses = state["responses"].clone()
        self._reward_sums = state["reward_sums"].clone()
        self._range = state["range"].clone()


def start_buffer(trainer: GRPOTrainer, buffer: FilteredBuffer) -> None:
    """Starts the buffer on the trainer's prompts. ValueError, saying what to do, where it cannot filter them."""
    if trainer.tools or trainer.environment_factories is not None or trainer.rollout_func is not None:
        raise ValueError(
            "buffer=filtered is for text rollouts of one turn, without tools, environments or a rollout_func: use "
            "buffer=plain"
        )
    if trainer.multi_objective_aggregation != "sum_then_normalize":
        raise ValueError(
            f"multi_objective_aggregation={trainer.multi_objective_aggregation!r} makes a prompt's advantages depend "
            "on the other prompts generated with it, rejected ones included: use 'sum_then_normalize' or buffer=plain"
        )
    if {"image", "images"} & set(trainer.train_dataset.column_names or ()):
        raise ValueError("buffer=filtered joins rollouts of text, and these prompts have images: use buffer=plain")
    if not isinstance(trainer.train_dataset, Sized):
        raise ValueError(
            "buffer=filtered draws prompts from the whole training set, which needs a length: load it without "
            "streaming, or use buffer=plain"
        )
    num_prompts = len(trainer.train_dataset)
    needed = trainer.args.generation_batch_size // trainer.num_generations
    if num_prompts < needed:
        raise ValueError(
            f"the training set has {num_prompts} prompts, and a rollout needs {needed} different ones: give more "
            "prompts, a smaller batch.sequences_per_step, or buffer=plain"
        )
    buffer.start(num_prompts)
