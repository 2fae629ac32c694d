"""Writes the results of each step: its estimates, the sequences that it trained on, and averages."""

from __future__ import annotations

import itertools
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rl_training.engine.driver import StepDriver
from rl_training.engine.open_step import OpenStep
from rl_training.errors import UserError
from rl_training.hosts.equal_rewards import equal_rewards_warning
from rl_training.parallel.ranks import all_ranks
from rl_training.policy.rollout import join_rollouts
from rl_training.records.folder import LOGS_FOLDER
from rl_training.records.jsonl import METRICS_FILE, Records
from rl_training.statistics.estimate import Estimate

logger = logging.getLogger(__name__)

MAX_NAMED_ESTIMATES = 3  # missing estimates that a warning names; the report lists all of them


class EstimateWriter:
    """Writes the estimates of each measured step to the records, on rank 0, and warns about missing ones.

    Args:
        driver: Ends each step and returns its estimates.
        records: Where to write: `Records`, a folder, or None to write nothing.
        decode: Returns the text of a tensor of token ids.
        longer_responses: Advice for a warning: what lets responses get longer in this loop.
    """

    def __init__(
        self,
        driver: StepDriver,
        records: Records | str | Path | None,
        decode: Callable[[Tensor], str],
        longer_responses: str = "allow longer ones",
    ) -> None:
        self._driver, self._decode, self._longer_responses = driver, decode, longer_responses
        records = as_records(records)
        self.records = records if all_ranks().number == 0 else None
        self.latest: dict[str, Estimate] = {}  # by name, each from the last step that measured it
        self.names: dict[str, list[str]] = {}  # names of the estimates, by probe
        self._last_step_end = time.perf_counter()
        self._step_time = 0.0  # duration of the last step, in seconds
        self._has_warned_of_equal_rewards = False
        self._num_missing_steps = Counter[str]()  # steps with missing estimates, by reason

    def begin(self) -> None:
        """Start the clock when training begins. A step's time runs from the end of the previous step to its own end."""
        self._last_step_end = time.perf_counter()
        self._step_time = 0.0
        self._has_warned_of_equal_rewards = False
        self._num_missing_steps.clear()

    def wants_rollouts_of(self, number: int) -> bool:
        """Return whether the sequences of a step are recorded, by its number, even if no probe measures it."""
        return self.records is not None and self.records.wants_rollouts_of(number)

    def finish(self, number: int) -> dict[str, float]:
        """End the driver's step, write its sequences and estimates, and return the numbers to log.

        Returns:
            Estimates and standard errors by name, nan where missing, and the probes' costs. Empty if no probe measured
            the step.
        """
        step = self._driver.open_step
        if step is not None and self.records is not None and self.records.wants_rollouts_of(number):
            self.records.write_rollouts(number, _sequence_rows(step, self._decode))
        if step is not None and not self._has_warned_of_equal_rewards:
            self._warn_if_nothing_is_learned(number, step)
        estimates = self._driver.finish()
        numbers = self.write(number, estimates)
        now = time.perf_counter()
        self._step_time, self._last_step_end = now - self._last_step_end, now
        if not estimates:
            return {}
        costs = self._driver.costs.by_name(self._step_time) | {"step_time": self._step_time}
        return numbers | {f"probe_cost/{name}": cost for name, cost in costs.items()}

    def write_step(self, number: int, line: dict[str, Any]) -> dict[str, float]:
        """Finish a step of a loop that logs nothing itself: complete and write its line of metrics.jsonl. Collective.

        Args:
            number: The optimizer step.
            line: What the loop knows about the step. The averages and estimates are added in place.

        Returns:
            The estimates, errors and costs that are not nan.
        """
        if self._driver.open_step is not None:  # None if the step was left out before its gradients were ready
            line |= _without_nan(_averages(self._driver.open_step))
        measured = _without_nan(self.finish(number))
        line |= measured | {"step_time": self._step_time}
        if self.records is not None:
            row = {name: value.item() if isinstance(value, Tensor) else value for name, value in line.items()}
            self.records.write_metrics(number, row)
        return measured

    def note_interrupt(self, error: BaseException | None) -> None:
        """Add a note to a KeyboardInterrupt, shown below its traceback, that says where the measurements are."""
        if not isinstance(error, KeyboardInterrupt) or self.records is None:
            return
        folder = self.records.folder
        if not (folder / METRICS_FILE).is_file():
            error.add_note(f"interrupted before a step was logged: {folder} holds no numbers")
            return
        note = f"what was measured until then is in {folder}"
        if folder.name == LOGS_FOLDER:
            note += f"; the report of it: rl-training report {folder.parent}, or write_report({str(folder.parent)!r})"
        error.add_note(note)

    def write(self, number: int, estimates: Mapping[str, Mapping[str, Estimate]]) -> dict[str, float]:
        """Write the estimates of one step, given by probe and name, and return all values and standard errors."""
        numbers: dict[str, float] = {}
        for probe, by_name in estimates.items():
            if self.records is not None:
                self.records.write_estimates(number, all_ranks().count, probe, by_name)
            self.latest.update(by_name)
            self.names[probe] = [*by_name]
            for name, estimate in by_name.items():
                numbers |= {name: estimate.value, f"{name}_se": estimate.stderr}
        self._warn_of_missing(estimates)
        return numbers

    def write_missing(self, number: int, reason: str) -> None:
        """Write nan with this reason for every estimate of a step that is not measured because measuring has ended."""
        missing = Estimate.missing(reason)
        for probe in self._driver.probes:
            if probe.measures_at(number):
                by_name = dict.fromkeys(self.names.get(probe.name) or [probe.name], missing)
                self.latest |= by_name
                if self.records is not None:
                    self.records.write_estimates(number, all_ranks().count, probe.name, by_name)

    def _warn_if_nothing_is_learned(self, number: int, step: OpenStep) -> None:
        """Warn at the first step whose responses all earned the same reward. Collective if a probe measures it."""
        ranks = all_ranks()
        if not step.rollouts or (ranks.count > 1 and not step.probes):
            return
        warning = equal_rewards_warning(step.rollouts, ranks, self._longer_responses)
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


