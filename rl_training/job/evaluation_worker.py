"""The evaluation of one checkpoint in its own process, and its result.

That process imports this file, and with it only what it needs: no trainer, no report.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import rl_training.job.silence  # noqa: F401

from transformers.utils import logging

from rl_training.evaluation.policy import load_policy
from rl_training.evaluation.responses import Response, generate_responses
from rl_training.evaluation.workers import Send, run_in_process
from rl_training.job.evaluation_plan import EvaluationPlan, make


@dataclass
class CheckpointResponses:
    """The result of one checkpoint: its responses, the time they took, or why there are none."""

    responses: list[Response] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    reason: str = ""


def ask(
    plan: EvaluationPlan,
    checkpoint: Path,
    device: str,
    share: int = 0,
    num_shares: int = 1,
    on_responses: Callable[[int], None] | None = None,
) -> CheckpointResponses:
    """Returns the result of one checkpoint, from its own process."""
    answers = CheckpointResponses()

    def receive(content: list[Response] | dict[str, float]) -> None:
        if isinstance(content, dict):
            answers.seconds = content
        else:
            answers.responses += content
            if on_responses:
                on_responses(len(content))

    start = time.perf_counter()
    work = functools.partial(_answer, plan, checkpoint, device, share, num_shares)
    answers.reason = run_in_process(work, receive, imports=[__name__])
    answers.seconds["total"] = time.perf_counter() - start
    return answers


def _answer(plan: EvaluationPlan, checkpoint: Path, device: str, share: int, num_shares: int, send: Send) -> None:
    """Sends the responses of this checkpoint, batch by batch, and then the seconds that it all took."""
    logging.disable_progress_bar()
    seconds: dict[str, float] = {}
    start = time.perf_counter()
    model = plan.config.get("model") or {}
    policy = load_policy(
        checkpoint,
        functools.partial(make, "model", model) if model else None,
        with_reference=plan.kl,
        temperature=plan.temperature,
        max_completion_length=plan.max_completion_length,
        device=device,
        dtype=model.get("dtype", "float32"),
        quantization=model.get("quantization"),
    )
    task = plan.task()
    seconds["load"] = time.perf_counter() - start
    for responses in generate_responses(
        policy, task, plan.sampling.batches(share, num_shares), plan.sampling.seed, seconds
    ):
        send(responses)
    send(seconds)


def join(parts: list[CheckpointResponses]) -> CheckpointResponses:
    """Returns the merged results of all processes; times are those of the slowest."""
    reasons = [f"process {rank}: {part.reason}" for rank, part in enumerate(parts) if part.reason]
    names = {name for part in parts for name in part.seconds}
    seconds = {name: max(part.seconds.get(name, 0.0) for part in parts) for name in sorted(names)}
    return CheckpointResponses([r for part in parts for r in part.responses], seconds, "; ".join(reasons))
