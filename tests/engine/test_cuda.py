"""On a GPU: probes do not change a bit of training, values agree with the CPU's, offloading gives the same values.

Tests that are meaningful on a CPU run there as well, so this code is exercised without a GPU. benchmarks/gpu.py runs
all of them on a GPU. Kernels without a deterministic version are allowed, with a warning.
"""

from __future__ import annotations

import importlib.util
import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when CUDA starts
os.environ.setdefault("FLASH_ATTENTION_DETERMINISTIC", "1")

import pytest
import torch
from peft import LoraConfig
from replay import STEPS, ReplayTrainer
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from trainers import FEW, LORA, differing, every_probe, outcome, trained_weights

from rl_training import DrGRPOTrainer
from rl_training.models.load import TINY_PATH, load_causal_lm
from rl_training.probes import GradientNoiseScaleProbe, SimpleEntropyProbe
from rl_training.records.jsonl import read_estimates

MakeTrainer = Callable[..., DrGRPOTrainer]
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
needs_flash_attention = pytest.mark.skipif(
    not torch.cuda.is_available() or importlib.util.find_spec("flash_attn") is None, reason="needs CUDA and flash_attn"
)
KINDS: dict[str, dict[str, Any]] = {
    "fp32": {"bf16": False},
    "bf16": {"bf16": True},
    "checkpointing": {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}},
    "LoRA in bf16": {"peft_config": LoraConfig(**LORA), "bf16": True},
}


def of_kinds(*kinds: str, on_cpu: bool = True) -> pytest.MarkDecorator:
    """Parametrize a test with all kinds on the GPU, and with the last kind on the CPU."""
    on_gpu = [pytest.param("cuda", kind, marks=needs_cuda) for kind in kinds]
    return pytest.mark.parametrize(("device", "kind"), [("cpu", kinds[-1])] * on_cpu + on_gpu)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=needs_cuda)])
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(autouse=True)
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True, warn_only=True)
    with sdpa_kernel(SDPBackend.MATH):  # the backward of the other kernels is not deterministic
        yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def rounded_products(device: str) -> Iterator[None]:
    """Let fp32 products use fewer bits if the machine can: TF32 on a GPU, bf16 on a CPU."""
    backends: Any = torch.backends
    setting, kind = (backends.cuda.matmul, "tf32") if device == "cuda" else (backends.mkldnn.matmul, "bf16")
    before, setting.fp32_precision = setting.fp32_precision, kind
    yield
    setting.fp32_precision = before


def assert_equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert [name for name in a if not torch.equal(a[name], b[name])] == []


def assert_probes_change_nothing(make_trainer: MakeTrainer, device: str, **settings: Any) -> None:
    ends = []
    for probes in ([], every_probe()):
        torch.manual_seed(0)  # of an adapter's weights
        trainer = make_trainer(probes=probes, use_cpu=device == "cpu", **FEW, **settings)
        ends.append(outcome(trainer))
    assert next(iter(trainer.model.parameters())).device.type == device
    assert differing(*ends) == []
    assert math.isfinite(trainer.attachment.latest["delta_h/forward"].value)


@of_kinds(*KINDS, on_cpu=False)  # hosts/trl/test_bitwise.py has these on the CPU
def test_training_with_probes_is_bitwise_training_without_them(make_trainer, device: str, kind: str) -> None:
    assert_probes_change_nothing(make_trainer, device, **KINDS[kind])


@pytest.mark.usefixtures("rounded_products")
def test_training_with_probes_in_tf32_is_bitwise_training_without_them(make_trainer: MakeTrainer, device: str) -> None:
    assert_probes_change_nothing(make_trainer, device, bf16=False)


@needs_flash_attention
def test_training_with_probes_and_flash_attention_is_bitwise_training_without_them(make_trainer: MakeTrainer) -> None:
    model, _ = load_causal_lm(TINY_PATH, attn_implementation="flash_attention_2")
    assert_probes_change_nothing(make_trainer, "cuda", bf16=True, model=model)


def test_measurements_are_in_ieee_fp32_where_training_is_in_tf32(make_trainer, device: str, request) -> None:
    trainer = make_trainer(probes=[SimpleEntropyProbe()], use_cpu=device == "cpu", **FEW)
    policy = trainer.attachment._measured.policy
    rollout = policy.sample(8, seed=1)
    exact = policy.score_rollout(rollout)
    request.getfixturevalue("rounded_products")
    again = policy.score_rollout(rollout)
    assert torch.equal(exact.logps, again.logps)
    assert torch.equal(exact.entropies, again.entropies)


