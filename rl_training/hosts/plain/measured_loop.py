"""`measured_loop`: checks a plain loop, describes it to the engine, and returns the calls that measure it."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from rl_training.engine.loop_spec import LoopSpec
from rl_training.engine.probe import Probe
from rl_training.hosts.plain import refusals
from rl_training.hosts.plain.calls import MeasuredLoop
from rl_training.hosts.policy import HostPolicy, Sample
from rl_training.hosts.probes import as_probes
from rl_training.options import named_arguments
from rl_training.parallel.fsdp import FullyShard
from rl_training.parallel.ranks import all_ranks
from rl_training.parallel.sharding import Shard
from rl_training.policy.scorer import Scorer
from rl_training.records.writer import Records
from rl_training.statistics.unavailable import Unavailable
from rl_training.step.reasons import Fixes, Reasons, reason_of_loop

NO_SAMPLE = Unavailable(
    "no_sample",
    "fresh responses are needed, and the loop does not say how to sample them",
    fix="measured_loop(..., sample=...)",
)
DR_GRPO_FIX = "measured_loop(dr_grpo=True) says that the loss is Dr-GRPO's alone"
FIXES = Fixes(
    batch_setting="measured_loop(microbatch_size={size}, microbatches={count})",
    steps_setting="measured_loop(microbatches={count})",
    num_folds_setting="{probe}(num_folds={folds})",
    fresh_responses="give sample=... to measured_loop on all",
)


@named_arguments
def measured_loop(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    probes: Sequence[Probe | str] | Probe | str,
    *,
    responses_per_prompt: int,
    microbatch_size: int,
    microbatches: int,
    max_grad_norm: float | None = None,
    records: Records | str | Path | None = None,
    temperature: float = 1.0,
    dr_grpo: bool = False,
    autocast: Callable[[], AbstractContextManager[Any]] | None = None,
    sample: Sample | None = None,
    decode: Callable[[Tensor], str] | None = None,
    sampling_mismatch: str = "",
    target_kl_share: float | str | None = None,
) -> MeasuredLoop:
    """Return a context in which probes measure a training loop in plain PyTorch: one process, DDP or FSDP2.

        with measured_loop(model, optimizer, probes, …) as measured:
            for number in range(1, steps + 1):
                with measured.step(number) as metrics:
                    for part in microbatches:
                        logps, entropies = …                     # from your own forward pass
                        measured.microbatch(part, logps, entropies)
                        …                                        # compute the loss from these logps; backward
                    measured.gradients_ready()                   # before the gradient is clipped
                    …                                            # clip, optimizer.step(), optimizer.zero_grad()

    When a step ends, `metrics` holds what was measured, and the same line is written to the records. To leave a step
    out (because of a gradient spike, for example), call `measured.skip_step()` instead of `optimizer.step()`.

    `backward` sums the gradients of a step's microbatches: divide the loss by their number, as for one large batch.

    Args:
        model: A Hugging Face causal language model, one sharded by `fully_shard`, or DDP or `torch.compile` around one.
        optimizer: A torch optimizer, or accelerate's wrapper of one. No GradScaler: train in bf16 or fp32.
        probes: What to measure: probe objects, or names such as "simple".
        responses_per_prompt: Responses that each prompt of a step has.
        microbatch_size: Sequences of one forward and backward on this rank, the same in all microbatches.
        microbatches: Microbatches of one optimizer step on this rank.
        max_grad_norm: The threshold of the loop's own `clip_grad_norm_`. None if it does not clip.
        records: Where rank 0 writes metrics.jsonl and probes.jsonl: a folder or `Records`. None writes nothing. Where
            another training lies, the next free number, my_run-2/logs. A loop that resumes continues in its own.
        temperature: The sampling temperature, by which the loop divides the logits.
        dr_grpo: Whether the loss is meant to be Dr-GRPO's: −A log π summed over all tokens, divided by a constant.
            Probes read the loss's actual weights; where these differ from Dr-GRPO's, the reason names this setting.
        autocast: Returns a new autocast context for the loop's forward pass. None for no autocast.
        sample: `sample(n)` returns n fresh responses, each to a random prompt. torch is seeded before, and its random
            state restored after. Under FSDP2 a call runs equally many passes on all ranks. None: no fresh ones.
        decode: Returns the text of a tensor of token ids. If None, the ids themselves are recorded.
        sampling_mismatch: Why the responses are not samples of the policy (top-p, say): most estimates are then nan.
        target_kl_share: The KL divergence of each step as a share of the policy's entropy: "auto", which is 1e-2, or a
            number. The learning rate of each step is set to meet it. None keeps the loop's rate. No other setting
            changes training.

    Raises:
        UserError: With what to change, if probes would corrupt training or cannot measure it.
    """
    probes = as_probes(probes)
    module = _inside_wrappers(model)
    refusals.refuse_scaled_optimizer(optimizer)
    optimizer = getattr(optimizer, "optimizer", optimizer)
    counts = {"responses_per_prompt": responses_per_prompt, "microbatch_size": microbatch_size}
    refusals.refuse_impossible_settings({**counts, "microbatches": microbatches}, temperature, max_grad_norm)
    refusals.refuse_what_cannot_be_measured(model, module, optimizer)
    is_sharded = isinstance(module, FSDPModule)
    scorer = Scorer(module, temperature, autocast=autocast or contextlib.nullcontext, run_inside_forward=is_sharded)
    loop = LoopSpec(
        responses_per_prompt=responses_per_prompt,
        microbatch_size=microbatch_size,
        microbatches=microbatches,
        shard=(FullyShard if is_sharded else Shard)(module, optimizer, max_grad_norm),
        policy=HostPolicy(module, scorer, microbatch_size, sample, decode),
        ranks=all_ranks(),
        reasons=Reasons(
            other_policy=reason_of_loop(sampling_mismatch),
            cannot_sample=None if sample is not None else NO_SAMPLE,
        ),
        fixes=dataclasses.replace(FIXES, dr_grpo=DR_GRPO_FIX if dr_grpo else ""),
    )
    return MeasuredLoop(probes, loop, records, target_kl_share)


def _inside_wrappers(model: nn.Module) -> nn.Module:
    """Return the model inside DDP and `torch.compile`, whichever is outside."""
    if isinstance(model, DistributedDataParallel):
        return _inside_wrappers(model.module)
    inside = getattr(model, "_orig_mod", None)  # of torch.compile
    return _inside_wrappers(inside) if isinstance(inside, nn.Module) else model