def as_records(given: Any) -> Records | None:
    """Return the given records, or new ones in the given folder. Raise UserError for anything else."""
    if given is None or isinstance(given, Records):
        return given
    if isinstance(given, str | Path):
        return Records(given)
    raise UserError(f"records={given!r}: give a folder, such as 'my_run/logs', or Records(FOLDER)")


def _without_nan(numbers: Mapping[str, float]) -> dict[str, float]:
    return {name: value for name, value in numbers.items() if not math.isnan(value)}


def _averages(step: OpenStep) -> dict[str, float]:
    """Return a step's means over all ranks, under TRL's names, nan where unknown. Collective."""
    rollout = join_rollouts(step.rollouts)
    lengths = rollout.completion_mask.sum(dim=1).double()
    rewards = torch.full_like(lengths, torch.nan) if rollout.rewards is None else rollout.rewards.to(lengths)
    group = rollout.prompt_index.cpu().unique(return_inverse=True)[1]
    rewards = rewards.cpu()  # a few numbers: on a GPU, every group below would cost a synchronization
    by_prompt = [rewards[group == g] for g in range(int(group.max()) + 1)]
    # A single response has no spread, and torch would warn about it.
    spreads = torch.stack([values.std() if len(values) > 1 else values.new_tensor(math.nan) for values in by_prompt])
    # Compared directly, because torch's standard deviation of equal numbers may not be exactly 0.
    are_equal = torch.stack([torch.isclose(prompt_rewards.min(), prompt_rewards.max()) for prompt_rewards in by_prompt])
    parts = {
        "reward": rewards,
        "reward_std": spreads,
        "frac_reward_zero_std": are_equal.double().where(~spreads.isnan(), math.nan),
        "completions/mean_length": lengths,
        "entropy": torch.cat([scores.entropies[scores.mask.bool()] for scores in step.scores]).double(),
    }
    reduce = all_ranks().reduce
    totals = reduce(torch.stack([values.sum().to(lengths.device) for values in parts.values()]))
    counts = reduce(torch.tensor([len(v) for v in parts.values()], device=totals.device).double())
    return dict(zip(parts, (totals / counts).tolist(), strict=True))


def _sequence_rows(step: OpenStep, decode: Callable[[Tensor], str]) -> Iterator[dict[str, Any]]:
    """Yield a row of the records for each sequence of this rank.

    `length` counts sampled tokens. `logp` is Σ_t log π(t), in nats, at the parameters that the step starts from.
    `importance_ratio` is π(sequence) / π_sampled(sequence): 1 if it was sampled at these parameters, nan if the
    log-probabilities of the older parameters were not kept.
    """
    for rollout, scores in zip(step.rollouts, step.scores, strict=True):
        mask = rollout.completion_mask.bool()
        logps = scores.logps.double().masked_fill(~mask, 0.0).sum(dim=1)
        ratios = torch.full_like(logps, 1.0 if rollout.on_policy else math.nan)
        if rollout.sampling_logps is not None:
            sampled = rollout.sampling_logps.double().masked_fill(~mask, 0.0).sum(dim=1)
            ratios = (logps - sampled).exp()
        rewards = torch.full_like(logps, math.nan) if rollout.rewards is None else rollout.rewards
        prompts = zip(rollout.prompt_ids.cpu(), rollout.prompt_mask.cpu().bool(), strict=True)
        responses = zip(rollout.completion_ids.cpu(), rollout.token_mask.cpu().bool(), strict=True)
        columns = {  # each is copied from the device in one transfer
            "prompt": [decode(ids[mask]) for ids, mask in prompts],
            "response": [decode(ids[mask]) for ids, mask in responses],
            "prompt_index": rollout.prompt_index.tolist(),
            "reward": rewards.tolist(),
            "advantage": rollout.advantages.tolist(),
            "length": mask.sum(dim=1).tolist(),
            "logp": logps.tolist(),
            "importance_ratio": ratios.tolist(),
        }
        yield from (dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True))
