"""Meaningless options of a probe are refused by name before training."""

from __future__ import annotations

import inspect
import math
from typing import Any

import pytest

from rl_training import Probe, UserError, probes
from rl_training.hosts.trl.settings.recorded import settings_of_probes
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
        (SimpleEntropyProbe, {"responses_per_prompt": 0}, r"^simple: responses_per_prompt=0 .*\b1\b"),
        (SimpleEntropyProbe, {"error_decay": 1.0}, r"error_decay=1\.0 .*\[0, 1\)"),
        (SimpleEntropyProbe, {"every": 0}, r"^simple: every=0 .*\b1\b"),
        (MeasuredStepProbe, {"responses_per_prompt": 0}, r"^measured: responses_per_prompt=0 .*\b1\b"),
        (MeasuredStepProbe, {"error_decay": 1.0}, r"^measured: error_decay=1\.0 .*\[0, 1\)"),
        (GradientNoiseScaleProbe, {"decay": 1.0}, r"^gns: decay=1\.0 .*\(0, 1\)"),
        (GradientNoiseScaleProbe, {"decay": 0.0}, r"^gns: decay=0\.0 .*\(0, 1\)"),
        (GroundTruthProbe, {"sequences": 1}, r"^ground_truth: sequences=1 .*\b2\b"),
        (GroundTruthProbe, {"sequences": 100_000_000}, r"^ground_truth: sequences=100000000 .*\b65536\b"),
        (InterventionsProbe, {"which": ["bonus", "clipcov"]}, r"clipcov.*\bclip_cov\b"),
        (InterventionsProbe, {"which": []}, r"which=\[\] .*which=\["),
        (InterventionsProbe, {"which": ["lr", "lr"]}, r"\blr\b"),
        (InterventionsProbe, {"decay": 0.0}, r"decay=0\.0 .*\(0, 1\]"),
    ],
)
def test_invalid_options_are_refused(probe: type[Probe], options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        probe(**options)


NO_NUMBERS = ["abc", math.nan, math.inf, -1, [1], True]
NO_FLAGS = ["abc", None, 1, 0.0]
MEANINGLESS: dict[str, list[Any]] = {  # by option, meaningless values for every probe that has it
    "every": [*NO_NUMBERS, None, 1.5, 0],
    "responses_per_prompt": [*NO_NUMBERS, None, 1.5, 0],
    "num_folds": [*NO_NUMBERS, 1.5, 0],
    "seed": [*NO_NUMBERS, None, 1.5],
    "sequences": [*NO_NUMBERS, None, 1.5, 1],
    "split_prompts": [*NO_NUMBERS, None, 1.5],
    "decay": [*NO_NUMBERS, None, 1.5],
    "error_decay": [*NO_NUMBERS, 1.5],
    "per_sequence": NO_FLAGS,
    "offload": NO_FLAGS,
    "compile": ["abc", 1, [True]],
    "steps": [*NO_NUMBERS, None, 1.5, 0, 2],
    "numerics": NO_FLAGS,
    "top_tokens": NO_FLAGS,
    "unclipped": NO_FLAGS,
    "keep_gathered": NO_FLAGS,
    "fold_dtype": ["abc", None, 1, ["float32"]],
    "which": [[], None, 1, "bonus", [None]],
}
BOUNDARY: dict[str, Any] = {  # by option, the last value that is accepted
    "every": 1,
    "responses_per_prompt": 1,
    "num_folds": 1,
    "seed": 0,
    "sequences": 65536,
    "split_prompts": 0,
    "error_decay": 0.0,
}
PROBES = [probe for name, probe in vars(probes).items() if name.endswith("Probe") and name != "Probe"]


@pytest.mark.parametrize("probe", PROBES)
def test_an_invalid_value_is_refused_in_one_line_by_every_probe(probe: type[Probe]) -> None:
    _, *options = inspect.signature(probe.__init__).parameters
    assert "every" in options
    assert MEANINGLESS.keys() >= {*options}, "give an option that is new its meaningless values"
    for option in options:
        for value in MEANINGLESS[option]:
            with pytest.raises(UserError) as refused:
                probe(**{option: value})
            assert option in str(refused.value), (option, value)
            assert "\n" not in str(refused.value)


@pytest.mark.parametrize("probe", PROBES)
def test_a_boundary_value_is_accepted(probe: type[Probe]) -> None:
    ends = BOUNDARY | ({"decay": 1} if probe is InterventionsProbe else {})
    _, *options = inspect.signature(probe.__init__).parameters
    made = probe(**{name: value for name, value in ends.items() if name in options})
    assert settings_of_probes([made])[made.name].keys() == {"class", *options}, "the run's settings lack one"


@pytest.mark.parametrize("probe", probes.BUILT_IN.values())
def test_a_probe_says_whether_num_folds_is_one_of_its_arguments(probe: type[Probe]) -> None:
    assert probe.takes_num_folds == ("num_folds" in inspect.signature(probe).parameters)
