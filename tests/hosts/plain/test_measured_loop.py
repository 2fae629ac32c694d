"""The host for a plain loop measures the same as `attach`, and does not change training."""

from __future__ import annotations

import dataclasses
import json
import math
import random
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import forks
import numpy as np
import pytest
import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from plain_loop import CLIP, loss_of, microbatches, rollout_of, scores_of, train
from replay import ReplayTrainer
from same_estimates import above_limit, differences, of_records, unknown_to_a_loop
from seen import Seen
from shared_rollouts import L_MAX, MICROBATCH, PROMPTS, G
from torch import Tensor
from torch.nn.utils import clip_grad_norm_
from trainers import trainer_maker
from trl import GRPOTrainer

from rl_training import Estimate, Probe, Reading, Rollout, attach, measured_loop
from rl_training.engine.open_step import OpenStep
from rl_training.engine.step_reasons import reasons_of_sequences
from rl_training.entropy import paired_effects, reward_gradient
from rl_training.hosts.plain.calls import MeasuredLoop
from rl_training.hosts.plain.measured_loop import FIXES
from rl_training.hosts.trl.settings.fixes import fixes_of
from rl_training.hosts.trl.settings.spelling import PYTHON
from rl_training.models.load import load_tiny
from rl_training.parallel.ranks import all_ranks
from rl_training.policy.rollout import Origin, take_rows
from rl_training.probes import (
    CovariancePredictorProbe,
    EffectiveSampleSizeProbe,
    GradientNoiseScaleProbe,
    GroundTruthProbe,
    InterventionsProbe,
    SimpleEntropyProbe,
    TokenClassesProbe,
)
from rl_training.records.files.lock import locked
from rl_training.records.jsonl import read_estimates
from rl_training.records.writer import Records
from rl_training.step.batch import Correction, LossSettings
from rl_training.step.exchange import Exchange
from rl_training.step.fold_reduction import FoldReduction
from rl_training.step.folds import plan_folds
from rl_training.step.reasons import REUSED, Reasons

STEPS, MICROBATCHES = 3, PROMPTS * G // MICROBATCH
ADAMW: dict[str, Any] = {"lr": 3e-4, "eps": 1e-5}  # else the first step is a sign, and rounding decides that of a zero


def probes() -> list[Any]:
    return [
        SimpleEntropyProbe(per_sequence=True),
        GradientNoiseScaleProbe(split_prompts=4),
        EffectiveSampleSizeProbe(),
        CovariancePredictorProbe(),
    ]


def new_loop(measuring: Any, model: Any = None, **facts: Any) -> tuple[Any, torch.optim.Optimizer, MeasuredLoop]:
    """Return a model, the optimizer that transformers would make for it, and their measured loop."""
    model = load_tiny()[0] if model is None else model
    model.train()
    groups = [
        {"params": [p for p in model.parameters() if (p.ndim > 1) == yes], "weight_decay": 0.1 * yes}
        for yes in (True, False)
    ]
    optimizer = torch.optim.AdamW(groups, **ADAMW)
    shape = {"responses_per_prompt": G, "microbatch_size": MICROBATCH, "microbatches": MICROBATCHES}
    return model, optimizer, measured_loop(model, optimizer, measuring, **(shape | {"max_grad_norm": CLIP} | facts))


def trained(model: Any, optimizer: Any, measured: MeasuredLoop, steps: int = STEPS, **how: Any) -> dict[str, Tensor]:
    """Train some steps of Dr-GRPO on the given rollouts, and return the weights."""
    train(model, optimizer, measured, steps, **how)
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def off_from(expected: Path, run: Path) -> dict[str, float]:
    unknown = unknown_to_a_loop(run)
    both = [
        {key: row for key, row in of_records(folder).items() if key[1] not in unknown} for folder in (expected, run)
    ]
    return differences(*both)


@pytest.fixture
def trainer(tmp_path: Path) -> Callable[..., ReplayTrainer]:
    def make(**settings: Any) -> ReplayTrainer:
        return trainer_maker(tmp_path)(
            ReplayTrainer, max_steps=STEPS, max_grad_norm=CLIP, per_device_train_batch_size=MICROBATCH,
            gradient_accumulation_steps=MICROBATCHES, num_generations=G, max_completion_length=L_MAX,
            adam_epsilon=ADAMW["eps"], optim="adamw_torch", **settings,
        )  # fmt: skip

    return make


