"""Whether the policy drew the responses: the test's sums against a plain twin, its error against enumeration."""

from __future__ import annotations

import copy
import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from example_steps import ALONE
from ranks_in_threads import on_two_ranks
from seen import Seen
from torch import Tensor

from rl_training import Rollout, measured_loop
from rl_training.models.load import load_tiny
from rl_training.parallel.ranks import Ranks
from rl_training.parallel.state_tensors import from_tensors, to_tensors
from rl_training.policy.rollout import take_rows
from rl_training.policy.scorer import Scorer
from rl_training.policy.scores import Scores
from rl_training.probes import EffectiveSampleSizeProbe, MeasuredStepProbe, SamplerProbe, SimpleEntropyProbe
from rl_training.step import residual
from rl_training.step.batch import Batch
from rl_training.step.martingale import bound
from rl_training.step.reasons import NO_TOKENS, REUSED
from rl_training.step.residual import NOT_DRAWN, UNTESTED, ResidualSums, ResidualTest
from rl_training.step.score_check import RANDOM_PASSES, ScoreCheck
from rl_training.tasks.arithmetic import arithmetic
from rl_training.vocabulary import ENGINE

PROMPTS, G, LENGTH = 16, 4, 12
COLD = 0.3  # a sampler at this temperature is noticed in two steps
SKEWED = torch.tensor([0.989, 0.01, 0.001], dtype=torch.float64)


# --- the bound --------------------------------------------------------------------------------------------------------


def paths(p: Tensor, length: int) -> Iterator[tuple[float, Tensor]]:
    """Yield every sequence of independent tokens with its probability, as the residuals of its tokens."""
    x = p.log() - (p * p.log()).sum()
    for tokens in itertools.product(range(len(p)), repeat=length):
        yield float(p[list(tokens)].prod()), x[list(tokens)]


@pytest.mark.parametrize("slope", [-3.0, -0.5, -0.1, 0.1, 0.5, 3.0])
@pytest.mark.parametrize("p", [SKEWED, torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)])
def test_what_the_bound_follows_from_is_a_supermartingale(p: Tensor, slope: float) -> None:
    """Enumerated: E exp(λS − λ²Q/2) is at most 1, however rare the tokens. With Q = V it is not."""
    x = p.log() - (p * p.log()).sum()
    variance = float((p * x.square()).sum())
    mean = with_variance_alone = 0.0
    for probability, path in paths(p, 3):
        quadratic = (float(path.square().sum()) + 2 * 3 * variance) / 3
        mean += probability * math.exp(slope * float(path.sum()) - slope**2 * quadratic / 2)
        with_variance_alone += probability * math.exp(slope * float(path.sum()) - slope**2 * 3 * variance / 2)
    assert mean <= 1.0
    if p is SKEWED and slope == -3.0:
        assert with_variance_alone > 1.0


def test_the_bound_is_where_the_mixture_reaches_one_over_alpha() -> None:
    """By a sum over slopes λ ~ N(0, 1/R) instead of the closed form."""
    for quadratic in (1.0, 300.0, 1e5):
        total, slopes = bound(quadratic, 0.01), torch.linspace(-3, 3, 200_001, dtype=torch.float64)
        density = (-12.5 * slopes.square()).exp() * math.sqrt(25.0 / (2 * math.pi))
        mixture = torch.trapezoid(density * (slopes * total - slopes.square() * quadratic / 2).exp(), slopes)
        assert float(mixture) == pytest.approx(100.0, rel=1e-4)


