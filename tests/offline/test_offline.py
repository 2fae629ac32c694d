"""A trainer restored at a checkpoint: its step is training's, nothing is moved, and the prediction comes true."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import forks
import numpy as np
import pandas as pd
import pytest
import torch
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig
from test_verdict import found as found_to_be
from torch import Tensor

from rl_training import Estimate, Probe
from rl_training.engine.batch import Rollout, take_rows
from rl_training.engine.step import Step
from rl_training.job.analysis import analyse_checkpoints
from rl_training.job.build import build_restored, build_run
from rl_training.job.run_settings import run_settings, words_of_the_run
from rl_training.mathematics.entropy import surrogate_weights
from rl_training.offline.buffers import UpdateBuffer, sample_evaluation, sample_update
from rl_training.offline.first_order import predict
from rl_training.offline.probe import Analysis, analyse
from rl_training.offline.restored import RestoredTrainer, refuse_without_gradients, restore
from rl_training.offline.results import print_table, read_result, write_result
from rl_training.offline.settings import (
    Evaluation,
    FirstOrderSettings,
    Memory,
    Settings,
    TruthSettings,
    UpdateConfig,
    refuse_learning_rate,
)
from rl_training.offline.update import make_update
from rl_training.records import read_probe_log
from rl_training.records.checkpoints import checkpoints_named

ROOT = Path(__file__).parents[2]
RUN = [
    "trainer.num_generations=4", "batch.sequences_per_step=32", "batch.microbatch_size=8", "logger=none", "probe=none",
    "++trainer.disable_tqdm=true", "trainer.max_steps=3", "trainer.save_steps=1", "++trainer.save_total_limit=null",
    "++trainer.weight_decay=0.1", "++trainer.max_grad_norm=0.1", "trainer.lr_scheduler_type=linear",
    "trainer.max_completion_length=24", "+probes.recorder._target_=test_offline.Recorder",
]  # fmt: skip
SMALL = Settings(Evaluation(prompts=24), UpdateConfig(prompts=8), memory=Memory(microbatch_size=8))
SEEN: dict[int, dict[str, Any]] = {}


class Recorder(Probe):
    """Keeps what each step learned from, its gradient and what it changed."""

    name = "recorder"

    def prepare(self, step: Step) -> None:
        self._before = {name: p.detach().clone() for name, p in step.gradients.parameters.items()}
        gradient = torch.cat([g.flatten() for g in step.gradients.mean.values()]).clone()
        SEEN[step.number] = {"rollout": step.batch.rollout, "gradient": gradient}

    def after_step(self, step: Step) -> None:
        change = [(p.detach() - self._before[name]).flatten() for name, p in step.gradients.parameters.items()]
        SEEN[step.number]["delta"] = torch.cat(change)

    def results(self) -> dict[str, Estimate]:
        return {"recorder/steps": Estimate(float(len(SEEN)))}


def composed(name: str, *overrides: str) -> DictConfig:
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        return compose(name, overrides=list(overrides))


@functools.cache
def trained(temporary: Path) -> Path:
    folder = temporary / "trained" / "run_1"
    build_run(composed("train", f"run_dir={folder}", *RUN)).train()
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three steps, each with its checkpoint; each file that analyses it has a copy of its own."""
    return shutil.copytree(trained(tmp_path_factory.getbasetemp()), tmp_path_factory.mktemp("offline") / "run_1")


def checkpoint(run: Path, step: int) -> Path:
    return run / "training_state" / f"checkpoint-{step}"


def restored_at(run: Path, step: int, *changes: str, learning_rate: float | None = None) -> RestoredTrainer:
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        return build_restored(run_settings(checkpoint(run, step), changes), checkpoint(run, step), learning_rate)


@pytest.fixture(scope="module")
def restored(run: Path) -> RestoredTrainer:
    return restored_at(run, 1)


@pytest.fixture(scope="module")
def analysed(restored: RestoredTrainer) -> Analysis:
    return analyse(restored, SMALL)


def as_update_buffer(rollout: Any) -> UpdateBuffer:
    _, number = rollout.prompt_index.unique(return_inverse=True)
    prompts = int(number.max()) + 1
    return UpdateBuffer(dataclasses.replace(rollout, prompt_index=number), prompts, 4)


def close(a: Tensor, b: Tensor) -> float:
    """Returns the norm of the difference over that of b."""
    return float((a - b).double().norm() / b.double().norm())


def joined(parts: Any) -> Tensor:
    """Returns a step, (P,), from its pieces."""
    return torch.cat([by_cause.total[0] for _, by_cause in parts])


# --- restored ---------------------------------------------------------------------------------------------------------


