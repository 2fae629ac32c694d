"""Each intervention is compared with a plain twin, and with TRL's own loss if TRL has it."""

from __future__ import annotations

import dataclasses
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from configs import REFUSED
from torch import Tensor

from rl_training.interventions.loss import LossInputs, loss_inputs, zero_advantage_share
from rl_training.interventions.named import (
    INTERVENTIONS,
    NEEDS,
    RATIOS_ARE_ONE,
    interventions_to_train,
    parse_intervention,
)
from rl_training.policy.rollout import Rollout
from rl_training.policy.scores import Scores
from rl_training.step.batch import Batch, Correction, LossSettings
from rl_training.step.folds import FoldSource
from rl_training.step.loss_weights import LossWeights

L, MICROBATCHES, EPSILON = 5, 2, 0.2
PROMPTS = [3, 3, 3, 4, 4, 4]
REWARDS = [1.0, 0.0, 0.5, 0.0, 2.0, 0.0]
LENGTHS = [5, 2, 3, 1, 5, 4]
TRUNCATED = [True, False, False, False, True, False]
PLAIN: dict[str, Any] = {"loss_type": "dr_grpo", "scale_rewards": "none", "beta": 0.0, "bf16": False, "use_cpu": True}


def double(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def table(seed: int, low: float, high: float) -> list[list[float]]:
    generator = torch.Generator().manual_seed(seed)
    values = torch.rand(len(PROMPTS), L, generator=generator, dtype=torch.float64) * (high - low) + low
    return values.tolist()


LOGPS, ENTROPIES, AT_SAMPLING, REFERENCE = table(0, -3, -0.1), table(1, 0, 2), table(2, -3, -0.1), table(3, -3, -0.1)
ADVANTAGES = [r - sum(REWARDS[3 * (i // 3) :][:3]) / 3 for i, r in enumerate(REWARDS)]
UNIT = 1 / (len(PROMPTS) * MICROBATCHES * L)


def plain(off_policy: bool = False, hides: bool = False) -> list[list[float]]:
    """Return the weight of each token's log π in Dr-GRPO's loss, from the formula."""
    rows = []
    for i, length in enumerate(LENGTHS):
        row = [0.0] * L
        for t in range(0 if hides and TRUNCATED[i] else length):
            ratio = math.exp(LOGPS[i][t] - AT_SAMPLING[i][t]) if off_policy else 1.0
            clipped = ratio > 1 + EPSILON if ADVANTAGES[i] > 0 else ratio < 1 - EPSILON
            row[t] = 0.0 if clipped else -UNIT * ratio * ADVANTAGES[i]
        rows.append(row)
    return rows


def make_loss(off_policy: bool = False, hides: bool = False) -> LossInputs:
    there = torch.tensor([[t < length for t in range(L)] for length in LENGTHS])
    truncated, advantages = torch.tensor(TRUNCATED), double(ADVANTAGES)
    seen = there & ~truncated.unsqueeze(1) if hides else there
    return LossInputs(
        weights=LossWeights(double(plain(off_policy, hides)), None),
        scores=Scores(double(LOGPS), double(ENTROPIES), seen.long()),
        advantages=advantages.masked_fill(truncated, 0.0) if hides else advantages,
        prompt_index=torch.tensor(PROMPTS),
        microbatches=MICROBATCHES,
        zero_advantage_share=0.25,
        settings=LossSettings(L, EPSILON, EPSILON, hides),
        rewards=double(REWARDS),
        truncated=truncated,
        old_logps=double(AT_SAMPLING) if off_policy else None,
        reference_logps=double(REFERENCE),
        hidden=there & ~seen,
    )


def tokens() -> list[tuple[int, int]]:
    return [(i, t) for i, length in enumerate(LENGTHS) for t in range(length)]


def covariance_order() -> list[tuple[int, int]]:
    """Return all tokens, sorted by how strongly their log-probability covaries with the advantage, largest first."""
    number = len(tokens())
    mean_a = sum(ADVANTAGES[i] for i, _ in tokens()) / number
    mean_l = sum(LOGPS[i][t] for i, t in tokens()) / number
    return sorted(tokens(), key=lambda at: -(ADVANTAGES[at[0]] - mean_a) * (LOGPS[at[0]][at[1]] - mean_l))


def deviation(i: int) -> float:
    group = REWARDS[3 * (i // 3) :][:3]
    mean = sum(group) / 3
    return math.sqrt(sum((r - mean) ** 2 for r in group) / 2)


def omega(i: int, t: int) -> float:
    probability = math.exp(LOGPS[i][t])
    return abs(ADVANTAGES[i] * (1 - probability) * (LOGPS[i][t] + ENTROPIES[i][t]))


def kept_by_entropy(share: float) -> set[tuple[int, int]]:
    """Return the tokens at or above the entropy quantile, which is interpolated between two entropies."""
    ordered = sorted(ENTROPIES[i][t] for i, t in tokens())
    position = (1 - share) * (len(ordered) - 1)
    below = math.floor(position)
    threshold = ordered[below] + (position - below) * (ordered[min(below + 1, len(ordered) - 1)] - ordered[below])
    return {(i, t) for i, t in tokens() if ENTROPIES[i][t] >= threshold}


LARGEST = max(omega(i, t) for i, t in tokens())
# By name: the factor on the weight c of token t of response i.
FACTORS: dict[str, Any] = {
    "psr": lambda i, t: float(ADVANTAGES[i] > 0),
    "nsr": lambda i, t: float(ADVANTAGES[i] < 0),
    "w_reinforce:0.3": lambda i, t: 0.3 if ADVANTAGES[i] > 0 else 1.0,
    "std_norm": lambda i, t: 1 / (deviation(i) + 1e-4),
    "length_norm": lambda i, t: L / LENGTHS[i],
    "dynamic_sampling": lambda i, t: 1 / 0.75,
    "drop_truncated": lambda i, t: float(not TRUNCATED[i]),
    "clip_cov:0.2": lambda i, t: float((i, t) not in covariance_order()[: int(0.2 * len(tokens()))]),
    "clip_cov:0.001": lambda i, t: float((i, t) not in covariance_order()[:1]),
    "top_entropy:0.3": lambda i, t: float((i, t) in kept_by_entropy(0.3)),
    "steer:0.5": lambda i, t: 0.5 ** (omega(i, t) / max(LARGEST, 0.02)),
}


@pytest.mark.parametrize("name", FACTORS)
def test_log_probability_weights_equal_the_plain_twin(name: str) -> None:
    weights = parse_intervention(name).weights(make_loss())
    assert weights.entropies is None
    expected = plain()
    for i, t in tokens():
        expected[i][t] *= FACTORS[name](i, t)
    torch.testing.assert_close(weights.logps, double(expected), rtol=1e-12, atol=0)


def test_the_entropy_bonus_is_its_strength_times_the_mean_token_entropy() -> None:
    weights = parse_intervention("bonus:0.03").weights(make_loss())
    assert weights.entropies is not None
    expected = [[-0.03 / (MICROBATCHES * sum(LENGTHS)) * (t < length) for t in range(L)] for length in LENGTHS]
    torch.testing.assert_close(weights.entropies, double(expected), rtol=1e-12, atol=0)
    assert torch.equal(weights.logps, make_loss().weights.logps)


@pytest.mark.parametrize("off_policy", [False, True])
def test_the_kl_term_is_the_k3_estimator_times_the_ratio(off_policy: bool) -> None:
    """The plain weights plus ∂/∂log π of ρ (π_ref/π − log(π_ref/π) − 1), by autograd."""
    logps = double(LOGPS).requires_grad_()
    ratio = (logps - (double(AT_SAMPLING) if off_policy else logps.detach())).exp()
    gap = double(REFERENCE) - logps
    mask = make_loss().scores.mask
    (pull,) = torch.autograd.grad((0.7 * ratio * (gap.exp() - gap - 1) * mask).sum() * UNIT, logps)
    weights = parse_intervention("kl:0.7").weights(make_loss(off_policy))
    torch.testing.assert_close(weights.logps, double(plain(off_policy)) + pull, rtol=1e-10, atol=1e-15)


def test_keep_truncated_gives_truncated_responses_their_plain_weights() -> None:
    weights = parse_intervention("keep_truncated").weights(make_loss(hides=True))
    torch.testing.assert_close(weights.logps, double(plain()), rtol=1e-12, atol=1e-18)
    assert not torch.allclose(make_loss(hides=True).weights.logps, weights.logps)


def test_off_policy_clip_higher_is_the_loss_clipped_at_that_bound() -> None:
    high = 20.0
    logps, mask = double(LOGPS).requires_grad_(), make_loss().scores.mask
    ratio = (logps - double(AT_SAMPLING)).exp()
    advantages = double(ADVANTAGES).unsqueeze(1)
    loss = -torch.minimum(ratio * advantages, ratio.clamp(1 - EPSILON, 1 + high) * advantages)
    (expected,) = torch.autograd.grad((loss * mask).sum() * UNIT, logps)
    weights = parse_intervention(f"clip_higher:{high}").weights(make_loss(off_policy=True))
    assert not torch.allclose(weights.logps, make_loss(off_policy=True).weights.logps)
    torch.testing.assert_close(weights.logps, expected, rtol=1e-12, atol=1e-12)


def test_off_policy_steer_includes_the_importance_ratio() -> None:
    sizes = {(i, t): math.exp(LOGPS[i][t] - AT_SAMPLING[i][t]) * omega(i, t) for i, t in tokens()}
    expected = plain(off_policy=True)
    for (i, t), size in sizes.items():
        expected[i][t] *= 0.5 ** (size / max(sizes.values()))
    weights = parse_intervention("steer:0.5").weights(make_loss(off_policy=True))
    torch.testing.assert_close(weights.logps, double(expected), rtol=1e-12, atol=0)


def test_off_policy_kl_cov_pulls_covariant_tokens_to_the_sampling_policy() -> None:
    weights = parse_intervention("kl_cov:0.2").weights(make_loss(off_policy=True))
    expected = plain(off_policy=True)
    for i, t in covariance_order()[: int(0.2 * len(tokens()))]:
        expected[i][t] += math.copysign(UNIT, LOGPS[i][t] - AT_SAMPLING[i][t])
    torch.testing.assert_close(weights.logps, double(expected), rtol=1e-12, atol=1e-15)


def sampler_ratio(i: int, t: int) -> float:
    return math.exp(LOGPS[i][t] - AT_SAMPLING[i][t])


def response_ratio(i: int) -> float:
    return math.prod(sampler_ratio(i, t) for t in range(LENGTHS[i]))


def passes_clip(i: int, t: int, epsilon: float) -> bool:
    return sampler_ratio(i, t) <= 1 + epsilon if ADVANTAGES[i] > 0 else sampler_ratio(i, t) >= 1 - epsilon


# By name: the factor on Dr-GRPO's own weight of token t of response i.
CORRECTIONS: dict[str, Any] = {
    "none": lambda i, t: 1.0,
    "tis:1.05": lambda i, t: min(sampler_ratio(i, t), 1.05),
    "mis:0.9,1.2": lambda i, t: sampler_ratio(i, t) * (0.9 <= sampler_ratio(i, t) <= 1.2),
    "mis:1.25": lambda i, t: sampler_ratio(i, t) * (0.8 <= sampler_ratio(i, t) <= 1.25),
    "seq_mask:1.1": lambda i, t: response_ratio(i) * (response_ratio(i) <= 1.1),
    "ppo_clip:0.1": lambda i, t: sampler_ratio(i, t) * passes_clip(i, t, 0.1),
    "exact": lambda i, t: response_ratio(i),
}


@pytest.mark.parametrize("name", CORRECTIONS)
def test_sampler_corrections_equal_the_plain_twin(name: str) -> None:
    """This holds whatever correction the loss itself has."""
    loss = make_loss()
    assert loss.settings is not None
    corrected = dataclasses.replace(loss.settings, correction=Correction(high=1.01))
    loss = dataclasses.replace(loss, sampling_logps=double(AT_SAMPLING), settings=corrected)
    loss = dataclasses.replace(loss, weights=LossWeights(0.3 * loss.weights.logps, None))
    expected = plain()
    for i, t in tokens():
        expected[i][t] *= CORRECTIONS[name](i, t)
    assert name == "none" or expected != plain()
    torch.testing.assert_close(parse_intervention(name).weights(loss).logps, double(expected), rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("name", [name for name, change in INTERVENTIONS.items() if change.nothing_on_policy])
def test_on_policy_interventions_on_ratios_change_exactly_nothing(name: str) -> None:
    loss = make_loss()
    assert parse_intervention(name).weights(loss) is loss.weights
    assert "every ratio is 1" in RATIOS_ARE_ONE


def test_optimizer_interventions_change_settings_and_no_loss_weight() -> None:
    lr, clip, bonus = map(parse_intervention, ("lr:0.5", "max_grad_norm:0.2", "bonus:0.2"))
    assert [(change.function is None, change.lr_factor, change.max_grad_norm) for change in (lr, clip, bonus)] == [
        (True, 0.5, None),
        (True, 1.0, 0.2),
        (False, 1.0, None),
    ]


def test_missing_inputs_of_an_intervention_are_reported() -> None:
    bare = LossInputs(
        make_loss().weights, make_loss().scores, make_loss().advantages, make_loss().prompt_index, MICROBATCHES, 1.0
    )
    reasons = {name: parse_intervention(name).unavailable_reason(bare) for name in INTERVENTIONS}
    assert [name for name, reason in reasons.items() if not reason] == ["bonus", "lr", "max_grad_norm"]
    assert [reasons[name] for name in ("psr", "std_norm", "kl")] == [
        NEEDS["advantages"], NEEDS["dr_grpo"], NEEDS["unit"],
    ]  # fmt: skip
    assert make_loss().settings is not None
    with_kl = dataclasses.replace(
        make_loss(), settings=dataclasses.replace(make_loss().settings, differs=frozenset({"beta"}))
    )
    refused = [name for name in INTERVENTIONS if parse_intervention(name).unavailable_reason(with_kl)]
    assert set(INTERVENTIONS) - set(refused) == {"bonus", "lr", "max_grad_norm", "kl", "kl_cov"}
    missing = {
        "std_norm": "rewards",
        "drop_truncated": "truncated",
        "kl": "reference",
        "dynamic_sampling": "some_advantage",
        "tis": "sampler",
    }
    dr_grpo = dataclasses.replace(bare, settings=make_loss().settings)
    for name, need in missing.items():
        assert parse_intervention(name).unavailable_reason(dr_grpo) == NEEDS[need]


def test_a_token_without_a_sampler_log_probability_is_not_corrected() -> None:
    """As in TRL, an unknown ratio counts as 1."""
    sampled = double(AT_SAMPLING)
    sampled[0, 1] = math.nan
    loss = dataclasses.replace(make_loss(), sampling_logps=sampled)
    for name in ("tis:2", "mis:2", "seq_mask:3", "ppo_clip:0.2", "exact"):
        assert bool(parse_intervention(name).weights(loss).logps.isfinite().all()), name
    logps = parse_intervention("tis:2").weights(loss).logps
    assert float(logps[0, 1]) == pytest.approx(plain()[0][1])


def test_a_microbatch_is_weighted_by_its_share_of_the_sequences() -> None:
    """The loss is a mean over 6 sequences, 3 and 1.5 times as many as the microbatches of 2 and 4 have."""
    loss, rows = make_loss(), torch.arange(6)
    rollout = Rollout(
        prompt_ids=rows.unsqueeze(1), prompt_mask=torch.ones(6, 1), completion_ids=torch.zeros(6, L),
        completion_mask=loss.scores.mask, advantages=loss.advantages, rewards=None, prompt_index=rows // 2,
    )  # fmt: skip
    parts = (range(2), range(2, 6))
    batch = Batch(rollout, loss.scores, loss.weights, parts, [], rows, torch.ones(6), 2, FoldSource.CAUGHT)
    inputs = loss_inputs(batch, lambda mine: mine)
    assert [part.microbatches for part in inputs] == [3.0, 1.5]
    assert torch.equal(inputs[1].weights.logps, loss.weights.logps[2:])
    assert all(part.whole_prompts for part in inputs)
    # If a prompt is split between microbatches anywhere, here or on another process, every microbatch knows it.
    cut = dataclasses.replace(batch, microbatch_rows=(range(2), range(2, 5), range(5, 6)))
    for step, reduce in ((cut, lambda mine: mine), (batch, lambda mine: mine + 1.0)):
        assert not any(part.whole_prompts for part in loss_inputs(step, reduce))


def test_prompts_without_any_advantage_are_counted_over_all_processes() -> None:
    """Two of three prompts here, and one of seven on the other processes."""
    advantages, prompts = torch.tensor([0.0, 0.0, 1.0, -1.0, 0.0, 0.0]), torch.tensor([5, 5, 2, 2, 9, 9])
    assert zero_advantage_share(advantages, prompts, lambda mine: mine) == pytest.approx(2 / 3)
    assert zero_advantage_share(advantages, prompts, lambda mine: mine + torch.tensor([1.0, 7.0])) == pytest.approx(
        3 / 10
    )


@pytest.mark.parametrize(("text", "said"), REFUSED["intervention"].items())
def test_an_invalid_intervention_is_refused_in_one_line(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)) as error:
        parse_intervention(text)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("later", ["tis:2", "mis:0.5,2", "exact", "clip_higher"])
def test_an_intervention_that_would_undo_others_must_come_first(later: str) -> None:
    assert [change.name for change in interventions_to_train([later, "psr"])] == [parse_intervention(later).name, "psr"]
    for names in (["psr", later], ["none", later]):
        with pytest.raises(ValueError, match=rf"^interventions: {re.escape(parse_intervention(later).name)} "):
            interventions_to_train(names)


@pytest.mark.parametrize("name", ["std_norm", "length_norm", "clip_higher", "psr", "tis"])
def test_a_loss_that_an_intervention_reweights_can_be_changed_by_another(name: str) -> None:
    """A loss changed by one of these is still a weight on advantages. A loss with a KL term is not."""
    settings = dataclasses.replace(make_loss().settings, differs=frozenset({parse_intervention(name).differs}))  # type: ignore[type-var]
    assert parse_intervention("psr").unavailable_reason(dataclasses.replace(make_loss(), settings=settings)) is None
    assert parse_intervention("kl").differs == "beta"


OWN = """
import sys
import numpy as np
import torch
from rl_training.step.loss_weights import LossWeights
from rl_training.interventions.reweighting import scaled

def softer(loss, strength):
    return scaled(loss, torch.full((6, 1), strength))

def in_place(loss, strength):
    loss.weights.logps.mul_(strength)
    return loss.weights

def nan(loss, strength):
    return scaled(loss, torch.full((6, 1), float("nan")))

def narrow(loss, strength):
    return LossWeights(loss.weights.logps[:, 1:], None)

def nothing(loss, strength):
    pass

def numbers(loss, strength):
    return LossWeights(loss.weights.logps.numpy(), None)

def array(loss, strength):
    return np.zeros((6, 5))

def text(loss, strength):
    return "half"

def raises(loss, strength):
    return loss.weight

def leaves(loss, strength):
    sys.exit(0)

def lr(loss, strength):
    return loss.weights

plain = lr
"""


@pytest.fixture
def custom_file(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(OWN, encoding="utf-8")
    return tmp_path / "mine.py"


def test_a_custom_function_in_a_file_is_an_intervention(custom_file: Path) -> None:
    mine, plain_weights = parse_intervention(f"{custom_file}:softer:0.5"), make_loss().weights.logps
    assert mine.name == "softer:0.5"
    assert torch.equal(mine.weights(make_loss()).logps, 0.5 * plain_weights)
    loss = make_loss()
    assert torch.equal(parse_intervention(f"{custom_file}:in_place:0.5").weights(loss).logps, 0.5 * plain_weights)
    assert torch.equal(loss.weights.logps, plain_weights)  # the function wrote into a copy


@pytest.mark.parametrize(("name", "said"), REFUSED["own_intervention"].items())
def test_a_faulty_custom_function_is_named_in_one_line(custom_file: Path, name: str, said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)) as error:
        parse_intervention(f"{custom_file}:{name}").weights(make_loss())
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ("import sys; sys.exit(0)", "mine.py failed: SystemExit: 0"),
        ("def f(:", "mine.py failed: SyntaxError"),
        ("from rl_training.interventions.loss import Remedied", "mine.py failed: ImportError: cannot import name"),
    ],
)
def test_an_unreadable_file_is_named_in_one_line(tmp_path: Path, lines: str, said: str) -> None:
    (tmp_path / "mine.py").write_text(lines, encoding="utf-8")
    with pytest.raises(ValueError, match=re.escape(said)) as error:
        parse_intervention(f"{tmp_path}/mine.py:f")
    assert "\n" not in str(error.value)


def test_a_module_name_without_a_dot_is_accepted(custom_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(custom_file.parent))
    assert parse_intervention("mine:softer:0.5").name == "softer:0.5"


@pytest.mark.parametrize(("names", "said"), REFUSED["interventions"])
def test_an_invalid_list_of_interventions_is_refused_in_one_line(names: Any, said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)) as error:
        interventions_to_train(names)
    assert "\n" not in str(error.value)
