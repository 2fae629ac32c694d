"""Steps of a plain loop that are skipped, repeated, or made with something that scales gradients."""

from __future__ import annotations

import contextlib
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from plain_loop import CLIP, loss_of, microbatches, scores_of
from shared_rollouts import MICROBATCH, G
from test_measured_loop import MICROBATCHES, new_loop
from torch.nn.utils import clip_grad_norm_

from rl_training import measured_loop
from rl_training.engine.verifier import LEFT_OUT
from rl_training.hosts.plain.calls import MeasuredLoop
from rl_training.probes import GradientNoiseScaleProbe, InterventionsProbe, SimpleEntropyProbe
from rl_training.records.jsonl import read_estimates
from rl_training.records.writer import Records


def one_step(model: Any, measured: MeasuredLoop, number: int) -> None:
    """Do one step up to its gradients, without the optimizer's step."""
    for part in microbatches(number):
        logps, entropies = scores_of(model, part)
        measured.microbatch(part, logps, entropies.detach())
        loss_of(logps, part, MICROBATCHES).backward()


def test_a_refused_step_may_be_repeated_and_no_step_number_may_be_missing() -> None:
    model, optimizer, measured = new_loop([])
    with measured:
        with pytest.raises(ValueError, match=r"optimizer\.step\(\) .*gradients_ready\(\)"), measured.step(5):
            optimizer.step()
        with measured.step(5):
            one_step(model, measured, 1)
            measured.gradients_ready()
            optimizer.step()
        with pytest.raises(ValueError, match="step 7 follows step 5: number"), measured.step(7):
            pass


@pytest.mark.parametrize("said", [True, False])
def test_a_skipped_step_has_no_predictions_and_the_next_has_no_backward_estimates(
    said: bool, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """Its sequences are measured and running sums stay. The loop may report the skip, or it is noticed."""
    probes = [SimpleEntropyProbe(), InterventionsProbe(["lr:0.5"], every=1), GradientNoiseScaleProbe()]
    model, optimizer, measured = new_loop(probes, records=Records(tmp_path))
    answers = []
    with measured:
        for number in (1, 2, 3):
            with measured.step(number):
                one_step(model, measured, number)
                measured.gradients_ready()
                clip_grad_norm_(model.parameters(), CLIP)
                if number != 2:
                    optimizer.step()
                elif said:
                    measured.skip_step()
                optimizer.zero_grad()
            answers.append(dict(measured.latest))
    first, out, last = answers
    for name in ("delta_h/forward", "delta_h/reuse", "intervention/lr:0.5/delta_h"):
        assert out[name].code == "left_out", name
    assert math.isfinite(out["delta_h/backward"].value)  # of step 1
    assert math.isfinite(out["entropy/token"].value)
    assert out["gns/trace_step"].value > 0.0
    assert last["delta_h/backward"].reason == LEFT_OUT.prefixed("step 2")
    assert math.isfinite(last["delta_h/forward"].value)
    mean = last["intervention/lr:0.5/mean_delta_h"].value
    assert first["intervention/lr:0.5/delta_h"].value != pytest.approx(mean, rel=1e-6)  # of steps 1 and 3
    assert last["intervention/lr:0.5/mean_delta_h"].detail["measured_steps"] == 2
    noticed = [line.partition(":")[0] for line in caplog.messages if "call measured.skip_step()" in line]
    assert noticed == ([] if said else ["step 2 has no optimizer.step(), so it is left out"])
    assert [row["step"] for row in map(json.loads, (tmp_path / "metrics.jsonl").read_text("utf-8").splitlines())] == [
        1, 2, 3,
    ]  # fmt: skip


@pytest.mark.parametrize("said", [True, False])
def test_a_step_skipped_before_its_gradients_are_ready_has_a_line_without_estimates(said: bool, tmp_path: Path) -> None:
    model, optimizer, measured = new_loop([SimpleEntropyProbe()], records=Records(tmp_path))
    with measured:
        for number in (1, 2, 3):
            with measured.step(number) as metrics:
                if number == 2:
                    part = microbatches(number)[0]
                    measured.microbatch(part, *scores_of(model, part))
                    metrics["loss"] = math.inf
                    if said:
                        measured.skip_step()
                        with pytest.raises(ValueError, match=r"before gradients_ready\(\): .* skip_step"):
                            measured.microbatch(part, *scores_of(model, part))
                    continue
                one_step(model, measured, number)
                measured.gradients_ready()
                clip_grad_norm_(model.parameters(), CLIP)
                optimizer.step()
                optimizer.zero_grad()
    assert {row["step"] for row in read_estimates(tmp_path)} == {1, 3}
    assert measured.latest["delta_h/backward"].code == "step_not_measured"
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text("utf-8").splitlines()]
    assert [("reward" in row, row["step"]) for row in rows] == [(True, 1), (False, 2), (True, 3)]


