"""An analysis changes nothing, its prediction comes true, and its command leaves complete results."""

from __future__ import annotations

import dataclasses
import math
import os
import re
import shutil
from pathlib import Path
from typing import Any

import forks
import numpy as np
import pandas as pd
import pytest
import torch
from analyzed_runs import RUN, SMALL, checkpoint, restored_at, results_of
from configs import composing
from full_disk import files_of_at_most
from hydra import compose

from rl_training.entropy.weights import surrogate_weights
from rl_training.errors import UserError
from rl_training.job.configuration.overrides import is_of_run
from rl_training.job.configuration.prepare import prepare_analysis
from rl_training.job.configuration.run_settings import run_settings
from rl_training.job.objects.trainer import build_restored
from rl_training.job.run.analysis import analyze_checkpoints
from rl_training.offline.analysis import Analysis, analyze
from rl_training.offline.first_order import predict
from rl_training.offline.restored import RestoredTrainer
from rl_training.offline.results import print_table, write_result
from rl_training.offline.settings import (
    EvaluationSettings,
    FirstOrderSettings,
    MemorySettings,
    TruthSettings,
    UpdateSettings,
)
from rl_training.parallel.vectors import dot
from rl_training.records import read_probe_log
from rl_training.records.analyses import read_analysis
from rl_training.records.checkpoints import resolve_checkpoints

# --- prediction and truth ---------------------------------------------------------------------------------------------


def test_the_prediction_is_a_weighted_sum_of_slopes_along_the_step(restored, analyzed) -> None:
    """The slope of every token comes from finite differences at 1/100 of the step, independent of the backward."""
    e, size = analyzed.evaluation, 1e-2
    ends = []
    for sign in (1.0, -1.0):
        with restored.stepped(analyzed.update.delta, sign * size):
            ends.append(restored.policy.score_rollout(e.rollout))
    width, mask = ends[0].logps.shape[1], e.rollout.completion_mask.bool()
    known = (e.scores.entropies[:, :width], mask, e.score_rows)
    assert analyzed.first_order is not None
    for column, target in enumerate(("token", "sequence")):
        w, u = surrogate_weights(*known, target=target, baseline="buffer")
        sums = [(w * s.logps + u * s.entropies).masked_fill(~mask, 0.0).double().sum() / len(mask) for s in ends]
        expected = float(sums[0] - sums[1]) / (2 * size)
        assert float(analyzed.first_order.value[0, column]) == pytest.approx(expected, rel=5e-3)


@pytest.mark.parametrize("settings", [[], ["++trainer.gradient_checkpointing=true", "++trainer.bf16=true"]])
def test_the_prediction_is_made_without_dropout_and_autocast(
    run: Path, restored: RestoredTrainer, analyzed: Analysis, monkeypatch: pytest.MonkeyPatch, settings: list[str]
) -> None:
    other = restored_at(run, 1, *settings) if settings else restored
    for layer in other.trainer.model.model.layers:
        monkeypatch.setattr(layer.self_attn, "attention_dropout", 0.3)
    monkeypatch.setattr(other.trainer.model.config, "attention_dropout", 0.3)  # the setting that turns dropout on
    again = predict(other, analyzed.evaluation, analyzed.update, 8)
    assert analyzed.first_order is not None
    assert again.value[0].tolist() == pytest.approx(analyzed.first_order.value[0].tolist(), rel=1e-5)
    assert all(module.training for module in other.trainer.model.modules())
    assert other.trainer.accelerator.native_amp == bool(settings)


def test_splits_add_up_and_the_product_of_means_is_entropy_gradient_times_step(analyzed) -> None:
    results = analyzed.results
    for split in ("part", "layer", "kind"):
        keys = [k for k in results if k.startswith(f"deltaH1/{split}/") and not k.endswith(("_se", "_sequence"))]
        assert sum(results[k] for k in keys) == pytest.approx(results["deltaH1"], rel=1e-4)
    assert analyzed.first_order is not None
    product = float(dot(analyzed.first_order.direction[0], analyzed.update.delta))
    assert results["bars_dot"] == pytest.approx(product / 2e-4, rel=1e-4)  # 3e-4, linear decay over 3 steps, at step 2


