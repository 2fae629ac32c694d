"""A trainer restored at a checkpoint takes training's step; what does not fit is refused before anything is sampled."""

from __future__ import annotations

import dataclasses
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from analyzed_runs import RUN, SEEN, SMALL, altered, as_update_buffer, checkpoint, close, restored_at
from configs import composed
from safetensors.torch import load_file, save_file
from torch import Tensor

from rl_training.errors import UserError
from rl_training.job.configuration.prepare import prepare_run
from rl_training.job.run.training import build_run
from rl_training.offline.analysis import Analysis, analyze
from rl_training.offline.buffers import UpdateBuffer, sample_update
from rl_training.offline.restored import RestoredTrainer, refuse_without_gradients, restore
from rl_training.offline.settings import MemorySettings, UpdateSettings
from rl_training.offline.update import make_update
from rl_training.policy.rollout import Rollout, take_rows

# --- restored ---------------------------------------------------------------------------------------------------------


def test_the_analyzed_adam_step_is_the_one_that_training_took(restored: RestoredTrainer) -> None:
    """With the same sequences, these agree: gradient, clipping, Adam's moments and their order, the learning rate."""
    real = SEEN[2]
    update = make_update(restored, as_update_buffer(real["rollout"]), MemorySettings(8))
    assert restored.step == 1
    assert restored.learning_rate == pytest.approx(3e-4 * 2 / 3)
    assert close(torch.cat(update.gradient), real["gradient"]) < 1e-5
    assert update.whole.clip < 0.9
    assert close(torch.cat(update.delta), real["delta"]) < 1e-4  # the rounding of θ + δθ − θ in fp32


def test_the_analyzed_sgd_step_is_the_one_that_training_took(tmp_path: Path) -> None:
    folder = tmp_path / "run_sgd"
    sgd = ["++trainer.optim=sgd", "trainer.learning_rate=0.3", "trainer.max_steps=2"]
    run = build_run(prepare_run(composed("train", f"run_dir={folder}", *RUN, *sgd)))
    run.train()
    run.end()
    real, restored = SEEN[2], restored_at(folder, 1)
    update = make_update(restored, as_update_buffer(real["rollout"]), MemorySettings(8))
    assert restored.learning_rate == pytest.approx(0.15)
    assert close(torch.cat(update.delta), real["delta"]) < 1e-4
    results = analyze(restored, SMALL)
    assert results.results["slope_check"] < 0.1
    assert results.tables["conditioning"] == []  # it exists only for Adam


def test_an_analysis_changes_no_state_of_the_trainer(restored: RestoredTrainer, analyzed: Analysis) -> None:
    def state() -> list[Tensor]:
        moments = [v for s in restored.trainer.optimizer.state.values() for v in s.values()]
        rates = torch.tensor([group["lr"] for group in restored.trainer.optimizer.param_groups])
        streams = [torch.random.get_rng_state(), torch.tensor(np.random.get_state()[1].astype(np.int64))]
        python = torch.tensor(random.getstate()[1])
        modes = torch.tensor([module.training for module in restored.trainer.model.modules()])
        parameters = [p.detach() for p in restored.trainer.model.parameters()]
        return [t.clone() for t in (*parameters, *moments, rates, *streams, python, modes)]

    before = state()
    again = analyze(restored, SMALL)
    assert all(torch.equal(a, b) for a, b in zip(before, state(), strict=True))
    assert all(p.grad is None for p in restored.trainer.model.parameters())
    assert json.dumps(again.results) == json.dumps(analyzed.results)  # the same seeds


def with_prompts(rollout: Rollout, count: int) -> UpdateBuffer:
    """Return `count` prompts with one response each, by repeating these sequences."""
    rows = take_rows(rollout, torch.arange(count) % rollout.num_sequences)
    return UpdateBuffer(dataclasses.replace(rows, prompt_index=torch.arange(count)), count, 1)


