"""Trains with verl's own worker on given rollouts, below Ray: python tests/hosts/verl/runs.py FOLDER WORLD RUN...

This uses all of verl from `train_mini_batch` down: worker, engine, loss, clipping, AdamW, scheduler, metrics. A RUN is
a name in RUNS, with `_bare` appended for a run without probes. Each process gets a contiguous share of the prompts, and
rank r writes FOLDER/RUN_WORLD/r.pt. Everything is imported once, then processes are forked and do all runs in turn.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import logging
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from rl_training import Reading, Rollout

sys.path.insert(0, str(Path(__file__).parents[2] / "support"))
os.environ |= {
    "VERL_USE_EXTERNAL_MODULES": "cpu_platform", "VERL_PLATFORM": "cpu", "VERL_ENGINE_DEVICE": "cuda",
    "WG_BACKEND": "ray", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "GLOO_SOCKET_IFNAME": "lo",
    "TOKENIZERS_PARALLELISM": "false", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0",
}  # fmt: skip

import torch
import torch.distributed as dist
import torch.multiprocessing
from shared_rollouts import L_MAX, MICROBATCH, PROMPTS, STEPS, G, given_rollout, of_another_sampler, rewards_of
from tensordict import TensorDict
from torch import Tensor
from verl.trainer.config import CheckpointConfig
from verl.utils import tensordict_utils
from verl.workers.config import (
    FSDPActorConfig,
    FSDPEngineConfig,
    FSDPOptimizerConfig,
    HFModelConfig,
    TrainingWorkerConfig,
)
from verl.workers.engine_workers import TrainingWorker
from verl.workers.utils.losses import ppo_loss
from verl.workers.utils.padding import no_padding_2_padding

import rl_training.hosts.verl  # noqa: F401, it registers the engine
from rl_training.engine.probe import Probe
from rl_training.hosts.verl import measurement
from rl_training.hosts.verl.batch import read_rollout, response_entropies
from rl_training.hosts.verl.message import BATCH_KEY, Message
from rl_training.hosts.verl.training_settings import TrainingSettings
from rl_training.models.load import load_tiny
from rl_training.statistics.estimate import Estimate
from rl_training.step.needs import Need

CLIP, LR, EPS = 0.05, 3e-4, 1e-5  # every step is clipped; the first one is not a sign that rounding could flip
INTERVENTIONS = ["bonus:0.5", "nsr", "lr:0.5"]
PROBES: dict[str, dict[str, Any]] = {
    "simple": {"_target_": "rl_training.probes.SimpleEntropyProbe", "per_sequence": True},
    "measured": {"_target_": "rl_training.probes.MeasuredStepProbe"},
    "sampler": {"_target_": "rl_training.probes.SamplerProbe"},
    "gns": {"_target_": "rl_training.probes.GradientNoiseScaleProbe", "split_prompts": PROMPTS},
    "ess": {"_target_": "rl_training.probes.EffectiveSampleSizeProbe"},
    "covariance": {"_target_": "rl_training.probes.CovariancePredictorProbe"},
    "interventions": {"_target_": "rl_training.probes.InterventionsProbe", "which": INTERVENTIONS, "every": 1},
    "recorder": {"_target_": "runs.Recorder"},
}
FEW = {"simple": {"_target_": "rl_training.probes.SimpleEntropyProbe"}, **{n: PROBES[n] for n in ("ess", "recorder")}}
# Differences from the default: microbatches of 8 sequences, fp32, padded, one step per rollout.
RUNS: dict[str, dict[str, Any]] = {
    "plain": {"probes": PROBES},
    "sampled": {"probes": PROBES, "other_sampler": True},
    "checkpointing": {"checkpointing": True},
    "packed": {"packed": True, "probes": PROBES},
    "dynamic": {"dynamic": 200},
    "groups": {"dynamic": 200, "group": G},
    "bf16": {"dtype": "bf16"},
    "two_steps": {"minis": 2},
    "two_epochs": {"epochs": 2, "lr": 1e-6},  # the second epoch is nearly on-policy
    "entropies": {"calculate_entropy": True},
    "bonus": {"calculate_entropy": True, "entropy_coeff": 0.01},
    "sync_each": {"use_no_sync": False},
    "all_at_once": {"packed": True, "dynamic": 200, "group": G, "checkpointing": True, "dtype": "bf16"},
    "lora": {"lora": 4, "probes": {"simple": FEW["simple"] | {"every": 2}}},
    "ended": {"probes": {**FEW, "ground_truth": {"_target_": "rl_training.probes.GroundTruthProbe", "every": 1}}},
    "skipped": {"not_finite": 2},
}
RUNS["bonus"]["folder"] = "entropies"  # as a second training into the folder of another one
RUNS["resumed"] = {**RUNS["ended"], "begins": STEPS, "folder": "ended"}  # its last step, from the checkpoint of `ended`


class Recorder(Probe):
    """Keeps this process's entries of each step's mean gradient, and the same computed from the folds."""

    name = "recorder"
    needs = Need.FOLD_GRADIENTS

    def measure(self, ctx: Any, state: Any) -> Reading:
        step = ctx.step
        gradients, share = step.gradients, (step.batch.fold_sizes / step.batch.fold_sizes.sum()).float()
        mean = {name: gradient.clone() for name, gradient in gradients.mean.items()}  # before clipping
        kept = {"mean": mean, "by_fold": {}, "sizes": [len(rows) for rows in step.batch.microbatch_rows]}
        kept["prompts"] = step.batch.rollout.prompt_index.tolist()
        if gradients.by_fold is not None:
            by_fold = gradients.layout.by_name(gradients.by_fold.means())
            kept["by_fold"] = {name: share @ vectors for name, vectors in by_fold.items()}
        KEPT.append(kept)
        return Reading(measured={"recorder/steps": Estimate(float(len(KEPT)))})


KEPT: list[dict[str, Any]] = []


class Said(logging.Handler):
    """Keeps the messages of the log."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


