"""Measure the seconds that probes cost, as the device spends them."""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch

ENGINE = "engine"  # charged with all time that no single probe causes, whichever probes there are


@dataclass(frozen=True)
class Costs:
    """What it cost to measure a step."""

    seconds: Mapping[str, float] = field(default_factory=dict)  # by name
    num_bytes: int = 0  # of all vectors held at once

    def by_name(self, step_seconds: float) -> dict[str, float]:
        """Return the costs as metrics, with their share of a step that took `step_seconds`.

        `engine_seconds` is what the probes share: hooks, fold gradients, the entropy gradient, checks.
        """
        costs = {f"{name}_seconds": seconds for name, seconds in self.seconds.items()}
        share = sum(self.seconds.values()) / step_seconds
        return costs | {"fraction_of_step": share, "buffer_bytes": float(self.num_bytes)}


class Clock:
    """Adds up seconds by name. On a GPU it uses events, so the host does not wait for the GPU until `read`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._seconds: dict[str, float] = defaultdict(float)
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
                self._seconds[name] += time.perf_counter() - start
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

    def read(self) -> dict[str, float]:
        """Return the seconds by name since the last call."""
        for name, start, end in self._events:
            end.synchronize()
            self._seconds[name] += start.elapsed_time(end) / 1e3
        seconds, self._seconds, self._events = dict(self._seconds), defaultdict(float), []
        return seconds