def test_the_step_that_is_analysed_is_the_step_that_training_took(restored: RestoredTrainer) -> None:
    """From the same sequences: gradient, clipping, Adam's moments and order, the scheduler's learning rate."""
    real = SEEN[2]
    update = make_update(restored, as_update_buffer(real["rollout"]), Memory(8))
    assert restored.step == 1
    assert restored.learning_rate == pytest.approx(3e-4 * 2 / 3)
    assert close(update.gradient, real["gradient"]) < 1e-5
    assert update.clip < 0.9
    assert close(update.delta, real["delta"]) < 1e-4  # what fp32 leaves of θ + δθ − θ


def test_a_step_of_sgd_too_is_the_one_that_training_took(tmp_path: Path) -> None:
    folder = tmp_path / "run_sgd"
    sgd = ["++trainer.optim=sgd", "trainer.learning_rate=0.3", "trainer.max_steps=2"]
    build_run(composed("train", f"run_dir={folder}", *RUN, *sgd)).train()
    real, restored = SEEN[2], restored_at(folder, 1)
    update = make_update(restored, as_update_buffer(real["rollout"]), Memory(8))
    assert restored.learning_rate == pytest.approx(0.15)
    assert close(update.delta, real["delta"]) < 1e-4
    assert close(update.parts.gradient, -0.15 * update.clip * real["gradient"]) < 1e-5
    found = analyse(restored, SMALL)
    assert found.results["slope_check"] < 0.1
    assert found.tables["conditioning"] == []  # there is none of Adam's


def test_an_analysis_moves_nothing(restored: RestoredTrainer, analysed: Analysis) -> None:
    def state() -> list[Tensor]:
        moments = [v for s in restored.trainer.optimizer.state.values() for v in s.values()]
        rates = torch.tensor([group["lr"] for group in restored.trainer.optimizer.param_groups])
        streams = [torch.random.get_rng_state(), torch.tensor(np.random.get_state()[1].astype(np.int64))]
        python = torch.tensor(random.getstate()[1])
        modes = torch.tensor([module.training for module in restored.trainer.model.modules()])
        parameters = [p.detach() for p in restored.trainer.model.parameters()]
        return [t.clone() for t in (*parameters, *moments, rates, *streams, python, modes)]

    before = state()
    again = analyse(restored, SMALL)
    assert all(torch.equal(a, b) for a, b in zip(before, state(), strict=True))
    assert all(p.grad is None for p in restored.trainer.model.parameters())
    assert json.dumps(again.results) == json.dumps(analysed.results)  # the same seeds


def test_the_step_without_a_fold_is_the_step_of_the_others(restored: RestoredTrainer, analysed: Analysis) -> None:
    whole = analysed.update_buffer
    update = make_update(restored, whole, Memory(32))
    assert update.num_folds == 8
    others = (whole.rollout.prompt_index != 3).nonzero().squeeze(1)
    rest = {key: v[others] if isinstance(v, Tensor) else v for key, v in vars(whole.rollout).items()}
    of_others = make_update(restored, as_update_buffer(type(whole.rollout)(**rest)), Memory(32))
    assert close(joined(update.without_fold(3)), of_others.delta) < 1e-4


def with_prompts(rollout: Rollout, count: int) -> UpdateBuffer:
    """Returns so many prompts with a response each: these sequences again and again."""
    rows = take_rows(rollout, torch.arange(count) % rollout.num_sequences)
    return UpdateBuffer(dataclasses.replace(rows, prompt_index=torch.arange(count)), count, 1)


@pytest.mark.parametrize("prompts", [1, 16, 17, 48, 100])
def test_u_is_cut_into_at_most_sixteen_folds_of_about_the_same_size(
    restored: RestoredTrainer, analysed: Analysis, prompts: int
) -> None:
    rollout = analysed.update_buffer.rollout
    idle = dataclasses.replace(rollout, advantages=torch.zeros_like(rollout.advantages))  # which costs nothing
    sizes = make_update(restored, with_prompts(idle, prompts), Memory(32)).fold_prompts.tolist()
    assert len(sizes) == min(prompts, 16)
    assert sum(sizes) == prompts
    assert max(sizes) - min(sizes) <= 1


def test_folds_of_other_sizes_are_left_out_by_their_share(restored: RestoredTrainer, analysed: Analysis) -> None:
    """18 prompts in 16 folds: the first and the ninth have two. Without one of these, and without one of the others."""
    rollout = with_prompts(analysed.update_buffer.rollout, 18).rollout
    advantages = torch.linspace(-1, 1, 18)
    rollout = dataclasses.replace(rollout, advantages=advantages)
    update = make_update(restored, UpdateBuffer(rollout, 18, 1), Memory(32))
    assert update.fold_prompts.tolist() == [2, 1, 1, 1, 1, 1, 1, 1] * 2
    for fold, prompts in ((8, {9, 10}), (9, {11})):
        others = torch.tensor([i for i in range(18) if i not in prompts])
        rest = dataclasses.replace(take_rows(rollout, others), prompt_index=torch.arange(len(others)))
        of_others = make_update(restored, UpdateBuffer(rest, len(others), 1), Memory(32))
        assert close(joined(update.without_fold(fold)), of_others.delta) < 1e-4


