"""Bounded steps, which may move the policy by a set share of its entropy: the rule alone, and in trainings."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from example_steps import shard_of
from plain_loop import loss_of, microbatches, scores_of
from ranks_in_threads import on_two_ranks
from shared_rollouts import MICROBATCH, G
from torch import Tensor
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from trainers import FEW, SGD, SHAPE, differing, outcome, trained_weights
from trl import GRPOConfig, GRPOTrainer

from rl_training import DrGRPOTrainer, Records, SimpleEntropyProbe, attach, measured_loop, write_report
from rl_training.engine.costs import Costs
from rl_training.engine.kl_bound import KLBound, schedule_factor, share_of_entropy
from rl_training.engine.kl_search import BoundState, info_without_search, search_factor
from rl_training.engine.open_step import OpenStep
from rl_training.models.load import load_tiny
from rl_training.parallel.ranks import Ranks
from rl_training.policy import token_distributions
from rl_training.policy.rollout import Rollout
from rl_training.policy.scores import Scores
from rl_training.policy.token_distributions import TokenDistributions

SHARE = 2e-3


# --- the rule ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("start", [1e-4, 0.1, 1.0, 30.0, 1e6])
def test_a_quadratic_kl_reaches_its_target_from_any_starting_rate(start: float) -> None:
    state = BoundState(start)
    for _ in range(30):
        info = search_factor(lambda factor: 0.7 * factor**2, 0.01, state)
        state = state.after(info)
        assert info.kl <= 0.02 or info.tries == 8
    assert state.factor == pytest.approx(math.sqrt(0.01 / 0.7))
    assert info.tries == 0


def test_the_first_factor_meets_the_target_with_the_geometric_mean_of_the_curvatures_of_the_last_steps() -> None:
    """KL / (factor · rate)² of the three steps; the last has 40 % of the weight, those before 60 % of the rest's."""
    curvatures, state = [300.0, 500.0, 200.0], BoundState()
    for curvature, rate in zip(curvatures, [1e-2, 5e-3, 2e-2], strict=True):
        info = search_factor(lambda factor: curvature * (factor * rate) ** 2, 1e-2, state, rate)  # noqa: B023
        assert info.kl <= 2e-2
        state = state.after(info, rate)
    assert state.curvature == pytest.approx(300.0**0.36 * 500.0**0.24 * 200.0**0.4)
    info = search_factor(lambda factor: 0.0, 1.1e-2, state, rate=2e-2)
    assert info.factor == pytest.approx(math.sqrt(1.1e-2 / state.curvature) / 2e-2)


def test_a_step_within_twice_the_kl_target_is_not_changed() -> None:
    info = search_factor(lambda factor: 0.019 * factor**2, 0.01, BoundState())
    assert (info.factor, info.share, info.tries) == (1.0, 1.0, 0)


def test_a_step_that_breaks_the_policy_is_shortened_until_it_does_not() -> None:
    def kl_of(factor: float) -> float:
        return math.nan if factor > 3.0 else math.inf if factor > 0.5 else factor**2

    info = search_factor(kl_of, 1e-2, BoundState(100.0))
    assert info.kl <= 2e-2
    assert info.share == pytest.approx(info.factor / 100.0)
    assert BoundState(100.0).after(info).factor == info.factor


def test_a_step_that_moves_no_weight_leaves_the_next_factor_unchanged() -> None:
    before = BoundState(0.3, curvature=1e-2)
    info = search_factor(lambda factor: 0.0, 1e-3, before)
    assert info.factor == pytest.approx(math.sqrt(0.1))
    assert before.after(info) == before


@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_a_step_whose_kl_is_never_finite_is_not_taken_and_leaves_the_next_one_as_it_was(broken: float) -> None:
    before = BoundState(0.3, 0.8)
    info = search_factor(lambda factor: broken, 1e-2, before)
    assert before.after(info) == before
    assert info.factor == 0.0
    estimates = info.estimates(rate=0.0)
    assert estimates["bound/kl"].code == "no_kl"
    assert math.isnan(estimates["bound/kl"].value)


