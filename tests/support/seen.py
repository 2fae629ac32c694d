"""Probes that remember: the steps they saw, and what they said of each."""

from __future__ import annotations

from typing import Any

from rl_training import Estimate, Probe


class Seen(Probe):
    """Keeps the steps that it sees."""

    name = "seen"

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.steps: list[Any] = []
        self.contexts: list[Any] = []

    def prepare(self, ctx: Any) -> None:
        self.steps.append(ctx.step)
        self.contexts.append(ctx)
        super().prepare(ctx)

    def results(self) -> dict[str, Estimate]:
        return {f"{self.name}/step": Estimate(float(self.steps[-1].number))}


class Kept(Seen):
    """Mixed into a probe, before it: keeps its answers, too."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.all: list[dict[str, Estimate]] = []

    def results(self) -> dict[str, Estimate]:
        self.all.append(dict(super(Seen, self).results()))
        return self.all[-1]