# --- prediction and truth ---------------------------------------------------------------------------------------------


def test_the_prediction_is_the_weighted_sum_of_slopes_along_the_step(
    restored: RestoredTrainer, analysed: Analysis
) -> None:
    """Slopes of every token by finite differences at a hundredth of the step: another way than the backward's."""
    e, size = analysed.evaluation, 1e-2
    sizes = [p.numel() for p in restored.parameters.values()]
    pieces = zip(restored.parameters.items(), analysed.update.delta.split(sizes), strict=True)
    shift = {name: size * piece.view(p.shape) for (name, p), piece in pieces}
    ends = []
    for sign in (1.0, -1.0):
        with restored.policy.shifted({name: sign * s for name, s in shift.items()}):
            ends.append(restored.policy.score_rollout(e.rollout))
    width, mask = ends[0].logps.shape[1], e.rollout.completion_mask.bool()
    known = (e.scores.entropies[:, :width], mask, e.number)
    assert analysed.first_order is not None
    for column, target in enumerate(("token", "sequence")):
        w, u = surrogate_weights(*known, target=target, baseline="buffer")
        sums = [(w * s.logps + u * s.entropies).masked_fill(~mask, 0.0).double().sum() / len(mask) for s in ends]
        expected = float(sums[0] - sums[1]) / (2 * size)
        assert float(analysed.first_order.value[0, column]) == pytest.approx(expected, rel=5e-3)


@pytest.mark.parametrize("settings", [[], ["++trainer.gradient_checkpointing=true", "++trainer.bf16=true"]])
def test_the_prediction_is_that_of_the_policy_as_it_is_measured_without_dropout_and_autocast(
    run: Path, restored: RestoredTrainer, analysed: Analysis, monkeypatch: pytest.MonkeyPatch, settings: list[str]
) -> None:
    other = restored_at(run, 1, *settings) if settings else restored
    for layer in other.trainer.model.model.layers:
        monkeypatch.setattr(layer.self_attn, "attention_dropout", 0.3)
    monkeypatch.setattr(other.trainer.model.config, "attention_dropout", 0.3)  # what says that there is one
    again = predict(other, analysed.evaluation, analysed.update, 8)
    assert analysed.first_order is not None
    assert again.value[0].tolist() == pytest.approx(analysed.first_order.value[0].tolist(), rel=1e-5)
    assert all(module.training for module in other.trainer.model.modules())
    assert other.trainer.accelerator.native_amp == bool(settings)


def test_the_splits_add_up_and_the_product_of_means_is_that_of_the_entropy_gradient_and_the_step(
    analysed: Analysis,
) -> None:
    found = analysed.results
    for split in ("part", "layer", "kind"):
        keys = [k for k in found if k.startswith(f"deltaH1/{split}/") and not k.endswith(("_se", "_sequence"))]
        assert sum(found[k] for k in keys) == pytest.approx(found["deltaH1"], rel=1e-4)
    assert analysed.first_order is not None
    product = float(analysed.first_order.direction[0].double() @ analysed.update.delta.double())
    assert found["bars_dot"] == pytest.approx(product / 2e-4, rel=1e-4)  # 3e-4, linear decay over 3 steps, after 1


def test_prediction_and_truth_agree_within_the_error_of_their_difference(analysed: Analysis) -> None:
    found = analysed.results
    assert abs(found["paired_error_odd"]) < 4 * found["paired_error_odd_se"] + 1e-3 * abs(found["deltaH_odd"])
    assert found["paired_error_odd_se"] < 0.2 * found["deltaH_true_se"]  # the noise that both share is gone
    scores = analysed.evaluation.scores
    assert found["H_orig"] == pytest.approx(float((scores.entropies * scores.mask).sum() / scores.mask.sum()), rel=1e-5)
    assert found["slope_check"] < 0.1
    assert abs(found["floor"]) < 1e-6
    assert 0.9 < found["ESS"] / 24 <= 1
    assert found["w_min"] < 1 < found["w_max"]