@pytest.mark.parametrize(
    ("target", "entropy", "rate", "code", "factor"),
    [
        (0.0, 0.0, 1e-3, "no_kl_target", 0.0),
        (math.nan, math.nan, 1e-3, "no_kl_target", 0.0),
        (0.0, 1.7, 0.0, "rate_is_zero", 0.3),
        (2e-3, 1.7, 0.0, "rate_is_zero", 0.3),  # a rate that no schedule has set
    ],
)
def test_a_step_without_a_kl_to_aim_at_is_not_searched(
    target: float, entropy: float, rate: float, code: str, factor: float
) -> None:
    info = info_without_search(target, entropy, rate, BoundState(0.3))
    assert info is not None
    assert info.factor == factor
    assert {estimate.code for estimate in info.estimates(rate).values()} == {code}
    assert info_without_search(1e-3, 1.7, 1e-3, BoundState()) is None


def test_growth_from_step_to_step_is_at_most_a_factor_of_two() -> None:
    state = BoundState().after(search_factor(lambda factor: 1e-12 * factor**2, 1e-2, BoundState()))
    info = search_factor(lambda factor: 1e-12 * factor**2, 1e-2, state)
    assert info.factor == 2.0


def test_the_factor_of_a_schedule_is_read_from_the_optimizer() -> None:
    assert schedule_factor([{"lr": 0.1, "initial_lr": 0.4}]) == 0.25
    assert schedule_factor([{"lr": 0.1}]) == 1.0
    one_cycle = {"initial_lr": 0.004, "max_lr": 0.1}
    assert [schedule_factor([one_cycle | {"lr": lr}]) for lr in (0.004, 0.1, 4e-7)] == pytest.approx([0.04, 1, 4e-6])
    assert schedule_factor([{"lr": 0.5, "initial_lr": 0.1}]) == 1.0  # a schedule that rises above its first rate


@pytest.mark.parametrize("share", [0.0, -1e-3, math.nan, math.inf, "fast", "nan"])
def test_a_kl_share_that_is_not_positive_is_refused(share: Any) -> None:
    with pytest.raises(ValueError, match=rf"target_kl_share={re.escape(repr(share))} "):
        share_of_entropy(share)


@pytest.mark.parametrize(("share", "number"), [("auto", 1e-2), ("2e-3", 2e-3), (2e-3, 2e-3), (None, None)])
def test_a_share_is_auto_or_a_number_also_from_a_command_line(share: Any, number: float | None) -> None:
    assert share_of_entropy(share) == number


@pytest.mark.parametrize("share", [0.11, 1.0, 2.0])
def test_a_kl_share_that_destroys_the_policy_is_refused(share: float) -> None:
    with pytest.raises(ValueError, match=rf"target_kl_share={share:g} .*\b0\.1\b"):
        share_of_entropy(share)
    assert share_of_entropy(0.1) == 0.1


@dataclasses.dataclass
class OneWeight:
    """A policy with one weight w whose next token is the first of two with the log-odds w times the sampled token."""

    weight: Tensor

    def token_distributions(self, rollout: Rollout, like: TokenDistributions | None = None) -> TokenDistributions:
        log_odds = self.weight.detach() * rollout.completion_ids[rollout.completion_mask.bool()]
        return TokenDistributions.of_logits(torch.stack([log_odds, torch.zeros_like(log_odds)], dim=1))

    @contextlib.contextmanager
    def with_weights(self, weights: Mapping[str, Tensor]) -> Iterator[None]:
        former, self.weight = self.weight, weights["w"]
        yield
        self.weight = former