@pytest.mark.parametrize("p", [SKEWED, torch.tensor([0.6, 0.3, 0.1], dtype=torch.float64)])
def test_chance_passes_the_bound_in_fewer_than_one_run_of_a_hundred_with_ten_thousand_looks(p: Tensor) -> None:
    x = p.log() - (p * p.log()).sum()
    variance = float((p * x.square()).sum())
    draw = torch.Generator().manual_seed(0)
    alarms = 0
    for _ in range(10):
        drawn = x[torch.multinomial(p, 100 * 10_000, replacement=True, generator=draw).view(100, 10_000)]
        looks = torch.arange(1, 10_001) * variance
        quadratic = (drawn.square().cumsum(1) + 2 * looks) / 3
        spread = quadratic + 25.0
        reasons = (spread * (2 * math.log(1 / residual.RUN_ALPHA) + (spread / 25.0).log())).sqrt()
        bounds = reasons + residual.SAMPLER_TOLERANCE * looks
        sums = ResidualSums(0.0, float(looks[-1]), float(drawn[0].square().sum()), 10_000.0, 1)
        assert float(bounds[0, -1]) == pytest.approx(sums.bound(residual.RUN_ALPHA))
        alarms += int((drawn.cumsum(1).abs() > bounds).any(dim=1).sum())
    assert alarms <= 5  # of 1000 runs


# --- the sums ---------------------------------------------------------------------------------------------------------


@functools.cache
def prompts() -> tuple[Tensor, Tensor]:
    tokenizer = load_tiny()[1]
    texts = arithmetic(num_train=PROMPTS, num_eval=2).train_dataset["prompt"]
    encoded = tokenizer(
        [text for text in texts for _ in range(G)], return_tensors="pt", padding=True, padding_side="left"
    )
    return encoded.input_ids, encoded.attention_mask


def drawn(model: Any, seed: int, temperature: float = 1.0, **facts: Any) -> Rollout:
    """Return responses that the model draws, with rewards that differ within every prompt."""
    ids, mask = prompts()
    torch.manual_seed(seed)
    with torch.no_grad():
        tokens = model.generate(
            input_ids=ids, attention_mask=mask, max_new_tokens=LENGTH, do_sample=True, temperature=temperature,
            top_k=0, top_p=1.0, pad_token_id=0, eos_token_id=load_tiny()[1].eos_token_id,
        )[:, ids.shape[1] :]  # fmt: skip
    is_end = (tokens == load_tiny()[1].eos_token_id).long()
    there = (is_end.cumsum(dim=1) - is_end == 0).long()
    rewards = torch.linspace(-1, 1, G).repeat(PROMPTS)
    return Rollout(
        prompt_ids=ids, prompt_mask=mask, completion_ids=tokens * there, completion_mask=there, advantages=rewards,
        rewards=rewards, prompt_index=torch.arange(PROMPTS * G) // G, **facts,
    )  # fmt: skip


def logits_of(model: Any, rollout: Rollout) -> Tensor:
    ids, there = (
        torch.cat(pair, dim=1)
        for pair in ((rollout.prompt_ids, rollout.completion_ids), (rollout.prompt_mask, rollout.token_mask))
    )
    with torch.no_grad():
        logits = model(input_ids=ids, attention_mask=there, use_cache=False).logits
    return logits[:, rollout.prompt_ids.shape[1] - 1 : -1].double()


def twin(model: Any, rollout: Rollout, rows: list[int], temperature: float = 1.0) -> ResidualSums:
    """Return the sums by their definition, token by token, in float64."""
    total = [0.0] * 4
    logits = logits_of(model, rollout) / temperature
    for row in rows:
        for column in rollout.completion_mask[row].nonzero().flatten().tolist():
            logp = logits[row, column].log_softmax(-1)
            x = logp - (logp.exp() * logp).sum()
            token = int(rollout.completion_ids[row, column])
            weight = 1.0
            if rollout.sampling_logps is not None:
                weight = float((logp[token] - rollout.sampling_logps[row, column].double()).exp())
            mean, variance = weight * float(x[token]), float((logp.exp() * x.square()).sum())
            total = [a + b for a, b in zip(total, (mean, variance, mean**2, mean**2 / weight), strict=True)]
    residual_sum, variance, squares, single = total
    count = int(rollout.completion_mask[rows].sum())
    return ResidualSums(residual_sum, variance * max(1.0, squares / single), squares, count, 1)


