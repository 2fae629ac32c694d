"""The kernel's pairs sum to the gradient part of δH₁, its entries equal those of single backwards, and runs resume."""

from __future__ import annotations

import dataclasses
import math
import multiprocessing
import os
import signal
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate.utils.other import get_free_port
from analyzed_runs import restored_at
from peft import LoraConfig
from safetensors.torch import load_file
from torch import Tensor
from trainers import L_MAX, trainer_maker
from trl import GRPOTrainer

from rl_training import DrGRPOTrainer
from rl_training.entropy.weights import surrogate_weights
from rl_training.hosts.trl.policy import TrainerPolicy
from rl_training.offline.analysis import analyze
from rl_training.offline.buffers import SampledBuffer, UpdateBuffer, units_of
from rl_training.offline.first_order import TOKEN, predict
from rl_training.offline.kernel.at_checkpoint import add_kernel
from rl_training.offline.kernel.blocks import KernelInputs, KernelRows
from rl_training.offline.kernel.calculate import calculate_kernel, save_tensors
from rl_training.offline.kernel.checks import check_identity
from rl_training.offline.kernel.sketches import cosines
from rl_training.offline.kernel.structure import Structure, headline, load_kernel
from rl_training.offline.restored import RestoredTrainer
from rl_training.offline.settings import (
    EvaluationSettings,
    KernelSettings,
    MemorySettings,
    Settings,
    TruthSettings,
    UpdateSettings,
)
from rl_training.offline.update import make_update
from rl_training.optim.adamw import AdamWState
from rl_training.optim.state import OptimizerView
from rl_training.tasks.arithmetic import arithmetic

NUM_E, NUM_U = 7, 10
FORK = multiprocessing.get_context("fork")
SETTINGS = KernelSettings(memory_gb=0.05, sketch_buckets=64, sketch_repeats=2)  # small, to be quick
LORA = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")


@dataclasses.dataclass
class Case:
    """A trainer that has taken two steps, and the inputs of the kernel for its third."""

    trainer: GRPOTrainer
    restored: RestoredTrainer
    inputs: KernelInputs

    @property
    def parameters(self) -> Mapping[str, torch.nn.Parameter]:
        return self.restored.parameters

    @property
    def optimizer(self) -> OptimizerView:
        return self.restored.optimizer

    def rows(self, microbatch: int = 3) -> KernelRows:
        return KernelRows(self.trainer, self.parameters, microbatch)


def trainer_of(folder: Path, **settings: Any) -> DrGRPOTrainer:
    rows = arithmetic(num_train=64, num_eval=8).train_dataset
    return trainer_maker(folder)(gradient_accumulation_steps=2, train_dataset=rows, **settings)


def case_of(trainer: GRPOTrainer, cold: bool = False) -> Case:
    if cold:
        trainer.create_optimizer_and_scheduler(1)
    else:
        trainer.train()
    trainer.optimizer.zero_grad()
    trainer.current_gradient_accumulation_steps = 1  # restore() sets this too
    policy = TrainerPolicy(trainer)
    restored = RestoredTrainer.of(trainer, Path(), 2, policy)
    of_e, of_u = policy.sample(NUM_E, 0), policy.sample(NUM_U, 1)
    of_u.advantages.copy_(torch.linspace(-0.5, 0.7, NUM_U))
    of_u.advantages[3] = 0.0
    update = make_update(restored, UpdateBuffer(of_u, NUM_U, 1), MemorySettings(4))
    scores = policy.score_rollout(of_e)
    evaluation = SampledBuffer(of_e, of_e.prompt_index, scores, *units_of(scores, 1), rows=(), seed=0, chunk_size=1)
    direction = restored.whole(predict(restored, evaluation, update, 4).direction[TOKEN])
    weights = surrogate_weights(scores.entropies, scores.mask, of_e.prompt_index, "token", "buffer")
    return Case(trainer, restored, KernelInputs.of_step(restored, of_e, weights, direction, of_u, update))