def test_entropy_and_kl_are_means_over_the_tokens_of_all_processes_with_errors_over_their_prompts() -> None:
    """The first process has two tokens, the second six, and the step moves the weight by −.1 · .05."""
    ids = torch.tensor([[1, 2, 3], [4, 5, 6]])
    masks = torch.tensor([[[1, 0, 0], [1, 0, 0]], [[1, 1, 1], [1, 1, 1]]])

    def bounded(rank: int, reduce: Callable[[Tensor], Tensor]) -> Tensor:
        weight = torch.nn.Parameter(torch.full((1,), 0.1, dtype=torch.float64))
        weight.grad = torch.full_like(weight, 0.05)
        shard = shard_of({"w": weight})
        shard.optimizer.param_groups[0]["lr"] = 0.1
        loop: Any = SimpleNamespace(shard=shard, policy=OneWeight(weight), ranks=Ranks(2, reduce, rank))
        mask = masks[rank]
        rollout = Rollout(ids, ids, ids, mask, torch.zeros(2), None, torch.arange(2))
        entropies = torch.full((2, 3), 0.5 if rank == 0 else 0.25, dtype=torch.float64)
        bound = KLBound(SHARE, loop, Costs(ids.device), BoundState())
        step = OpenStep(1, (), rollouts=[rollout], scores=[Scores(torch.zeros_like(entropies), entropies, mask)])
        bound.before_step(step)
        bound.after_step(step, was_taken=True)
        estimates = step.bounding
        kl = estimates["bound/kl"]
        return torch.tensor([estimates["bound/target_kl"].value, kl.value, kl.stderr, kl.num_samples])

    def kl_of(token: int) -> float:
        before, after = (torch.tensor([w * token, 0.0]).double().log_softmax(0) for w in (0.1, 0.095))
        return float((before.exp() * (before - after)).sum())

    prompts = [[kl_of(1)], [kl_of(4)], [kl_of(1), kl_of(2), kl_of(3)], [kl_of(4), kl_of(5), kl_of(6)]]
    kl = sum(map(sum, prompts)) / 8
    without = [(8 * kl - sum(prompt)) / (8 - len(prompt)) for prompt in prompts]
    stderr = math.sqrt(0.75 * sum((value - sum(without) / 4) ** 2 for value in without))
    for values in on_two_ranks(bounded):
        assert values.tolist() == pytest.approx([SHARE * (2 * 0.5 + 6 * 0.25) / 8, kl, stderr, 4], rel=1e-5)


# --- in training ------------------------------------------------------------------------------------------------------


def numbers_of(trainer: Any) -> list[dict[str, float]]:
    """Return the bound's logged values at each step."""
    rows = [{k: v for k, v in row.items() if k.startswith("bound/")} for row in trainer.state.log_history]
    return [row for row in rows if row]


class Onlooker(DrGRPOTrainer):
    """Keeps the sequences of each step, and the weights before and after it."""

    def _prepare_inputs(self, inputs: Any) -> Any:
        batch = super()._prepare_inputs(inputs)
        if self.state.global_step == len(getattr(self, "seen", [])):
            self.seen = [*getattr(self, "seen", []), []]
            self.weights = [*getattr(self, "weights", []), parameters_to_vector(self.model.parameters()).detach()]
        self.seen[-1].append({k: v for k, v in batch.items() if isinstance(v, Tensor)})
        return batch

    def kl_of_step(self, number: int, responses: int, tokens: int | None = None) -> float:
        """Return the KL per token of step `number`, counted from 0, by two plain passes over the whole vocabulary.

        If `tokens` is given, all tokens but this number of most probable ones count as one.
        """
        model, logps = self.model.eval(), []
        last = parameters_to_vector(model.parameters()).detach()
        for weights in [*self.weights, last][number : number + 2]:
            vector_to_parameters(weights, model.parameters())
            logps.append(torch.cat([full_logps(model, batch, responses) for batch in self.seen[number]]))
        vector_to_parameters(last, model.parameters())
        if tokens is not None:
            order = logps[0].argsort(dim=-1, descending=True)
            ordered = [logp.gather(-1, order) for logp in logps]
            others = [logp[:, tokens:].logsumexp(dim=-1, keepdim=True) for logp in ordered]
            logps = [torch.cat([logp[:, :tokens], other], dim=-1) for logp, other in zip(ordered, others, strict=True)]
        return float((logps[0].exp() * (logps[0] - logps[1])).sum(dim=-1).mean())


