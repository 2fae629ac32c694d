"""What cannot be measured at a step, and why, for steps made by hand."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import plain_loop
import pytest
import torch
from example_steps import drawn_adamw, shard_of
from ranks_in_threads import on_two_ranks
from shared_rollouts import MICROBATCH, PROMPTS
from shared_rollouts import G as G_OF_LOOP
from torch import Tensor
from two_turns import FOLDS, LOGITS, G, step_on

from rl_training import measured_loop
from rl_training.engine.context import StepContext
from rl_training.engine.fold_advice import ONE_FOLD, more_folds_fix
from rl_training.engine.fold_recorder import FoldRecorder
from rl_training.engine.loop_spec import LoopSpec
from rl_training.engine.open_step import OpenStep
from rl_training.engine.probe import Probe
from rl_training.engine.requirements import Requirements
from rl_training.engine.step_reasons import reasons_of_sequences
from rl_training.entropy.attribution import Attribution
from rl_training.entropy.data import EntropySettings
from rl_training.entropy.paired_effects import paired_effects_reason
from rl_training.entropy.prediction import EntropyPredictor
from rl_training.entropy.previous_update import PreviousUpdate
from rl_training.errors import UserError
from rl_training.hosts.plain.measured_loop import FIXES
from rl_training.hosts.trl.settings.fixes import fixes_of
from rl_training.hosts.trl.settings.spelling import COMMAND_LINE, PYTHON
from rl_training.models.load import load_tiny
from rl_training.optim import adamw as adamw_module
from rl_training.optim.state import OptimizerView, view_optimizer
from rl_training.parallel.ranks import Ranks
from rl_training.parallel.sharding import Shard
from rl_training.policy.rollout import Origin
from rl_training.probes import GradientNoiseScaleProbe, InterventionsProbe, MeasuredStepProbe, SimpleEntropyProbe
from rl_training.statistics.estimate import Estimate
from rl_training.statistics.jackknife import stderr_reason
from rl_training.statistics.unavailable import Unavailable
from rl_training.step.batch import LossSettings
from rl_training.step.folds import DEFAULT_NUM_FOLDS, plan_folds, plan_prompt_folds
from rl_training.step.needs import Need
from rl_training.step.reasons import MIXED_PROMPTS, Reasons


@pytest.fixture(scope="module")
def ctx() -> StepContext:
    logits = torch.nn.Parameter(torch.tensor(LOGITS, dtype=torch.float64))
    return step_on(logits, torch.arange(FOLDS * G) % 5, {"logits": drawn_adamw((3, 3), 0.1, 20)})


def test_paired_effects_need_four_folds(ctx: StepContext) -> None:
    batch, off_policy = ctx.step.batch, Unavailable("off_policy", "")
    batches = [dataclasses.replace(batch, fold_sizes=batch.fold_sizes[:n]) for n in (3, 4)]
    steps = [dataclasses.replace(ctx.step, batch=fewer) for fewer in batches]
    assert [paired_effects_reason(step, ctx.prediction, off_policy) for step in steps] == [stderr_reason(3), None]


def test_the_effective_sample_size_covers_all_ranks(ctx: StepContext) -> None:
    """This rank's 64 responses have ratio 1. The other rank has 16 of ratio 8 and 48 of 0: (64 + 128)²/(64 + 1024)."""
    batch = ctx.step.batch
    rollout = dataclasses.replace(batch.rollout, on_policy=False, sampling_logps=batch.scores.logps)
    batch = dataclasses.replace(batch, rollout=rollout, fold_sizes=2 * batch.fold_sizes)

    def reduce(sums: Tensor) -> Tensor:
        return sums + sums.new_tensor([128.0, 1024.0])

    step, passes = dataclasses.replace(ctx.step, batch=batch), dataclasses.replace(ctx.passes, ranks=Ranks(2, reduce))
    previous = PreviousUpdate(shard_of({"logits": torch.zeros(3, 3)}))
    predictor = EntropyPredictor(EntropySettings(), Attribution(["logits"]), passes)
    prediction, _ = predictor.predict(step, Need.FOLD_ENTROPY_GRADIENTS, previous)
    assert "is 0.26 of the sequences" in prediction.reason