def test_the_terminal_says_where_first_order_fails_and_nothing_where_it_does_not(
    restored: RestoredTrainer, analysed: Analysis, capsys: pytest.CaptureFixture[str]
) -> None:
    for measured, says in ((-0.9, False), (0.25, True)):
        results = {**analysed.results, **found_to_be(-1.0, measured, 0.1)}
        print_table(dataclasses.replace(analysed, results=results), restored, Path("result.json"))
        assert ("Step 2: higher orders cancel the first" in capsys.readouterr().out) == says


@pytest.mark.parametrize("size", [3, 32])
def test_numbers_do_not_depend_on_the_microbatch(restored: RestoredTrainer, analysed: Analysis, size: int) -> None:
    other = analyse(restored, dataclasses.replace(SMALL, memory=Memory(microbatch_size=size, offload=True)))
    for key, value in analysed.results.items():
        if key.startswith("deltaH") and not key.endswith("_se"):
            assert other.results[key] == pytest.approx(value, rel=1e-3, abs=1e-4 * abs(analysed.results["deltaH1"])), (
                key
            )


def test_the_error_of_a_prediction_leaves_out_whole_prompts_of_e(restored: RestoredTrainer) -> None:
    """Though microbatches cut them. Twin: weights of every token times its slope along the step."""
    found = analyse(
        restored, dataclasses.replace(SMALL, evaluation=Evaluation(10, 3), memory=Memory(microbatch_size=4))
    )
    assert found.first_order is not None
    assert found.truth is not None
    scores, slopes = found.evaluation.scores, found.truth.slopes
    for column, target in enumerate(("token", "sequence")):
        known = (scores.entropies, scores.mask, torch.arange(30))
        w, u = surrogate_weights(*known, target=target, baseline="buffer")
        of_prompt = (w * slopes[0] + u * slopes[1]).sum(dim=1).view(10, 3).sum(dim=1) / 30
        lengths = scores.mask.sum(dim=1).view(10, 3).sum(dim=1)
        share = lengths / lengths.sum() if target == "token" else 0.1
        left_out = (of_prompt.sum() - of_prompt) / (1 - share)
        stderr = math.sqrt(9) * float(left_out.std(correction=0))
        assert float(found.first_order.over_evaluation.stderr[0, column]) == pytest.approx(stderr, rel=0.02)
    assert found.results["deltaH_true_se"] == pytest.approx(float(found.truth.at[0].ahead.true.stderr[0]))
    assert found.truth.at[0].ahead.true.without.shape == (10, 2)


def test_what_is_not_asked_for_is_nan_with_the_reason(restored: RestoredTrainer) -> None:
    only = dataclasses.replace(SMALL, truth=TruthSettings(enabled=False))
    predicted = analyse(restored, only)
    assert math.isnan(predicted.results["deltaH_true"])
    assert "truth.enabled" in predicted.reasons["deltaH_true"]
    assert math.isfinite(predicted.results["deltaH1"])
    measured = analyse(restored, dataclasses.replace(SMALL, first_order=FirstOrderSettings(enabled=False)))
    assert math.isnan(measured.results["deltaH1"])
    assert "first_order.enabled" in measured.reasons["deltaH1"]
    assert "paired_error" not in measured.results
    assert math.isfinite(measured.results["deltaH_true"])
    few = analyse(restored, dataclasses.replace(only, update=UpdateConfig(prompts=4), evaluation=Evaluation(prompts=4)))
    assert math.isnan(few.results["deltaH1_se"])
    assert "fewer than 8" in few.reasons["deltaH1_se"]


def test_a_step_too_large_for_weights_is_measured_on_fresh_sequences_and_the_terminal_says_so(
    run: Path, analysed: Analysis, restored: RestoredTrainer, capsys: pytest.CaptureFixture[str]
) -> None:
    far = restored_at(run, 1, "trainer.max_completion_length=12", learning_rate=0.03)
    afresh = analyse(far, dataclasses.replace(SMALL, conditioning=False))
    for shown, at, how in ((afresh, far, "fresh samples"), (analysed, restored, "PDIS")):
        print_table(shown, at, run)
        assert re.findall(r"measured \((?!SNIS)(.*?)\)", capsys.readouterr().out) == [how]
    found = afresh.results
    assert found["resampled"] == 1
    assert found["ESS"] < 12
    assert math.isfinite(found["deltaH_true"])
    assert found["deltaH_true_se"] > 0


def test_the_same_buffers_under_other_preconditioners(analysed: Analysis) -> None:
    rows = {row["name"]: row for row in analysed.tables["conditioning"]}
    assert rows["adam"]["delta_h1"] == pytest.approx(analysed.results["deltaH1"], rel=1e-4)
    assert rows["adam"]["cosine"] == pytest.approx(1.0)
    assert analysed.first_order is not None
    gradient, direction = analysed.update.gradient.double(), analysed.first_order.direction[0].double()
    plain = -float(direction @ gradient) * float(analysed.update.delta.double().norm() / gradient.norm())
    assert rows["sgd"]["delta_h1"] == pytest.approx(plain, rel=1e-6)
    norms = torch.stack([p.square().sum() for p in analysed.update.parts])
    assert float(norms[2]) > 0  # weight decay is a part of the step


