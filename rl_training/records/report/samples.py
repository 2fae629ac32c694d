"""What the model said over training: some of the recorded sequences, for the page."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rl_training.records.rollout_file import iterate_rollouts

STEPS = 5  # shown, from the first recorded one to the last
OF_A_STEP = 3  # sequences shown, of different prompts


def samples_over_time(logs: Path) -> list[Mapping[str, Any]]:
    """Returns the first responses to the first prompts of a few recorded steps; none where none were recorded."""
    found: dict[int, dict[int, Mapping[str, Any]]] = {}
    for row in iterate_rollouts(logs):
        of_step = found.setdefault(int(row["step"]), {})
        if len(of_step) < OF_A_STEP:
            of_step.setdefault(int(row["prompt_index"]), row)
    steps = sorted(found)
    if len(steps) > STEPS:
        steps = [steps[round(i * (len(steps) - 1) / (STEPS - 1))] for i in range(STEPS)]
    return list(itertools.chain.from_iterable(found[step].values() for step in steps))
