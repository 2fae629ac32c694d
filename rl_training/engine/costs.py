"""Measure what probes cost: seconds, as the device spends them, and bytes."""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping

import torch

from rl_training.vocabulary import ENGINE


class Costs:
    """What it costs to measure a step. On a GPU, time is taken by events: the host waits for none before `end_step`.

    Made when training begins: the first step's time runs from then on, that of each later one from the last one's end.
    """

    def __init__(self, device: torch.device) -> None:
        self.step_seconds = 0.0  # of the last step, measured or not
        self.seconds: Mapping[str, float] = {}  # of measuring it, by name
        self.num_bytes = 0  # of all vectors held at once, in the last measured step
        self._last_step_end = time.perf_counter()
        self._device = device
        self._current: dict[str, float] = defaultdict(float)
        self._events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []
        self._is_running = False

    @contextlib.contextmanager
    def timed(self, name: str = ENGINE) -> Iterator[None]:
        """Add the time spent inside the context to `name`. Inside another such context, the outer one's name counts."""
        if self._is_running:
            yield
            return
        self._is_running = True
        try:
            if self._device.type == "cuda":
                with self._timed_by_events(name):
                    yield
            else:
                start = time.perf_counter()
                yield
                self._current[name] += time.perf_counter() - start
        finally:
            self._is_running = False

    @contextlib.contextmanager
    def _timed_by_events(self, name: str) -> Iterator[None]:
        events = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        stream = torch.cuda.current_stream(self._device)  # may differ from the process's current device
        events[0].record(stream)
        yield
        events[1].record(stream)
        self._events.append((name, *events))

    def end_step(self, num_bytes: int | None) -> None:
        """Keep the seconds since the last call as those of the step. `num_bytes` is None if it was not measured."""
        for name, start, end in self._events:
            end.synchronize()
            self._current[name] += start.elapsed_time(end) / 1e3
        self.seconds = dict(self._current)
        self._current.clear()
        self._events.clear()
        self.num_bytes = self.num_bytes if num_bytes is None else num_bytes
        now = time.perf_counter()
        self.step_seconds = now - self._last_step_end
        self._last_step_end = now

    def by_name(self) -> dict[str, float]:
        """Return the last step's costs as metrics, with their share of the step's time.

        `engine_seconds` is what the probes share: hooks, fold gradients, the entropy gradient, checks.
        """
        costs = {f"{name}_seconds": seconds for name, seconds in self.seconds.items()}
        share = sum(self.seconds.values()) / self.step_seconds
        costs |= {"fraction_of_step": share, "buffer_bytes": float(self.num_bytes)}
        return costs | {"step_time": self.step_seconds}