# --- the buffers ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("overlap", ["forbidden", "wanted"])
def test_prompts_of_e_avoid_those_of_u_or_keep_to_them(
    restored: RestoredTrainer, analysed: Analysis, overlap: str
) -> None:
    update, total = analysed.update_buffer, len(restored.trainer.train_dataset)
    evaluation = sample_evaluation(restored, Evaluation(64, overlap=overlap), update, 64)  # type: ignore[arg-type]
    ids = restored.trainer._tokenize_prompts(list(evaluation.prompts))[0]
    rollout = update.rollout
    learned = {tuple(i[m.bool()].tolist()) for i, m in zip(rollout.prompt_ids, rollout.prompt_mask, strict=True)}
    assert {tuple(i) in learned for i in ids} == {overlap == "wanted"}
    assert len(learned) == 8 <= total


def test_e_can_be_the_evaluation_split_or_given_rows_with_several_responses(restored: RestoredTrainer) -> None:
    data = restored.trainer.train_dataset
    given = sample_evaluation(restored, Evaluation(responses=2, source=[5, 7]), None, 64)
    assert given.prompts == (data[5]["prompt"], data[5]["prompt"], data[7]["prompt"], data[7]["prompt"])
    held_out = sample_evaluation(restored, Evaluation(4, source="eval"), None, 64)
    assert set(held_out.prompts) <= set(restored.trainer.eval_dataset["prompt"])
    with pytest.raises(ValueError, match="row 99999 is not in the training set"):
        sample_evaluation(restored, Evaluation(source=[99999]), None, 64)


def test_u_is_rewarded_as_training_rewards_and_filtered_as_it_filters(
    restored: RestoredTrainer, analysed: Analysis
) -> None:
    rollout = analysed.update_buffer.rollout
    assert rollout.rewards is not None
    rewards = rollout.rewards.view(8, 4)
    torch.testing.assert_close(rollout.advantages.view(8, 4), rewards - rewards.mean(dim=1, keepdim=True))
    filtered = sample_update(restored, UpdateConfig(8, filtered=True), 64).rollout
    idle = [float((r.advantages.view(8, 4) == 0).all(dim=1).double().mean()) for r in (rollout, filtered)]
    assert idle[1] < idle[0]
    assert restored.trainer.buffer is None


# --- the guards -------------------------------------------------------------------------------------------------------


def test_a_schedule_that_has_ended_is_said_and_a_learning_rate_is_the_fix(run: Path) -> None:
    with pytest.raises(ValueError, match=r"learning rate at .* is 0.*learning_rate=1e-6"):
        restored_at(run, 3)
    assert restored_at(run, 3, learning_rate=1e-4).learning_rate == 1e-4


@pytest.mark.parametrize(
    ("rate", "why"), [(-1e-4, ""), (math.nan, ""), (math.inf, ""), (0, "with 0 there is no step"), ("a", "")]
)
def test_a_learning_rate_that_makes_no_step_is_refused(rate: Any, why: str) -> None:
    with pytest.raises(ValueError, match=rf"learning_rate={rate} must be a number above 0, or null .*{why}"):
        refuse_learning_rate(rate)


def altered(run: Path, tmp_path: Path, alter: Callable[[Path], None]) -> Path:
    """Returns a copy of the run whose first checkpoint has been tampered with."""
    copy = tmp_path / "run_2"
    shutil.copytree(checkpoint(run, 1), checkpoint(copy, 1))
    shutil.copy(run / "config.yaml", copy)
    alter(checkpoint(copy, 1))
    return copy


def permute_moments(folder: Path) -> None:
    saved = torch.load(folder / "optimizer.pt")
    saved["state"][0], saved["state"][1] = saved["state"][1], saved["state"][0]
    torch.save(saved, folder / "optimizer.pt")


@pytest.mark.parametrize(
    ("alter", "says"),
    [
        (permute_moments, "moments of .* have the shape of another parameter"),
        (lambda f: (f / "optimizer.pt").unlink(), "has no optimizer.pt"),
        (lambda f: (f / "model.safetensors").write_bytes(b"half"), "model.safetensors is damaged"),
    ],
    ids=["moments", "no optimizer", "damaged"],
)
def test_an_incomplete_checkpoint_is_refused(run: Path, tmp_path: Path, alter: Any, says: str) -> None:
    copy = altered(run, tmp_path, alter)
    with pytest.raises(ValueError, match=says):
        restored_at(copy, 1)


