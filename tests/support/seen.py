"""Probes that keep the steps they see and the estimates they return."""

from __future__ import annotations

from typing import Any

from rl_training import Estimate, Probe, Reading


class Seen(Probe):
    """Keeps the steps that it sees."""

    name = "seen"

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.kept_steps: list[Any] = []
        self.contexts: list[Any] = []

    def measure(self, ctx: Any, state: Any) -> Reading:
        self.kept_steps.append(ctx.step)
        self.contexts.append(ctx)
        return Reading(measured={f"{self.name}/step": Estimate(float(ctx.step.number))}, state=state)


class Kept(Seen):
    """Mixin to put before a probe's class: keeps the steps, the final estimates of each, and the latest state."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.all: list[dict[str, Estimate]] = []
        self.state: Any = None

    def measure(self, ctx: Any, state: Any) -> Reading:
        self.kept_steps.append(ctx.step)
        self.contexts.append(ctx)
        return super(Seen, self).measure(ctx, state)

    def after_step(self, ctx: Any, reading: Reading) -> Reading:
        reading = super().after_step(ctx, reading)
        self.all.append(reading.estimates)
        self.state = reading.state
        return reading
