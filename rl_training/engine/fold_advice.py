"""Advice to a user whose steps have too few folds: what to type, in the host's own settings, to get enough."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rl_training.engine.fold_placement import choose_folds, num_folds_in
from rl_training.engine.loop_spec import LoopSpec
from rl_training.engine.probe import Probe
from rl_training.statistics.unavailable import Unavailable
from rl_training.step.folds import DEFAULT_NUM_FOLDS, FoldSource, plan_folds, plan_prompt_folds

ONE_FOLD = Unavailable(
    "one_fold",
    "a step has only one fold, so there is no scatter between folds and none can be left out",
    fix="use {more}",
)


def one_fold_reason(loop: LoopSpec, probes: Sequence[Probe], *, can_recompute: bool) -> Unavailable:
    """Return the reason why a step of one fold is not enough for these probes, with the advice of `more_folds_fix`."""
    return ONE_FOLD.formatted(more=more_folds_fix(loop, probes, can_recompute=can_recompute))


def more_folds_fix(loop: LoopSpec, probes: Sequence[Probe], *, can_recompute: bool) -> str:
    """Return what to type to give a step DEFAULT_NUM_FOLDS folds.

    Args:
        loop: The training loop.
        probes: All probes of the training.
        can_recompute: See `choose_folds`.
    """
    larger_request = _larger_request(loop, probes, loop.sizes)
    if larger_request and _enough_folds(loop, loop.sizes):
        return larger_request  # nothing but the request is in the way
    same_responses = [_smaller_microbatches(loop, probes), _further_passes(loop, probes) if can_recompute else ""]
    return ", or ".join(filter(None, same_responses)) or _larger_steps(loop, probes)


def _num_folds(loop: LoopSpec, sizes: Sequence[int], request: int | None = None) -> int:
    """Return the number of folds that microbatches of these sizes give."""
    return num_folds_in(plan_folds(sizes, loop.responses_per_prompt, loop.ranks.count, request))


def _enough_folds(loop: LoopSpec, sizes: Sequence[int]) -> int:
    """Return the fewest folds, from DEFAULT_NUM_FOLDS on, that microbatches of these sizes can give; 0 if none."""
    requests = range(DEFAULT_NUM_FOLDS, _num_folds(loop, sizes) + 1)
    return next((request for request in requests if _num_folds(loop, sizes, request) == request), 0)


def _larger_request(loop: LoopSpec, probes: Sequence[Probe], sizes: Sequence[int]) -> str:
    """Return what to set if microbatches of these sizes have too few folds because probes ask for few; otherwise ""."""
    asking = [probe for probe in probes if probe.num_folds is not None]
    if not asking or _num_folds(loop, sizes, asking[0].num_folds) >= DEFAULT_NUM_FOLDS:
        return ""
    return _num_folds_setting(loop, asking, _enough_folds(loop, sizes))


def _smaller_microbatches(loop: LoopSpec, probes: Sequence[Probe]) -> str:
    """Return the largest microbatches that give the same step enough folds. Empty if none do."""
    responses = loop.responses_per_prompt
    local_size = sum(loop.sizes)
    # Sizes of whole prompts, or of equal parts of one.
    fitting = [n for n in range(1, max(loop.sizes)) if local_size % n == 0 and 0 in (n % responses, responses % n)]
    enough = [size for size in fitting if _enough_folds(loop, [size] * (local_size // size))]
    if not enough:
        return ""
    size = enough[-1]
    count = local_size // enough[-1]
    setting = _with_request(_batch_setting(loop, size, count), loop, probes, [size] * count)
    return f"smaller microbatches, {setting}"


def _further_passes(loop: LoopSpec, probes: Sequence[Probe]) -> str:
    """Return the option of probes that gives the same step enough folds by further passes. Empty if none does."""
    asking = [probe for probe in probes if probe.num_folds is not None]
    naming = asking or [probe for probe in probes if probe.takes_num_folds][:1]
    if not naming or loop.num_prompts == 0:
        return ""
    planned = plan_folds(loop.sizes, loop.responses_per_prompt, loop.ranks.count)
    most = num_folds_in(plan_prompt_folds(loop.num_prompts, loop.ranks.count))
    _, source = choose_folds(
        planned, lambda: loop.num_prompts, loop.ranks.count, most, plan_fails=False, can_recompute=True
    )
    if source is not FoldSource.RECOMPUTED or most < DEFAULT_NUM_FOLDS:
        return ""
    option = _num_folds_setting(loop, naming, most)
    return f"{option}, which takes a step's forward passes and backwards once more"


def _larger_steps(loop: LoopSpec, probes: Sequence[Probe]) -> str:
    """Return the smallest steps that have enough prompts, and what they cost."""
    size = max(loop.sizes)
    responses = loop.responses_per_prompt
    num_ranks = loop.ranks.count
    new_size = math.gcd(size, responses)
    new_count = -(-DEFAULT_NUM_FOLDS // num_ranks) * responses // new_size
    setting = _batch_setting(loop, new_size, new_count)
    if new_size == size:
        setting = loop.fixes.steps_setting.format(**_step_of(loop, new_size, new_count))
    setting = _with_request(setting, loop, probes, [new_size] * new_count)
    cost = f"{new_size * new_count / sum(loop.sizes):.3g} times as many responses a step"
    num_prompts = loop.num_prompts * num_ranks
    return f"steps of at least {DEFAULT_NUM_FOLDS} prompts, where these have {num_prompts}: {setting} ({cost})"


def _with_request(setting: str, loop: LoopSpec, probes: Sequence[Probe], sizes: Sequence[int]) -> str:
    """Return the setting that gives microbatches of these sizes, and what probes must ask for besides, if anything."""
    return " and ".join(filter(None, [setting, _larger_request(loop, probes, sizes)]))


def _num_folds_setting(loop: LoopSpec, probes: Sequence[Probe], folds: int) -> str:
    """Return the setting by which each of these probes asks for so many folds: all must ask for the same."""
    setting = loop.fixes.num_folds_setting
    return " and ".join(setting.format(name=probe.name, probe=type(probe).__name__, folds=folds) for probe in probes)


def _batch_setting(loop: LoopSpec, size: int, count: int) -> str:
    """Return the setting of so many microbatches of this size on each rank."""
    return loop.fixes.batch_setting.format(size=size, **_step_of(loop, size, count))


def _step_of(loop: LoopSpec, size: int, count: int) -> dict[str, int]:
    """Return what a host's settings may name of a step of so many microbatches of this size on each rank."""
    sequences = size * count * loop.ranks.count
    return {"count": count, "sequences": sequences, "prompts": sequences // loop.responses_per_prompt}