def test_prediction_and_truth_agree_within_the_error_of_their_difference(analyzed: Analysis) -> None:
    results = analyzed.results
    assert abs(results["paired_error_odd"]) < 4 * results["paired_error_odd_se"] + 1e-3 * abs(results["deltaH_odd"])
    assert results["paired_error_odd_se"] < 0.2 * results["deltaH_true_se"]  # the noise that both share cancels
    scores = analyzed.evaluation.scores
    assert results["H_orig"] == pytest.approx(
        float((scores.entropies * scores.mask).sum() / scores.mask.sum()), rel=1e-5
    )
    assert results["slope_check"] < 0.1
    assert abs(results["floor"]) < 1e-6
    assert 0.9 < results["ESS"] / 24 <= 1
    assert results["w_min"] < 1 < results["w_max"]


def test_the_terminal_warns_only_where_first_order_fails(restored, analyzed, capsys) -> None:
    for measured, says in ((-0.9, False), (0.25, True)):
        results = {**analyzed.results, **results_of(-1.0, measured, 0.1)}
        print_table(dataclasses.replace(analyzed, results=results), restored, Path("result.json"))
        shown = capsys.readouterr().out
        assert ("Step 2: higher orders cancel the first" in shown) == says
        assert "-1.00 ± 0.20" in shown  # 1.96 standard errors of 0.1


@pytest.mark.parametrize("size", [3, 32])
def test_results_do_not_depend_on_the_microbatch_size(restored: RestoredTrainer, analyzed: Analysis, size: int) -> None:
    other = analyze(restored, dataclasses.replace(SMALL, memory=MemorySettings(microbatch_size=size, offload=True)))
    for key, value in analyzed.results.items():
        if key.startswith("deltaH") and not key.endswith("_se"):
            assert other.results[key] == pytest.approx(value, rel=1e-3, abs=1e-4 * abs(analyzed.results["deltaH1"])), (
                key
            )


def test_the_error_of_a_prediction_leaves_out_whole_prompts_of_e(restored: RestoredTrainer) -> None:
    """Even if microbatches split prompts. The twin sums each token's weight times its slope along the step."""
    results = analyze(
        restored,
        dataclasses.replace(SMALL, evaluation=EvaluationSettings(10, 3), memory=MemorySettings(microbatch_size=4)),
    )
    assert results.first_order is not None
    assert results.truth is not None
    scores, slopes = results.evaluation.scores, results.truth.slopes
    for column, target in enumerate(("token", "sequence")):
        known = (scores.entropies, scores.mask, torch.arange(30))
        w, u = surrogate_weights(*known, target=target, baseline="buffer")
        of_prompt = (w * slopes[0] + u * slopes[1]).sum(dim=1).view(10, 3).sum(dim=1) / 30
        lengths = scores.mask.sum(dim=1).view(10, 3).sum(dim=1)
        share = lengths / lengths.sum() if target == "token" else 0.1
        left_out = (of_prompt.sum() - of_prompt) / (1 - share)
        stderr = math.sqrt(9) * float(left_out.std(correction=0))
        assert float(results.first_order.over_evaluation.stderr[0, column]) == pytest.approx(stderr, rel=0.02)
    assert results.results["deltaH_true_se"] == pytest.approx(float(results.truth.at[0].forward.true.stderr[0]))
    assert results.truth.at[0].forward.true.without.shape == (10, 2)


def test_results_that_were_not_requested_are_nan_with_the_reason(restored: RestoredTrainer) -> None:
    only = dataclasses.replace(SMALL, truth=TruthSettings(enabled=False))
    predicted = analyze(restored, only)
    assert math.isnan(predicted.results["deltaH_true"])
    assert "truth.enabled" in predicted.reasons["deltaH_true"]
    assert math.isfinite(predicted.results["deltaH1"])
    measured = analyze(restored, dataclasses.replace(SMALL, first_order=FirstOrderSettings(enabled=False)))
    assert math.isnan(measured.results["deltaH1"])
    assert "first_order.enabled" in measured.reasons["deltaH1"]
    assert "paired_error" not in measured.results
    assert math.isfinite(measured.results["deltaH_true"])
    few = analyze(
        restored, dataclasses.replace(only, update=UpdateSettings(prompts=4), evaluation=EvaluationSettings(prompts=4))
    )
    assert math.isnan(few.results["deltaH1_se"])
    assert "fewer than 8" in few.reasons["deltaH1_se"]


def test_a_step_too_large_for_importance_weights_is_measured_on_fresh_sequences(
    run: Path, analyzed: Analysis, restored: RestoredTrainer, capsys: pytest.CaptureFixture[str]
) -> None:
    far = restored_at(run, 1, "trainer.max_completion_length=12", learning_rate=0.03)
    afresh = analyze(far, dataclasses.replace(SMALL, conditioning=False))
    for shown, at, how in ((afresh, far, "fresh samples"), (analyzed, restored, "PDIS")):
        print_table(shown, at, run)
        assert re.findall(r"measured \((?!SNIS)(.*?)\)", capsys.readouterr().out) == [how]
    results = afresh.results
    assert results["resampled"] == 1
    assert results["ESS"] < 12
    assert math.isfinite(results["deltaH_true"])
    assert results["deltaH_true_se"] > 0


