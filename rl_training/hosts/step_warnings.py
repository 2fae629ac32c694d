"""Warns about steps while training runs: of missing estimates, of names that two probes share, of equal rewards."""

from __future__ import annotations

import itertools
import logging
import math
from collections import Counter
from collections.abc import Mapping

from rl_training.engine.step_result import StepResult
from rl_training.hosts.equal_rewards import equal_rewards_warning
from rl_training.parallel.ranks import all_ranks
from rl_training.statistics.estimate import Estimate

logger = logging.getLogger(__name__)

MAX_NAMED_ESTIMATES = 3  # missing estimates that a warning names; the report lists all of them


class StepWarnings:
    """Warns about each thing once in a training, on rank 0.

    Args:
        longer_responses: Advice: what lets responses get longer in this loop.
    """

    def __init__(self, longer_responses: str) -> None:
        self._longer_responses = longer_responses
        self._has_warned_of_equal_rewards = False
        self._num_missing_steps = Counter[str]()  # steps with missing estimates, by reason
        self._probe_of: dict[str, str] = {}  # the probe that each estimate's name belongs to
        self._sharing: set[tuple[str, str]] = set()  # probes with a name in common

    def begin(self) -> None:
        """Begin a training."""
        self._has_warned_of_equal_rewards = False
        self._num_missing_steps.clear()
        self._probe_of.clear()
        self._sharing.clear()

    def warn(self, number: int, result: StepResult) -> None:
        """Warn about a step that has ended, by its number. Collective if a probe measured it."""
        if not self._has_warned_of_equal_rewards:
            self._warn_of_equal_rewards(number, result)
        self._warn_of_missing(result.estimates)
        self._warn_of_shared_names(result.estimates)

    def _warn_of_equal_rewards(self, number: int, result: StepResult) -> None:
        """Warn if all responses of the step earned the same reward, so that nothing is learned."""
        ranks = all_ranks()
        if not result.rollouts or (ranks.count > 1 and not result.is_measured):
            return
        warning = equal_rewards_warning(result.rollouts, ranks, self._longer_responses)
        self._has_warned_of_equal_rewards = bool(warning)
        if warning and ranks.number == 0:
            logger.warning(f"step {number}: {warning}")

    def _warn_of_missing(self, estimates: Mapping[str, Mapping[str, Estimate]]) -> None:
        """Warn once about each reason that makes estimates nan, at its second step: at the first, some always are.

        A reason with a code is known by it: its text may quote numbers of the step.
        """
        missing: dict[str, list[str]] = {}
        texts: dict[str, str] = {}
        for name, estimate in itertools.chain.from_iterable(by_name.items() for by_name in estimates.values()):
            if math.isnan(estimate.value):
                code = estimate.code or estimate.reason
                missing.setdefault(code, []).append(name)
                texts.setdefault(code, estimate.reason)
        for code, names in missing.items():
            self._num_missing_steps[code] += 1
            if self._num_missing_steps[code] == 2 and all_ranks().number == 0:
                more = f" and {len(names) - MAX_NAMED_ESTIMATES} more" if len(names) > MAX_NAMED_ESTIMATES else ""
                logger.warning(f"not measured: {', '.join(names[:MAX_NAMED_ESTIMATES])}{more}: {texts[code]}")

    def _warn_of_shared_names(self, estimates: Mapping[str, Mapping[str, Estimate]]) -> None:
        """Warn once about each two probes that give an estimate the same name, of which logs keep one."""
        for probe, by_name in estimates.items():
            for name in by_name:
                other = self._probe_of.setdefault(name, probe)
                if other == probe or (other, probe) in self._sharing:
                    continue
                self._sharing.add((other, probe))
                if all_ranks().number == 0:
                    logger.warning(
                        f"probes {other!r} and {probe!r} both measure {name!r}, and logs and reports show one of them: "
                        "begin each one's names with its own"
                    )
