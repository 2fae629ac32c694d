"""The states during training: initialized, passed to each measurement, kept once a step is verified."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rl_training.engine.context import StepContext
from rl_training.engine.probe import Probe, Reading
from rl_training.errors import UserError
from rl_training.parallel.state_tensors import tensors_by_name
from rl_training.statistics.estimate import Estimate
from rl_training.statistics.unavailable import Unavailable
from rl_training.step.needs import Need


class ProbeStates:
    """Holds the state of each probe by its name, and checks what probes return.

    A step that fails once its gradients are ready, and is retried, is measured again. A state that comes with
    predictions is then still that of the step before. One without predictions is kept at once, so it knows the step
    already.

    Raises:
        UserError: A checkpoint cannot store the state of a probe.
    """

    def __init__(self, probes: Sequence[Probe]) -> None:
        self._probes = probes
        self.values = self.initial()
        tensors_by_name(self.values)

    def initial(self) -> dict[str, Any]:
        """Return the states at the start of a training run."""
        return {probe.name: probe.init() for probe in self._probes}

    def measure(self, probe: Probe, ctx: StepContext) -> Reading:
        """Return the probe's reading before the step."""
        reading = self._checked(probe, "measure", probe.measure(ctx, self.values[probe.name]))
        # Without predictions the new state is kept in any case, so the old one need not stay in memory as well.
        if not reading.predicted:
            self.values[probe.name] = reading.state
        return reading

    def after_step(self, probe: Probe, ctx: StepContext, reading: Reading) -> Reading:
        """Return the probe's reading after the step."""
        complete = self._checked(probe, "after_step", probe.after_step(ctx, reading))
        if not complete.estimates:
            raise UserError(
                f"probe {probe.name!r} returned nothing at step {ctx.step.number}: return nan with a reason instead"
            )
        return complete

    def commit(self, readings: Mapping[str, Reading], reason: Unavailable | None) -> dict[str, Reading]:
        """Store the states of a step, and return its final readings.

        Args:
            readings: From the probes that measured the step, by name.
            reason: Set if the step did not follow the optimizer's formula. Predictions then become nan, and a state
                that came with a prediction is dropped.
        """
        is_valid = {name: reason is None or not reading.predicted for name, reading in readings.items()}
        self.values |= {name: reading.state for name, reading in readings.items() if is_valid[name]}
        return {
            name: reading if reason is None else reading.without_predictions(reason)
            for name, reading in readings.items()
        }

    def _checked(self, probe: Probe, method: str, reading: Any) -> Reading:
        """Return a probe's reading if it is valid. UserError, naming the probe, if not."""
        rule = f"probe {probe.name!r}: {method} must return"
        if not isinstance(reading, Reading):
            raise UserError(f"{rule} a Reading, and returned {_described(reading)}")
        for estimates in (reading.predicted, reading.measured):
            _require_estimates(estimates, probe, rule)
        duplicates = reading.predicted.keys() & reading.measured.keys()
        if duplicates:
            raise UserError(f"{rule} an estimate once, and {min(duplicates)!r} is both predicted and measured")
        if reading.predicted and Need.ENTROPY_GRADIENT not in probe.needs:
            raise UserError(
                f"{rule} predictions only with needs = Need.ENTROPY_GRADIENT, with which a step is verified: set it, "
                "or return them as measured"
            )
        _require_same_kind(reading.state, self.values[probe.name], rule)
        return reading


def _require_estimates(estimates: Any, probe: Probe, rule: str) -> None:
    """Raise UserError unless these are estimates by name, as a trainer's logs can hold them beside its own."""
    if not isinstance(estimates, Mapping):
        raise UserError(f"{rule} Estimates by name, and returned {_described(estimates)}")
    for name, estimate in estimates.items():
        if not isinstance(estimate, Estimate):
            raise UserError(f"{rule} Estimates by name, and {name!r} is {_described(estimate)}")
        if not isinstance(estimate.value, int | float) or not isinstance(estimate.stderr, int | float):
            raise UserError(f"{rule} numbers, and {name!r} has a {type(estimate.value).__name__}: float(...)")
        if "/" not in name:  # the trainer's own metrics ("reward", "kl", "loss") have none
            raise UserError(f"{rule} names with a slash, and {name!r} has none: {probe.name}/{name}, say")


def _require_same_kind(state: Any, before: Any, rule: str) -> None:
    """Raise UserError unless a state can take the place of the one before."""
    if type(state) is not type(before):
        raise UserError(
            f"{rule} the next state too, {_described(before)} as from init(), and Reading(..., state=...) has "
            f"{_described(state)}"
        )
    if isinstance(before, Mapping) and state.keys() != before.keys():
        other = min(map(str, state.keys() ^ before.keys()))
        raise UserError(f"{rule} a state with the names that init() gives, and differs in {other!r}")


def _described(value: Any) -> str:
    kind = type(value).__name__
    return "None" if value is None else f"{'an' if kind[0] in 'aeiou' else 'a'} {kind}"