def run_test(rollout: Rollout, scores: Scores, ranks: Ranks = ALONE, missing: Any = None) -> ResidualTest:
    """Return a test of all rows of a rollout, added in two parts."""
    test, logs = ResidualTest(ResidualSums(), 1.0), None
    if rollout.sampling_logps is not None:
        logs = (scores.logps - rollout.sampling_logps).double()
    for rows in torch.arange(rollout.num_sequences).split(40):
        part = Scores(*(getattr(scores, name)[rows] for name in ("logps", "entropies", "mask", "varentropies")))
        test.add(rows, part, None if logs is None else logs[rows], rollout.untested)
    test.decide(ranks, missing, logs is not None)
    return test


def differing(sums: ResidualSums, others: ResidualSums) -> list[str]:
    return [
        field.name
        for field in dataclasses.fields(sums)
        if getattr(sums, field.name) != pytest.approx(getattr(others, field.name), rel=1e-5, abs=1e-4)
    ]


def half_masked(rollout: Rollout) -> Rollout:
    """Return the rollout with every third token written by an environment."""
    policy = rollout.completion_mask * (torch.arange(rollout.completion_ids.shape[1]) % 3 != 1).long()
    return dataclasses.replace(rollout, completion_mask=policy, environment_mask=rollout.completion_mask - policy)


@pytest.mark.parametrize("way", ["body and head", "called head", "full logits"])
@pytest.mark.parametrize("case", ["plain", "temperature", "several turns", "sampler"])
def test_sums_are_those_of_a_plain_twin(case: str, way: str) -> None:
    """The head's logits are made in chunks of two positions."""
    model, temperature = load_tiny()[0].float().eval(), 0.7 if case == "temperature" else 1.0
    rollout = drawn(model, 1)
    if case == "several turns":
        rollout = half_masked(rollout)
    if case == "sampler":
        sampled = (logits_of(model, rollout) / 1.3).log_softmax(-1).gather(-1, rollout.completion_ids.unsqueeze(-1))
        rollout = dataclasses.replace(rollout, sampling_logps=sampled.squeeze(-1))
    options = {"called head": {"call_head": True}, "full logits": {"whole_logits": True}}.get(way, {})
    scorer = Scorer(model, temperature, chunk_logits=128, **options)
    scores = scorer.score(rollout, torch.arange(rollout.num_sequences), graph=way != "full logits", varentropy=True)
    test = run_test(rollout, scores)
    assert test._step is not None
    assert differing(test._step, twin(model, rollout, [*range(PROMPTS * G)], temperature)) == []


def test_weighted_tokens_of_a_known_sampler_have_mean_zero_and_the_policys_own_do_not() -> None:
    """Enumerated over the three tokens of a policy and of a sampler."""
    sampler = torch.tensor([0.8, 0.15, 0.05], dtype=torch.float64)
    policy = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    entropy = -(policy * policy.log()).sum()
    scores = Scores(policy.log().unsqueeze(1), entropy.expand(3, 1), torch.ones(3, 1), torch.ones(3, 1))
    weighted, plain = 0.0, 0.0
    for token in range(3):
        for logs in ((policy / sampler).log().unsqueeze(1), None):
            test, row = ResidualTest(ResidualSums(), 1.0), slice(token, token + 1)
            part = Scores(*(getattr(scores, name)[row] for name in ("logps", "entropies", "mask", "varentropies")))
            test.add(torch.tensor([token]), part, None if logs is None else logs[row], False)
            test.decide(ALONE, None, logs is not None)
            assert test._step is not None
            share = float(sampler[token]) * test._step.residual
            weighted, plain = weighted + (logs is not None) * share, plain + (logs is None) * share
    assert weighted == pytest.approx(0.0, abs=1e-12)
    assert plain > 0.1


