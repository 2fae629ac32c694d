"""On a GPU: training with probes is bitwise the training without, values are the CPU's, offloaded rows say the same.

Skipped without CUDA. benchmarks/gpu.py runs them. Kernels without a deterministic kind are allowed, with a warning.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when CUDA starts

import pytest
import torch
from replay import STEPS, ReplayTrainer
from torch import Tensor

from rl_training import DrGRPOTrainer, Probe
from rl_training.probes import (
    CovariancePredictorProbe,
    EffectiveSampleSizeProbe,
    ErrorSharesProbe,
    GradientNoiseScaleProbe,
    GroundTruthProbe,
    ResponsesProbe,
    SimpleEntropyProbe,
)
from rl_training.records.jsonl import read_estimates

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
MakeTrainer = Callable[..., DrGRPOTrainer]


@pytest.fixture(autouse=True)
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def all_probes(**of_simple: Any) -> list[Probe]:
    simple = SimpleEntropyProbe(per_sequence=True, own_prompts=True, **of_simple)
    others = [GradientNoiseScaleProbe(split_prompts=1), EffectiveSampleSizeProbe(), CovariancePredictorProbe()]
    return [simple, ResponsesProbe(count=2), ErrorSharesProbe(), *others]


def parameters(trainer: DrGRPOTrainer) -> dict[str, Tensor]:
    return {name: p.detach().cpu() for name, p in trainer.model.named_parameters()}


def assert_equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert [name for name in a if not torch.equal(a[name], b[name])] == []


@pytest.mark.parametrize("settings", [{"bf16": False}, {"bf16": True}, {"gradient_checkpointing": True}], ids=str)
def test_training_with_probes_is_bitwise_the_training_without(
    make_trainer: MakeTrainer, settings: dict[str, bool]
) -> None:
    settings = {"gradient_checkpointing_kwargs": {"use_reentrant": False}, **settings}
    probes = [*all_probes(), GroundTruthProbe(every=1)]
    bare, probed = (make_trainer(probes=p, **settings) for p in ([], probes))
    for trainer in (bare, probed):
        trainer.train()
    assert next(iter(bare.model.parameters())).device.type == "cuda"
    assert_equal(parameters(bare), parameters(probed))
    assert math.isfinite(probed.attachment.latest["delta_h/forward"].value)


def test_rows_in_host_memory_say_what_rows_on_the_gpu_do(make_trainer: MakeTrainer) -> None:
    here, there = (make_trainer(probes=all_probes(offload=offload)) for offload in (False, True))
    for trainer in (here, there):
        trainer.train()
    assert_equal(parameters(here), parameters(there))
    for name in ("forward", "backward", "own_prompts", "part/momentum", "forward_sequence"):
        a, b = (trainer.attachment.latest[f"delta_h/{name}"] for trainer in (here, there))
        assert b.value == pytest.approx(a.value, rel=1e-4, abs=1e-4 * a.stderr if a.stderr > 0 else 1e-7), name


def test_values_are_those_of_the_cpu_on_the_same_rollouts(make_trainer: MakeTrainer) -> None:
    class OnItsDevice(ReplayTrainer):
        def _generate_and_score_completions(self, inputs: Any) -> dict[str, Tensor]:
            rollout = super()._generate_and_score_completions(inputs)
            return {key: tensor.to(self.accelerator.device) for key, tensor in rollout.items()}

    shape = {"gradient_accumulation_steps": 8, "max_steps": STEPS, "adam_epsilon": 1e-5}
    kinds = ({"use_cpu": True}, {"bf16": False})
    cpu, gpu = (make_trainer(OnItsDevice, probes=all_probes(), **shape, **kind) for kind in kinds)
    for trainer in (cpu, gpu):
        trainer.train()
    names = ("delta_h/forward", "delta_h/backward", "delta_h/forward_se", "gns/trace", "ess/token_weight")
    for a, b in zip(cpu.state.log_history[:STEPS], gpu.state.log_history[:STEPS], strict=True):
        for name in names:
            if name in a:
                scale = a.get(f"{name}_se", 0.0)
                assert b[name] == pytest.approx(a[name], rel=1e-3, abs=1e-3 * scale), (a["step"], name)


def test_a_resumed_run_ends_bitwise_where_the_uninterrupted_one_does(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    settings = {"save_strategy": "steps", "save_steps": 1, "max_steps": 3}
    whole, resumed = (make_trainer(probes=all_probes(), **settings) for _ in range(2))
    whole.train()
    resumed.train(resume_from_checkpoint=str(tmp_path / "state" / "checkpoint-1"))
    assert_equal(parameters(whole), parameters(resumed))
    a, b = (trainer.attachment.latest for trainer in (whole, resumed))
    assert {name: e.value for name, e in a.items() if not math.isnan(e.value)} == {
        name: e.value for name, e in b.items() if not math.isnan(e.value)
    }


def test_fsdp2_estimates_what_a_gpu_without_it_does_and_trains_as_it_does_without_probes(tmp_path: Path) -> None:
    """On the GPUs that there are, two at most: with one, FSDP2 cuts nothing, and all of its code runs."""
    world = min(torch.cuda.device_count(), 2)
    plain, sharded, bare = "plain_1_gpu", f"fsdp2_{world}_gpu", f"fsdp2_{world}_gpu_bare"
    replay = Path(__file__).with_name("replay.py")
    subprocess.run([sys.executable, str(replay), str(tmp_path), plain, sharded, bare], check=True)
    with_probes, without = (torch.load(tmp_path / run / "0.pt", map_location="cpu") for run in (sharded, bare))
    assert_equal(with_probes["parameters"], without["parameters"])
    one, several = (read_estimates(tmp_path / run / "logs") for run in (plain, sharded))
    assert [(row["step"], row["name"]) for row in one] == [(row["step"], row["name"]) for row in several]
    for a, b in zip(one, several, strict=True):
        if a["name"] in ("delta_h/forward", "delta_h/backward", "gns/trace", "ess/token_weight"):
            scale = a["stderr"] if math.isfinite(a["stderr"]) else 0.0
            assert b["value"] == pytest.approx(a["value"], rel=1e-3, abs=1e-3 * scale, nan_ok=True), a


def test_measuring_puts_the_gpus_random_stream_back(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(probes=[SimpleEntropyProbe()])
    trainer.train()
    before = torch.cuda.get_rng_state()
    trainer.attachment._policy.sample(8, seed=1)
    assert torch.equal(torch.cuda.get_rng_state(), before)
