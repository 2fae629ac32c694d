"""Claims on the warnings about missing estimates while training runs."""

from __future__ import annotations

from typing import Any

import pytest

from rl_training import Estimate
from rl_training.engine.step_result import StepResult
from rl_training.entropy.prediction import TOO_FAR
from rl_training.hosts.step_warnings import StepWarnings
from rl_training.statistics.unavailable import Unavailable


def test_a_warning_of_many_missing_estimates_names_three(caplog: pytest.LogCaptureFixture) -> None:
    """The warning comes once, at the second step without them."""
    missing = {f"a/{number}": Estimate.missing("no reference") for number in range(5)}
    warnings = StepWarnings("allow longer ones")
    for step in (1, 2, 3):
        warnings.warn(step, StepResult(1.0, estimates={"probe": missing}))
    assert [line.message for line in caplog.records] == ["not measured: a/0, a/1, a/2 and 2 more: no reference"]


def test_a_reason_with_a_number_is_reported_once_for_the_estimates_of_all_probes(caplog: Any) -> None:
    warnings = StepWarnings("allow longer ones")
    for step, ess in ((1, 0.1), (2, 0.2), (3, 0.3)):
        missing = Estimate.missing(TOO_FAR.formatted(ess=ess, least=0.5))
        warnings.warn(step, StepResult(1.0, estimates={"one": {"a": missing}, "other": {"b": missing}}))
        assert [line.message.split(": ")[1] for line in caplog.records] == ["a, b"] * (step > 1)
    assert "sample size is 0.20" in caplog.text


def test_each_reason_is_reported_with_its_own_estimates(caplog: Any) -> None:
    warnings = StepWarnings("allow longer ones")
    backward, measured = (Unavailable(code, "nothing is known yet") for code in ("first_step", "no_earlier_weights"))
    for step in (1, 2):
        estimates = {"one": {"a": Estimate.missing(backward), "b": Estimate.missing(measured)}}
        warnings.warn(step, StepResult(1.0, estimates=estimates))
    assert [line.message for line in caplog.records] == [f"not measured: a: {backward}", f"not measured: b: {measured}"]