def test_an_adapter_missing_from_the_checkpoint_is_refused(run: Path) -> None:
    with pytest.raises(ValueError, match="holds all weights, and the model has an adapter: use adapter=none"):
        restored_at(run, 1, "adapter=lora")


def test_each_guard_says_what_is_wrong(restored: RestoredTrainer, make_trainer: Any, run: Path) -> None:
    policy, parameters, device = restored.policy, restored.parameters, restored.device
    with torch.no_grad(), pytest.raises(ValueError, match="G3: gradients are switched off"):
        refuse_without_gradients(policy, parameters, device)
    with torch.inference_mode():
        made_there = torch.nn.Parameter(torch.zeros(2))
    with pytest.raises(ValueError, match="G4: odd was made in inference mode"):
        refuse_without_gradients(policy, {**parameters, "odd": made_there}, device)
    with pytest.raises(ValueError, match="G6: 'odd' is trainable and gets no gradient"):
        refuse_without_gradients(policy, {**parameters, "odd": torch.nn.Parameter(torch.zeros(2))}, device)
    frozen = make_trainer()
    frozen.model.requires_grad_(False)
    with pytest.raises(ValueError, match="G1: no parameter is trainable"):
        restore(frozen, checkpoint(run, 1))
    larger = make_trainer()
    larger.model.odd = torch.nn.Parameter(torch.zeros(2))
    with pytest.raises(ValueError, match=r"G2: 'odd' is trainable, and .* does not hold it"):
        restore(larger, checkpoint(run, 1))


def test_reentrant_checkpointing_is_refused_before_anything_is_sampled(run: Path) -> None:
    reentrant = ("trainer.gradient_checkpointing=true", "trainer.gradient_checkpointing_kwargs={use_reentrant: true}")
    with pytest.raises(ValueError, match=r"G[56]: .*checkpointing"):
        restored_at(run, 1, *reentrant)


@pytest.mark.parametrize(
    ("nonsense", "says"),
    [
        ({"evaluation": {"prompts": 1}}, "evaluation.prompts=1"),
        ({"evaluation": {"overlap": "some"}}, "choose from forbidden, allowed, wanted"),
        ({"truth": {"etas": [1.0, -1.0]}}, "multiples of the step above 0"),
        ({"truth": {"enabled": False}, "first_order": {"enabled": False}}, "neither prediction nor truth"),
    ],
)
def test_settings_that_mean_nothing_are_refused(nonsense: dict[str, Any], says: str) -> None:
    kinds = {"evaluation": Evaluation, "truth": TruthSettings, "first_order": FirstOrderSettings}
    with pytest.raises(ValueError, match=says):
        Settings(**{key: kinds[key](**values) for key, values in nonsense.items()})


# --- the command ------------------------------------------------------------------------------------------------------


def test_settings_of_the_run_stand_beside_those_of_the_analysis() -> None:
    words = ["checkpoint=R", "--multirun", "trainer.beta=0", "update.seed=1,2", 'data.path="a b.jsonl"', "--cfg", "job"]
    assert words_of_the_run(words) == ["trainer.beta=0", 'data.path="a b.jsonl"']


def test_a_run_keeps_its_settings_but_those_that_are_changed(run: Path) -> None:
    changed = run_settings(checkpoint(run, 1), ["trainer.temperature=0.7", "seed=5"])
    assert (changed.trainer.temperature, changed.seed, changed.trainer.num_generations) == (0.7, 5, 4)
    with pytest.raises(ValueError, match=r"have it; did you mean batch.microbatch_size\?"):
        run_settings(checkpoint(run, 1), ["batch.microbatch_sise=4"])


def test_a_checkpoint_outside_a_run_says_what_it_needs_and_then_works(run: Path, tmp_path: Path) -> None:
    shutil.copytree(checkpoint(run, 1), tmp_path / "alone" / "checkpoint-1")
    alone = tmp_path / "alone" / "checkpoint-1"
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        with pytest.raises(ValueError, match=r"is not in a run .* model=… data=…"):
            run_settings(alone, [])
        named = ["model=hub", f"model.name={alone}", "data=arithmetic", "trainer.num_generations=4", *RUN[1:3]]
        restored = build_restored(run_settings(alone, named), alone)
    assert restored.learning_rate == pytest.approx(2e-4)


