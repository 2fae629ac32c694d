"""The sampler probe: its metrics by loops over tokens, truncated distributions, and what it reads from TRL."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import reference
import torch
from example_steps import ALONE, run_each
from other_samplers import COPIES, OtherSampler
from seen import Kept
from torch import Tensor

from rl_training.engine.context import StepContext
from rl_training.models.load import load_tiny
from rl_training.parallel.ranks import Ranks
from rl_training.policy.rollout import Rollout
from rl_training.policy.scores import Scores
from rl_training.probes.sampler import METRICS, TRUNCATED_SAMPLER, SamplerProbe
from rl_training.statistics.estimate import Estimate
from rl_training.step.batch import Batch, Correction, LossSettings
from rl_training.step.folds import FoldSource
from rl_training.step.loss_weights import LossWeights
from rl_training.step.reasons import Reasons

G, PROMPTS, T = 4, 5, 6


class Says(Kept, SamplerProbe):
    """The sampler probe, which keeps its steps and estimates."""


def context(batch: Batch, ranks: Ranks, reasons: Reasons, policy: Any = None) -> StepContext:
    """Return a context with only the parts of a step that the probe reads."""
    step: Any = SimpleNamespace(batch=batch, reasons=reasons)
    passes: Any = SimpleNamespace(ranks=ranks, policy=policy)
    return StepContext(step, passes)


def batch_of(logps: Tensor, sampled: Tensor | None, mask: Tensor, rewards: Tensor, correction: Any = None) -> Batch:
    count, index = len(logps), torch.arange(len(logps)) // G
    ids = torch.zeros(count, 1, dtype=torch.long)
    rollout = Rollout(ids, ids + 1, mask.long(), mask.long(), rewards, rewards, index, sampled)
    return Batch(
        rollout, Scores(logps, torch.zeros_like(logps), mask), LossWeights(logps, None), (range(count),),
        (), index, torch.tensor([float(count)]), G, FoldSource.CAUGHT, LossSettings(T, 0.2, 0.2, False, correction),
    )  # fmt: skip


def answers(batch: Batch, ranks: Ranks = ALONE, reasons: Reasons | None = None) -> dict[str, Estimate]:
    return SamplerProbe().measure(context(batch, ranks, reasons or Reasons()), None).estimates


def random_batch(correction: Correction | None = None) -> Batch:
    draw = torch.Generator().manual_seed(4)
    mask = torch.arange(T) < torch.randint(1, T + 1, (G * PROMPTS, 1), generator=draw)
    logps, noise = (torch.randn(G * PROMPTS, T, generator=draw, dtype=torch.float64) for _ in range(2))
    rewards = torch.randint(0, 2, (G * PROMPTS,), generator=draw).double()
    return batch_of(logps, (logps + 0.2 * noise).masked_fill(~mask, math.nan), mask, rewards, correction)


def test_the_reward_gap_is_over_responses_with_a_reward() -> None:
    """Two of three responses have rewards, 1 and 0, with ratios 2 and 1: (2 · 1) / 3 − 1 / 2."""
    logps = torch.tensor([[math.log(2)], [0.0], [math.log(5)]], dtype=torch.float64)
    batch = batch_of(logps, torch.zeros_like(logps), torch.ones(3, 1), torch.tensor([1.0, 0.0, math.nan]))
    estimates = answers(batch)
    assert estimates["sampler/reward_gap"].value == pytest.approx(2 / 3 - 1 / 2)
    assert estimates["sampler/mean_ratio"].value == pytest.approx(8 / 3)


def by_loops(batch: Batch, upper: float) -> dict[str, Any]:
    """Return by metric a formula, and the rows [tokens, kl, outside, changed, sequences, r, ρ, ρ², ρr] of prompts."""
    rows = []
    for prompt in range(PROMPTS):
        row = [0.0] * 9
        for i in range(prompt * G, prompt * G + G):
            n = int(batch.scores.mask[i].sum())
            d = [float(batch.scores.logps[i, k] - batch.rollout.sampling_logps[i, k]) for k in range(n)]
            whole, reward = math.exp(sum(d)), float(batch.rollout.rewards[i])
            row = [x + y for x, y in zip(row, [
                n, sum(math.exp(x) - 1 - x for x in d), sum(not 0.9 <= math.exp(x) <= 1.1 for x in d),
                sum(math.exp(x) > upper for x in d), 1, reward, whole, whole**2, whole * reward,
            ], strict=True)]  # fmt: skip
        rows.append(row)
    formulas = {
        "kl": lambda s: s[1] / s[0], "ratio_outside": lambda s: s[2] / s[0], "ess": lambda s: s[6] ** 2 / s[4] / s[7],
        "mean_ratio": lambda s: s[6] / s[4], "reward_gap": lambda s: s[8] / s[6] - s[5] / s[4],
        "corrected_share": lambda s: s[3] / s[0],
    }  # fmt: skip
    return {name: (formula, rows) for name, formula in formulas.items()}


def test_every_metric_and_its_error_over_prompts_equal_plain_loops() -> None:
    batch = random_batch(Correction(high=1.15))
    estimates = answers(batch)
    for name, (formula, rows) in by_loops(batch, 1.15).items():
        estimate = estimates[f"sampler/{name}"]
        assert estimate.value == pytest.approx(formula([sum(c) for c in zip(*rows, strict=True)]), rel=1e-10), name
        assert estimate.stderr == pytest.approx(reference.jackknife_stderr(formula, rows), rel=1e-8), name
        assert estimate.num_samples == PROMPTS
    assert 0 < estimates["sampler/corrected_share"].value < 1


def test_a_token_without_a_log_probability_has_ratio_1_and_a_remark() -> None:
    """As in TRL's loss. All other ratios stay what they are."""
    batch = random_batch()
    known = batch.rollout.sampling_logps.clone()
    given = known.clone()
    given[0, 0] = math.nan
    known[0, 0] = batch.scores.logps[0, 0]
    some, all_known = (
        answers(dataclasses.replace(batch, rollout=dataclasses.replace(batch.rollout, sampling_logps=logps)))
        for logps in (given, known)
    )
    for name, estimate in all_known.items():
        assert some[name].value == pytest.approx(estimate.value, nan_ok=True), name
    assert "no log-probability of" in some["sampler/ess"].reason
    assert "no log-probability of" not in all_known["sampler/ess"].reason