def test_a_step_reused_on_one_process_is_reused_on_all() -> None:
    """Otherwise one process would skip collectives in which the other waits."""

    def found(rank: int, reduce: Callable[[Tensor], Tensor]) -> Tensor:
        ranks = Ranks(2, reduce, rank)
        shard = SimpleNamespace(leaves={})
        loop: Any = SimpleNamespace(ranks=ranks, fixes=FIXES, reasons=Reasons(), shard=shard)
        rollout: Any = SimpleNamespace(prompt_index=torch.tensor([0, 0, 1, 1]), num_sequences=4, origin=Origin())
        step = OpenStep(1, [], fold_groups=plan_folds([4], 2, 2), sizes=[4], responses_per_prompt=2, rollouts=[rollout])
        step.seen_prompts = {1} if rank == 0 else set()  # from which an earlier step has learned
        why = reasons_of_sequences(step, loop, other_policy=None)
        return torch.tensor([bool(why.split_prompts), bool(why.no_folds), bool(why.reused)])

    assert [flags.tolist() for flags in on_two_ranks(found)] == [[False, False, True]] * 2


def measured(probes: list[Probe], responses_per_prompt: int = G_OF_LOOP, **settings: Any) -> list[dict[str, Estimate]]:
    """Return the estimates of two steps of a plain loop."""
    torch.manual_seed(0)
    model = load_tiny()[0]
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    size = settings.pop("microbatch_size", MICROBATCH)
    loop = measured_loop(
        model, optimizer, probes, responses_per_prompt=responses_per_prompt, microbatch_size=size,
        microbatches=PROMPTS * G_OF_LOOP // size, max_grad_norm=plain_loop.CLIP, dr_grpo=True, **settings,
    )  # fmt: skip
    return plain_loop.train(model, optimizer, loop, steps=2)


@pytest.mark.filterwarnings("error:.*degrees of freedom")
def test_prompts_with_one_response_have_no_entropy_gradient_and_training_goes_on(monkeypatch) -> None:
    def each_a_prompt(number: int, rollout_of: Any = plain_loop.rollout_of) -> Any:
        rollout = rollout_of(number)
        return dataclasses.replace(rollout, prompt_index=torch.arange(rollout.num_sequences))

    monkeypatch.setattr(plain_loop, "rollout_of", each_a_prompt)
    _, answer = measured([SimpleEntropyProbe(), MeasuredStepProbe(), GradientNoiseScaleProbe()], responses_per_prompt=1)
    assert answer["delta_h/forward"].code == answer["measured/delta_h"].code == "one_response"
    assert answer["gns/trace"].value > 0


def test_the_noise_scale_alone_has_the_folds_of_microbatches_and_no_further_pass(monkeypatch) -> None:
    recomputed, recompute = [], FoldRecorder.recompute
    monkeypatch.setattr(FoldRecorder, "recompute", lambda self, *args: recomputed.append(recompute(self, *args)))
    answers = measured([SimpleEntropyProbe(num_folds=PROMPTS, every=2), GradientNoiseScaleProbe()])
    assert all(math.isfinite(answer["gns/trace_step"].value) for answer in answers)
    assert len(recomputed) == 1  # at the first step, which the other probe measures too


def test_a_loop_wholly_under_autocast_is_measured_in_full_precision() -> None:
    """In bf16 the mean of the folds' gradients would differ from the step's by .3 %, and every step would fail."""

    def autocast() -> Any:
        return torch.autocast("cpu", torch.bfloat16)

    with autocast():
        *_, answer = measured([SimpleEntropyProbe()], autocast=autocast)
    assert answer["delta_h/forward"].reason == ""