@of_kinds("fp32", "LoRA in bf16")
def test_fold_gradients_in_host_memory_give_the_estimates_of_those_on_the_gpu(
    make_trainer: MakeTrainer, device: str, kind: str
) -> None:
    settings = {"use_cpu": device == "cpu", **FEW, **KINDS[kind]}
    trainers, ends = [], []
    for offload in (False, True):
        torch.manual_seed(0)  # of an adapter's weights
        probes = [SimpleEntropyProbe(per_sequence=True, offload=offload), GradientNoiseScaleProbe(split_prompts=1)]
        trainers.append(make_trainer(probes=probes, **settings))
        ends.append(outcome(trainers[-1]))
    here, there = trainers
    assert differing(*ends) == []
    for name in ("forward", "backward", "part/momentum", "forward_sequence"):
        a, b = (trainer.attachment.latest[f"delta_h/{name}"] for trainer in (here, there))
        assert b.value == pytest.approx(a.value, rel=1e-4, abs=1e-4 * a.stderr if a.stderr > 0 else 1e-7), name


@needs_cuda
def test_gpu_estimates_equal_those_of_the_cpu_on_the_same_rollouts(make_trainer: MakeTrainer) -> None:
    class OnItsDevice(ReplayTrainer):
        def _generate_and_score_completions(self, inputs: Any) -> dict[str, Tensor]:
            rollout = super()._generate_and_score_completions(inputs)
            return {key: tensor.to(self.accelerator.device) for key, tensor in rollout.items()}

    shape = {"gradient_accumulation_steps": 4, "max_steps": STEPS, "adam_epsilon": 1e-5}
    kinds = ({"use_cpu": True}, {"bf16": False})
    cpu, gpu = (make_trainer(OnItsDevice, probes=every_probe(), **shape, **kind) for kind in kinds)
    for trainer in (cpu, gpu):
        trainer.train()
    names = ("delta_h/forward", "delta_h/backward", "delta_h/forward_se", "gns/trace", "ess/token_weight")
    for a, b in zip(cpu.state.log_history[:STEPS], gpu.state.log_history[:STEPS], strict=True):
        for name in names:
            if name in a:
                scale = a.get(f"{name}_se", 0.0)
                assert b[name] == pytest.approx(a[name], rel=1e-3, abs=1e-3 * scale), (a["step"], name)


@of_kinds("fp32", "LoRA in bf16")
def test_a_resumed_run_ends_bitwise_equal_to_the_uninterrupted_one(
    make_trainer: MakeTrainer, device: str, kind: str, tmp_path: Path
) -> None:
    settings = {"save_strategy": "steps", "save_steps": 1, "max_steps": 2, "use_cpu": device == "cpu"}
    settings |= {**FEW, **KINDS[kind]}
    whole, resumed = (make_trainer(probes=every_probe(), **settings) for _ in range(2))
    whole.train()
    resumed.train(resume_from_checkpoint=str(tmp_path / "state" / "checkpoint-1"))
    assert torch.equal(trained_weights(whole), trained_weights(resumed))
    assert repr(resumed.attachment.latest) == repr(whole.attachment.latest)


@needs_cuda
def test_fsdp2_gives_the_estimates_of_one_plain_gpu_and_trains_as_without_probes(tmp_path: Path) -> None:
    """Uses at most two of the available GPUs. With one, FSDP2 shards nothing, but all of its code runs."""
    world = min(torch.cuda.device_count(), 2)
    plain, sharded, bare = "plain_1_gpu", f"fsdp2_{world}_gpu", f"fsdp2_{world}_gpu_bare"
    replay = Path(__file__).parents[1] / "support" / "replay.py"
    subprocess.run([sys.executable, str(replay), str(tmp_path), plain, sharded, bare], check=True)
    with_probes, without = (torch.load(tmp_path / run / "0.pt", map_location="cpu") for run in (sharded, bare))
    assert_equal(with_probes["parameters"], without["parameters"])
    alone, several = (read_estimates(tmp_path / run / "logs") for run in (plain, sharded))
    assert [(row["step"], row["name"]) for row in alone] == [(row["step"], row["name"]) for row in several]
    for a, b in zip(alone, several, strict=True):
        if a["name"] in ("delta_h/forward", "delta_h/backward", "gns/trace", "ess/token_weight"):
            scale = a["stderr"] if math.isfinite(a["stderr"]) else 0.0
            assert b["value"] == pytest.approx(a["value"], rel=1e-3, abs=1e-3 * scale, nan_ok=True), a


def test_measuring_restores_the_random_state_of_the_device(make_trainer: MakeTrainer, device: str) -> None:
    trainer = make_trainer(probes=[SimpleEntropyProbe()], use_cpu=device == "cpu", **FEW)
    state = torch.cuda.get_rng_state if device == "cuda" else torch.get_rng_state
    before = state()
    trainer.attachment._measured.policy.sample(8, seed=1)
    assert torch.equal(state(), before)