SETTINGS_OF: dict[str, dict[str, Any]] = {
    "full": {"max_grad_norm": 0.05},  # small enough to clip
    "adapter": {"peft_config": LORA, "learning_rate": 1e-3},
    "adapter, checkpointing": {
        "peft_config": LORA, "learning_rate": 1e-3, "gradient_checkpointing": True,
        "gradient_checkpointing_kwargs": {"use_reentrant": False},
    },
    "SGD, clipped": {"optim": "sgd", "learning_rate": 1e-2, "max_grad_norm": 0.02},
    "adapter, first step": {"peft_config": LORA},  # no moments: P is 1/|g|, and some entries of g are nearly 0
}  # fmt: skip


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Case]:
    made: dict[str, Case] = {}

    def get(name: str) -> Case:
        if name not in made:
            trainer = trainer_of(tmp_path_factory.mktemp("kernel"), **SETTINGS_OF[name])
            made[name] = case_of(trainer, cold="first" in name)
        return made[name]

    return get


def calculated(case: Case, folder: Path, settings: KernelSettings = SETTINGS, **more: Any) -> dict[str, Tensor]:
    calculate_kernel(case.rows(), case.inputs, settings, folder, **more)
    return dict(load_kernel(folder).tensors)


@pytest.fixture(scope="module")
def finished(cases: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function that gives the folder of a case's kernel, which is computed once."""
    made: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in made:
            made[name] = tmp_path_factory.mktemp("finished") / "kernel"
            calculated(cases(name), made[name])
        return made[name]

    return get


def in_blocks_of(case: Case, rows: int) -> KernelSettings:
    """Return settings whose budget is just enough for `rows` rows and a microbatch of 3."""
    size = sum(p.numel() for p in case.parameters.values())
    return dataclasses.replace(SETTINGS, memory_gb=(4 * 3 * size + 8 * rows * size + 1) / 1e9)


# --- what it is -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SETTINGS_OF)
def test_pairs_add_up_to_the_gradient_part_of_the_entropy_change(name: str, finished: Any) -> None:
    """The sum over all pairs equals x̄·δθ from ordinary backwards to 1e-5.

    At a first step P is 1/|g|, and terms for nearly zero entries of g cancel. There fp32 keeps about 1e-7 of the sum
    without cancellation, and different orders of summing g differ.
    """
    metadata, first = load_kernel(finished(name)).metadata, "first" in name
    assert float(metadata["identity_error"]) < (5e-7 * float(metadata["cancellation"]) if first else 1e-5)
    rel = 1e-2 if first else 1e-5
    assert float(metadata["pairs_sum"]) == pytest.approx(float(metadata["delta_h/part/gradient"]), rel=rel)
    assert float(metadata["delta_h/part/gradient"]) != 0.0


def test_kernel_rows_keep_training_checkpointing_and_disable_dropout(cases: Any) -> None:
    """Each layer is recomputed in each backward, and every flag is restored."""
    case = cases("adapter, checkpointing")
    layers = [m for m in case.trainer.model.modules() if getattr(m, "gradient_checkpointing", False)]
    calls: list[bool] = []
    rows, inputs = case.rows(), case.inputs  # this also verifies the scorer
    attention = next(m for m in layers if hasattr(m, "self_attn")).self_attn
    handle = attention.register_forward_pre_hook(lambda module, _: calls.append(module.training))
    flags = [m.training for m in case.trainer.model.modules()]
    list(
        rows.logp_and_entropy_gradients(inputs.evaluation, torch.arange(2), inputs.logp_weights, inputs.entropy_weights)
    )
    handle.remove()
    assert calls == [False] * 3  # forward, and once more for each of two backwards
    assert [m.training for m in case.trainer.model.modules()] == flags
    assert any(flags)


def plain_kernels(case: Case) -> tuple[Tensor, Tensor, Tensor]:
    """Compute K, X̃ (with M = κP) and W·δθ of E in fp64, with one backward per sequence and AdamW written out."""
    rows, q = case.rows(), case.inputs
    ones = torch.ones_like(q.update.completion_mask, dtype=torch.float32)

    def of(rollout: Any, weights: Tensor, entropies: Tensor | None = None) -> Tensor:
        gradients = [rows.sum(rollout, torch.tensor([i]), weights, entropies) for i in range(rollout.num_sequences)]
        return torch.stack(gradients).double()

    w_u = of(q.update, ones)
    w_e, x_e = of(q.evaluation, torch.ones_like(q.logp_weights)), of(q.evaluation, q.logp_weights, q.entropy_weights)
    g = -(q.update.advantages.double() @ w_u) / (NUM_U * q.max_length)
    g = g * min(1.0, case.optimizer.max_grad_norm / (float(g.norm()) + 1e-6))
    states = list((case.optimizer.states or {}).values())
    assert all(isinstance(s, AdamWState) for s in states)
    m, v = (torch.cat([getattr(s, key).reshape(-1) for s in states]).double() for key in ("exp_avg", "exp_avg_sq"))
    decayed = [torch.full((p.numel(),), s.weight_decay) for p, s in zip(case.parameters.values(), states, strict=True)]
    theta = torch.cat([p.detach().reshape(-1) for p in case.parameters.values()]).double()
    s = states[0]
    (beta1, beta2), t = s.betas, s.step + 1
    p_of_step = 1.0 / (((beta2 * v + (1 - beta2) * g * g) / (1 - beta2**t)).sqrt() + s.eps)
    metric = s.lr * (1 - beta1) / (1 - beta1**t) * p_of_step
    delta = -s.lr * p_of_step * (beta1 * m + (1 - beta1) * g) / (1 - beta1**t) - s.lr * torch.cat(decayed) * theta
    return w_e * metric @ w_u.T, x_e * metric @ w_u.T, w_e @ delta


@pytest.mark.parametrize("name", ["full", "adapter"])
def test_kernel_entries_equal_those_of_single_backwards_and_plain_adamw(name: str, cases: Any, finished: Any) -> None:
    tensors = load_kernel(finished(name)).tensors
    kernel, entropy_kernel, moves = plain_kernels(cases(name))
    for ours, plain in ((tensors["kernel"], kernel), (tensors["entropy_kernel"], entropy_kernel)):
        assert float((ours - plain).norm() / plain.norm()) < 1e-5
    assert torch.allclose(tensors["products"].sum(dim=1), moves, rtol=1e-4, atol=1e-4 * float(moves.abs().max()))


def test_the_kernel_does_not_depend_on_blocks_and_microbatches(cases: Any, finished: Any, tmp_path: Path) -> None:
    case, whole = cases("adapter"), load_kernel(finished("adapter")).tensors
    parts = calculated(case, tmp_path / "parts", in_blocks_of(case, 2))
    calculate_kernel(case.rows(4), case.inputs, SETTINGS, tmp_path / "fours")
    for other in (parts, load_file(tmp_path / "fours" / "kernel.safetensors")):
        assert other.keys() == whole.keys()
        for key, value in whole.items():
            assert float((other[key] - value).double().norm()) <= 1e-5 * float(value.double().norm()), key


def test_rows_held_in_bf16_change_the_kernel_by_less_than_a_hundredth(
    cases: Any, finished: Any, tmp_path: Path
) -> None:
    exact = load_kernel(finished("full")).tensors["kernel"]
    rounded = calculated(cases("full"), tmp_path / "bf16", dataclasses.replace(SETTINGS, dtype="bfloat16"))["kernel"]
    assert 1e-6 < float((rounded - exact).norm() / exact.norm()) < 1e-2


def test_sketches_approximate_the_cosines_of_the_kernel(cases: Any, tmp_path: Path) -> None:
    """Compared between E and U, where the kernel is exact. A cosine's error is 1/√4096."""
    tensors = calculated(cases("adapter"), tmp_path, KernelSettings())
    exact = tensors["kernel"] / (tensors["sq_norms"][:, None] * tensors["update_sq_norms"]).sqrt()
    values, stderr = cosines(
        tensors["sketches"], tensors["update_sketches"], tensors["sq_norms"], tensors["update_sq_norms"]
    )
    assert float((values - exact).square().mean().sqrt()) < 2 / 64
    assert float(((values - exact).abs() <= 2.36 * stderr).double().mean()) > 0.85


def test_gradients_are_stored_on_request(cases: Any, tmp_path: Path) -> None:
    case = cases("adapter")
    tensors = calculated(case, tmp_path, dataclasses.replace(SETTINGS, store_gradients=True))
    w_u = torch.cat([load_file(path)["W"] for path in sorted(tmp_path.glob("gradients-update-*"))]).double()
    g = -(case.inputs.update.advantages.double() @ w_u) / (NUM_U * L_MAX)
    assert len(w_u) == NUM_U
    assert float(g.norm()) > 0
    assert len(list(tmp_path.glob("gradients-e*"))) == 6  # W and x of E, three microbatches each
    assert tensors["kernel"].shape == (NUM_E, NUM_U)


# --- a run that is killed, or shared ----------------------------------------------------------------------------------


class Killed(KernelRows):
    """Is killed in the second block, without a chance to clean up."""

    left = 6

    def logp_gradients(self, rollout: Any, rows: Tensor) -> Tensor:
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        self.left -= 1
        return super().logp_gradients(rollout, rows)


def test_a_killed_run_resumes_after_its_last_block(cases: Any, tmp_path: Path, capsys: Any) -> None:
    """It is killed by SIGKILL in a separate process. The result is then bitwise the same."""
    case = cases("adapter")
    settings = in_blocks_of(case, 3)
    whole = calculated(case, tmp_path / "whole", settings)
    folder = tmp_path / "killed"
    dying = Killed(case.trainer, case.parameters, 3)
    child = FORK.Process(target=calculate_kernel, args=(dying, case.inputs, settings, folder))
    child.start()
    child.join(timeout=100)
    assert child.exitcode == -signal.SIGKILL
    assert {path.name for path in folder.iterdir()} == {"block-00000.safetensors"}
    longer = dataclasses.replace(case.inputs, max_length=L_MAX + 1)
    with pytest.raises(ValueError, match=f"^{folder} .*max_length: "):
        calculate_kernel(case.rows(), longer, settings, folder)
    again = Killed(case.trainer, case.parameters, 3)
    again.left = 8  # the microbatches of U in the other two blocks
    calculate_kernel(again, case.inputs, settings, folder)
    assert again.left == 0
    calculated_again = load_kernel(folder).tensors
    assert {path.name for path in folder.iterdir()} == {"kernel.safetensors"}
    assert calculated_again.keys() == whole.keys()
    for key, value in whole.items():
        assert torch.equal(calculated_again[key], value), key
    assert "3 blocks of 3 rows" in capsys.readouterr().out


def test_the_folder_of_another_kernel_is_refused(cases: Any, finished: Any) -> None:
    case = cases("adapter")
    longer = dataclasses.replace(case.inputs, max_length=L_MAX + 1)
    of_u = case.inputs.update
    otherwise_taught = dataclasses.replace(
        case.inputs, update=dataclasses.replace(of_u, advantages=2 * of_u.advantages)
    )
    for other, named in ((longer, "max_length"), (otherwise_taught, "advantages")):
        with pytest.raises(ValueError, match=f"^{finished('adapter')} .*{named}: "):
            calculate_kernel(case.rows(), other, SETTINGS, finished("adapter"))


def share(rank: int, port: int, case: Case, folder: Path) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=2, timeout=timedelta(seconds=60))
    calculate_kernel(case.rows(), case.inputs, SETTINGS, folder)
    dist.destroy_process_group()