def test_prompts_on_another_process_count_like_local_ones() -> None:
    """Two processes with copies of the prompts give the same values, from sums over 2 P units instead of P."""
    batch = random_batch()
    alone, both = answers(batch), answers(batch, Ranks(2, lambda tensor: 2 * tensor))
    for name in (f"sampler/{name}" for name in METRICS):
        assert both[name].value == pytest.approx(alone[name].value, rel=1e-12)
        assert both[name].num_samples == 2 * PROMPTS
    ratio = both["sampler/kl"].stderr / alone["sampler/kl"].stderr
    assert ratio == pytest.approx(math.sqrt(1 / 2), rel=0.1)


def test_prompts_spread_over_processes_give_values_without_errors() -> None:
    batch = random_batch()
    whole, parts = answers(batch), answers(batch, reasons=Reasons(split_prompts="spread"))
    assert {estimate.value for estimate in whole.values()} == {estimate.value for estimate in parts.values()}
    assert all(math.isnan(estimate.stderr) and estimate.reason == "spread" for estimate in parts.values())


def test_numerics_and_their_error_use_one_response_per_prompt() -> None:
    batch = random_batch()
    again = batch.scores.logps + 0.1 * torch.randn(batch.scores.logps.shape, generator=torch.Generator().manual_seed(1))

    def score(rollout: Rollout, rows: Tensor, *, graph: bool) -> Scores:
        assert not graph  # for a graph without a backward, FSDP2 would keep the weights gathered
        return Scores(again[rows], again[rows], batch.scores.mask[rows])

    policy = SimpleNamespace(run_passes=run_each, scorer=SimpleNamespace(score=score))
    answers = SamplerProbe(numerics=True).measure(context(batch, ALONE, Reasons(), policy), None).estimates
    rows = []
    for i in range(0, G * PROMPTS, G):
        apart = (batch.scores.logps[i] - again[i])[batch.scores.mask[i]].tolist()
        outside = sum(not 0.9 <= math.exp(x) <= 1.1 for x in apart)
        rows.append([float(len(apart)), sum(math.exp(x) - 1 - x for x in apart), outside])
    for number, name in enumerate(("kl", "outside"), start=1):
        estimate, formula = answers[f"sampler/numerics_{name}"], lambda s, n=number: s[n] / s[0]
        assert estimate.value == pytest.approx(formula([sum(column) for column in zip(*rows, strict=True)]), rel=1e-9)
        assert estimate.stderr == pytest.approx(reference.jackknife_stderr(formula, rows), rel=1e-8)
        assert estimate.num_samples == PROMPTS


