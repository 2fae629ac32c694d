"""What all tests share: no network hubs, one thread, trainers with quick steps, and the order of the files."""

import gc
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from shortcuts import spare_trainings

gc.disable()  # until everything is imported: see pytest_collection_finish
# Libraries read these when they are imported. No test module has been imported yet.
TRACKIO = tempfile.TemporaryDirectory(prefix="trackio-")
os.environ["TRACKIO_DIR"] = TRACKIO.name
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("RL_TRAINING_STRICT", "1")  # an error in a probe fails a test
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("WANDB_MODE", "offline")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # no test compiles, and importing the compiler takes a second


@pytest.fixture
def make_trainer(tmp_path: Path) -> Callable[..., Any]:
    """Return a function that makes trainers on the shipped model and task: see support/trainers.py."""
    from trainers import trainer_maker  # not above: the process that only distributes the tests need not import torch

    return trainer_maker(tmp_path)


@pytest.fixture(scope="module")
def stand_in(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with questions and a model that answers some of them: see support/qwen_stand_in.py."""
    from qwen_stand_in import taught

    return taught(tmp_path_factory.getbasetemp())


# The slowest files, slowest first. One that started last would keep a single process busy while the others are idle.
LONG = [
    "test_processes", "test_sharding", "test_fold_placement", "test_command_line", "test_wheel",
    "test_hostile_records", "test_docs", "test_resume", "test_ground_truth", "test_simple_probe", "test_attach",
    "test_batches_of_subclasses", "test_loggers", "test_offline", "test_training_with_interventions",
    "test_sequence_kernel", "test_secrets", "test_bitwise", "test_measured_loop", "test_buffer", "test_verifier",
    "test_real_scale", "test_attached_run", "test_interventions_probe", "test_config", "test_token_classes",
    "test_gpu_benchmark", "test_several_turns", "test_train", "test_waiting", "test_measured_probe", "test_kl_bound",
    "test_offline_probe", "test_terms_check", "test_report", "test_evaluate", "test_sweep", "test_restored",
    "test_offline_real", "test_probe_contract", "test_guard", "test_examples", "test_residual", "test_launcher",
    "test_score_check", "test_alerts", "test_foreign_runs", "test_gns", "test_gns_in_training", "test_token_advantages",
    "test_cuda", "test_branch", "test_probe_states", "test_offline_ends", "test_values",
    "test_reward_gradient", "test_tasks_gsm8k", "test_bias", "test_compare", "test_floors", "test_trl_features",
    "test_kernel_structure", "test_report_interventions", "test_scorer", "test_sync", "test_tiny",
]  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the tests of LONG first, file by file; all others keep their order."""
    items.sort(key=lambda item: LONG.index(item.path.stem) if item.path.stem in LONG else len(LONG))


def pytest_collection_finish() -> None:
    """Once everything is imported, cache what trainings would repeat, and start the server of forks."""
    if not os.environ.get("PLAIN_TESTS"):  # make test-plain
        spare_trainings()
    gc.enable()
    if "forks" in sys.modules:
        sys.modules["forks"].start_server()