def test_responses_of_a_skipped_step_count_as_fresh() -> None:
    """The second attempt, which trains, has a fresh sample; the third does not."""
    model, optimizer, measured = new_loop([SimpleEntropyProbe()])
    codes = []
    with measured:
        for number in (1, 2):
            with measured.step(number, rollout_number=1):
                one_step(model, measured, 1)
                measured.gradients_ready()
                clip_grad_norm_(model.parameters(), CLIP)
                if number == 2:
                    optimizer.step()
                optimizer.zero_grad()
            codes.append(measured.latest["delta_h/forward"].code)
        with pytest.raises(ValueError, match="on_policy=False, sampling_logps="), measured.step(3, 1):
            one_step(model, measured, 1)
    assert codes == ["left_out", ""]


@pytest.mark.parametrize("is_ready", [True, False])
def test_a_skipped_bounded_step_restores_the_learning_rate_of_the_schedule(is_ready: bool) -> None:
    model, optimizer, measured = new_loop([], target_kl_share=1e-6)
    rates = [group["lr"] for group in optimizer.param_groups]
    with measured, measured.step(1) as metrics:
        one_step(model, measured, 1)
        if is_ready:
            measured.gradients_ready()
            assert [group["lr"] for group in optimizer.param_groups] != rates
        measured.skip_step()
        assert [group["lr"] for group in optimizer.param_groups] == rates
    if is_ready:
        assert metrics["learning_rate"] == rates[0]  # of the schedule, as TRL logs it


def test_an_optimizer_that_steps_after_its_step_has_ended_is_refused() -> None:
    """Otherwise every step would look skipped, and all weights would look edited."""
    model, optimizer, measured = new_loop([])
    with measured:
        with measured.step(1):
            one_step(model, measured, 1)
            measured.gradients_ready()
        with pytest.raises(ValueError, match=r"optimizer\.step\(\)"):
            optimizer.step()


@pytest.mark.parametrize("enabled", [True, False])
def test_a_grad_scaler_is_an_error_unless_it_is_switched_off(enabled: bool) -> None:
    """Unscaled and clipped, the gradient is the same as without a scaler, but the microbatches' norms are not."""
    model, optimizer, measured = new_loop([GradientNoiseScaleProbe()])
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=enabled)
    with measured, contextlib.ExitStack() as refused:
        if enabled:
            refused.enter_context(pytest.raises(ValueError, match=r"GradScaler.* bf16 or fp32"))
        with measured.step(1):
            for part in microbatches(1):
                logps, entropies = scores_of(model, part)
                measured.microbatch(part, logps, entropies.detach())
                scaler.scale(loss_of(logps, part, MICROBATCHES)).backward()
            measured.gradients_ready()
            scaler.unscale_(optimizer)
            clip_grad_norm_(model.parameters(), CLIP)
            scaler.step(optimizer)
            scaler.update()
    assert ("gns/trace_step" in measured.latest) != enabled


def test_an_accelerate_optimizer_with_a_grad_scaler_is_refused() -> None:
    Accelerator(cpu=True)
    model, optimizer, _ = new_loop([])
    outer = AcceleratedOptimizer(optimizer, scaler=torch.amp.GradScaler("cpu"))
    shape = {"responses_per_prompt": G, "microbatch_size": MICROBATCH, "microbatches": MICROBATCHES}
    with pytest.raises(ValueError, match="GradScaler"):
        measured_loop(model, outer, [], **shape)