def full_logps(model: Any, batch: dict[str, Tensor], responses: int) -> Tensor:
    """Return the log-probabilities of all tokens at the sampled tokens of the first responses to each prompt."""
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
    there = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
    with torch.no_grad():
        logits = model(input_ids=ids, attention_mask=there).logits[:, batch["prompt_ids"].shape[1] - 1 : -1]
    chosen = (torch.arange(len(ids)) % 4 < responses).unsqueeze(1) & batch["completion_mask"].bool()
    return logits[chosen].double().log_softmax(dim=-1)


REUSED = {"num_iterations": 2, "adam_beta1": 0.0, "learning_rate": 3e-3}
EIGHT_PROMPTS = {"gradient_accumulation_steps": 4}


@pytest.mark.parametrize(("settings", "responses", "tokens"), [(REUSED, 4, None), (EIGHT_PROMPTS, 2, 6)])
def test_the_step_taken_has_the_reported_kl(
    make_trainer: Callable[..., Any],
    settings: dict[str, Any],
    responses: int,
    tokens: int | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is measured on the first responses to each prompt, 16 in all."""
    if tokens is not None:
        monkeypatch.setattr(token_distributions, "MAX_TOKENS", tokens)
    settings = SHAPE | {"max_steps": 2, "learning_rate": 1e-2, "target_kl_share": SHARE} | settings
    trainer = make_trainer(Onlooker, **settings)
    trainer.train()
    for number, said in enumerate(numbers_of(trainer)):
        assert trainer.kl_of_step(number, responses, tokens) == pytest.approx(said["bound/kl"], rel=1e-3)
        assert said["bound/kl"] <= 2 * said["bound/target_kl"]
    first = numbers_of(trainer)[0]
    assert first["bound/first_kl"] > 10 * first["bound/target_kl"]
    assert first["bound/learning_rate"] == pytest.approx(settings["learning_rate"] * first["bound/kept_share"])


@pytest.mark.parametrize("optimizer", [{}, SGD, {"max_grad_norm": 1e-3, "weight_decay": 0.5}])
def test_the_bounded_step_is_a_multiple_of_the_unbounded_step(
    make_trainer: Callable[..., Any], optimizer: dict[str, Any]
) -> None:
    settings = SHAPE | {"max_steps": 1} | optimizer
    moves = []
    for share in (None, 1e-4):
        trainer = make_trainer(target_kl_share=share, **settings)
        before = trained_weights(trainer)
        trainer.train()
        moves.append(trained_weights(trainer) - before)
    factor = numbers_of(trainer)[0]["bound/rate_factor"]
    assert factor < 0.5
    torch.testing.assert_close(moves[1], factor * moves[0], rtol=1e-3, atol=1.2e-7)  # differences of fp32 weights


def test_predictions_are_of_the_bounded_step(make_trainer: Callable[..., Any]) -> None:
    """A step whose learning rate the bound has found gets the same estimates as one that starts with that rate."""
    settings = SHAPE | {"max_steps": 2, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 8}
    bounded = make_trainer(probes=[SimpleEntropyProbe()], target_kl_share=1e-4, **settings | {"learning_rate": 1e-2})
    bounded.train()
    rates = [row["bound/learning_rate"] for row in numbers_of(bounded)]
    plain = make_trainer(probes=[SimpleEntropyProbe()], **settings | {"learning_rate": rates[0]})
    for group in plain.create_optimizer().param_groups:
        group["lr"] = rates[0]

    def set_rate(args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        for group in plain.optimizer.param_groups:
            group["lr"] = rates[state.global_step]

    plain.callback_handler.callbacks[0].on_step_begin = set_rate
    plain.train()
    assert torch.equal(trained_weights(plain), trained_weights(bounded))
    for name in ("delta_h/forward", "delta_h/backward", "step/formula_error", "delta_h/cumulative_predicted"):
        first, other = plain.attachment.latest[name], bounded.attachment.latest[name]
        assert (first.value, first.stderr) == pytest.approx((other.value, other.stderr), nan_ok=True), name


def test_the_kl_target_scales_with_the_square_of_the_schedules_factor(make_trainer: Callable[..., Any]) -> None:
    probes = [SimpleEntropyProbe(num_folds=4)]  # measures the entropy over all tokens
    settings = SHAPE | {"max_steps": 4, "lr_scheduler_type": "linear", "warmup_steps": 2, "target_kl_share": SHARE}
    trainer = make_trainer(probes=probes, **settings)
    trainer.train()
    targets = [row["bound/target_kl"] for row in numbers_of(trainer)]
    entropies = [row["entropy/token"] for row in trainer.state.log_history if "entropy/token" in row]
    schedule = [0.0, 0.5, 1.0, 0.5]
    for factor, target, entropy in zip(schedule, targets, entropies, strict=True):
        assert target == pytest.approx(SHARE * entropy * factor**2)
    rates = [row["learning_rate"] for row in trainer.state.log_history if "learning_rate" in row]
    assert rates == pytest.approx([3e-3 * factor for factor in schedule])  # the schedule's own, as before
    first, second, *_ = numbers_of(trainer)
    assert (first["bound/kl"], first["bound/learning_rate"]) == (0.0, 0.0)
    assert second["bound/rate_factor"] == second["bound/kept_share"]  # the first step has left the first factor at 1


def test_probes_do_not_change_a_bounded_training(make_trainer: Callable[..., Any]) -> None:
    settings = FEW | {"target_kl_share": SHARE, "learning_rate": 1e-2, "max_steps": 3}
    bare = outcome(make_trainer(**settings))
    measured = outcome(make_trainer(probes=[SimpleEntropyProbe(num_folds=2)], **settings))
    assert differing(bare, measured) == []


def test_a_resumed_training_is_bitwise_the_uninterrupted_one(make_trainer: Callable[..., Any], tmp_path: Path) -> None:
    settings = FEW | {"target_kl_share": SHARE, "learning_rate": 1e-2, "max_steps": 4, "save_strategy": "steps"}
    whole = make_trainer(**settings | {"save_steps": 2})
    whole.train()
    resumed = make_trainer(**settings | {"save_steps": 2, "output_dir": str(tmp_path / "other")})
    resumed.train(resume_from_checkpoint=str(tmp_path / "state" / "checkpoint-2"))
    assert torch.equal(trained_weights(whole), trained_weights(resumed))
    assert numbers_of(whole)[2:] == numbers_of(resumed)[-2:]


@pytest.mark.parametrize("optim", ["adafactor", "rmsprop"])
def test_a_step_without_a_formula_is_shortened_by_interpolating_the_weights(
    make_trainer: Callable[..., Any], optim: str
) -> None:
    """It goes back to the length that its KL allows, by interpolating the weights before and after the first try."""
    settings = SHAPE | {"max_steps": 1, "learning_rate": 1e-2, "optim": optim, "weight_decay": 0.0}
    moves = []
    for share in (None, SHARE):
        trainer = make_trainer(Onlooker, target_kl_share=share, **settings)
        before = trained_weights(trainer)
        trainer.train()
        moves.append(trained_weights(trainer) - before)
    (said,) = numbers_of(trainer)
    assert said["bound/tries"] > 0
    assert said["bound/learning_rate"] == pytest.approx(1e-2 * said["bound/kept_share"])
    torch.testing.assert_close(moves[1], said["bound/kept_share"] * moves[0], rtol=1e-3, atol=1.2e-7)
    assert trainer.kl_of_step(0, responses=4) == pytest.approx(said["bound/kl"], rel=1e-2)


def test_a_step_without_a_formula_that_ends_in_nan_weights_is_undone() -> None:
    model, part = load_tiny()[0].train(), microbatches(1)[0]
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3)
    before = parameters_to_vector(model.parameters()).detach().clone()
    with measured_loop(
        model, optimizer, [], responses_per_prompt=G, microbatch_size=MICROBATCH, microbatches=1, target_kl_share=SHARE
    ) as measured, measured.step(1):  # fmt: skip
        logps, entropies = scores_of(model, part)
        measured.microbatch(part, logps, entropies.detach())
        loss_of(logps, part, 1).backward()
        measured.gradients_ready()
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, math.nan)
        optimizer.step()
    assert torch.equal(parameters_to_vector(model.parameters()), before)
    assert measured.latest["bound/kl"].code == "no_kl"


def test_rounding_that_hides_small_steps_is_reported_and_refused(make_trainer: Callable[..., Any]) -> None:
    trainer = make_trainer(
        target_kl_share=1e-7, dtype=torch.bfloat16, **FEW | {"learning_rate": 1e-2, "bf16": True, "max_steps": 3}
    )
    with pytest.raises(ValueError, match=r"^target_kl_share: .*fp32"):
        trainer.train()


def take_step(measured: Any, number: int, model: Any, optimizer: torch.optim.Optimizer) -> dict[str, float]:
    """Take a step of a plain loop, and return what was measured."""
    parts = microbatches(1)
    with measured.step(number) as metrics:
        for part in parts:
            logps, entropies = scores_of(model, part)
            measured.microbatch(part, logps, entropies.detach())
            loss_of(logps, part, len(parts)).backward()
        measured.gradients_ready()
        optimizer.step()
    return dict(metrics)


def test_a_plain_loop_gets_the_kl_bound_by_one_argument() -> None:
    losses, count = [], len(microbatches(1))
    for share in (None, SHARE):
        torch.manual_seed(0)
        model = load_tiny()[0].train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        with measured_loop(
            model, optimizer, [], responses_per_prompt=G, microbatch_size=MICROBATCH, microbatches=count, dr_grpo=True,
            target_kl_share=share,
        ) as measured:  # fmt: skip
            losses.append(take_step(measured, 1, model, optimizer))
        assert optimizer.param_groups[0]["lr"] == 1e-2
    assert losses[1]["bound/learning_rate"] < 0.1 * losses[0]["learning_rate"]
    assert measured.latest["bound/kl"].value <= 2 * measured.latest["bound/target_kl"].value


def test_a_schedule_that_stays_far_below_the_optimizers_rate_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    model, count = load_tiny()[0].train(), len(microbatches(1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 3e-4)  # meant as a rate
    with measured_loop(
        model, optimizer, [], responses_per_prompt=G, microbatch_size=MICROBATCH, microbatches=count, dr_grpo=True,
        target_kl_share=SHARE,
    ) as measured:  # fmt: skip
        for number in (1, 2, 3):
            take_step(measured, number, model, optimizer)
            optimizer.zero_grad()
            schedule.step()
    (said,) = [line for line in caplog.messages if "the schedule holds the learning rate at" in line]
    assert "at 0.0003 of the optimizer's own, 1" in said


def test_a_bounded_step_that_is_not_made_restores_the_learning_rate_of_the_loop() -> None:
    """However it ends. Hosts may still say that the optimizer has stepped, as TRL does after a discarded step."""
    torch.manual_seed(0)
    model, (part, *_) = load_tiny()[0].train(), microbatches(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with measured_loop(
        model, optimizer, [], responses_per_prompt=G, microbatch_size=MICROBATCH, microbatches=1, target_kl_share=SHARE
    ) as measured:
        driver = measured._driver
        ends = [(1, driver.skip_step), (1, driver.fail_step), (1, measured.skip_step), (2, driver.close)]
        for number, end in ends:
            with contextlib.suppress(InterruptedError), measured.step(number):
                logps, entropies = scores_of(model, part)
                measured.microbatch(part, logps, entropies.detach())
                loss_of(logps, part, 1).backward()
                measured.gradients_ready()
                assert optimizer.param_groups[0]["lr"] < 1e-3
                end()
                assert optimizer.param_groups[0]["lr"] == 1e-2
                if end == driver.skip_step:
                    driver.stepped()
                if driver.has_step:
                    assert not driver.finish().numbers
                raise InterruptedError
        with pytest.raises(RuntimeError, match=r"^call start\(loop\) before begin\(number\)$"), measured.step(2):
            pass


def test_a_training_that_fails_within_a_bounded_step_restores_the_learning_rate(
    make_trainer: Callable[..., Any],
) -> None:
    trainer = make_trainer(GRPOTrainer, config_class=GRPOConfig, **FEW | PLAIN_TRL | {"max_steps": 1})

    def fail(*args: Any, **kwargs: Any) -> None:
        assert trainer.optimizer.param_groups[0]["lr"] < 1e-3
        raise InterruptedError

    trainer.callback_handler.callbacks[0].on_pre_optimizer_step = fail
    with attach(trainer, probes=(), target_kl_share=SHARE):
        with pytest.raises(InterruptedError):
            trainer.train()
        assert trainer.optimizer.param_groups[0]["lr"] == 1e-2


def test_any_trl_trainer_gets_the_kl_bound_by_one_argument_of_attach(make_trainer: Callable[..., Any]) -> None:
    trainer = make_trainer(GRPOTrainer, config_class=GRPOConfig, **FEW | PLAIN_TRL)
    with attach(trainer, probes=(), metrics="all", target_kl_share=SHARE):
        trainer.train()
    first, *_ = numbers_of(trainer)
    assert first["bound/first_kl"] > 10 * first["bound/target_kl"]
    assert first["bound/kl"] <= 2 * first["bound/target_kl"]


def test_a_second_training_of_a_trainer_starts_with_the_initial_factor(make_trainer: Callable[..., Any]) -> None:
    """That factor is 1: the factor of another training's last step does not apply."""
    trainer = make_trainer(GRPOTrainer, config_class=GRPOConfig, **FEW | PLAIN_TRL | {"max_steps": 2})
    with attach(trainer, probes=(), metrics="all", target_kl_share=SHARE):
        for _ in range(2):
            trainer.train()
            first, second = numbers_of(trainer)
            assert first["bound/rate_factor"] == first["bound/kept_share"]
            assert second["bound/rate_factor"] < 0.5 * second["bound/kept_share"]


PLAIN_TRL: dict[str, Any] = {"use_cpu": True, "bf16": False, "learning_rate": 1e-2, "loss_type": "dapo"}


def test_the_report_shows_the_kl_and_the_learning_rate_of_bounded_steps(
    make_trainer: Callable[..., Any], tmp_path: Path
) -> None:
    records = Records(tmp_path / "run" / "logs")
    trainer = make_trainer(records=records, target_kl_share=SHARE, **FEW | {"learning_rate": 1e-2, "max_steps": 3})
    trainer.train()
    page = write_report(tmp_path / "run").read_text(encoding="utf-8")
    shortened = sum(row["bound/tries"] > 0 for row in numbers_of(trainer))
    rates = [row["bound/learning_rate"] for row in numbers_of(trainer)]
    assert f"{shortened} of 3 steps were shortened" in page
    assert f"the learning rate went from {rates[0]:.2g} to {rates[2]:.2g}" in page
    for title in ("How far each step moves the policy", "The learning rate that this takes"):
        assert title in page
