"""The phases of an analysis. Each has a progress bar, a duration, and the settings to lower if memory runs out."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

from tqdm.auto import tqdm

from rl_training.errors import UserError, is_short_of_memory

Progress = Callable[[int], None]  # called with the number of sequences done since the last call
LOWER = {  # what to do if a phase runs out of memory
    "load": "keep frozen weights in fewer bits, as the run did: adapter=lora model.dtype=bfloat16, or adapter=qlora",
    "sample U": "lower memory.generation_size, or trainer.max_completion_length",
    "sample E": "lower memory.generation_size, or for scoring batch.microbatch_size",
    "gradient of U": "lower memory.microbatch_size, set memory.offload=true, trainer.gradient_checkpointing=true",
    "gradient of E": "lower memory.microbatch_size, set trainer.gradient_checkpointing=true",
    "truth": "lower batch.microbatch_size, the number of sequences scored at once",
    "conditioning": "set conditioning=false",
    "kernel": "lower kernel.memory_gb, or kernel.microbatch_size",
    "sweep": "lower memory.microbatch_size, or for scoring batch.microbatch_size",
}


class Phases:
    """Shows a progress bar for each phase of an analysis, and records how many seconds it took."""

    def __init__(self, shown: bool) -> None:
        self.seconds: dict[str, float] = {}
        self._shown = shown

    @contextlib.contextmanager
    def __call__(self, name: str, total: int) -> Iterator[Progress]:
        start = time.perf_counter()
        with tqdm(total=total, desc=f"{name:13}", unit="seq", disable=not self._shown, leave=True) as bar:

            def advance(count: int) -> None:
                bar.update(min(count, total - bar.n))

            with explain_out_of_memory(name):
                yield advance
            advance(total)
        self.seconds[name] = time.perf_counter() - start


@contextlib.contextmanager
def explain_out_of_memory(phase: str) -> Iterator[None]:
    """Turn an out-of-memory error inside the context into a UserError that names the settings to lower."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:  # torch's errors are RuntimeErrors
        if not is_short_of_memory(error):
            raise
        raise UserError(f"out of memory in phase {phase!r}: {LOWER[phase]}") from error


def silent(count: int) -> None:
    """Ignore progress."""
