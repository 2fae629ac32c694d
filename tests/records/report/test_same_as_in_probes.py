"""Names, codes and defaults that the report repeats, because the probes that have them import torch."""

from __future__ import annotations

import inspect

from rl_training.probes import measured as measured_probe
from rl_training.probes.interventions import InterventionsProbe
from rl_training.probes.running_sum import SOME_STEPS
from rl_training.probes.sampler import TRUNCATED_SAMPLER
from rl_training.records.report import predictions
from rl_training.records.report.interventions import section as interventions
from rl_training.records.report.sections import sampler
from rl_training.records.table import measured
from rl_training.statistics.calibration import MIN_PAIRS
from rl_training.statistics.jackknife import FEW_FOLDS, FEW_PROMPTS, MIN_UNITS_OFFLINE


def test_the_report_repeats_codes_and_names_as_the_probes_have_them() -> None:
    assert SOME_STEPS.code == measured.SOME_STEPS
    assert TRUNCATED_SAMPLER.code == sampler.TRUNCATED
    assert (FEW_FOLDS.code, FEW_PROMPTS.code) == predictions.FEW
    assert (measured.SPAN, measured.REWARD_SUM) == (measured_probe.STEPS, measured_probe.REWARD_SUM)
    assert MIN_PAIRS == MIN_UNITS_OFFLINE


def test_the_report_assumes_the_defaults_of_the_probe_of_interventions() -> None:
    arguments = inspect.signature(InterventionsProbe).parameters
    assert {name: arguments[name].default for name in interventions.DEFAULTS} == interventions.DEFAULTS