def test_tokens_of_which_the_sampler_gave_no_log_probability_are_not_tested() -> None:
    """Their ratio counts as 1 elsewhere, but who drew them is unknown."""
    logps, ones = torch.full((2, 3), -1.0, dtype=torch.float64), torch.ones(2, 3, dtype=torch.float64)
    scores, sampling_logps = Scores(logps, 0.5 * ones, ones, ones), logps.clone()
    sampling_logps[0, 1] = torch.nan
    batch: Any = SimpleNamespace(fold=torch.zeros(1), scores=scores)
    batch.rollout = SimpleNamespace(
        sampling_logps=sampling_logps, on_policy=True, untested=False, has_unknown_sampler=False
    )
    batch.log_ratios = lambda: Batch.log_ratios(batch)
    policy: Any = SimpleNamespace(scorer=None)
    test = ResidualTest(ResidualSums(), 1.0)
    ScoreCheck(batch, policy, test).compare(torch.arange(2), scores)
    test.decide(ALONE, None, is_sampler=True)
    assert test._step is not None
    assert (test._step.tokens, test._step.residual) == (5.0, -2.5)


def test_two_ranks_test_all_tokens_together() -> None:
    model = load_tiny()[0].float().eval()
    rollout = drawn(model, 2)
    scores = Scorer(model).score(rollout, torch.arange(rollout.num_sequences), graph=False, varentropy=True)
    alone = run_test(rollout, scores)

    def run(rank: int, reduce: Any) -> Tensor:
        rows = torch.arange(5, rollout.num_sequences) if rank else torch.arange(5)
        part = Scores(*(getattr(scores, name)[rows] for name in ("logps", "entropies", "mask", "varentropies")))
        test = run_test(take_rows(rollout, rows), part, Ranks(2, reduce, rank))
        assert test._step is not None
        return torch.tensor(dataclasses.astuple(test._step))

    assert alone._step is not None
    for sums in on_two_ranks(run):
        assert sums.tolist() == pytest.approx(dataclasses.astuple(alone._step))


# --- the decision -----------------------------------------------------------------------------------------------------


def test_the_run_is_noticed_before_any_of_its_steps_and_stays_so_after_a_checkpoint() -> None:
    step = ResidualSums(residual=60.0, variance=800.0, squares=800.0, tokens=2000.0, steps=1)  # 2.1 standard errors
    test = ResidualTest(ResidualSums(), 1.0)
    noticed = []
    for _ in range(8):
        test.begin()
        test._step = step
        test.reason = test._reason(step)
        noticed.append(test.reason is not None)
        test.finish(was_taken=True)
    assert noticed == [False] * 4 + [True] * 4
    kept = from_tensors(ResidualSums(), to_tensors(test.run))
    assert kept == test.run
    assert kept.steps == 8
    resumed = ResidualTest(kept, 1.0)
    assert resumed.reason is not None
    assert resumed.reason.code == NOT_DRAWN.code


def test_a_step_that_is_not_taken_is_forgotten() -> None:
    test = ResidualTest(ResidualSums(), 1.0)
    test._step = ResidualSums(500.0, 100.0, 100.0, 200.0, 1)
    test.finish(was_taken=False)
    test.begin()
    test.finish(was_taken=True)
    assert test.run == ResidualSums()
    assert test.reason is None


def test_a_difference_of_half_a_percent_in_temperature_is_no_other_policy_however_long_the_run() -> None:
    for drift, is_noticed in ((0.004, False), (0.006, True)):
        sums = ResidualSums(drift * 1e9, 1e9, 1e9, 1e9, 1000)
        assert (ResidualTest(sums, 1.0).reason is not None) == is_noticed


