"""Training's scores are verified: if they differ from the probes' scores, no estimate about the policy is made."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import plain_loop
import pytest
import torch
from example_steps import ALONE, run_each
from peft import LoraConfig, get_peft_model
from plain_loop import CLIP, scores_of, train
from ranks_in_threads import on_two_ranks
from seen import Seen
from shared_rollouts import MICROBATCH, G
from torch import Tensor
from trainers import FEW, differing, outcome
from transformers import MixtralConfig, MixtralForCausalLM, Qwen2ForCausalLM
from trl import GRPOTrainer

from rl_training import Rollout, attach, measured_loop
from rl_training.models.load import load_tiny
from rl_training.parallel.ranks import Ranks
from rl_training.policy.rollout import take_rows
from rl_training.policy.scorer import Scorer
from rl_training.policy.scores import Scores
from rl_training.probes import EffectiveSampleSizeProbe, InterventionsProbe, MeasuredStepProbe, SimpleEntropyProbe
from rl_training.step.score_check import ROTARY_CAUSE, ROWS, TOLERANCE, ScoreCheck

STEPS, MICROBATCHES = 3, 4
ODD = 2  # the step at which a loop does something different
Forward = Callable[[Any, Rollout], tuple[Tensor, Tensor]]


def tiny(**changes: Any) -> Any:
    """Return the shipped model with a changed config."""
    policy = load_tiny()[0]
    model = Qwen2ForCausalLM(type(policy.config)(**policy.config.to_dict() | changes))
    model.load_state_dict(policy.state_dict())
    return model.train()


def estimates(
    probes: list[Any] | None = None, model: Any = None, forward: Forward = scores_of, steps: int = STEPS, **facts: Any
) -> list[dict[str, Any]]:
    """Return the estimates of each step of a plain loop."""
    model = load_tiny()[0] if model is None else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, eps=1e-5)
    measured = measured_loop(
        model, optimizer, probes or [SimpleEntropyProbe()], responses_per_prompt=G, microbatch_size=MICROBATCH,
        microbatches=MICROBATCHES, max_grad_norm=CLIP, **facts,
    )  # fmt: skip
    return train(model, optimizer, measured, steps, count=MICROBATCHES, forward=forward)


def at_odd_steps(change: Forward, otherwise: Forward = scores_of) -> Forward:
    """Return a forward pass for a loop that is `change` at step ODD, and `otherwise` at the others."""
    calls = itertools.count()

    def forward(model: Any, part: Rollout) -> tuple[Tensor, Tensor]:
        is_odd = next(calls) // MICROBATCHES + 1 == ODD
        return change(model, part) if is_odd else otherwise(model, part)

    return forward


def hotter(model: Any, part: Rollout, temperature: float = 1.5) -> tuple[Tensor, Tensor]:
    ids = torch.cat([part.prompt_ids, part.completion_ids], dim=1)
    there = torch.cat([part.prompt_mask, part.completion_mask], dim=1)
    logp = (model(input_ids=ids, attention_mask=there).logits / temperature).log_softmax(dim=-1)
    logp = logp[:, part.prompt_ids.shape[1] - 1 : -1]
    return logp.gather(-1, part.completion_ids.unsqueeze(-1)).squeeze(-1), -(logp.exp() * logp).sum(dim=-1)


def half_hidden(model: Any, part: Rollout) -> tuple[Tensor, Tensor]:
    """Score with the first token of each prompt hidden from attention."""
    mask = part.prompt_mask.clone()
    mask[torch.arange(len(mask)), mask.argmax(dim=1)] = 0
    return scores_of(model, dataclasses.replace(part, prompt_mask=mask))


def other_entropies(model: Any, part: Rollout) -> tuple[Tensor, Tensor]:
    logps, entropies = scores_of(model, part)
    return logps, 1.2 * entropies


OTHER: dict[str, tuple[Forward, str]] = {
    "another temperature": (hotter, "log-probabilities"),
    "another mask": (half_hidden, "log-probabilities"),
    "other entropies": (other_entropies, "entropies"),
}


@pytest.mark.parametrize("other", OTHER)
def test_a_step_whose_scores_differ_from_the_policys_has_a_reason_and_no_estimates(other: str) -> None:
    change, what = OTHER[other]
    probes = [SimpleEntropyProbe(), MeasuredStepProbe(), InterventionsProbe(["lr:0.5"], every=1)]
    seen = Seen()
    first, odd, last = estimates([*probes, EffectiveSampleSizeProbe(), seen], forward=at_odd_steps(change))
    for name in ("delta_h/forward", "entropy/token", "measured/delta_h", "intervention/lr:0.5/delta_h"):
        assert odd[name].code == "other_scores", name
        assert f"training's {what} differ" in odd[name].reason, name
        assert math.isnan(odd[name].value)
    for row in (first, last):
        assert math.isfinite(row["delta_h/forward"].value)
    assert math.isfinite(last["delta_h/backward"].value)  # it needs only the step that was made
    assert math.isfinite(odd["entropy/visited_prefixes"].value)
    assert math.isfinite(odd["ess/advantage"].value)
    assert odd["ess/importance"].reason == odd["delta_h/forward"].reason
    # If it is unknown which policy is trained, no loop can provide fresh responses from it.
    fresh = [ctx.reasons.no_fresh_responses for ctx in seen.contexts]
    assert [reason == odd["delta_h/forward"].reason for reason in fresh] == [False, True, False]


def test_the_score_difference_is_the_token_mean_over_each_prompts_first_response() -> None:
    """The difference is computed by hand in fp64, with the weights that the loop has at the second step."""
    outcomes = []

    def forward(model: Any, part: Rollout) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            rows = torch.arange(0, MICROBATCH, G)
            pair = [s(model, part)[0][rows].double() for s in (hotter, scores_of)]
            outcomes.append((pair[0] - pair[1]).abs()[part.completion_mask[rows].bool()])
        return hotter(model, part)

    odd = estimates(forward=at_odd_steps(forward))[ODD - 1]
    (off,) = re.findall(r"differ by ([\d.]+) nats per token .* at temperature=1; ", odd["delta_h/forward"].reason)
    assert float(off) == pytest.approx(float(torch.cat(outcomes).mean()), rel=0.05)


@pytest.mark.parametrize("rounded", [False, True])
def test_the_score_check_scores_no_extra_row_in_a_correct_loop(monkeypatch: pytest.MonkeyPatch, rounded: bool) -> None:
    """Only the rows of X are scored, one response per prompt, and twice four for the padding check at step 1."""
    scored, score = [], Scorer.score

    def counted(scorer: Scorer, rollout: Any, rows: Tensor, **how: Any) -> Scores:
        scored.append(len(rows))
        return score(scorer, rollout, rows, **how)

    monkeypatch.setattr("rl_training.hosts.plain.refusals.refuse_other_scores", lambda *args: None)
    monkeypatch.setattr(Scorer, "score", counted)
    how: dict[str, Any] = {"forward": under_autocast(scores_of), "autocast": in_bf16} if rounded else {}
    estimates(**how)
    assert sum(scored) == STEPS * MICROBATCH * MICROBATCHES // G + 4


def test_all_processes_agree_where_the_scores_of_one_differ() -> None:
    nothing, mask = torch.zeros(ROWS, 4, dtype=torch.float64), torch.ones(ROWS, 4)
    unscored = Scores(nothing, nothing, mask)
    scorer = SimpleNamespace(training_rounding="", rounding_reason="", temperature=1.0, score=lambda *_, **__: unscored)
    policy: Any = SimpleNamespace(
        scorer=scorer, model=torch.nn.Module(), measuring=contextlib.nullcontext, run_passes=run_each
    )
    rollout = SimpleNamespace(prompt_index=torch.arange(ROWS))

    def said(rank: int, reduce: Callable[[Tensor], Tensor], off: float) -> Tensor:
        stored = Scores(nothing + rank * off, nothing, mask)
        batch: Any = SimpleNamespace(
            fold=torch.zeros(1), scores=stored, rollout=rollout, microbatch_rows=(range(ROWS),)
        )
        check = ScoreCheck(batch, policy)
        check.score_and_compare(torch.arange(ROWS))
        why = check.difference_reason(Ranks(2, reduce, rank))
        return torch.tensor([bool(why), f"by {off / 2:.2g} nats" in (why or "")])

    for off in (1.9 * TOLERANCE, 2.1 * TOLERANCE):
        values = [tensor.tolist() for tensor in on_two_ranks(lambda rank, reduce, off=off: said(rank, reduce, off))]
        assert values == [[off > 2 * TOLERANCE] * 2] * 2


def test_a_non_finite_score_is_not_taken_for_another_policy() -> None:
    """A diverged policy is still the same policy."""
    nothing, mask = torch.zeros(1, 4, dtype=torch.float64), torch.ones(1, 4)
    policy: Any = SimpleNamespace(scorer=SimpleNamespace(training_rounding="", rounding_reason="", temperature=1.0))
    for bad in (math.nan, math.inf, -math.inf):
        stored = torch.tensor([[bad, 0.0, 0.0, 0.0]], dtype=torch.float64)
        check = ScoreCheck(SimpleNamespace(fold=torch.zeros(1), scores=Scores(stored, nothing, mask)), policy)
        check.compare(torch.arange(1), Scores(nothing, nothing, mask))
        assert check.difference_reason(ALONE) is None


# --- noise or rounding in a forward pass is not a different policy ----------------------------------------------------


def mixtral() -> Any:
    torch.manual_seed(0)
    sizes = dict.fromkeys(("hidden_size", "intermediate_size"), 32) | {"num_hidden_layers": 2, "vocab_size": 103}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_local_experts": 4}
    return MixtralForCausalLM(MixtralConfig(**sizes, **heads, router_jitter_noise=0.1)).train()


def in_bf16() -> Any:
    return torch.autocast("cpu", torch.bfloat16)


def under_autocast(of_loop: Forward) -> Forward:
    def forward(model: Any, part: Rollout) -> tuple[Tensor, Tensor]:
        with in_bf16():
            return of_loop(model, part)

    return forward


NOISY: dict[str, dict[str, Any]] = {
    "dropout": {"model": lambda: tiny(attention_dropout=0.1)},
    "jitter of a router": {"model": mixtral},
    "autocast": {"model": tiny, "autocast": in_bf16},
    "weights in bf16": {"model": lambda: tiny().to(torch.bfloat16)},
}


@pytest.mark.parametrize("noisy", NOISY)
def test_the_score_check_allows_noise_and_rounding_and_detects_a_temperature(noisy: str) -> None:
    how = dict(NOISY[noisy])
    model, forwards = how.pop("model")(), [functools.partial(hotter, temperature=3.0), scores_of]
    if "autocast" in how:
        forwards = [under_autocast(forward) for forward in forwards]
    right, odd = estimates(model=model, forward=at_odd_steps(*forwards), steps=2, **how)
    assert math.isfinite(right["delta_h/forward"].value), right["delta_h/forward"].reason
    assert odd["delta_h/forward"].code == "other_scores"


def test_a_training_with_noise_on_embeddings_is_measured(make_trainer: Any) -> None:
    weights = []
    for probes in ([], [SimpleEntropyProbe()]):
        trainer = make_trainer(GRPOTrainer, neftune_noise_alpha=5.0, **FEW)
        with attach(trainer, probes=probes, whole_prompts=True) as attachment:
            weights.append(outcome(trainer))
    assert differing(*weights) == []
    assert math.isfinite(attachment.latest["delta_h/forward"].value), attachment.latest["delta_h/forward"].reason


# --- rotary tables that depend on the longest row of a batch ----------------------------------------------------------

WITHIN, BEYOND = 64, (20, 24)  # positions that the tables cover; sequences have up to 32
FACTORS = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}


def with_tables(kind: str, positions: int) -> Any:
    rope = {"rope_type": kind, "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": positions}
    rope |= FACTORS if kind == "longrope" else {}
    return tiny(rope_parameters=rope, max_position_embeddings=positions)


def as_short_as_it_is(model: Any, part: Rollout) -> tuple[Tensor, Tensor]:
    """Score a microbatch without the columns that are padding in all rows."""
    whole, width = part.completion_ids.shape[1], int(part.completion_mask.sum(dim=1).max())
    cut = {name: getattr(part, name)[:, :width] for name in ("completion_ids", "completion_mask")}
    scores = scores_of(model, dataclasses.replace(part, **cut))
    return tuple(torch.nn.functional.pad(scores_of_rank, (0, whole - width)) for scores_of_rank in scores)  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("kind", "probe", "name"),
    [
        ("dynamic", SimpleEntropyProbe, "delta_h/forward"),
        ("longrope", SimpleEntropyProbe, "delta_h/forward"),
        (
            "dynamic",
            MeasuredStepProbe,
            "measured/kl",
        ),  # every batch of its rows has a long one, so longrope's tables do not differ
    ],
)
def test_rotary_tables_that_depend_on_the_longest_row_are_named_as_the_reason(kind: str, probe: Any, name: str) -> None:
    for positions in (WITHIN, *BEYOND):
        *_, answer = estimates([probe()], model=with_tables(kind, positions), forward=as_short_as_it_is, steps=2)
        said = answer[name].reason.startswith(ROTARY_CAUSE)
        assert (said, math.isnan(answer[name].value)) == (positions != WITHIN, positions != WITHIN)


def test_probes_restore_the_rotary_tables_of_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short rows reset dynamic tables and longer rows extend them, so a step ends with the tables of its last rows.

    The probe scores rows of all microbatches together, and the next step starts with rows that are not longer.
    """
    lengths = itertools.cycle([24, 4, 16, 12, 20, 4, 16, 12])

    def microbatches(number: int, size: int) -> list[Rollout]:
        parts = [take_rows(plain_loop.rollout_of(number), rows) for rows in torch.arange(4 * size).split(size)]
        return [
            dataclasses.replace(part, completion_mask=torch.ones_like(part.completion_ids).cumsum(1).le(length).long())
            for part, length in zip(parts, itertools.islice(lengths, 4), strict=True)
        ]

    monkeypatch.setattr(plain_loop, "microbatches", microbatches)
    trained = []
    for probes in ([MeasuredStepProbe()], [EffectiveSampleSizeProbe()]):
        model = with_tables("dynamic", BEYOND[0])
        estimates(probes, model=model, forward=as_short_as_it_is, steps=2)
        trained.append([parameter.detach().clone() for parameter in model.parameters()])
    assert all(torch.equal(first, other) for first, other in zip(*trained, strict=True))


def dropping(model: Any, probability: float = 0.1) -> Any:
    """Return the model with adapters that drop out, and by which dropout changes log-probabilities by tenths."""
    adapter = LoraConfig(r=4, lora_alpha=16, target_modules="all-linear", lora_dropout=probability)
    model = get_peft_model(model, adapter)
    torch.manual_seed(0)
    for name, param in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(param, std=0.05)
    return model.train()


def test_dropout_does_not_hide_another_temperature() -> None:
    """It moves scores both ways, and another temperature moves entropies one way."""
    model = dropping(load_tiny()[0])
    first, odd, last = estimates(model=model, forward=at_odd_steps(functools.partial(hotter, temperature=1.25)))
    assert odd["entropy/token"].code == odd["delta_h/forward"].code == "other_scores"
    for row in (first, last):
        assert math.isfinite(row["entropy/token"].value), row["entropy/token"].reason