def test_checkpoints_are_found_by_run_folder_or_word(run: Path, tmp_path: Path) -> None:
    all_of_them = [checkpoint(run, step) for step in (1, 2, 3)]
    assert checkpoints_named(str(run), tmp_path) == all_of_them[-1:]
    assert checkpoints_named(str(run / "training_state"), tmp_path) == all_of_them
    assert checkpoints_named([str(all_of_them[1]), str(all_of_them[0])], tmp_path) == [all_of_them[1], all_of_them[0]]
    assert checkpoints_named("latest", run.parent) == all_of_them[-1:]
    assert checkpoints_named("all", run.parent) == all_of_them
    with pytest.raises(ValueError, match="there is no such folder"):
        checkpoints_named(str(tmp_path / "nowhere"), tmp_path)
    with pytest.raises(ValueError, match=r"no run in .* has a complete checkpoint"):
        checkpoints_named("latest", tmp_path)


def test_results_are_written_whole_or_not_at_all(restored: RestoredTrainer, analysed: Analysis, tmp_path: Path) -> None:
    path = tmp_path / "here" / "result.json"
    write_result(path, restored, analysed, {"offline": {"learning_rate": None}})
    read = read_result(path)
    assert read["results"]["deltaH1"] == analysed.results["deltaH1"]
    assert read["settings"]["offline"]["learning_rate"] is None
    before = path.read_bytes()
    path.with_name("result.json.tmp").mkdir()  # what cannot be written to
    with pytest.raises(OSError, match="make room"):
        write_result(path, restored, analysed, {})
    assert path.read_bytes() == before


def test_two_processes_say_what_one_says_in_sweeps_and_logs_too(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = [f"checkpoint={checkpoint(run, 1)}", "evaluation.prompts=24", "update.prompts=8", "memory.generation_size=24"]
    own += ["report=false", "log.level=debug", "sweep.evaluation_sizes=[8,16]", "sweep.update_seeds=[3]"]
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        (path,) = analyse_checkpoints(compose("offline", [*own, f"output={tmp_path / 'one'}"]))
    assert "predicted, first order" in capsys.readouterr().out
    forks.run_on_ranks(("offline.py", *own, f"output={tmp_path / 'two'}"), 2, ACCELERATE_USE_CPU="true")
    one, two = (read_result(tmp_path / p / path.relative_to(tmp_path / "one")) for p in ("one", "two"))
    assert (one["world_size"], two["world_size"]) == (1, 2)
    compared = compare(one["results"], two["results"], 1e-5)
    for table in ("sizes", "updates"):  # of fewer sequences, and of another step
        rows = zip(*(found["tables"][table] for found in (one, two)), strict=True)
        compared += sum(compare(a, b, 1e-4) for a, b in rows)
    assert compared > 60 + 3 * 20
    logs = [read_probe_log(found["log"]) for found in (one, two)]
    for name in ("evaluation", "update"):
        texts = [log[name][["prompt", "response", "length"]] for log in logs]
        assert len(texts[0]) == {"evaluation": 24, "update": 32}[name]
        pd.testing.assert_frame_equal(*texts)
    one_has, two_have = (log["statistics"].astype(float) for log in logs)
    pd.testing.assert_frame_equal(one_has, two_have, rtol=1e-3, atol=1e-5)
    for column in ("logp", "entropy_after", "logp_slope"):
        np.testing.assert_allclose(*(log["tokens"][column].to_numpy() for log in logs), rtol=1e-3, atol=1e-5)


def compare(one: dict[str, Any], two: dict[str, Any], tolerance: float) -> int:
    """Asserts that numbers are the same, to so much of themselves or of the prediction; returns how many are known."""
    compared = 0
    for key, value in one.items():
        scale = abs(one["deltaH1_sequence" if "sequence" in key else "deltaH1"])
        if not key.startswith(("floor", "slope")):
            assert two[key] == pytest.approx(value, rel=tolerance, abs=tolerance * scale, nan_ok=True), key
            compared += not math.isnan(value)
    return compared


# --- the loss ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings",
    [[], ["++trainer.entropy_coef=0.3"], ["++trainer.top_entropy_quantile=0.3", "++trainer.entropy_coef=0.2"]],
)
def test_the_gradient_of_u_is_that_of_trl_s_own_loss(run: Path, settings: list[str]) -> None:
    restored = restored_at(run, 1, *settings)
    trainer = restored.trainer
    trainer.current_gradient_accumulation_steps = 1
    buffer = sample_update(restored, UpdateConfig(8), 64)
    update = make_update(restored, buffer, Memory(8))
    rollout = buffer.rollout
    losses = []
    for rows in torch.arange(32).split(8):
        inputs = {
            name: getattr(rollout, name)[rows]
            for name in ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "advantages")
        }
        losses.append(trainer._compute_loss(trainer.model, inputs | {"num_items_in_batch": None}))
    gradients = torch.autograd.grad(torch.stack(losses).mean(), list(restored.parameters.values()))
    assert close(update.gradient, torch.cat([g.flatten() for g in gradients])) < 1e-5