def test_attach_and_the_plain_loop_give_the_same_estimates(
    tmp_path: Path, trainer: Callable[..., ReplayTrainer]
) -> None:
    """TRL's trainer and a hand-written loop get the same sequences, weights and optimizer.

    With TRL's forward pass in the loop, training and numbers are identical. A hand-written forward rounds differently.
    """
    trainer(probes=probes(), records=Records(tmp_path / "attach")).train()
    of_trl = trainer()

    def trl_scores(model: Any, part: Rollout) -> tuple[Tensor, Tensor]:
        ids = torch.cat([part.prompt_ids, part.completion_ids], dim=1)
        there = torch.cat([part.prompt_mask, part.completion_mask], dim=1)
        return of_trl._get_per_token_logps_and_entropies(
            model, ids, there, part.completion_ids.shape[1], compute_entropy=True
        )[:2]

    loop = new_loop(probes(), model=of_trl.model, records=Records(tmp_path / "loop"), dr_grpo=True)
    trained(*loop, forward=trl_scores)
    for name, maker in (("attach", "trl"), ("loop", "loop")):
        assert json.loads((tmp_path / name / "settings.json").read_text())["made_by"] == maker
    exact = off_from(tmp_path / "attach", tmp_path / "loop")
    unknown = unknown_to_a_loop(tmp_path / "loop")
    reasons = [
        [row["reason"] for row in read_estimates(tmp_path / name) if row["name"] not in unknown]
        for name in ("attach", "loop")
    ]
    assert reasons[0] == reasons[1]
    trained(*new_loop(probes(), records=Records(tmp_path / "by_hand"), dr_grpo=True))
    assert {name.split("/")[0] for name in exact} >= {"delta_h", "gns", "ess", "covariance"}
    assert max(exact.values()) < 1e-9
    assert above_limit(off_from(tmp_path / "attach", tmp_path / "by_hand"), 2e-5) == {}


class Drawing(Probe):
    """Draws from every random number generator, as a custom probe may do."""

    name = "drawing"

    def measure(self, ctx: Any, state: Any) -> Reading:
        drawn = float(torch.rand(())) + random.random() + float(np.random.random())
        return Reading(measured={"drawing/numbers": Estimate(drawn)})

    after_step = measure


def streams() -> tuple[Any, ...]:
    return torch.random.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()


def test_training_is_bitwise_the_same_with_and_without_probes(tmp_path: Path) -> None:
    before = random.getstate(), np.random.get_state()
    torch.manual_seed(0)
    bare, untouched = trained(*new_loop([]), steps=2), streams()
    torch.manual_seed(0)
    random.setstate(before[0])
    np.random.set_state(before[1])
    given = (probe for probe in [*probes(), Drawing()])  # any iterable
    measured = trained(*new_loop(given, records=Records(tmp_path)), steps=2, entropies=False)
    assert all(torch.equal(bare[name], measured[name]) for name in bare)
    assert {row["probe"] for row in read_estimates(tmp_path)} > {probe.name for probe in probes()}
    assert streams() == untouched


