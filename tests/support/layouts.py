"""Trains on given rollouts in a plain loop, under every layout that torch has. The ranks of test_sharding.py run this.

Fold k always consists of rows 8k to 8k + 7 of a step's 32 rows, or of half of these, no matter over which processes and
microbatches they are spread. So every layout measures the same. A case is a dictionary with `kind` (one, ddp, fsdp2)
and the OPTIONS that it changes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from plain_loop import CLIP, loss_of, rollout_of, scores_of
from shared_rollouts import G
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_param_group
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

from rl_training import Estimate, Probe, Reading, Rollout, measured_loop
from rl_training.engine.context import StepContext
from rl_training.models.load import load_tiny
from rl_training.policy.rollout import take_rows
from rl_training.probes import (
    EffectiveSampleSizeProbe,
    GradientNoiseScaleProbe,
    InterventionsProbe,
    MeasuredStepProbe,
    SamplerProbe,
    SimpleEntropyProbe,
    TokenClassesProbe,
)

STEPS, FOLD, PROMPTS = 2, 8, 8  # optimizer steps; sequences per fold; prompts per step
ROWS = torch.arange(4 * G, 12 * G)  # 8 of the 16 given prompts: 4 with long responses, 4 with short ones
OPTIONS: dict[str, Any] = {
    "kind": "one",
    "microbatch": 8,  # sequences per backward on each process
    "dtype": torch.float64,
    "sync": "each",  # gradients are reduced at each microbatch, or only at the last one
    "reshard": True,  # FSDP2 frees gathered weights after the forward pass
    "lora": False,
    "row": False,  # train only matrices with one row: under FSDP2 the first process holds all of them
    "checkpointing": False,
    "probes": True,
    "sampler": False,  # another policy sampled the responses
    "shuffled": False,  # each prompt of a process is spread over its microbatches
    "num_folds": None,
    "keep_gathered": False,
    "few": False,  # only probes that use the step's own folds, and one intervention
    "numerics": False,  # only probes that score single rows again
}


class ScoringProbe(Probe):
    """Scores one row with a graph and never calls backward, as a custom probe may do."""

    name = "scoring"

    def measure(self, ctx: StepContext, state: Any) -> Reading:
        step = ctx.step
        logps = ctx.policy.score(step.batch.rollout, torch.arange(1)).logps
        return Reading(measured={"scoring/logps": Estimate(float(logps.sum()))})


def probes(case: dict[str, Any]) -> list[Any]:
    if not case["probes"]:
        return []
    if case["numerics"]:
        return [SamplerProbe(numerics=True), ScoringProbe()]
    few: list[Any] = [
        SimpleEntropyProbe(per_sequence=True, num_folds=case["num_folds"], keep_gathered=case["keep_gathered"]),
        GradientNoiseScaleProbe(split_prompts=0 if case["few"] else PROMPTS),
        EffectiveSampleSizeProbe(),
        InterventionsProbe(["lr:0.5"] if case["few"] else ["bonus:0.5", "nsr", "lr:0.5"], every=1),
    ]
    if case["few"]:
        return few
    return [*few, MeasuredStepProbe(responses_per_prompt=2), SamplerProbe(), TokenClassesProbe(every=1)]


def model_of(case: dict[str, Any]) -> nn.Module:
    torch.manual_seed(0)
    model = load_tiny()[0].to(case["dtype"])
    if case["lora"] or case["row"]:
        from peft import LoraConfig, get_peft_model

        rank = 1 if case["row"] else 4
        model = get_peft_model(model, LoraConfig(r=rank, target_modules="all-linear", task_type="CAUSAL_LM"))
        for name, param in model.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(param, std=0.02).requires_grad_(not case["row"])
    if case["checkpointing"]:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model.train()


def wrapped(model: Any, case: dict[str, Any]) -> Any:
    layers = [module for name, module in model.named_modules() if name.endswith(("layers.0", "layers.1"))]
    assert layers
    if case["kind"] == "fsdp2":
        for module in (*layers, model):
            fully_shard(module, reshard_after_forward=case["reshard"])
        return model
    return DistributedDataParallel(model) if case["kind"] == "ddp" else model


def rows_of(case: dict[str, Any], rank: int, world: int) -> Iterator[Tensor]:
    """Yield the rows of each microbatch of a process."""
    size = case["microbatch"]
    count = PROMPTS * G // world // size
    rows = []
    for m in range(count):
        if case["kind"] == "ddp" and case["num_folds"] == world:  # a fold is what a process has
            first = (rank * count + m) * size
        elif count * size // FOLD * world >= PROMPTS * G // FOLD and size >= FOLD:  # each process has whole folds
            first = (m * world + rank) * size
        else:  # the rows of a fold are contiguous across all processes
            first = m * world * size + rank * size
        rows.append(torch.arange(first, first + size))
    if case["shuffled"]:  # the first microbatch gets the first responses of each prompt
        rows = list(torch.cat(rows).view(-1, count, G // count).transpose(0, 1).reshape(count, -1))
    yield from rows


def by_another(policy: nn.Module, rollout: Rollout, number: int) -> Rollout:
    """Return the rollout as if a noisy version of the policy had sampled it."""
    with torch.no_grad():
        logps = scores_of(policy, rollout)[0]
    noise = torch.randn(logps.shape, generator=torch.Generator().manual_seed(number), dtype=logps.dtype)
    return dataclasses.replace(rollout, sampling_logps=logps + 0.05 * noise)


def train(case: dict[str, Any], rank: int, world: int) -> dict[str, Any]:
    """Train, and return each step's estimates and a digest of this process's weights, optimizer and random numbers."""
    case = OPTIONS | case
    policy = model_of(case)
    rollouts = {number: take_rows(rollout_of(number), ROWS) for number in range(1, STEPS + 1)}
    if case["sampler"]:
        rollouts = {number: by_another(policy, rollout, number) for number, rollout in rollouts.items()}
    model = wrapped(policy, case)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=3e-4, eps=1e-5, weight_decay=0.1)
    count = PROMPTS * G // world // case["microbatch"]
    scored_rows = []
    torch.manual_seed(1 + rank)
    with measured_loop(
        model, optimizer, probes(case), responses_per_prompt=G, microbatch_size=case["microbatch"],
        microbatches=count, max_grad_norm=CLIP, dr_grpo=True,
    ) as measured, num_gathers(measured) as gathers:  # fmt: skip
        for number in range(1, STEPS + 1):
            rollout = rollouts[number]
            with measured.step(number) as metrics:
                for m, rows in enumerate(rows_of(case, rank, world)):
                    part, last = take_rows(rollout, rows), m == count - 1
                    if case["kind"] == "fsdp2":
                        model.set_requires_gradient_sync(last or case["sync"] == "each")
                    alone = case["kind"] == "ddp" and not (last or case["sync"] == "each")
                    with model.no_sync() if alone else contextlib.nullcontext():
                        logps, entropies = scores_of(model, part)
                        measured.microbatch(part, logps, entropies.detach())
                        loss_of(logps, part, count).backward()
                measured.gradients_ready()
                metrics["grad_norm"] = float(clip_grad_norm_(trained, CLIP))
                optimizer.step()
                optimizer.zero_grad()
            scored_rows.append({name: (e.value, e.stderr, e.reason) for name, e in measured.latest.items()})
        sent, during = measured._driver._started().passes.reduction.bytes_sent, num_groups()
    return {
        "estimates": scored_rows,
        "digest": digest(trained, optimizer),
        "sent": sent,
        "groups": (during, num_groups()),
        "gathers": gathers,
    }


@contextlib.contextmanager
def num_gathers(measured: Any) -> Iterator[list[int]]:
    """Yield a list that gets, for each context in which FSDP2 keeps weights gathered, how often a module's were."""
    shard, counts = measured._driver._started().passes.reduction.shard, []
    gather, gathered_once = _fsdp_param_group.foreach_all_gather, shard.gathered_once

    def counted(*args: Any) -> Any:
        counts[-1:] = [count + 1 for count in counts[-1:]]
        return gather(*args)

    @contextlib.contextmanager
    def keeping() -> Iterator[None]:
        with gathered_once(), mock.patch.object(_fsdp_param_group, "foreach_all_gather", counted):
            counts.append(0)
            yield

    with mock.patch.object(shard, "gathered_once", keeping):
        yield counts


def num_groups() -> int:
    """Return the number of process groups in this process."""
    return len(dist.distributed_c10d._world.pg_map) if dist.is_initialized() else 0


def digest(trained: list[Any], optimizer: torch.optim.Optimizer) -> str:
    sha = hashlib.sha256(torch.get_rng_state().numpy().tobytes())
    for param in trained:
        for value in (param, *(value for value in optimizer.state[param].values() if torch.is_tensor(value))):
            local = value.to_local() if hasattr(value, "to_local") else value
            sha.update(local.detach().contiguous().numpy().tobytes())
    return sha.hexdigest()


def worker(rank: int, folder: Path, cases: dict[str, dict[str, Any]]) -> None:
    """Train all cases one after another as one of the processes, and save the result of each."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    world = dist.get_world_size()
    for name, case in cases.items():
        torch.save(train(case, rank, world), folder / f"{name}_{world}_{rank}.pt")
