"""Options of a probe that mean nothing are refused by name, before anything is trained."""

from __future__ import annotations

import re
from typing import Any

import pytest

from rl_training import Probe
from rl_training.probes import (
    GradientNoiseScaleProbe,
    GroundTruthProbe,
    InterventionsProbe,
    MeasuredStepProbe,
    SimpleEntropyProbe,
)


@pytest.mark.parametrize(
    ("probe", "options", "said"),
    [
        (SimpleEntropyProbe, {"responses_per_prompt": 0}, "at least 1"),
        (SimpleEntropyProbe, {"error_decay": 1.0}, "must lie in"),
        (SimpleEntropyProbe, {"every": 0}, "every=0 must be at least 1"),
        (MeasuredStepProbe, {"responses_per_prompt": 0}, "measured: responses_per_prompt=0 must be at least 1"),
        (MeasuredStepProbe, {"error_decay": 1.0}, "measured: error_decay=1.0 must lie in [0, 1)"),
        (GradientNoiseScaleProbe, {"decay": 1.0}, "between 0 and 1"),
        (GradientNoiseScaleProbe, {"decay": 0.0}, "between 0 and 1"),
        (GradientNoiseScaleProbe, {"split_prompts": -1}, "or more"),
        (GroundTruthProbe, {"sequences": 1}, "sequences"),
        (GroundTruthProbe, {"seed": -1}, "seed"),
        (InterventionsProbe, {"which": ["bonus", "clipcov"]}, "did you mean clip_cov"),
        (InterventionsProbe, {"which": []}, "names none"),
        (InterventionsProbe, {"which": ["lr", "lr"]}, "has lr twice"),
        (InterventionsProbe, {"decay": 0.0}, "must lie in (0, 1]"),
    ],
)
def test_options_that_mean_nothing_are_refused(probe: type[Probe], options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        probe(**options)
