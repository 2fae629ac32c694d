"""Trainings with real vLLM generation on the CPU. `make test-vllm` makes the environment; skipped elsewhere.

The runs are those of tests/support/vllm_runs.py, each in a separate process.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vllm: make test-vllm")
PROGRAM = Path(__file__).parents[2] / "support" / "vllm_runs.py"
ROOT = Path(__file__).parents[3]


@functools.cache
def run(kind: str, processes: int = 1) -> dict[str, Any]:
    """Return the results of tests/support/vllm_runs.py."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    launcher = ["-m", "torch.distributed.run", f"--nproc_per_node={processes}", f"--master_port={port}"]
    with tempfile.TemporaryDirectory() as folder:
        ended = subprocess.run(
            [sys.executable, *(launcher if processes > 1 else []), str(PROGRAM), folder, kind],
            cwd=ROOT, capture_output=True, text=True, timeout=1800,
        )  # fmt: skip
    lines = [line for line in ended.stdout.splitlines() if line.startswith('{"same"')]
    assert lines, ended.stdout[-2000:] + ended.stderr[-4000:]
    return json.loads(lines[-1])


@pytest.mark.parametrize(("kind", "processes"), [("lora", 1), ("plain", 2), ("filtered", 1), ("bf16", 1)])
def test_training_with_probes_is_bitwise_training_without_them(kind: str, processes: int) -> None:
    """Compares trained parameters and vLLM's samples on every process."""
    outcome = run(kind, processes)
    assert outcome["same"]
    assert outcome["processes"] == processes
    assert all(value is not None for value in outcome["forward"])


@pytest.mark.parametrize(("kind", "processes"), [("lora", 1), ("plain", 2), ("filtered", 1)])
def test_vllm_samples_from_the_trainers_policy_where_both_compute_in_fp32(kind: str, processes: int) -> None:
    assert run(kind, processes)["largest_difference"] < 1e-4


def test_by_default_vllm_samples_in_bf16_as_the_importance_weights_show() -> None:
    low, high = run("bf16")["ratio"]
    assert 0.8 < low < 1 - 1e-4
    assert 1 + 1e-4 < high < 1.25


def test_bf16_sampling_changes_forward_far_less_than_its_error_bar() -> None:
    """Compared with the same rollouts without the ratios of the trainer's to vLLM's probabilities."""
    outcome = run("bf16")
    pairs = zip(outcome["forward"], outcome["forward_unweighted"], outcome["forward_se"], strict=True)
    assert all(abs(weighed - plain) < 0.2 * stderr for weighed, plain, stderr in pairs)
    assert outcome["forward"] != outcome["forward_unweighted"]


def test_a_resumed_run_ends_bitwise_equal_to_the_uninterrupted_one() -> None:
    outcome = run("lora")
    assert outcome["resumed"]
    assert outcome["forward_resumed"] == outcome["forward"][-1]


def test_prompts_without_mixed_rewards_are_replaced_under_vllm() -> None:
    outcome = run("filtered")
    assert all(filled > 0 for filled in outcome["filled"])