@pytest.mark.parametrize("missing", [REUSED, RANDOM_PASSES])
def test_what_cannot_be_tested_says_why_and_enters_no_sum(missing: Any) -> None:
    scores = Scores(torch.full((1, 9), -30.0), torch.ones(1, 9), torch.ones(1, 9), torch.ones(1, 9))
    row = torch.ones(1, 9, dtype=torch.long)
    rollout = Rollout(row, row, row, row, torch.zeros(1), None, torch.zeros(1, dtype=torch.long))
    for given, why in ((rollout, missing), (dataclasses.replace(rollout, untested=True), UNTESTED)):
        test = once(given, scores, missing if given is rollout else None)
        assert test.reason is None
        assert {name: estimate.code for name, estimate in test.estimates().items()} == dict.fromkeys(
            (residual.MEAN, residual.RUN, residual.BOUND), why.code
        )
    empty = once(rollout, dataclasses.replace(scores, mask=torch.zeros(1, 9)), None)
    assert empty.estimates()[residual.MEAN].code == NO_TOKENS.code


def once(rollout: Rollout, scores: Scores, missing: Any) -> ResidualTest:
    test = ResidualTest(ResidualSums(), 1.0)
    test.add(torch.zeros(1), scores, None, rollout.untested)
    test.decide(ALONE, missing, False)
    return test


# --- in a loop --------------------------------------------------------------------------------------------------------


def train(
    probes: list[Any], steps: int, *, rate: float = 1e-3, temperature: float = 1.0, reported: bool = False, **facts: Any
) -> Any:
    """Train a plain loop on responses drawn at a temperature, of which the loop says nothing."""
    model = load_tiny()[0].float()
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    measured = measured_loop(
        model, optimizer, probes, responses_per_prompt=G, microbatch_size=16, microbatches=4, dr_grpo=True
    )
    estimates, models = [], []
    with measured:
        for number in range(1, steps + 1):
            rollout = drawn(model, number, temperature, **facts)
            models.append(copy.deepcopy(model))
            with measured.step(number):
                for rows in torch.arange(PROMPTS * G).split(16):
                    part = take_rows(rollout, rows)
                    ids, there = (
                        torch.cat(pair, dim=1)
                        for pair in ((part.prompt_ids, part.completion_ids), (part.prompt_mask, part.completion_mask))
                    )
                    logits = model(input_ids=ids, attention_mask=there, use_cache=False).logits
                    logp = logits[:, part.prompt_ids.shape[1] - 1 : -1].log_softmax(dim=-1)
                    logps = logp.gather(-1, part.completion_ids.unsqueeze(-1)).squeeze(-1)
                    if reported:  # raw log-probabilities at temperature 1, as vLLM returns them
                        part = dataclasses.replace(part, sampling_logps=logps.detach())
                    measured.microbatch(part, logps, -(logp.exp() * logp).sum(-1).detach())
                    (-(logps * part.completion_mask * part.advantages.unsqueeze(1)).sum() / 1000).backward()
                measured.gradients_ready()
                optimizer.step()
                optimizer.zero_grad()
            estimates.append(dict(measured.latest))
    return measured, estimates, models


def all_probes() -> list[Any]:
    return [SimpleEntropyProbe(responses_per_prompt=G), MeasuredStepProbe(), EffectiveSampleSizeProbe(), SamplerProbe()]


class MeasuredAgain(MeasuredStepProbe):
    name = "again"


ASSUME = ("entropy/token", "delta_h/forward", "measured/delta_h", "ess/importance", "sampler/ess")


@pytest.mark.parametrize("reported", [False, True])
def test_a_sampler_at_another_temperature_is_noticed_even_if_it_reports_raw_log_probabilities(reported: bool) -> None:
    _, (*_, last), _ = train(all_probes(), 2, temperature=COLD, reported=reported)
    assert {last[name].code for name in ASSUME} == {NOT_DRAWN.code}
    assert last[residual.MEAN].value > 2 * last[residual.MEAN].stderr
    assert last[residual.RUN].value > last[residual.BOUND].value > 3
    assert last[residual.MEAN].code == NOT_DRAWN.code
    assert math.isfinite(last["entropy/visited_prefixes"].value)