@pytest.mark.parametrize("prompts", [2, 16, 17, 48, 100])
def test_u_is_cut_into_at_most_sixteen_folds_of_about_the_same_size(restored, analyzed, prompts: int) -> None:
    rollout = analyzed.update_buffer.rollout
    idle = dataclasses.replace(rollout, advantages=torch.zeros_like(rollout.advantages))  # so that it costs nothing
    sizes = make_update(restored, with_prompts(idle, prompts), MemorySettings(32)).batch.fold_sizes.tolist()
    assert len(sizes) == min(prompts, 16)
    assert sum(sizes) == prompts
    assert max(sizes) - min(sizes) <= 1


def test_folds_of_unequal_sizes_are_left_out_by_their_share(restored: RestoredTrainer, analyzed: Analysis) -> None:
    """18 prompts in 16 folds: the first and the ninth have two. Leaves out one of these, and one of the others."""
    rollout = with_prompts(analyzed.update_buffer.rollout, 18).rollout
    advantages = torch.linspace(-1, 1, 18)
    rollout = dataclasses.replace(rollout, advantages=advantages)
    update = make_update(restored, UpdateBuffer(rollout, 18, 1), MemorySettings(32))
    assert update.batch.fold_sizes.tolist() == [2, 1, 1, 1, 1, 1, 1, 1] * 2
    for fold, prompts in ((8, {9, 10}), (9, {11})):
        others = torch.tensor([i for i in range(18) if i not in prompts])
        rest = dataclasses.replace(take_rows(rollout, others), prompt_index=torch.arange(len(others)))
        of_others = make_update(restored, UpdateBuffer(rest, len(others), 1), MemorySettings(32))
        without = update.without
        delta = torch.cat([piece.delta(without.clipped.without(fold, piece)).total for piece in without.pieces])
        assert close(delta, torch.cat(of_others.delta)) < 1e-4


# --- the guards -------------------------------------------------------------------------------------------------------


def test_a_finished_schedule_is_refused_with_a_learning_rate_as_the_fix(run: Path) -> None:
    with pytest.raises(ValueError, match=r"checkpoint-3 .*learning_rate=1e-6"):
        restored_at(run, 3)
    assert restored_at(run, 3, learning_rate=1e-4).learning_rate == 1e-4


def permute_moments(folder: Path) -> None:
    saved = torch.load(folder / "optimizer.pt")
    saved["state"][0], saved["state"][1] = saved["state"][1], saved["state"][0]
    torch.save(saved, folder / "optimizer.pt")


def diverged(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"][0] = torch.nan
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "probes.safetensors").unlink()  # the checksums of the whole weights


@pytest.mark.parametrize(
    ("alter", "says"),
    [
        (permute_moments, r"moments of model\.\S+ "),
        (lambda f: (f / "optimizer.pt").unlink(), r"checkpoint-1 .*optimizer\.pt"),
        (lambda f: (f / "model.safetensors").write_bytes(b"half"), "model.safetensors "),
        (diverged, r"checkpoint-1: model\.norm\.weight is not finite: .* choose an earlier checkpoint"),
        (lambda f: torch.save(print, f / "optimizer.pt"), r"/optimizer\.pt .*builtins\.print"),
        (lambda f: torch.save(print, f / "scheduler.pt"), r"/scheduler\.pt .*builtins\.print"),
    ],
    ids=["moments", "no optimizer", "damaged", "diverged", "code in the optimizer", "code in the schedule"],
)
def test_an_incomplete_checkpoint_is_refused(run: Path, tmp_path: Path, alter: Any, says: str) -> None:
    copy = altered(run, tmp_path, alter)
    with pytest.raises(ValueError, match=says):
        restored_at(copy, 1)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("adapter=lora", "adapter=none"),
        ("trainer.optim=sgd", r"optimizer\.pt does not fit .*written by one without .*momentum.*trainer\.optim"),
        ("buffer=filtered", r"^\S+ has no buffer\.safetensors.* buffer=plain"),
        ("data=three_words", "prompts of this task are messages, and the model has no chat template"),
    ],
)
def test_what_differs_from_the_checkpoints_run_is_refused_by_name(run: Path, change: str, says: str) -> None:
    with pytest.raises(UserError, match=says):
        restored_at(run, 1, change)