def test_two_processes_compute_the_kernel_of_one(cases: Any, finished: Any, tmp_path: Path) -> None:
    case, stored = cases("adapter"), load_kernel(finished("adapter")).tensors
    port = get_free_port()
    processes = [FORK.Process(target=share, args=(rank, port, case, tmp_path / "two")) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(timeout=100)
    assert [process.exitcode for process in processes] == [0, 0]
    two = load_kernel(tmp_path / "two")
    assert float(two.metadata["identity_error"]) < 1e-5
    assert two.metadata["rows_per_block"] == "4"
    for key, value in stored.items():
        assert float((two.tensors[key] - value).double().norm()) <= 1e-5 * float(value.double().norm()), key


def refused(rank: int, port: int, case: Case, folder: Path) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=2, timeout=timedelta(seconds=60))
    with pytest.raises(ValueError, match=f"^{folder} .*max_length"):
        calculate_kernel(case.rows(), case.inputs, SETTINGS, folder)


def test_a_block_of_another_kernel_is_refused_by_all_processes_at_the_start(cases: Any, tmp_path: Path) -> None:
    save_tensors({}, tmp_path / "block-00001.safetensors", {"max_length": "25"})
    port = get_free_port()
    processes = [FORK.Process(target=refused, args=(rank, port, cases("adapter"), tmp_path)) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(timeout=100)
    assert [process.exitcode for process in processes] == [0, 0]
    assert [path.name for path in tmp_path.iterdir()] == ["block-00001.safetensors"]


# --- over training ----------------------------------------------------------------------------------------------------


def test_fixed_texts_are_kept_over_checkpoints_and_estimate_only_their_own_policys_entropy(run, tmp_path) -> None:
    asked = Settings(
        EvaluationSettings(prompts=6), UpdateSettings(prompts=2), truth=TruthSettings(enabled=False), conditioning=False
    )
    fixed, folders = dataclasses.replace(SETTINGS, source="fixed"), [tmp_path / step / "kernel" for step in "12"]
    for step, folder in enumerate(folders, start=1):
        restored = restored_at(run, step)
        analysis = analyze(restored, asked)
        analysis.add(add_kernel(restored, analysis, fixed, folder))
        assert {key for key, value in analysis.results.items() if math.isnan(value)} == analysis.reasons.keys()
    assert "another step's policy" in analysis.reasons["kernel/share_coupling"]
    first, second = (Structure.read(folder) for folder in folders)
    assert [row["hash"] for row in first.evaluation] == [row["hash"] for row in second.evaluation]
    assert [row["reward"] for row in first.evaluation] == [row["reward"] for row in second.evaluation]
    assert all(a["logp"] != b["logp"] for a, b in zip(first.evaluation, second.evaluation, strict=True))
    for s in (first, second):
        assert float(s.kernel.metadata["identity_error"]) < 1e-5
    assert math.isfinite(headline(first)["kernel/share_coupling"])
    of_second = headline(second)
    assert math.isnan(of_second["kernel/share_coupling"])
    assert of_second["kernel/logp_correlation"] > 0.9


# --- every run checks itself ------------------------------------------------------------------------------------------


class Forgetful(KernelRows):
    """Loses part of the gradient, like a hook on a module that is used twice."""

    def logp_gradients(self, rollout: Any, rows: Tensor) -> Tensor:
        result = super().logp_gradients(rollout, rows)
        result[:, : result.shape[1] // 10] = 0.0
        return result


class Mixing(KernelRows):
    """Swaps the gradients of a batch's rows, so only their sum is right."""

    def logp_and_entropy_gradients(
        self, rollout: Any, rows: Tensor, logp_weights: Tensor, entropy_weights: Tensor
    ) -> Any:
        for result in super().logp_and_entropy_gradients(rollout, rows, logp_weights, entropy_weights):
            yield result.roll(1, dims=0)


@pytest.mark.parametrize(("broken", "message"), [(Forgetful, "differs from the batch gradient"), (Mixing, "its own")])
def test_wrong_rows_end_the_run(broken: type[KernelRows], message: str, cases: Any, tmp_path: Path) -> None:
    case = cases("full")
    with pytest.raises(ValueError, match=message):
        calculate_kernel(broken(case.trainer, case.parameters, 4), case.inputs, SETTINGS, tmp_path)
    assert not (tmp_path / "kernel.safetensors").exists()


def test_a_kernel_that_lost_a_row_is_refused(cases: Any, finished: Any) -> None:
    case, tensors = cases("full"), dict(load_kernel(finished("full")).tensors)
    value = float(load_kernel(finished("full")).metadata["pairs_sum"])
    by_rows = torch.tensor([value, 50 * abs(value)], dtype=torch.float64)
    metadata = check_identity(tensors, case.inputs, by_rows, value, 1e-4)
    assert float(metadata["identity_error"]) < 1e-12
    tensors["entropy_kernel"][2] = 0.0
    with pytest.raises(ValueError, match="rows of the kernel"):
        check_identity(tensors, case.inputs, by_rows, value, 1e-4)
