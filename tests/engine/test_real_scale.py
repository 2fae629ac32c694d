"""The settings of a run on a real model, with a small stand-in: experiment=qwen_gsm8k, bf16, checkpointing, qlora."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from configs import composed
from peft import LoraConfig
from qwen_stand_in import experiment
from seen import Seen
from torch import Tensor, nn
from trainers import FEW, graded

from rl_training import Estimate, Probe, Reading
from rl_training.job.configuration.prepare import microbatches_per_step
from rl_training.models import load as models
from rl_training.models.load import load_causal_lm, load_tiny
from rl_training.probes import GradientNoiseScaleProbe, GroundTruthProbe, SimpleEntropyProbe, TokenClassesProbe
from rl_training.records.jsonl import read_metrics
from rl_training.statistics.jackknife import MIN_UNITS_OFFLINE

LINEAR = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


# --- the experiment ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_real_experiment_trains_lora_in_bf16_with_checkpointing_and_measures(
    stand_in, tmp_path, dtype: str
) -> None:
    truth = ("probe=[simple,gns,ess,ground_truth]", "probes.ground_truth.every=1", "probes.ground_truth.sequences=16")
    other = [] if dtype == "float32" else [f"model.dtype={dtype}"]
    run = experiment(stand_in, tmp_path / "run", "trainer.max_steps=1", *truth, *other)
    model = run.trainer.model
    adapted = {name.split(".")[-2] for name, module in model.named_modules() if name.endswith("lora_A")}
    assert adapted == LINEAR
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}
    assert {p.dtype for p in model.parameters() if not p.requires_grad} == {getattr(torch, dtype)}
    seen: list[tuple[bool, bool, bool, torch.dtype]] = []  # training mode, inside a backward, autocast, output's dtype

    def look(module: nn.Module, inputs: Any, output: Tensor) -> None:
        if torch.is_grad_enabled():
            in_backward = torch._C._current_graph_task_id() >= 0
            seen.append((model.training, in_backward, torch.is_autocast_enabled("cpu"), output.dtype))

    model.base_model.model.model.layers[0].mlp.gate_proj.lora_A["default"].register_forward_hook(look)
    run.train()
    of_training = {(True, in_backward, True, torch.bfloat16) for in_backward in (True, False)}  # True: recomputed
    of_evaluation = {(False, in_backward, False, torch.float32) for in_backward in (True, False)}
    assert set(seen) == of_training | of_evaluation
    (line,) = read_metrics(tmp_path / "run" / "logs")
    assert line["step"] == 1
    assert line["reward"] > 0
    assert all(math.isfinite(line[name]) for name in ("delta_h/forward_se", "delta_h/true", "ess/advantage"))
    assert line["delta_h/forward"] != 0
    assert line["gns/trace"] > 0
    layers = {name for name in line if name.startswith("delta_h/layer/")}
    assert {"delta_h/layer/0", "delta_h/layer/1"} <= layers


def test_the_real_experiment_has_error_bars_on_1_2_4_and_8_processes() -> None:
    cfg = composed("train", "experiment=qwen_gsm8k")
    batch = (cfg.batch.sequences_per_step, cfg.batch.microbatch_size)
    steps = {n: microbatches_per_step(*batch, n, cfg.trainer.num_generations) for n in (1, 2, 4, 8)}
    assert steps == {1: 16, 2: 8, 4: 4, 8: 2}
    assert min(n * (1 if n >= 8 else k) for n, k in steps.items()) >= MIN_UNITS_OFFLINE


# --- bf16 -------------------------------------------------------------------------------------------------------------


def test_a_run_with_bf16_weights_is_warned_with_the_fix(stand_in: Path, tmp_path: Path, caplog) -> None:
    with caplog.at_level("WARNING"):
        experiment(stand_in, tmp_path / "run", "adapter=none", "model.dtype=bfloat16")
    assert "model.dtype=float32" in caplog.text


def test_training_bf16_weights_warns_that_rounding_loses_steps(make_trainer, caplog) -> None:
    """TRL uses the fused optimizer. Its predicted step is what it does, to the last bit of every weight."""
    probes = [SimpleEntropyProbe(), GradientNoiseScaleProbe(), TokenClassesProbe(every=1)]
    trainer = make_trainer(dtype=torch.bfloat16, probes=probes, **FEW)
    with caplog.at_level("WARNING"):
        trainer.train()
    line = next(line for line in reversed(trainer.state.log_history) if "step/formula_error" in line)
    assert line["step/formula_error"] < 0.05
    assert 0.0 < line["update/surviving_share"] < 0.9
    for name in ("forward", "backward", "reuse", "part/momentum"):
        assert math.isfinite(line[f"delta_h/{name}"])
    assert line["delta_h/forward"] == pytest.approx(
        sum(line[f"delta_h/part/{cause}"] for cause in ("momentum", "gradient", "decay")), abs=1e-9
    )
    assert "steps are rounded: model.embed_tokens.weight is kept in bfloat16" in caplog.text
    assert "Adam's second moment never decays" in caplog.text  # with TRL's default beta2 of 0.999


# --- 4 bits -----------------------------------------------------------------------------------------------------------


class StepAndFormula(Seen):
    """Keeps the parameters' change at each step, and the change that the optimizer's formula predicts."""

    def __init__(self) -> None:
        super().__init__()
        self.pairs: list[tuple[Tensor, Tensor]] = []

    def measure(self, ctx: Any, state: Any) -> Reading:
        step = ctx.step
        reading = super().measure(ctx, state)
        assert step.optimizer.states is not None
        norm = torch.stack([gradient.norm() for gradient in step.gradients.mean.values()]).norm()
        scale = min(1.0, step.optimizer.max_grad_norm / (float(norm) + 1e-6))
        self._before = {name: p.detach().clone() for name, p in step.weights.items()}
        self._said = {
            name: step.optimizer.states[name].delta(p.detach(), scale * step.gradients.mean[name]).total
            for name, p in step.weights.items()
        }
        return reading

    def after_step(self, ctx: Any, reading: Reading) -> Reading:
        step = ctx.step
        done = torch.cat([(p.detach() - self._before[name]).flatten() for name, p in step.weights.items()])
        self.pairs.append((done, torch.cat([said.flatten() for said in self._said.values()])))
        return reading


def four_bit_run(make_trainer: Any, *probes: Probe) -> tuple[dict[str, Tensor], dict[str, Estimate]]:
    """Train the shipped model in 4 bits with checkpointing and autocast; return weights and estimates after 2 steps."""
    trainer = make_trainer(
        model=load_tiny("bfloat16", "nf4")[0], dtype=None, probes=probes, bf16=True, activation_checkpointing=True,
        peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"),
        per_device_train_batch_size=4, gradient_accumulation_steps=4, max_completion_length=8, reward=graded,
        learning_rate=1e-5,  # typical for real models: 0.2 % of an adapter's weight
        lr_scheduler_type="linear",
    )  # fmt: skip
    trainer.train()
    weights = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    return weights, dict(trainer.attachment.latest)


def test_probes_measure_fp32_adapters_on_a_4_bit_base_without_touching_training(make_trainer: Any) -> None:
    pytest.importorskip("bitsandbytes")
    simple, truth, steps = SimpleEntropyProbe(), GroundTruthProbe(every=1, sequences=8), StepAndFormula()
    with_probes, answers = four_bit_run(make_trainer, simple, truth, steps)
    without, _ = four_bit_run(make_trainer)
    assert [name for name in without if not torch.equal(with_probes[name], without[name])] == []
    trained = {name: p.dtype for name, p in without.items() if ".lora_" in name}
    assert {name.split(".")[-4] for name in trained} == LINEAR
    assert set(trained.values()) == {torch.float32}
    assert {p.dtype for name, p in without.items() if "base_layer.weight" in name} == {torch.uint8}
    for done, said in steps.pairs:
        torch.testing.assert_close(done, said, rtol=0, atol=2e-8)  # changes are about 1e-5
        assert done.abs().max() > 5e-6
    assert all(math.isfinite(answers[name].stderr) for name in ("delta_h/forward", "delta_h/trapezoid"))
    assert math.isfinite(answers["delta_h/true"].value)


def test_qlora_composes_with_the_experiment_and_loads_4_bits(stand_in: Path) -> None:
    pytest.importorskip("bitsandbytes")
    cfg = composed("train", "experiment=qwen_gsm8k", "adapter=qlora", f"model.name={stand_in / 'model'}")
    assert cfg.adapter == composed("train", "adapter=lora").adapter
    model, _ = load_causal_lm(cfg.model.name, cfg.model.dtype, cfg.model.quantization)
    quantised = {name.split(".")[-1] for name, m in model.named_modules() if type(m).__name__ == "Linear4bit"}
    assert quantised == LINEAR  # not the head, which is tied to the embedding


def test_without_bitsandbytes_4_bits_are_refused_with_the_extra_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "is_bitsandbytes_available", lambda: False)
    with pytest.raises(ValueError, match=re.escape("pip install 'rl-training[qlora]'")):
        load_tiny("bfloat16", "nf4")