def test_each_guard_names_its_finding(restored: RestoredTrainer, make_trainer: Any, run: Path) -> None:
    policy, parameters, device = restored.policy, restored.parameters, restored.device
    with torch.no_grad(), pytest.raises(ValueError, match=r"scores .*no_grad"):
        refuse_without_gradients(policy, parameters, device)
    with torch.inference_mode(), pytest.raises(ValueError, match=r"scores .*inference_mode"):
        refuse_without_gradients(policy, parameters, device)
    with pytest.raises(ValueError, match=r"^'odd' .* gradient"):
        refuse_without_gradients(policy, {**parameters, "odd": torch.nn.Parameter(torch.zeros(2))}, device)
    frozen = make_trainer()
    frozen.model.requires_grad_(False)
    with pytest.raises(ValueError, match=r"^'model\.embed_tokens\.weight' .*is_trainable=True"):
        restore(frozen, checkpoint(run, 1))
    larger = make_trainer()
    larger.model.odd = torch.nn.Parameter(torch.zeros(2))
    with pytest.raises(ValueError, match=rf"^'odd' .*{checkpoint(run, 1)}"):
        restore(larger, checkpoint(run, 1))


def test_reentrant_checkpointing_is_refused_before_anything_is_sampled(run: Path) -> None:
    reentrant = ("trainer.gradient_checkpointing=true", "trainer.gradient_checkpointing_kwargs={use_reentrant: true}")
    with pytest.raises(ValueError, match=r"scores .*checkpointing"):
        restored_at(run, 1, *reentrant)


# --- the loss ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings",
    [
        [],
        ["++trainer.entropy_coef=0.3"],
        ["++trainer.top_entropy_quantile=0.3", "++trainer.entropy_coef=0.2"],
        ["++trainer.importance_sampling_level=sequence", "++trainer.off_policy_mask_threshold=0.1"],
    ],
)
def test_the_gradient_of_u_equals_that_of_trls_loss(run: Path, settings: list[str]) -> None:
    restored = restored_at(run, 1, *settings)
    trainer = restored.trainer
    trainer.current_gradient_accumulation_steps = 1
    buffer = sample_update(restored, UpdateSettings(8), 64)
    update = make_update(restored, buffer, MemorySettings(8))
    rollout = buffer.rollout
    losses = []
    for rows in torch.arange(32).split(8):
        inputs = {
            name: getattr(rollout, name)[rows]
            for name in ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "advantages")
        }
        losses.append(trainer._compute_loss(trainer.model, inputs | {"num_items_in_batch": None}))
    gradients = torch.autograd.grad(torch.stack(losses).mean(), list(restored.parameters.values()))
    assert close(torch.cat(update.gradient), torch.cat([g.flatten() for g in gradients])) < 1e-5


def test_the_step_of_a_vllm_run_is_analyzed_without_a_sampler_correction(run: Path) -> None:
    """TRL's loss then includes a ratio to that sampler, which is 1."""
    restored = restored_at(run, 1)
    buffer, gradients = sample_update(restored, UpdateSettings(8), 64), []
    for use_vllm in (False, True):
        restored.trainer.use_vllm = restored.trainer.vllm_importance_sampling_correction = use_vllm
        gradients.append(torch.cat(make_update(restored, buffer, MemorySettings(8)).gradient))
    assert torch.equal(*gradients)


def test_a_loss_term_unknown_at_a_checkpoint_is_refused(run: Path) -> None:
    with pytest.raises(ValueError, match=r"entropy_coef, use_adaptive_entropy: .*entropy=False"):
        restored_at(run, 1, "++trainer.use_adaptive_entropy=true", "++trainer.entropy_coef=0.1")