def test_a_failing_backward_ends_without_a_collective(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may have failed on this process alone. With a collective, the processes would wait for each other forever."""
    sent = []
    monkeypatch.setattr(Exchange, "send", lambda self, names, *arguments: sent.append(names))

    def fails(loss: Tensor) -> None:
        raise RuntimeError("out of memory")

    model, optimizer, measured = new_loop([SimpleEntropyProbe()])
    with pytest.raises(RuntimeError, match="out of memory"):
        train(model, optimizer, measured, steps=1, backward=fails)
    assert not sent
    assert not any(param._backward_hooks for param in model.parameters())


def test_no_hook_is_left_after_a_failed_step_or_after_the_context(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the end itself fails, which is a collective."""
    model, optimizer, measured = new_loop(probes(), records=tmp_path / "run" / "logs")
    before = {id(owner): set(vars(owner)) for owner in (model, optimizer)}

    def fail() -> None:
        with measured.step(1):
            a_microbatch(measured, model)
            assert any(p._backward_hooks for p in model.parameters())
            raise RuntimeError("of the loop's own")

    def disconnected(reduction: FoldReduction) -> None:
        raise ConnectionError

    monkeypatch.setattr(FoldReduction, "close", disconnected)
    measured.__enter__()
    with pytest.raises(RuntimeError, match="of the loop's own"):
        fail()
    assert not any(p._backward_hooks for p in model.parameters())
    with pytest.raises(ConnectionError):
        measured.__exit__(None, None, None)
    with locked(tmp_path / "run", "it is locked"):
        pass
    assert measured._driver._training is not None
    assert (
        measured._driver._training.measurer._fold_recorder.by_fold is None
    )  # this memory has the size of the parameters
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks
    assert {id(owner): set(vars(owner)) for owner in (model, optimizer)} == before
    assert all("forward" not in vars(module) for module in model.modules())


def test_entropies_that_the_loop_does_not_pass_come_from_the_scorer_and_a_compiled_model_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without dropout, the training pass and another forward pass give the same entropies."""
    monkeypatch.delenv("TORCHDYNAMO_DISABLE")
    compiled = torch.compile(load_tiny()[0], backend="eager")
    trained(*new_loop([SimpleEntropyProbe()], records=Records(tmp_path / "own")), steps=2)
    by_scorer = new_loop([SimpleEntropyProbe()], model=compiled, records=Records(tmp_path / "scorer"))
    with torch.compiler.set_stance("force_eager"):  # the wrapper without the time of compiling
        trained(*by_scorer, steps=2, entropies=False)
    assert above_limit(off_from(tmp_path / "own", tmp_path / "scorer")) == {}


def test_a_resumed_loop_gives_the_estimates_of_an_uninterrupted_one(tmp_path: Path) -> None:
    trained(*new_loop(probes(), records=Records(tmp_path / "whole")))
    model, optimizer, first = new_loop(probes(), records=Records(tmp_path / "parts"))
    train(model, optimizer, first, steps=2)
    state = torch.load(saved(tmp_path / "state.pt", model, optimizer, first), weights_only=True)
    model, optimizer, second = new_loop(probes(), records=Records(tmp_path / "parts"))
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    second.load_state_dict(state["measured"])
    with second, second.step(3):
        for part in microbatches(3):
            logps, entropies = scores_of(model, part)
            second.microbatch(part, logps, entropies)
            loss_of(logps, part, MICROBATCHES).backward()
        second.gradients_ready()
        clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
    assert set(off_from(tmp_path / "whole", tmp_path / "parts").values()) == {0.0}


def saved(path: Path, model: Any, optimizer: Any, measured: MeasuredLoop) -> Path:
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "measured": measured.state_dict()}
    torch.save(state, path)
    return path


def respond(model: Any, number: int) -> Rollout:
    """Return `number` responses of eight tokens, each to a random prompt of four tokens."""
    prompts = torch.randint(4, 50, (number, 4))
    there = torch.ones_like(prompts)
    whole = model.generate(
        prompts, attention_mask=there, max_new_tokens=8, min_new_tokens=8, do_sample=True, top_k=0, pad_token_id=0
    )
    responses = whole[:, 4:]
    nothing = torch.zeros(number)
    return Rollout(prompts, there, responses, torch.ones_like(responses), nothing, None, torch.zeros(number).long())


def test_ground_truth_from_the_loops_own_sampler_does_not_change_training(tmp_path: Path) -> None:
    torch.manual_seed(0)
    bare, untouched = trained(*new_loop([]), steps=1), torch.random.get_rng_state()
    torch.manual_seed(0)
    model = load_tiny()[0]
    asked: list[int] = []

    def sample(number: int) -> Rollout:
        assert not model.training
        asked.append(number)
        return respond(model, number)

    measuring = [SimpleEntropyProbe(), GroundTruthProbe(sequences=64)]
    measured = trained(*new_loop(measuring, model=model, sample=sample, records=Records(tmp_path)), steps=1)
    assert all(torch.equal(bare[name], measured[name]) for name in bare)
    assert torch.equal(untouched, torch.random.get_rng_state())
    assert model.training
    assert set(asked) == {MICROBATCH}
    (truth,) = (row for row in read_estimates(tmp_path) if row["name"] == "delta_h/true")
    assert 0 < abs(truth["value"]) < 1
    assert truth["num_samples"] == 64


def test_a_declared_step_on_an_earlier_rollout_is_measured_as_off_policy_also_after_another(tmp_path: Path) -> None:
    model, optimizer, measured = new_loop([SimpleEntropyProbe()], records=Records(tmp_path))
    for group in optimizer.param_groups:
        group["lr"] = 1e-6  # with a larger rate these random responses soon have probability 0
    sampled: list[Tensor] = []

    def make_step(number: int, rollout_number: int, **known: Any) -> None:
        with measured.step(number, rollout_number=rollout_number):
            for k, part in enumerate(microbatches(rollout_number)):
                logps, entropies = scores_of(model, part)
                sampled.append(logps.detach())
                older = {name: value[k] for name, value in known.items()}
                measured.microbatch(dataclasses.replace(part, on_policy=not older, **older), logps, entropies)
                loss_of(logps, part, MICROBATCHES).backward()
            measured.gradients_ready()
            clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            optimizer.zero_grad()

    with measured:
        make_step(1, rollout_number=1)
        make_step(2, rollout_number=2)
        with pytest.raises(ValueError, match="on_policy=False, sampling_logps="):
            make_step(3, rollout_number=1)
        optimizer.zero_grad()
        make_step(3, rollout_number=1, sampling_logps=sampled[:MICROBATCHES])
    first, second, third = (row for row in read_estimates(tmp_path) if row["name"] == "delta_h/forward")
    assert first["reason"] == second["reason"] == ""
    assert third["reason"] == REUSED.with_fix(FIXES.no_reuse)


# --- mistakes: each is one line that says what to do ------------------------------------------------------------------


def a_microbatch(measured: MeasuredLoop, model: Any, **changed: Any) -> None:
    part = microbatches(1)[0]
    logps, entropies = scores_of(model, part)
    measured.microbatch(**({"rollout": part, "logps": logps, "entropies": entropies} | changed))


def in_a_step(act: Callable[[MeasuredLoop, Any], None]) -> Callable[[MeasuredLoop, Any], None]:
    def mistake(measured: MeasuredLoop, model: Any) -> None:
        with measured, measured.step(1):
            act(measured, model)

    return mistake


def first_logps(model: Any) -> Tensor:
    return scores_of(model, microbatches(1)[0])[0]


def first_entropies(model: Any) -> Tensor:
    return scores_of(model, microbatches(1)[0])[1]


# By name of the mistake. An optimizer's step at the wrong moment has a separate test.
MISTAKES: dict[str, tuple[Callable[[MeasuredLoop, Any], object], str]] = {
    "not entered": (lambda loop, model: loop.step(1).__enter__(), r"begin step\(\.\.\.\) inside .*outside"),
    "microbatch between steps": (
        lambda loop, model: a_microbatch(loop.__enter__(), model),
        r"call microbatch\(\.\.\.\) inside .*between two steps",
    ),
    "step in a step": (in_a_step(lambda loop, model: loop.step(2).__enter__()), "after the previous step has ended"),
    "no backward": (
        in_a_step(lambda loop, model: [a_microbatch(loop, model) for _ in range(2)]),
        "backward of microbatch 1 did not reach its logps",
    ),
    "too few": (
        in_a_step(lambda loop, model: loop.gradients_ready()),
        r"0 microbatches given, but measured_loop\(microbatches=8\)",
    ),
    "no graph": (
        in_a_step(lambda loop, model: a_microbatch(loop, model, logps=first_logps(model).detach())),
        "logps have no graph",
    ),
    "other shape": (
        in_a_step(lambda loop, model: a_microbatch(loop, model, logps=first_logps(model)[:, :-1])),
        r"logps have shape \(8, 22\), and completion_ids \(8, 23\)",
    ),
    "other size": (
        in_a_step(lambda loop, model: a_microbatch(loop, model, rollout=rollout_of(1))),
        r"64 .*microbatch_size=8",
    ),
    "entropies in bits": (
        in_a_step(lambda loop, model: a_microbatch(loop, model, entropies=first_entropies(model) / math.log(2.0))),
        r"entropies .*[\d.]+ .*[\d.]+ nats per token",
    ),
    "shifted by a token": (
        in_a_step(lambda loop, model: a_microbatch(loop, model, logps=first_logps(model).roll(1, dims=1))),
        "nats per token .*temperature=1.* one token",
    ),
    "other probes": (
        lambda loop, model: loop.load_state_dict({"gns": {}}),
        r"\['gns'\].* \['checks', .*'simple'\]",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_reported_in_one_line_with_the_fix(mistake: str) -> None:
    make, said = MISTAKES[mistake]
    model, _, measured = new_loop([SimpleEntropyProbe()])
    with pytest.raises(ValueError, match=said) as caught:
        make(measured, model)
    assert "\n" not in str(caught.value)


def reentrant(model: Any) -> None:
    model.gradient_checkpointing_enable({"use_reentrant": True})


def static_graph(model: Any) -> None:
    model.static_graph = True  # an attribute of DDP


@pytest.mark.filterwarnings("ignore:.*deprecated:FutureWarning")
@pytest.mark.parametrize(("harm", "said"), [(reentrant, "use_reentrant=False"), (static_graph, "static_graph")])
def test_settings_that_a_second_backward_would_corrupt_are_refused_at_once(
    harm: Callable[[Any], None], said: str
) -> None:
    model = load_tiny()[0]
    harm(model)
    with pytest.raises(ValueError, match=said):
        new_loop([], model=model)


@pytest.mark.parametrize("device", ["mps", "xpu"])
def test_devices_without_float64_are_refused_at_once(device: str, make_trainer, monkeypatch) -> None:
    model = load_tiny()[0]
    optimizer = torch.optim.AdamW(model.parameters())
    trainer = make_trainer(GRPOTrainer)
    there = SimpleNamespace(device=torch.device(device))
    monkeypatch.setattr(model, "parameters", lambda: iter([there]))
    monkeypatch.setattr(type(trainer.accelerator), "device", there.device)
    loop = {"responses_per_prompt": 4, "microbatch_size": 4, "microbatches": 1}
    starts = (lambda: measured_loop(model, optimizer, "simple", **loop), lambda: attach(trainer, probes="simple"))
    for start in starts:
        with pytest.raises(ValueError, match=f"cannot on {device.upper()}: ") as error:
            start()
        assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        ({"responses_per_prompt": 0}, "responses_per_prompt=0): give a whole number, at least 1"),
        ({"microbatches": 0}, "microbatches=0)"),
        ({"microbatch_size": -8}, "microbatch_size=-8)"),
        ({"microbatch_size": 8.0}, "microbatch_size=8.0)"),
        ({"temperature": 0}, "temperature=0): give a number above 0"),
        ({"temperature": math.nan}, "temperature=nan)"),
        ({"temperature": None}, "temperature=None): give a number above 0"),
        ({"max_grad_norm": -1.0}, "max_grad_norm=-1.0)"),
        ({"max_grad_norm": "1"}, "max_grad_norm='1'): give a number above 0, or None"),
    ],
)
def test_impossible_sizes_and_temperatures_are_refused_by_name(facts: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"measured_loop({said}")):
        new_loop([], **facts)


class HalfAFold(Seen):
    name = "half"
    num_folds = 2.5  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            [SimpleEntropyProbe],
            r"SimpleEntropyProbe'> .*SimpleEntropyProbe\(\)",
        ),
        ([None], "^None "),
        (["entropy"], "^'entropy' .* simple,"),
        ([HalfAFold()], "half: num_folds=2.5 "),
        ({"simple": {"every": 5}}, r"SimpleEntropyProbe\(every=5\)"),
    ],
)
def test_an_object_that_is_not_a_probe_is_refused_in_words(given: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        new_loop(given)


def test_an_optimizer_that_trains_nothing_of_the_model_is_refused() -> None:
    model, other = load_tiny()[0], load_tiny()[0]
    shape = {"responses_per_prompt": G, "microbatch_size": MICROBATCH, "microbatches": MICROBATCHES}
    with pytest.raises(ValueError, match=r"model\.parameters\(\)"):
        measured_loop(model, torch.optim.AdamW(other.parameters()), [], **shape)
    with pytest.raises(ValueError, match=r"SimpleNamespace .*torch\.optim\.Optimizer"):
        measured_loop(model, SimpleNamespace(step=None), [], **shape)  # type: ignore[arg-type]
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(ValueError, match=r"^ReLU .* language model"):
        measured_loop(torch.nn.ReLU(), optimizer, [], **shape)
    with pytest.raises(ValueError, match=r"model\.parameters\(\)"):
        measured_loop(model.requires_grad_(False), optimizer, [], **shape)


class Critic(torch.nn.Module):
    """A language model with an additional value head."""

    def __init__(self) -> None:
        super().__init__()
        self.lm, self.value = load_tiny()[0], torch.nn.Linear(64, 1)


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (Critic, r"^Critic .*model\.lm\b"),
        (lambda: load_tiny()[0].model, "^Qwen2Model .* logits"),
    ],
)
def test_a_model_without_logits_is_refused_by_name_and_the_one_inside_it_is_measured(
    model: Callable[[], Any], said: str
) -> None:
    whole = model()
    shape = {"responses_per_prompt": G, "microbatch_size": MICROBATCH, "microbatches": MICROBATCHES}
    optimizer = torch.optim.AdamW(whole.parameters(), **ADAMW)
    with pytest.raises(ValueError, match=said):
        measured_loop(whole, optimizer, [SimpleEntropyProbe()], **shape)
    if isinstance(whole, Critic):
        measured = measured_loop(whole.lm, optimizer, [SimpleEntropyProbe()], max_grad_norm=CLIP, **shape)
        assert train(whole.lm, optimizer, measured, steps=1)[0]["delta_h/forward"].value != 0.0


def test_an_accelerate_optimizer_is_measured_as_the_one_it_wraps() -> None:
    Accelerator(cpu=True)
    model, optimizer, _ = new_loop([])
    shape = {"responses_per_prompt": G, "microbatch_size": MICROBATCH, "microbatches": MICROBATCHES}
    outer = AcceleratedOptimizer(optimizer)
    measured = measured_loop(model, outer, [SimpleEntropyProbe()], max_grad_norm=CLIP, **shape)
    estimates = train(model, outer, measured, steps=1)[0]
    plain = new_loop([SimpleEntropyProbe()])
    assert estimates["delta_h/forward"] == train(*plain, steps=1)[0]["delta_h/forward"]


def test_a_step_without_any_token_has_no_estimates_for_that_reason() -> None:
    model, optimizer, measured = new_loop([*probes(), InterventionsProbe(every=1), TokenClassesProbe(every=1)])
    with measured, measured.step(1):
        for part in microbatches(0):
            part = dataclasses.replace(part, completion_mask=torch.zeros_like(part.completion_mask))
            logps, entropies = scores_of(model, part)
            measured.microbatch(part, logps, entropies)
            loss_of(logps, part, MICROBATCHES).backward()
        measured.gradients_ready()
        optimizer.step()
    for name in ("entropy/token", "delta_h/forward", "intervention/psr/delta_h", "tokens/text/word/delta_h"):
        estimate = measured.latest[name]
        assert math.isnan(estimate.value)
        assert estimate.code == "no_tokens", name


def test_a_reward_gradient_proportional_to_the_steps_gradient_needs_no_extra_pass(monkeypatch) -> None:
    """The loop does not say what its loss divides by. If no multiple is accepted, a separate pass gives the same."""
    rewards, counts, iter_basis_gradients = [], [], paired_effects.iter_basis_gradients

    def counted(batch: Any, passes: Any, weights: Any) -> Any:
        counts.append(len(weights))
        return iter_basis_gradients(batch, passes, weights)

    monkeypatch.setattr(paired_effects, "iter_basis_gradients", counted)
    for rounding in (reward_gradient.TOLERANCE, -1.0):
        monkeypatch.setattr(reward_gradient, "TOLERANCE", rounding)
        loop = new_loop([InterventionsProbe(["lr"], every=1)], dr_grpo=True)
        rewards.append(train(*loop, steps=1)[0]["intervention/lr/delta_reward"])
    assert counts == [0, 1]
    assert rewards[0].value != 0
    for first, other in zip(*((reward.value, reward.stderr) for reward in rewards), strict=True):
        assert first == pytest.approx(other, rel=1e-3)


def test_autocast_that_the_loop_does_not_declare_is_refused_with_what_to_type() -> None:
    def halved(model: Any, part: Rollout) -> tuple[Tensor, Tensor]:
        with torch.autocast("cpu", torch.bfloat16):
            return scores_of(model, part)

    with pytest.raises(ValueError, match=r'give autocast=lambda: torch.autocast\("cpu", torch.bfloat16\)'):
        train(*new_loop([SimpleEntropyProbe()]), steps=1, forward=halved)
    declared = new_loop([SimpleEntropyProbe()], autocast=lambda: torch.autocast("cpu", torch.bfloat16))
    assert math.isfinite(train(*declared, steps=1, forward=halved)[0]["entropy/token"].value)


def test_each_process_samples_its_own_responses(monkeypatch: pytest.MonkeyPatch) -> None:
    """With one seed each process draws different numbers, reproducibly. They take prompts 0, 2, … and 1, 3, …."""

    def sample(number: int) -> Rollout:
        ids = torch.randint(0, 9, (number, 8))
        return dataclasses.replace(take_rows(rollout_of(0), torch.arange(number)), completion_ids=ids)

    policy = new_loop([], sample=sample)[2]._policy
    drawn = []
    for process in (0, 1, 1):
        ranks = SimpleNamespace(count=2, number=process)
        monkeypatch.setattr("rl_training.hosts.policy.all_ranks", lambda ranks=ranks: ranks)
        drawn.append(policy.sample(8, seed=3))
    first, second, again = (rollout.completion_ids for rollout in drawn)
    assert not torch.equal(first, second)
    assert torch.equal(second, again)
    assert [rollout.prompt_index.tolist() for rollout in drawn[:2]] == [[0, 2, 4, 6], [1, 3, 5, 7]]


def test_estimates_from_fresh_responses_are_nan_where_the_loop_cannot_sample(tmp_path: Path) -> None:
    trained(*new_loop([SimpleEntropyProbe(), GroundTruthProbe()], records=Records(tmp_path)), steps=1)
    (truth,) = (row for row in read_estimates(tmp_path) if row["name"] == "delta_h/true")
    assert math.isnan(truth["value"])
    assert "measured_loop(..., sample=...)" in truth["reason"]


def test_the_example_loop_leaves_records_and_a_report(tmp_path: Path) -> None:
    done = forks.run("examples/plain_loop.py", "2", str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "report" / "report.html").is_file()
    rows = [json.loads(line) for line in (tmp_path / "logs" / "metrics.jsonl").read_text("utf-8").splitlines()]
    assert [row["step"] for row in rows] == [1, 2]
    assert {"loss", "reward", "grad_norm", "delta_h/forward", "gns/trace", "probe_cost/fraction_of_step"} <= rows[
        1
    ].keys()


def test_reasons_end_in_the_fix_for_this_kind_of_loop() -> None:
    settings = LossSettings(8, 0.2, 0.2, True, Correction(), frozenset({"delta", "loss_type", "intervention"}))
    of_trl = fixes_of(settings, PYTHON)
    assert of_trl.dr_grpo == (
        "set loss_type='dr_grpo', delta=None, mask_truncated_completions=False, "
        "vllm_importance_sampling_correction=False, no intervention"
    )
    for words in (FIXES, dataclasses.replace(FIXES, whole_prompts="do this", dr_grpo="do that"), of_trl):
        shard = SimpleNamespace(leaves={})
        loop: Any = SimpleNamespace(fixes=words, reasons=Reasons(), ranks=all_ranks(), shard=shard)
        part: Any = SimpleNamespace(prompt_index=torch.zeros(2), num_sequences=2, origin=Origin())
        step = OpenStep(1, [], fold_groups=plan_folds([2], 4), sizes=[2], responses_per_prompt=4, rollouts=[part])
        why = reasons_of_sequences(step, loop, other_policy=None)
        reasons = why.split_prompts, why.no_folds
        assert all(reason.endswith(f": {words.whole_prompts}") for reason in reasons)
        assert not any("attach" in reason or "Trainer" in reason for reason in reasons)
