"""Responses over several turns: the environment's tokens are conditioned on, and its randomness is averaged over."""

from __future__ import annotations

import contextlib
import itertools
import math
import random
import types
from typing import Any

import pytest
import torch
from datasets import Dataset
from simple_twin import Answers, Recorder, Twin, per_sequence, per_token
from torch import Tensor
from trainers import Outcome, differing, outcome
from trl import GRPOTrainer
from two_turns import LOGITS, OUTCOMES, coverage, exact, policy_logp, tables

from rl_training import DrGRPOTrainer, attach
from rl_training.entropy.weights import surrogate_weights
from rl_training.hosts.trl.policy import TrainerPolicy
from rl_training.models.load import load_tiny
from rl_training.probes import EffectiveSampleSizeProbe, GradientNoiseScaleProbe, GroundTruthProbe

# --- a policy of two turns, by enumeration ------------------------------------------------------------------------


def mean_gradient(target: str) -> Tensor:
    """Return the estimate's expectation over all groups of two outcomes."""
    groups = list(itertools.product(OUTCOMES, repeat=2))
    outcomes = torch.cartesian_prod(torch.arange(len(OUTCOMES)), torch.arange(len(OUTCOMES))).flatten()
    logits = torch.tensor(LOGITS, dtype=torch.float64, requires_grad=True)
    logps, entropies, mask = tables(outcomes, logits)
    w, u = surrogate_weights(entropies, mask, torch.arange(len(groups)).repeat_interleave(2), target)
    chance = [math.prod(o.chance * math.exp(policy_logp(o)) for o in group) for group in groups]
    of_sequence = torch.tensor(chance, dtype=torch.float64).repeat_interleave(2) / 2
    alive = mask.bool()
    total = (of_sequence.unsqueeze(1) * (w * logps.where(alive, 0.0) + u * entropies.where(alive, 0.0))).sum()
    return torch.autograd.grad(total, logits)[0]


@pytest.mark.parametrize("target", ["sequence", "length"])
def test_the_mean_over_all_groups_and_answers_is_the_exact_entropy_derivative(target: str) -> None:
    expected = torch.tensor(exact(LOGITS, of_length=target == "length")[1], dtype=torch.float64)
    torch.testing.assert_close(mean_gradient(target), expected, rtol=0, atol=1e-9)


def test_forward_is_unbiased_over_several_turns_and_its_error_bars_cover() -> None:
    coverages = coverage(batches=80)
    for truth, mean, error, covered in zip(*coverages, strict=True):
        assert abs(mean - truth) < 4 * error
        assert abs(truth) > 10 * error
        assert 0.86 <= covered <= 1.0  # expected: .940 ± .027


# --- TRL's own turns --------------------------------------------------------------------------------------------------

TEMPLATE = (
    "{%- for message in messages -%}{%- if message.role == 'assistant' -%}"
    "{{ message.content }}{%- if message.tool_calls -%}{%- for call in message.tool_calls -%}"
    "{{ call.function.name }}{%- for key, value in call.function.arguments.items() -%}{{ key }}{{ value }}"
    "{%- endfor -%}{%- endfor -%}{%- endif -%}<eos>"
    "{%- elif message.role == 'tool' -%}={{ message.content }}{%- else -%}{{ message.content }}{%- endif -%}"
    "{%- endfor -%}"
)


def calling_tokenizer() -> Any:
    """Return the tiny model's tokenizer set up as a chat model's: every second response is parsed as a `look` call."""
    tokenizer = load_tiny()[1]
    tokenizer.chat_template = TEMPLATE
    tokenizer.response_template = {}

    def parse_response(self: Any, ids: list[int], **kwargs: Any) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": self.decode(ids, skip_special_tokens=True)}
        if sum(ids) % 2:
            function = {"name": "look", "arguments": {"where": len(ids)}}
            message["tool_calls"] = [{"type": "function", "function": function}]
        return message

    tokenizer.parse_response = types.MethodType(parse_response, tokenizer)
    return tokenizer


def look(where: int) -> str:
    """Say what is there.

    Args:
        where: a place

    Returns:
        What is there.
    """
    return "+" * (1 + where % 3) + str(where % 10)


class Weather:
    """An environment with its own random numbers, which only training may consume."""

    dice: random.Random

    def reset(self, **kwargs: Any) -> str:
        return f"+{self.dice.randrange(10)}"

    def look(self, where: int) -> str:
        """Say what is there.

        Args:
            where: a place

        Returns:
            What is there.
        """
        return "-" * self.dice.randrange(1, 4) + str(self.dice.randrange(10))


def ask_and_look(prompts: list[Any], trainer: GRPOTrainer) -> dict[str, list[Any]]:
    """Generate as a custom `rollout_func`: every second response gets an answer and is then continued."""
    tokenizer = trainer.processing_class
    asked = [tokenizer(prompt[0]["content"])["input_ids"] for prompt in prompts]
    given, _ = trainer._generate_single_turn(asked, None, {}, trainer.num_generations)
    masks = [[1] * len(ids) for ids in given]
    calls = [i for i, ids in enumerate(given) if sum(ids) % 2]
    for i in calls:
        answer = tokenizer("=" + look(len(given[i])))["input_ids"]
        given[i], masks[i] = given[i] + answer, masks[i] + [0] * len(answer)
    more, _ = trainer._generate_single_turn([asked[i] + given[i] for i in calls], None, {}, 1)
    for i, ids in zip(calls, more, strict=True):
        given[i], masks[i] = given[i] + ids, masks[i] + [1] * len(ids)
    return {"prompt_ids": asked, "completion_ids": given, "logprobs": None, "env_mask": masks}