def test_a_term_of_the_loss_that_is_not_known_at_a_checkpoint_is_refused(run: Path) -> None:
    restored = restored_at(run, 1, "++trainer.use_adaptive_entropy=true", "++trainer.entropy_coef=0.1")
    with pytest.raises(ValueError, match=r"trainer.use_adaptive_entropy=True adds a term to the loss that is not read"):
        make_update(restored, sample_update(restored, UpdateConfig(4), 64), Memory(8))


# --- DeepSpeed's shards -----------------------------------------------------------------------------------------------


def write_shards(folder: Path, restored: RestoredTrainer, ranks: int, swap: bool) -> dict[str, Tensor]:
    """Writes a checkpoint's optimizer as ZeRO does, two groups cut into a slice per rank; returns exp_avg by name."""
    parameters, generator = restored.parameters, torch.Generator().manual_seed(0)
    groups = [[n for n in parameters if "bias" not in n and "norm" not in n]]
    groups.append([n for n in parameters if n not in groups[0]])
    exp_avg = {n: torch.randn(p.shape, generator=generator) for n, p in parameters.items()}
    states: list[dict[str, Any]] = [{"single_partition_of_fp32_groups": [], "state": {}} for _ in range(ranks)]
    for number, names in enumerate(groups):
        order = [names[1], names[0], *names[2:]] if swap else names
        flat = {
            "weights": torch.cat([parameters[n].detach().flatten() for n in order]),
            "exp_avg": torch.cat([exp_avg[n].flatten() for n in order]),
        }
        padding = -len(flat["weights"]) % ranks
        cut = {key: torch.nn.functional.pad(value, (0, padding)).chunk(ranks) for key, value in flat.items()}
        for rank, state in enumerate(states):
            state["single_partition_of_fp32_groups"].append(cut["weights"][rank])
            moments = {"exp_avg": cut["exp_avg"][rank], "exp_avg_sq": cut["exp_avg"][rank].square(), "step": 7}
            state["state"][number] = moments
    shards = folder / "global_step1"
    shards.mkdir()
    (folder / "latest").write_text("global_step1")
    (folder / "optimizer.pt").unlink()
    shapes = [{n: parameters[n].shape for n in names} for names in groups]
    torch.save({"param_shapes": shapes}, shards / "mp_rank_00_model_states.pt")
    for rank, state in enumerate(states):
        hyper = [{"lr": 5e-4, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": decay} for decay in (0.1, 0.0)]
        of_rank = {
            "single_partition_of_fp32_groups": state["single_partition_of_fp32_groups"],
            "base_optimizer_state": {"state": state["state"], "param_groups": hyper},
            "partition_count": [ranks, ranks],
            "zero_stage": 2,
        }
        torch.save({"optimizer_state_dict": of_rank}, shards / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
    return exp_avg


@pytest.fixture
def deepspeed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if it were installed: these shards hold none of its classes, and can be read without."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)


@pytest.mark.usefixtures("deepspeed")
def test_moments_and_settings_are_joined_from_the_shards_of_ranks(
    run: Path, tmp_path: Path, restored: RestoredTrainer
) -> None:
    given: dict[str, Tensor] = {}
    copy = altered(run, tmp_path, lambda folder: given.update(write_shards(folder, restored, 12, swap=False)))
    states = restored_at(copy, 1).optimizer.states
    assert states is not None
    assert all(torch.equal(state.exp_avg, given[name]) for name, state in states.items())  # type: ignore[union-attr]
    assert {(state.lr, state.step) for state in states.values()} == {(5e-4, 7)}  # type: ignore[union-attr]
    for name, state in states.items():  # each group of parameters has its own
        assert state.weight_decay == (0.0 if "bias" in name or "norm" in name else 0.1), name


@pytest.mark.usefixtures("deepspeed")
def test_shards_in_another_order_are_refused_since_the_weights_are_not_the_models(
    run: Path, tmp_path: Path, restored: RestoredTrainer
) -> None:
    copy = altered(run, tmp_path, lambda folder: write_shards(folder, restored, 2, swap=True))
    with pytest.raises(ValueError, match=r"joined from the ranks' shards, differs from the model's weight"):
        restored_at(copy, 1)


@pytest.mark.usefixtures("deepspeed")
def test_shards_of_which_some_are_missing_are_refused(run: Path, tmp_path: Path, restored: RestoredTrainer) -> None:

    def lose_one(folder: Path) -> None:
        write_shards(folder, restored, 3, swap=False)
        next((folder / "global_step1").glob("*rank_1_*")).unlink()

    with pytest.raises(ValueError, match="shards of 2 ranks of"):
        restored_at(altered(run, tmp_path, lose_one), 1)
