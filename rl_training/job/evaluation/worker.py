"""Generates the responses of one checkpoint in a separate process.

The process imports this file, so the file imports only what the process needs: no trainer, no report.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import rl_training.job.silence  # noqa: F401

from transformers.utils import logging

from rl_training.evaluation.options import EvaluationOptions
from rl_training.evaluation.responses import Batch, Response, generate_responses
from rl_training.evaluation.workers import Send, run_in_process
from rl_training.job.objects.checkpoint_policy import load_policy
from rl_training.job.objects.make import make, make_task


@dataclass
class CheckpointResponses:
    """The result of one checkpoint: its responses and the seconds they took, or the reason why there are none."""

    responses: list[Response] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    reason: str = ""

    def add(self, responses: Sequence[Response], seconds: Mapping[str, float]) -> None:
        """Add the responses of one batch, with the seconds that they took by phase."""
        self.responses += responses
        for phase, taken in seconds.items():
            self.seconds[phase] = self.seconds.get(phase, 0.0) + taken


@dataclass(frozen=True)
class Work:
    """What a worker process generates, from settings only: models and data are made in the process."""

    model: dict[str, Any]  # the run's first model; {} if it is not known
    data: dict[str, Any]
    options: EvaluationOptions
    checkpoint: Path
    device: str
    batches: Sequence[Batch]

    def run(self, on_responses: Callable[[int], object]) -> CheckpointResponses:
        """Generate the responses in a process of their own, and return them.

        Args:
            on_responses: Called with the number of responses after each batch.
        """
        result = CheckpointResponses()

        def receive(sent: tuple[list[Response], dict[str, float]]) -> None:
            result.add(*sent)
            on_responses(len(sent[0]))

        start = time.perf_counter()
        result.reason = run_in_process(
            self._send_responses, receive, imports=[__name__], if_out_of_memory="lower the option batch_size"
        )
        result.seconds["total"] = time.perf_counter() - start
        return result

    def _send_responses(self, send: Send) -> None:
        """Send the responses of each batch with the seconds that they took, by phase; loading is sent first."""
        logging.disable_progress_bar()
        start = time.perf_counter()
        policy = load_policy(
            self.checkpoint,
            functools.partial(make, "model", self.model) if self.model else None,
            with_reference=self.options.kl and bool(self.model),
            temperature=self.options.temperature,
            max_completion_length=self.options.max_completion_length,
            device=self.device,
            dtype=self.model.get("dtype", "float32"),
            quantization=self.model.get("quantization"),
        )
        task = make_task(self.data)
        send(([], {"load": time.perf_counter() - start}))
        for responses_and_seconds in generate_responses(policy, task, self.batches, self.options.seed):
            send(responses_and_seconds)


def merge_results(parts: Sequence[CheckpointResponses]) -> CheckpointResponses:
    """Merge the results of all processes. Times are those of the slowest process."""
    if len(parts) == 1:
        return parts[0]
    reasons = [f"process {rank}: {part.reason}" for rank, part in enumerate(parts) if part.reason]
    names = sorted({name for part in parts for name in part.seconds})
    seconds = {name: max(part.seconds.get(name, 0.0) for part in parts) for name in names}
    return CheckpointResponses([r for part in parts for r in part.responses], seconds, "; ".join(reasons))