def test_a_policy_that_draws_itself_is_measured_and_its_sums_are_the_twins() -> None:
    """The sum is that of each step's tokens at the weights before the step. Its state resumes exactly.

    Each token counts once, although a second probe scores it by the policy before the step too.
    """
    measured, estimates, models = train([*all_probes(), MeasuredAgain()], 2)
    tokens = [drawn(model, number).completion_mask.sum() for number, model in enumerate(models, 1)]
    assert [step[residual.MEAN].num_samples for step in estimates] == tokens
    assert not [name for name in ASSUME for step in estimates[1:] if math.isnan(step[name].value)]
    first = load_tiny()[0].float()
    sums = twin(first, drawn(first, 1), [*range(PROMPTS * G)])
    of_step = estimates[0][residual.MEAN]
    assert of_step.value == pytest.approx(sums.residual / sums.tokens, rel=1e-4, abs=1e-7)
    assert of_step.stderr == pytest.approx(sums.stderr / sums.tokens, rel=1e-5)
    state = measured.state_dict()["residual"]
    steps = [(step[residual.MEAN].num_samples, step[residual.MEAN].value) for step in estimates]
    assert float(state["tokens"]) == sum(count for count, _ in steps)
    assert float(state["residual"]) == pytest.approx(sum(count * mean for count, mean in steps))
    assert float(state["steps"]) == 2


def test_measured_adds_the_responses_that_simple_does_not_score_by_the_policy_before_the_step() -> None:
    """Weighted by that policy's ratio to the one that draws, each response once."""
    probes = [SimpleEntropyProbe(), MeasuredStepProbe(responses_per_prompt=3)]
    _, (_, second), (before, now) = train(probes, 2, rate=0.3)
    rollout = drawn(now, 2)
    firsts = [*range(0, PROMPTS * G, G)]
    logps = logits_of(now, rollout).log_softmax(-1).gather(-1, rollout.completion_ids.unsqueeze(-1)).squeeze(-1)
    others = [row for row in range(PROMPTS * G) if row % G in (1, 2)]
    scored_before = twin(before, dataclasses.replace(rollout, sampling_logps=logps), others)
    sums = twin(now, rollout, firsts) + scored_before
    unweighted = twin(now, rollout, [*firsts, *others])
    estimate = second[residual.MEAN]
    assert estimate.num_samples == sums.tokens
    assert estimate.value == pytest.approx(sums.residual / sums.tokens, rel=1e-3)
    assert estimate.stderr == pytest.approx(sums.stderr / sums.tokens, rel=1e-4)
    assert estimate.value != pytest.approx(unweighted.residual / sums.tokens, rel=1e-2)


def test_measured_alone_notices_and_tells_all_probes_of_the_step_and_untested_responses_are_measured() -> None:
    seen = Seen()
    _, (*_, last), _ = train([seen, MeasuredStepProbe()], 2, temperature=2.0)
    assert last["measured/delta_h"].code == NOT_DRAWN.code
    assert [ctx.reasons.sampling_mismatch.code for ctx in seen.contexts] == [NOT_DRAWN.code] * 2
    _, (*_, last), _ = train([SimpleEntropyProbe()], 2, temperature=COLD, untested=True)
    assert math.isfinite(last["delta_h/forward"].value)
    assert last[residual.MEAN].code == UNTESTED.code


def test_responses_that_measured_alone_scores_speak_against_the_estimates_of_all_probes_of_the_step() -> None:
    """Whatever the order of the probes. The responses that `simple` scores are no evidence yet at the third step."""
    probes = [
        SimpleEntropyProbe(),
        EffectiveSampleSizeProbe(),
        SamplerProbe(),
        MeasuredStepProbe(responses_per_prompt=G),
    ]
    measured, (_, second, third), _ = train(probes, 3, temperature=1.25)
    assert not [name for name in ASSUME if math.isnan(second[name].value)]
    assert abs(third[residual.RUN].value) > third[residual.BOUND].value
    assert {third[name].code for name in ASSUME} == {NOT_DRAWN.code}
    assert measured._driver.states()[ENGINE].errors.steps.tolist() == [1, 2]  # later error bars do not average over it