def test_without_another_sampler_ratios_are_one_and_off_policy_missing() -> None:
    batch = random_batch()
    on_policy = dataclasses.replace(batch, rollout=dataclasses.replace(batch.rollout, sampling_logps=None))
    values = [estimate.value for estimate in answers(on_policy).values()]
    assert values == [0, 0, 1, 1, 0, 0]
    later = dataclasses.replace(on_policy, rollout=dataclasses.replace(on_policy.rollout, on_policy=False))
    assert all(estimate.code == "no_sampling_logps" for estimate in answers(later).values())


@pytest.mark.parametrize(("top_p", "flagged"), [(0.95, True), (1.0, False)])
def test_a_truncated_sampler_is_flagged_within_one_batch_and_no_other_ever(top_p: float, flagged: bool) -> None:
    """64 prompts × 4 responses of 12 tokens. Without a cut, 100 batches from a sampler with noisy logits."""
    estimates = []
    for seed in range(3 if flagged else 100):
        draw = torch.Generator().manual_seed(seed)
        logits = 2.0 * torch.randn(256, 12, 16, generator=draw, dtype=torch.float64)
        sampler = logits + 0.03 * torch.randn(logits.shape, generator=draw, dtype=torch.float64)
        if flagged:
            chances, order = logits.softmax(-1).sort(-1, descending=True)
            cut = torch.zeros_like(logits).scatter(-1, order, (chances.cumsum(-1) - chances >= top_p).double())
            sampler = logits.masked_fill(cut.bool(), -math.inf)
        table = sampler.log_softmax(-1)
        tokens = torch.multinomial(table.exp().flatten(0, 1), 1, generator=draw).view(256, 12, 1)
        logps, sampled = (table_logps.gather(-1, tokens).squeeze(-1) for table_logps in (logits.log_softmax(-1), table))
        mask, rewards = torch.ones_like(logps), torch.zeros(256, dtype=torch.float64)
        estimates.append(answers(batch_of(logps, sampled, mask, rewards))["sampler/mean_ratio"])
    assert [estimate.reason == TRUNCATED_SAMPLER for estimate in estimates] == [flagged] * len(estimates)
    batch = batch_of(logps, sampled, mask, rewards)
    later = dataclasses.replace(batch, rollout=dataclasses.replace(batch.rollout, on_policy=False))
    assert answers(later)["sampler/mean_ratio"].reason == ""  # the policy may have trained on these responses


@pytest.mark.parametrize(("noise", "length"), [(0.1, 16), (0.2, 16), (0.1, 64)])
def test_the_log_effective_size_falls_by_twice_the_kl_of_a_response(noise: float, length: int) -> None:
    """ESS/N = exp(−2 KL T) holds to 5 %, down to .6."""
    draw = torch.Generator().manual_seed(0)
    logits = 2.0 * torch.randn(4096, length, 16, generator=draw, dtype=torch.float64)
    sampler = (logits + noise * torch.randn(logits.shape, generator=draw, dtype=torch.float64)).log_softmax(-1)
    tokens = torch.multinomial(sampler.exp().flatten(0, 1), 1, generator=draw).view(4096, length, 1)
    logps, sampled = (table_logps.gather(-1, tokens).squeeze(-1) for table_logps in (logits.log_softmax(-1), sampler))
    estimates = answers(batch_of(logps, sampled, torch.ones_like(logps), torch.zeros(4096, dtype=torch.float64)))
    expected = math.exp(-2.0 * estimates["sampler/kl"].value * length)
    assert estimates["sampler/ess"].value == pytest.approx(expected, rel=0.05)
    assert expected < 0.91


@pytest.mark.parametrize(
    ("correction", "expected"),
    [
        (Correction(high=2.0), [[0.5, 2.0, 1.0], [2.0, 2.0, 1.0]]),
        (Correction(masks=True, low=0.6, high=2.5), [[0.0, 2.0, 1.0], [0.0, 2.0, 1.0]]),
        (Correction(per_sequence=True, masks=True, high=3.0), [[1.0] * 3, [0.0] * 3]),
        (Correction(per_sequence=True, high=3.0), [[1.0] * 3, [3.0] * 3]),
    ],
)
def test_corrections_of_two_responses_equal_those_by_hand(correction: Correction, expected: list[list[float]]) -> None:
    """The tokens' ratios are ½, 2 and 4, 2. The third column is padding, with log ratio 0."""
    logs = torch.tensor([[0.5, 2.0, 1.0], [4.0, 2.0, 1.0]], dtype=torch.float64).log()
    torch.testing.assert_close(correction.factors(logs), torch.tensor(expected, dtype=torch.float64))