class AdamW(torch.optim.Optimizer):
    """Another library's optimizer with the same name as one of torch's."""

    __module__ = "bitsandbytes.optim.adamw"

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 1e-3})

    def step(self, closure: Any = None) -> None:
        """Leave the weights unchanged."""


def test_an_optimizer_of_another_library_is_distinguished_from_torchs_of_the_same_name() -> None:
    model = load_tiny()[0]
    view = view_optimizer(Shard(model, AdamW(model.parameters()), None))
    assert view.states is None
    assert view.reason.code == "no_formula"
    assert "bitsandbytes' AdamW" in view.reason.message
    assert "torch's AdamW" in view.reason.message


def test_a_parameter_that_does_not_move_does_not_make_a_step_look_like_a_sign_step() -> None:
    warm, cold = drawn_adamw((2,), 0.0, 20), drawn_adamw((2,), 0.0, 0)
    assert not OptimizerView({"warm": warm, "frozen": cold.not_updated()}, 1.0).has_sign_based_step
    assert OptimizerView({"warm": warm, "cold": cold}, 1.0).has_sign_based_step


def test_an_unreached_parameter_does_not_hide_adams_metric_of_the_others(
    make_trainer: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """That parameter's Adam state stays cold after any number of steps."""
    monkeypatch.setattr(adamw_module, "WARM_STEPS", 1)
    model, probe = load_tiny()[0], GradientNoiseScaleProbe()
    model.unused = torch.nn.Parameter(torch.ones(3))
    trainer = make_trainer(probes=[probe], model=model, max_steps=3, max_completion_length=8)
    trainer.train()
    adam = trainer.attachment.driver.states()["gns"].moments[:, 1]
    assert adam.isfinite().all(dim=1).tolist() == [False, True, True]


# By batch per device and gradient accumulation, with eight responses per prompt: the messages when training begins.
SAID: dict[tuple[int, int], tuple[str, str]] = {
    (8, 1): (
        "1 fold of whole prompts a step, from 1 microbatch of 8",
        r"no prediction.* steps of at least 8 prompts, .* 1: measured_loop\(microbatches=8\) \(8 times as many resp",
    ),
    (4, 16): ("8 folds of whole prompts a step, from 16 microbatches of 4", ""),
    (16, 4): (
        "4 folds of whole prompts",
        r"uncertain error bars: .*\(microbatch_size=8, microbatches=8\), or SimpleEntropyProbe\(num_folds=8\), which",
    ),
    (2, 32): ("8 folds of whole prompts a step, from 32 microbatches of 2", ""),
    (64, 1): (
        "8 folds of whole prompts .*; these folds take a step's forward passes and backwards once more. If the loss",
        "",
    ),
    (24, 3): ("9 folds of whole prompts .*; these folds take", ""),
    (12, 6): ("9 folds of whole prompts .*; these folds take", ""),
    (12, 2): ("1 fold of whole prompts", r"no prediction: .*\(microbatch_size=4, microbatches=16\) \(2.67 times"),
}


@pytest.mark.parametrize("batch", SAID, ids=str)
def test_training_begins_with_what_the_batch_will_measure_and_how_to_change_it(
    batch: tuple[int, int], caplog: pytest.LogCaptureFixture
) -> None:
    size, count = batch
    plan, missing = SAID[batch]
    model = load_tiny()[0]
    probes = [SimpleEntropyProbe(), InterventionsProbe(["lr:0.5"])]
    with measured_loop(
        model, torch.optim.AdamW(model.parameters()), probes, responses_per_prompt=8, microbatch_size=size,
        microbatches=count, dr_grpo=True,
    ):  # fmt: skip
        (line,) = caplog.messages  # at the default log level
    assert re.search(f"robes measure {plan}", line)
    assert re.match(missing or "probes measure", line)


def test_shuffled_prompts_need_further_passes_only_where_folds_are_microbatches() -> None:
    model = load_tiny()[0]
    optimizer = torch.optim.AdamW(model.parameters())
    with measured_loop(
        model, optimizer, [SimpleEntropyProbe()], responses_per_prompt=8, microbatch_size=8, microbatches=4
    ) as measured:
        loop, requirements = measured._driver._started().loop, measured._driver._requirements
    shuffled = dataclasses.replace(loop, reasons=Reasons(no_folds=MIXED_PROMPTS))
    folds = [
        requirements.folds_of_full_step(dataclasses.replace(shuffled, ranks=Ranks(count, torch.clone)))
        for count in (4, 8)
    ]
    assert folds == [(8, True), (8, False)]


PLAIN_LOSS = LossSettings(12, 0.2, 0.2, hides_truncated=False)
# By host: its advice, and patterns for what a user would type to change microbatches or folds.
TYPED = {
    "loop": (FIXES, r"\((?:microbatch_size=(\d+), )?microbatches=(\d+)", r"SimpleEntropyProbe\(num_folds=(\d+)\)"),
    "attach": (
        fixes_of(PLAIN_LOSS, PYTHON),
        r"(?:per_device_train_batch_size=(\d+), )?gradient_accumulation_steps=(\d+) in GRPO",
        r"SimpleEntropyProbe\(num_folds=(\d+)\)",
    ),
    "train": (
        fixes_of(PLAIN_LOSS, COMMAND_LINE), r"(?:batch\.microbatch_size=(\d+) )?batch\.sequences_per_step=(\d+)",
        r"probes\.simple\.num_folds=(\d+)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("host", TYPED)
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_advice_names_the_setting_to_type_and_following_it_gives_enough_folds(host: str, ranks: int) -> None:
    fixes, of_batch, of_folds = TYPED[host]
    kinds = set()
    for group, size, count in itertools.product((1, 2, 3, 8), (1, 2, 6, 8, 12, 16, 24, 64), (1, 2, 3, 6, 16)):
        if size * count % group or plan_folds([size] * count, group, ranks)[-1].folds.stop >= DEFAULT_NUM_FOLDS:
            continue
        loop = LoopSpec(group, size, count, cast(Any, None), cast(Any, None), Ranks(ranks, torch.clone), fixes=fixes)
        said = more_folds_fix(loop, [SimpleEntropyProbe()], can_recompute=True)
        asked, cut = re.search(of_batch, said), re.search(of_folds, said)
        assert asked or cut, said
        if asked:
            new, other = int(asked[1] or size), int(asked[2])
            steps = other // (new * ranks) if host == "train" else other
            assert plan_folds([new] * steps, group, ranks)[-1].folds.stop >= DEFAULT_NUM_FOLDS, said
            kinds.add("larger" if new * steps > size * count else "smaller")
            assert new * steps >= size * count
        if cut:
            num_folds = plan_prompt_folds(size * count // group, ranks, int(cut[1]))[-1].folds.stop
            assert num_folds == int(cut[1]) >= DEFAULT_NUM_FOLDS, said
            kinds.add("cut")
    assert kinds == {"larger", "smaller", "cut"}


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_advice_where_few_folds_are_asked_for_changes_the_request_and_only_what_else_is_in_the_way(ranks: int) -> None:
    kinds = set()
    for size, count, asked in itertools.product((4, 8, 16), (1, 2, 6, 16), (1, 2, 4, 7, 9)):
        is_refused = asked not in (1, plan_prompt_folds(max(1, size * count // 8), ranks, asked)[-1].folds.stop)
        is_enough = plan_folds([size] * count, 8, ranks, asked)[-1].folds.stop >= DEFAULT_NUM_FOLDS
        if is_refused or is_enough or size * count % 8:
            continue
        loop = LoopSpec(8, size, count, cast(Any, None), cast(Any, None), Ranks(ranks, torch.clone), fixes=FIXES)
        probes = [SimpleEntropyProbe(num_folds=asked), InterventionsProbe(num_folds=asked)]
        said = more_folds_fix(loop, probes, can_recompute=False)
        typed = re.search(TYPED["loop"][1], said)
        sizes = [int(typed[1] or size)] * int(typed[2]) if typed else [size] * count
        requests = re.findall(r"(\w+Probe)\(num_folds=(\d+)\)", said)
        assert [name for name, _ in requests] in ([], ["SimpleEntropyProbe", "InterventionsProbe"])
        request = int(requests[0][1]) if requests else asked
        assert plan_folds(sizes, 8, ranks, request)[-1].folds.stop >= DEFAULT_NUM_FOLDS, said
        refused_if_impossible = Requirements.of([SimpleEntropyProbe(num_folds=request)])
        refused_if_impossible.refuse_impossible_folds(sum(sizes) // 8, ranks)
        is_asked_only = plan_folds([size] * count, 8, ranks)[-1].folds.stop >= DEFAULT_NUM_FOLDS
        assert bool(typed) is not is_asked_only, said
        kinds.add((bool(typed), bool(requests)))
    assert {(False, True), (True, True)} <= kinds


@pytest.mark.parametrize(("size", "count"), [(4, 1), (2, 2)])
def test_estimates_of_a_one_prompt_step_name_the_setting_that_gives_enough_folds(
    size: int, count: int, make_trainer: Callable[..., Any]
) -> None:
    """Also if it spans two microbatches, which then do not mix prompts."""
    one_prompt = {"gradient_accumulation_steps": count, "per_device_train_batch_size": size, "max_steps": 1}
    trainer = make_trainer(
        probes=[SimpleEntropyProbe(), GradientNoiseScaleProbe()], max_completion_length=8, **one_prompt
    )
    trainer.train()
    for name in ("delta_h/forward", "gns/trace"):
        reason = trainer.attachment.latest[name].reason
        assert reason.endswith(
            f": gradient_accumulation_steps={8 * count} in GRPOConfig (8 times as many responses a step)"
        )


@pytest.mark.parametrize(
    ("num_prompts", "num_ranks", "num_folds", "fix"),
    [(2, 1, 3, ".*num_folds=2"), (8, 2, 9, ".*num_folds=8"), (8, 2, 17, ".*num_folds=16"),
     (1, 1, 4, "leave num_folds out.*")],
)  # fmt: skip
def test_more_folds_than_prompts_allow_are_refused_with_a_number_that_gives_a_prediction(
    num_prompts: int, num_ranks: int, num_folds: int, fix: str
) -> None:
    requirements = Requirements.of([SimpleEntropyProbe(num_folds=num_folds)])
    with pytest.raises(UserError, match=f"num_folds={num_folds} .*: {fix}$"):
        requirements.refuse_impossible_folds(num_prompts, num_ranks)


def test_training_with_one_fold_announces_that_there_is_no_noise_scale(caplog) -> None:
    model = load_tiny()[0]
    shape = {"responses_per_prompt": 8, "microbatch_size": 64, "microbatches": 1}
    with measured_loop(model, torch.optim.AdamW(model.parameters()), [GradientNoiseScaleProbe()], **shape):
        assert caplog.messages[0].startswith(f"no noise scale: {ONE_FOLD.message}: use smaller")


def test_the_announcement_at_the_start_and_the_estimates_have_the_same_reasons(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Here: only one prompt, and another policy's samples. Both are reported at the start and with each estimate."""
    short = {"responses_per_prompt": G_OF_LOOP, "microbatch_size": G_OF_LOOP, "microbatches": 1}
    for settings, code in (({}, "one_fold"), ({"sampling_mismatch": "top-p cuts them"}, "sampling_mismatch")):
        caplog.clear()
        model = load_tiny()[0]
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
        loop = measured_loop(
            model, optimizer, [SimpleEntropyProbe()], max_grad_norm=plain_loop.CLIP, **short, **settings
        )
        first, *_ = plain_loop.train(model, optimizer, loop, steps=1, size=G_OF_LOOP, count=1)
        reason = first["delta_h/forward"]
        assert reason.code == code
        assert reason.reason in "\n".join(caplog.messages)