SAID = Said()
logging.getLogger("rl_training").addHandler(SAID)


def read_untested(*args: Any) -> Rollout:
    """Return a microbatch's sequences, of which it is not tested who drew them: given ones were not drawn."""
    return dataclasses.replace(read_rollout(*args), untested=True)


measurement.read_rollout = read_untested  # type: ignore[assignment]


def nested(tensor: Tensor, mask: Tensor) -> Tensor:
    """Return the masked entries of each row as a nested tensor, as verl's trainer passes them on."""
    rows = [row[kept] for row, kept in zip(tensor, mask.bool(), strict=True)]
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


def data_of(step: int, rank: int, world: int) -> TensorDict:
    """Return this rank's share of a rollout in verl's format. The uids are the prompts' numbers."""
    rollout = given_rollout(step)
    rollout["rewards"] = rewards_of(rollout)
    share = PROMPTS * G // world
    rank_rows = {n: v[rank * share : (rank + 1) * share] for n, v in rollout.items() if n != "num_items_in_batch"}
    prompt, mask = rank_rows["prompt_mask"], rank_rows["completion_mask"]
    tokens = torch.cat([prompt, mask], dim=1)
    last = torch.nn.functional.one_hot(mask.sum(dim=1) - 1, mask.shape[1])
    data = {
        "prompts": nested(rank_rows["prompt_ids"], prompt),
        "responses": nested(rank_rows["completion_ids"], mask),
        "response_mask": nested(mask, mask),
        "loss_mask": nested(mask, mask),
        "input_ids": nested(torch.cat([rank_rows["prompt_ids"], rank_rows["completion_ids"]], dim=1), tokens),
        "position_ids": nested((tokens.cumsum(dim=1) - 1).clamp(min=0), tokens),
        "advantages": nested(rank_rows["advantages"].unsqueeze(1) * mask, mask),
        "rm_scores": nested(rank_rows["rewards"].unsqueeze(1) * last, mask),
    }
    batch = TensorDict(data, batch_size=share)
    tensordict_utils.assign_non_tensor_stack(batch, "uid", [str((rank * share + i) // G) for i in range(share)])
    return batch


def new_worker(model: Path, run: dict[str, Any]) -> TrainingWorker:
    """Return verl's worker with a fresh engine in it."""
    model_config = HFModelConfig(
        path=str(model), load_tokenizer=False, use_remove_padding=run.get("packed", False),
        enable_gradient_checkpointing=run.get("checkpointing", False), lora_rank=run.get("lora", 0),
        override_config={"attn_implementation": "sdpa"},
    )  # fmt: skip
    precision = {"param_dtype": run.get("dtype", "fp32"), "reduce_dtype": "fp32", "buffer_dtype": "fp32"}
    dynamic = run.get("dynamic", 0)
    engine = FSDPEngineConfig(
        strategy="fsdp2", mixed_precision=precision, use_torch_compile=False, use_dynamic_bsz=dynamic > 0,
        max_token_len_per_gpu=dynamic, micro_batch_size_per_gpu=MICROBATCH, infer_micro_batch_size_per_gpu=MICROBATCH,
        infer_max_token_len_per_gpu=dynamic, use_no_sync_for_gradient_accumulation=run.get("use_no_sync", True),
    )  # fmt: skip
    optimizer = FSDPOptimizerConfig(
        lr=run.get("lr", LR), weight_decay=0.1, betas=(0.9, 0.999), clip_grad=CLIP, total_training_steps=10,
        override_optimizer_config={"eps": EPS},
    )  # fmt: skip
    actor = FSDPActorConfig(
        strategy="fsdp2", rollout_n=G, ppo_micro_batch_size_per_gpu=MICROBATCH, use_dynamic_bsz=dynamic > 0,
        loss_agg_mode=run.get("loss", "seq-mean-token-sum-norm"), loss_scale_factor=L_MAX, clip_ratio=0.2,
        entropy_coeff=run.get("entropy_coeff", 0.0), fsdp_config=engine, model_config=model_config,
    )  # fmt: skip
    worker = TrainingWorker(
        TrainingWorkerConfig(
            model_type="language_model", model_config=model_config, engine_config=engine, optimizer_config=optimizer,
            checkpoint_config=CheckpointConfig(),
        )
    )  # fmt: skip
    worker.reset()
    worker.set_loss_fn(functools.partial(ppo_loss, config=actor))
    return worker


def message(folder: Path, step: int, run: dict[str, Any]) -> Message:
    """Return what the trainer would send with this rollout."""
    if "folder" in run:
        folder = folder.with_name(f"{run['folder']}_{dist.get_world_size()}")
    training: TrainingSettings = {
        "probes": run.get("probes", FEW), "folder": str(folder / "logs"), "rollouts_every": 1,
        "recorded": {"verl": {"actor": {"entropy_coeff": run.get("entropy_coeff", 0.0)}}}, "responses_per_prompt": G,
        "has_plain_advantages": True, "sampling_mismatch": "", "max_response_length": L_MAX, "end_tokens": [3],
        "whole_prompts_fix": "the fix of verl's trainer",
    }  # fmt: skip
    return {"training": training, "rollout": {"number": step, "is_fresh": True}}


def take_step(worker: TrainingWorker, data: TensorDict, run: dict[str, Any], about: Message | None) -> Any:
    """Take the steps on one rollout, and return verl's metrics."""
    common = {"temperature": 1.0, "calculate_entropy": run.get("calculate_entropy", False)}
    tensordict_utils.assign_non_tensor(data, **common, force_group_size=run.get("group", 1))
    scored = data.clone()
    tensordict_utils.assign_non_tensor(scored, compute_loss=False, global_token_num=None)
    logps = no_padding_2_padding(tensordict_utils.get(worker.infer_batch(scored), "log_probs"), data).detach()
    lengths = data["responses"].offsets().diff()
    mask = torch.arange(logps.shape[1]) < lengths.unsqueeze(1)
    data["old_log_probs"] = nested(logps, mask)
    if run.get("other_sampler"):
        ids = data["responses"].to_padded_tensor(0)
        data["rollout_log_probs"] = nested(of_another_sampler(logps, ids), mask)
    size = PROMPTS * G // run.get("minis", 1)
    tensordict_utils.assign_non_tensor(
        data, global_batch_size=size, mini_batch_size=size, epochs=run.get("epochs", 1), seed=1,
        dataloader_kwargs={"shuffle": False}, compute_loss=True,
    )  # fmt: skip
    if about is not None:
        tensordict_utils.assign_non_tensor(data, **{BATCH_KEY: about})
    return tensordict_utils.get(worker.train_mini_batch(data), "metrics")


def whole_weights(worker: TrainingWorker) -> dict[str, Tensor]:
    state = worker.engine.module.state_dict()
    return {n: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone() for n, p in state.items()}


def train(name: str, folder: Path, model: Path) -> dict[str, Any]:
    """Train one run, and return its results on this rank."""
    kind = name.removesuffix("_bare")
    run, rank, world = RUNS[kind], dist.get_rank(), dist.get_world_size()
    KEPT.clear()
    SAID.messages.clear()
    torch.manual_seed(0)
    worker = new_worker(model, run)
    metrics, started = [], time.perf_counter()
    is_timed = []  # whether the time counts as measuring's, of each computation that is made for probes alone

    def watched_entropies(*args: Any) -> Tensor:
        is_timed.append(worker.engine._measurement.driver.costs._is_running)
        return response_entropies(*args)

    measurement.response_entropies = watched_entropies
    if run.get("begins"):
        worker.load_checkpoint(str(folder.parent / f"ended_{world}" / "checkpoint"))
    for step in range(run.get("begins", 1), STEPS + 1):
        about = None if name != kind else message(folder, step, run)
        data = data_of(step, rank, world)
        if run.get("not_finite") == step:
            data["advantages"].values()[: int(data["advantages"].offsets()[1])] = torch.inf  # in the first response
        metrics.append(take_step(worker, data, run, about))
        if kind == "ended" and step == STEPS - 1:
            worker.save_checkpoint(str(folder / "checkpoint"), global_step=step)
    measured = worker.engine._measurement
    if measured is not None:
        measured.claim.release()  # as the end of a process does
    return {
        "parameters": whole_weights(worker), "metrics": metrics, "kept": list(KEPT), "said": list(SAID.messages),
        "sizes": [] if measured is None else measured._loop.sizes,
        "latest": {} if measured is None else dict(measured._writer.latest),
        "seconds": (time.perf_counter() - started) / STEPS, "is_timed": is_timed,
    }  # fmt: skip


def one_rank(rank: int, folder: Path, world: int, names: list[str], store: str) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world)}
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    for name in names:
        run_folder = folder / f"{name}_{world}"
        run_folder.mkdir(parents=True, exist_ok=True)
        torch.save(train(name, run_folder, folder / "model"), run_folder / f"{rank}.pt")
    dist.barrier()
    os._exit(0)


def main() -> None:
    folder, world, names = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
    if not (folder / "model").exists():
        load_tiny()[0].save_pretrained(folder / "model")
    gc.freeze()
    with tempfile.TemporaryDirectory() as store:
        torch.multiprocessing.start_processes(
            one_rank, args=(folder, world, names, f"{store}/store"), nprocs=world, start_method="fork"
        )


if __name__ == "__main__":
    sys.modules["runs"] = sys.modules["__main__"]  # so that the recorder writes into this module's KEPT
    main()
