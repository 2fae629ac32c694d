"""FilteredBuffer chooses a rollout's prompts by the rewards of their responses so far.

A prompt whose responses all get the same reward has zero advantage and contributes no gradient. Two remedies:

    rejection   replaces such a prompt with another one, until the rollout is full or `max_attempts` generations were
                made. Every rank knows all rewards, so all decide the same without communicating
    weights     draws a prompt in proportion to   floor + (1 - floor) 4 E[p (1 - p)],   at most 1

p is the probability that the current policy answers the prompt correctly, and p (1 - p) the variance of a 0/1 reward.
The posterior of p is Beta(a, b), so E[p (1 - p)] = a b / ((a + b) (a + b + 1)), with

    a = 2 m + successes,  b = 2 (1 - m) + failures

Successes and failures are the prompt's own; m is the success rate of all responses. A prompt without responses thus
gets the average weight. Because the policy changes, a response counts half after `half_life` rollouts.

Rewards need not be 0 and 1: each is scaled linearly from the lowest (0) to the highest (1) reward seen so far. While
all rewards are equal, all prompts are drawn with equal weight.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from rl_training.errors import UserError
from rl_training.policy.rollout import are_mixed

PRIOR_RESPONSES = 2.0  # weight of the prior, in responses; at m = 1/2 the prior of p is uniform


def prompt_weights(successes: Tensor, responses: Tensor, floor: float) -> Tensor:
    """Return the weights, (N,), with which N prompts are drawn, from their successes and responses so far, (N,) each.

    Before any response, with floor 0.1, every weight is 0.1 + 0.9 * 4 * 1/6 = 0.7.
    """
    mean = successes.sum() / responses.sum() if responses.any() else 0.5
    a = PRIOR_RESPONSES * mean + successes
    b = PRIOR_RESPONSES * (1 - mean) + responses - successes
    return floor + (1 - floor) * 4 * a * b / ((a + b) * (a + b + 1))


class FilteredBuffer:
    """The prompts of a training set, with the rewards of their responses. It draws the same prompts on every rank.

    Args:
        max_attempts: Maximum number of generations per rollout, the first included. 1 replaces no prompt.
        floor: Smallest weight of a prompt, above 0 and at most 1. 1 draws all prompts with equal weight.
        half_life: Number of rollouts after which a reward counts half.
        seed: Seed of the draws.
    """

    def __init__(self, max_attempts: int = 2, floor: float = 0.1, half_life: float = 50.0, seed: int = 0) -> None:
        if type(max_attempts) is not int or max_attempts < 1:
            raise UserError(f"buffer.max_attempts={max_attempts} must be a whole number, at least 1")
        if type(floor) not in (int, float) or not 0 < floor <= 1:
            raise UserError(f"buffer.floor={floor} must be a number above 0 (or prompts die out) and at most 1")
        if type(half_life) not in (int, float) or not half_life > 0:
            raise UserError(f"buffer.half_life={half_life} must be a number above 0; .inf forgets nothing")
        self.max_attempts = max_attempts
        self.floor = floor
        self.half_life = half_life
        self.seed = seed
        self.start(num_prompts=0)

    def start(self, num_prompts: int) -> None:
        """Forget everything, and start with a training set of this many prompts."""
        self._generator = torch.Generator().manual_seed(self.seed)
        self._responses = torch.zeros(num_prompts, dtype=torch.float64)
        self._reward_sums = torch.zeros(num_prompts, dtype=torch.float64)
        self._range = torch.tensor([torch.inf, -torch.inf], dtype=torch.float64)  # lowest and highest reward seen

    @property
    def num_prompts(self) -> int:
        return len(self._responses)

    def weights(self) -> Tensor:
        """Return the weights of all prompts, (N,)."""
        low, high = self._range.tolist()
        if high <= low or not are_mixed(self._range):
            return torch.ones_like(self._responses)
        successes = (self._reward_sums - self._responses * low) / (high - low)
        successes = successes.clamp(min=0.0).minimum(self._responses)  # rounding
        return prompt_weights(successes, self._responses, self.floor)

    def draw(self, num: int, tried: Sequence[int]) -> list[int]:
        """Draw `num` different prompts that are not in `tried`."""
        weights = self.weights()
        weights[list(tried)] = 0.0
        return torch.multinomial(weights, num, generator=self._generator).tolist()

    def forget(self) -> None:
        """Discount past rewards. Call it once per rollout."""
        decay = 0.5 ** (1 / self.half_life)
        self._responses *= decay
        self._reward_sums *= decay

    def learn(self, prompts: Sequence[int], rewards: Tensor) -> None:
        """Add the rewards, (prompts, responses), of the generated responses of all ranks."""
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
        """Continue from a state. Raise UserError if it belongs to a training set of another length."""
        if len(state["responses"]) != self.num_prompts:
            raise UserError(
                f"the checkpoint's buffer knows {len(state['responses'])} prompts and the training set has "
                f"{self.num_prompts}: resume with the training set that it was written with, or start a new run from "
                "its weights (on the command line: model=hub model.name=CHECKPOINT)"
            )
        self._generator.set_state(state["generator"])
        self._responses = state["responses"].clone()
        self._reward_sums = state["reward_sums"].clone()
        self._range = state["range"].clone()