def test_conditioning_rows_of_adam_and_sgd_follow_from_the_same_buffers(analyzed: Analysis) -> None:
    rows = {row["name"]: row for row in analyzed.tables["conditioning"]}
    assert rows["adam"]["delta_h1"] == pytest.approx(analyzed.results["deltaH1"], rel=1e-4)
    assert rows["adam"]["cosine"] == pytest.approx(1.0)
    assert analyzed.first_order is not None
    update = analyzed.update
    norms = [float(dot(vector, vector)) ** 0.5 for vector in (update.delta, update.gradient)]
    plain = -float(dot(analyzed.first_order.direction[0], update.gradient)) * norms[0] / norms[1]
    assert rows["sgd"]["delta_h1"] == pytest.approx(plain, rel=1e-6)
    assert analyzed.results["deltaH1/part/decay"] != 0.0  # weight decay is part of the step


def test_without_any_advantage_directions_without_momentum_are_nan_with_the_reason(run: Path) -> None:
    small = dataclasses.replace(SMALL, update=UpdateSettings(prompts=2), truth=TruthSettings(enabled=False))
    results = analyze(restored_at(run, 1, "trainer.max_completion_length=1"), small)
    assert not torch.cat(results.update.gradient).any()
    rows = {row["name"]: row for row in results.tables["conditioning"]}
    nan = {name for name, row in rows.items() if math.isnan(row["delta_h1"])}
    assert nan == {"momentum-free adam", "sgd"} == {name for name, row in rows.items() if math.isnan(row["cosine"])}
    assert {f"conditioning/{name}" for name in nan} <= results.reasons.keys()
    assert rows["adam"]["delta_h1"] == pytest.approx(results.results["deltaH1"], rel=1e-4)


# --- the command ------------------------------------------------------------------------------------------------------


def test_results_hold_the_settings_of_the_run_and_of_the_analysis() -> None:
    words = ["checkpoint=R", "--multirun", "trainer.beta=0", "update.seed=1,2", 'data.path="a b.jsonl"', "--cfg", "job"]
    assert [*filter(is_of_run, words)] == ["trainer.beta=0", 'data.path="a b.jsonl"']


def test_an_analysis_uses_the_settings_of_the_run_except_overridden_ones(run: Path) -> None:
    changed = run_settings(checkpoint(run, 1), ["trainer.temperature=0.7", "seed=5"])
    assert (changed.trainer.temperature, changed.seed, changed.trainer.num_generations) == (0.7, 5, 4)
    with pytest.raises(ValueError, match=r"batch\.microbatch_sise: .*batch\.microbatch_size\?"):
        run_settings(checkpoint(run, 1), ["batch.microbatch_sise=4"])
    with pytest.raises(ValueError, match=r"evalution\.prompts: .*evaluation\.prompts\?"):
        run_settings(checkpoint(run, 1), ["evalution.prompts=4"])


def test_a_checkpoint_outside_a_run_says_what_it_needs_and_then_works(run: Path, tmp_path: Path) -> None:
    shutil.copytree(checkpoint(run, 1), tmp_path / "alone" / "checkpoint-1")
    alone = tmp_path / "alone" / "checkpoint-1"
    with composing():
        with pytest.raises(ValueError, match=f"{alone} .* model=… data=…"):
            run_settings(alone, [])
        with pytest.raises(ValueError, match=r"^/checkpoint-1 .*/config\.yaml\b"):
            run_settings(Path("/checkpoint-1"), [])
        named = ["model=hub", f"model.name={alone}", "data=arithmetic", "trainer.num_generations=4", *RUN[1:3]]
        restored = build_restored(run_settings(alone, named), alone)
    assert restored.learning_rate == pytest.approx(2e-4)