def test_a_later_step_of_a_rollout_is_corrected_by_the_ratios_of_its_first() -> None:
    """The policy has moved by 1 nat per token since then. Before, no ratio was out of bounds."""
    batch = random_batch(Correction(high=1.5))
    old = batch.rollout.sampling_logps
    later = dataclasses.replace(batch.rollout, on_policy=False, old_logps=old)
    moved = dataclasses.replace(batch.scores, logps=(old + 1.0).masked_fill(batch.scores.mask == 0, 0.0))
    estimates = answers(dataclasses.replace(batch, rollout=later, scores=moved))
    assert estimates["sampler/ratio_outside"].value == 1.0
    assert estimates["sampler/corrected_share"].value == 0.0


def test_numerics_are_rounding_alone_where_only_the_batch_shape_differs(make_trainer: Any) -> None:
    trainer = make_trainer(probes=[SamplerProbe(numerics=True)], max_steps=1, max_completion_length=8)
    trainer.train()
    estimates = trainer.attachment.latest
    assert 0 <= estimates["sampler/numerics_kl"].value < 1e-9
    assert estimates["sampler/numerics_outside"].value == 0


def test_a_stale_sampler_is_measured_and_the_step_is_predicted(make_trainer: Any, tmp_path: Path) -> None:
    probe = Says()
    stale = OtherSampler("stale", dict(load_tiny()[0].named_parameters()))
    trainer = make_trainer(probes=[probe], max_steps=3, trainer_arguments={"rollout_func": stale}, learning_rate=1e-3)
    trainer.train()
    first, _, third = probe.all
    assert first["sampler/kl"].value < 1e-9  # its weights are still the policy's
    assert third["sampler/kl"].value > 1e-6
    assert 0 < third["sampler/ess"].value < 1 - 1e-6
    rollout = probe.kept_steps[-1].batch.rollout
    assert rollout.on_policy
    assert rollout.old_logps is None


def test_placeholder_zero_log_probabilities_are_not_used_as_ratios(make_trainer: Any) -> None:
    def with_zeros(prompts: list, trainer: Any) -> dict[str, Any]:
        said = OtherSampler("own")(prompts, trainer)
        return said | {"logprobs": [[0.0] * len(logps) for logps in said["logprobs"]]}

    trainer = make_trainer(probes=["simple"], max_steps=1, trainer_arguments={"rollout_func": with_zeros})
    trainer.train()
    assert trainer.attachment.latest["delta_h/forward"].code == "placeholder_logps"


@pytest.mark.parametrize("name", ["int8", "bf16"])
def test_the_kl_to_a_rounded_sampler_equals_that_of_both_models_in_float64(make_trainer: Any, name: str) -> None:
    """The reference scores each response with both models, without padding."""
    probe = Says()
    trainer = make_trainer(probes=[probe], max_steps=1, trainer_arguments={"rollout_func": OtherSampler(name)})
    weights_before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    trainer.train()
    seen = probe.kept_steps[0].batch.rollout
    models = [load_tiny()[0].double() for _ in range(2)]
    for model, weights in zip(models, (weights_before, COPIES[name](weights_before)), strict=True):
        model.load_state_dict({name: weight.double() for name, weight in weights.items()}, strict=False)
    terms = []
    for i in range(seen.num_sequences):
        prompt = seen.prompt_ids[i][seen.prompt_mask[i].bool()]
        said = seen.completion_ids[i][seen.completion_mask[i].bool()]
        with torch.no_grad():
            logits = [model(torch.cat([prompt, said])[None]).logits[0, len(prompt) - 1 : -1] for model in models]
        policy, sampler = (table_logps.log_softmax(-1).gather(-1, said[:, None]).squeeze(-1) for table_logps in logits)
        terms += ((policy - sampler).exp() - 1 - (policy - sampler)).tolist()
    assert probe.all[0]["sampler/kl"].value == pytest.approx(sum(terms) / len(terms), rel=2e-3)
    assert sum(terms) / len(terms) > 1e-7