TURNS: dict[str, dict[str, Any]] = {
    "tool": {"tools": [look]},
    "environment": {"environment_factory": Weather},
    "rollout_func": {"rollout_func": ask_and_look},
}


def trained(make_trainer: Any, kind: str, probes: list[Any], **settings: Any) -> tuple[Outcome, Any, GRPOTrainer]:
    """Train two steps of 8 or 4 prompts with 4 responses each."""
    Weather.dice = random.Random(0)
    prompts = [[{"role": "user", "content": f"{a}+{a % 7}="}] for a in range(16)]
    experimental = pytest.warns(UserWarning, match="experimental feature")
    with contextlib.nullcontext() if kind == "tool" else experimental:
        trainer = make_trainer(
            DrGRPOTrainer if kind == "tool" else GRPOTrainer, dtype=torch.float64, trainer_arguments=TURNS[kind],
            reward=lambda completions, **kwargs: [float(len(str(c)) % 5) for c in completions],
            train_dataset=Dataset.from_dict({"prompt": prompts}), processing_class=calling_tokenizer(),
            per_device_train_batch_size=4, gradient_accumulation_steps=8 if kind == "tool" else 4,
            max_tool_calling_iterations=1, adam_epsilon=1e-5, max_grad_norm=0.05, **settings,
        )  # fmt: skip
    if kind == "tool":
        trainer.attachment.remove()
    attachment = attach(trainer, probes=probes, whole_prompts=True)
    return outcome(trainer), attachment, trainer


@pytest.mark.parametrize(("kind", "masked"), [("tool", True), ("environment", False), ("rollout_func", False)])
def test_over_several_turns_the_probe_equals_the_plain_twin_and_training_is_unchanged(
    make_trainer, monkeypatch: pytest.MonkeyPatch, kind: str, masked: bool
) -> None:
    settings = {"mask_truncated_completions": masked, "max_completion_length": 14 if masked else 32}
    monkeypatch.setattr(TrainerPolicy, "sample", lambda *_: pytest.fail("fresh responses were asked for"))
    probe, recorder = Answers(per_sequence=True), Recorder()
    truth = GroundTruthProbe(every=1, sequences=8)
    probes = [probe, truth, recorder, GradientNoiseScaleProbe(), EffectiveSampleSizeProbe()]
    probed, attachment, trainer = trained(make_trainer, kind, probes, **settings)
    assert differing(probed, trained(make_trainer, kind, [], **settings)[0]) == []
    assert kind == "rollout_func" or trainer.state.log_history[0]["tools/call_frequency"] > 0.2
    same = {"rel": 1e-3, "abs": 2e-6}  # TRL's fused head computes in fp32
    cut_in_second_turn = 0
    assert len(probe.all) == len(recorder.steps) == 2
    for step in recorder.steps:
        rollout = step.rollout
        written = rollout.token_mask.sum(dim=1) - rollout.completion_mask.sum(dim=1)
        assert 0.1 < float((written > 0).float().mean()) < 0.9
        assert rollout.completion_mask[:, 0].all()  # the policy's tokens come first, and count even if cut off later
        cut_in_second_turn += int(((rollout.completion_mask[:, -1] == 1) & (written > 0)).sum())
    # The last step, whose Adam moments come from the first one.
    answer = probe.all[-1]
    twin = Twin(step, responses=1, max_length=settings["max_completion_length"])
    for suffix, statistic in (("", per_token), ("_sequence", per_sequence)):
        forward, stderr = twin.change(twin.update_without, statistic), twin.stderr(twin.update_without, statistic)
        assert answer[f"delta_h/forward{suffix}"].value == pytest.approx(forward, **same)
        assert answer[f"delta_h/forward{suffix}"].stderr == pytest.approx(stderr, **same)
    assert answer["entropy/token"].value == pytest.approx(sum(twin.entropy_of) / sum(twin.lengths), **same)
    assert not masked or cut_in_second_turn > 2
    for name in ("delta_h/true", "delta_h/evaluation"):
        assert attachment.latest[name].code == "generation_keeps_state"
    weights = (rollout.advantages.abs() * rollout.completion_mask.sum(dim=1)).double()
    kish = float(weights.sum() ** 2 / weights.square().sum())
    assert attachment.latest["ess/token_weight"].value == pytest.approx(kish, rel=1e-6)


def test_a_second_step_on_truncated_turns_still_knows_which_tokens_were_sampled(make_trainer) -> None:
    probe, recorder = Answers(), Recorder()
    trained(make_trainer, "tool", [probe, recorder], num_iterations=2, mask_truncated_completions=True,
          max_completion_length=14)  # fmt: skip
    first, second = recorder.steps
    mask = second.rollout.completion_mask.bool()
    assert torch.equal(first.rollout.completion_ids, second.rollout.completion_ids)
    left_out = (second.rollout.advantages == 0) & mask[:, -1]
    assert int(left_out.sum()) > 2
    twin = Twin(first, responses=1, max_length=14)  # at the parameters that sampled
    for row, expected in enumerate(twin.logps):
        sampled = second.rollout.sampling_logps[row][mask[row]].double()
        torch.testing.assert_close(sampled, expected.detach(), rtol=1e-4, atol=1e-4)
    assert math.isfinite(probe.all[1]["entropy/token"].value)
    assert math.isfinite(probe.all[1]["delta_h/reuse"].value)