def test_checkpoints_are_found_by_run_folder_or_keyword(run: Path, tmp_path: Path, caplog) -> None:
    all_of_them = [checkpoint(run, step) for step in (1, 2, 3)]
    assert resolve_checkpoints(str(run), tmp_path) == all_of_them[-1:]
    assert resolve_checkpoints(str(run / "training_state"), tmp_path) == all_of_them
    assert resolve_checkpoints([str(all_of_them[1]), str(all_of_them[0])], tmp_path) == [all_of_them[1], all_of_them[0]]
    assert resolve_checkpoints("latest", run.parent) == all_of_them[-1:]
    assert resolve_checkpoints("all", run.parent) == all_of_them
    shutil.copytree(run, tmp_path / "run" / "kept")
    newest = tmp_path / "run" / "kept" / "training_state" / "checkpoint-3"
    os.truncate(newest / "model.safetensors", 9)
    for choice in ("all", str(newest.parent)):
        caplog.clear()
        undamaged = [newest.with_name("checkpoint-1"), newest.with_name("checkpoint-2")]
        assert resolve_checkpoints(choice, tmp_path / "run") == undamaged
        assert caplog.text.count("skipping ") == 1, "each is read once"
    with composing(), pytest.raises(ValueError, match=r"^checkpoint=\[\] "):
        analyze_checkpoints(prepare_analysis(compose("offline", ["checkpoint=[]"])))
    with pytest.raises(ValueError, match=f"{tmp_path / 'nowhere'}: "):
        resolve_checkpoints(str(tmp_path / "nowhere"), tmp_path)
    with pytest.raises(ValueError, match=f"{tmp_path}.* checkpoint=PATH"):
        resolve_checkpoints("latest", tmp_path)


def test_results_are_written_whole_or_not_at_all(restored: RestoredTrainer, analyzed: Analysis, tmp_path: Path) -> None:
    path = tmp_path / "here" / "result.json"
    write_result(
        path, restored, analyzed, {"offline": {"learning_rate": None, "update": {"filtered": False, "seed": 1}}}
    )
    read = read_analysis(path)
    assert read["results"]["deltaH1"] == analyzed.results["deltaH1"]
    assert read["settings"]["offline"]["learning_rate"] is None
    before = path.read_bytes()
    with files_of_at_most(100), pytest.raises(UserError, match=str(path)):
        write_result(path, restored, analyzed, {})
    assert path.read_bytes() == before


def test_two_processes_give_the_results_sweeps_and_logs_of_one(run, tmp_path, capsys) -> None:
    overrides = [
        f"checkpoint={checkpoint(run, 1)}",
        "evaluation.prompts=24",
        "update.prompts=8",
        "memory.generation_size=24",
    ]
    overrides += ["report=false", "log.level=debug", "sweep.evaluation_sizes=[8,16]", "sweep.update_seeds=[3]"]
    with composing():
        (path,) = analyze_checkpoints(prepare_analysis(compose("offline", [*overrides, f"output={tmp_path / 'one'}"])))
    assert "predicted, first order" in capsys.readouterr().out
    forks.run_on_ranks(("offline.py", *overrides, f"output={tmp_path / 'two'}"), 2, ACCELERATE_USE_CPU="true")
    first, second = (read_analysis(tmp_path / p / path.relative_to(tmp_path / "one")) for p in ("one", "two"))
    assert (first["world_size"], second["world_size"]) == (1, 2)
    compared = compare(first["results"], second["results"], 1e-5)
    for table in ("sizes", "updates"):  # for fewer sequences, and for another step
        rows = zip(*(analysis["tables"][table] for analysis in (first, second)), strict=True)
        compared += sum(compare(a, b, 1e-4) for a, b in rows)
    assert compared > 60 + 3 * 20
    logs = [read_probe_log(analysis["log"]) for analysis in (first, second)]
    for name in ("evaluation", "update"):
        texts = [log[name][["prompt", "response", "length"]] for log in logs]
        assert len(texts[0]) == {"evaluation": 24, "update": 32}[name]
        pd.testing.assert_frame_equal(*texts)
    one_has, two_have = (log["statistics"].astype(float) for log in logs)
    pd.testing.assert_frame_equal(one_has, two_have, rtol=1e-3, atol=1e-5)
    for column in ("logp", "entropy_after", "logp_slope"):
        np.testing.assert_allclose(*(log["tokens"][column].to_numpy() for log in logs), rtol=1e-3, atol=1e-5)


def compare(first: dict[str, Any], second: dict[str, Any], tolerance: float) -> int:
    """Assert that the numbers agree to `tolerance` of themselves or of the prediction. Return how many are not nan."""
    compared = 0
    for key, value in first.items():
        scale = abs(first["deltaH1_sequence" if "sequence" in key else "deltaH1"])
        if not key.startswith(("floor", "slope")):
            assert second[key] == pytest.approx(value, rel=tolerance, abs=tolerance * scale, nan_ok=True), key
            compared += not math.isnan(value)
    return compared
