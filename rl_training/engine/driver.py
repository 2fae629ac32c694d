"""The step that is being measured: begun before its first microbatch, filled by each of them, dropped at its end."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from trl import GRPOTrainer

from rl_training.live import host
from rl_training.live.optimizer import mean_gradients
from rl_training.live.policy import TrainerPolicy
from rl_training.live.rollouts import Generation
from rl_training.live.sharding import Sharding
from rl_training.live.tap import GradientTap
from rl_training.mathematics.folds import fold_numbers, fold_ranges, ranges_of, split_prompts
from rl_training.probes.base import Need, Probe
from rl_training.step.rollout import Rollout
from rl_training.step.slices import fill_slices
from rl_training.step.types import Microbatch, OptimizerView, StepContext

RANKS_THAT_ARE_FOLDS = 8  # from so many ranks on, each is one fold by default: enough for an error bar


@dataclass
class Step:
    """One optimizer step on this rank."""

    probes: Sequence[Probe]  # that measure it; there may be none
    folds: tuple[range, ...]  # the rows of this rank's folds
    optimizer: OptimizerView | None  # as it stands before the step; None where nobody measures
    microbatches: list[Microbatch] = field(default_factory=list)
    loss_weights: list[dict[str, Tensor]] = field(default_factory=list)  # by microbatch: of logps, of entropies
    other_terms: bool = False  # the loss has terms beside these
    is_complete: bool = False  # all gradients are in
    context: StepContext | None = None  # of a complete step that is measured

    def __post_init__(self) -> None:
        self.seconds = dict.fromkeys((probe.name for probe in self.probes), 0.0)

    def tell(self, moment: str, what: Rollout | Microbatch | StepContext) -> None:
        """Calls this method of every probe, on the clock."""
        for probe in self.probes:
            with self.timed(probe):
                getattr(probe, moment)(what)

    def watch_loss(self, logps: Tensor, entropies: Tensor, other_terms: bool) -> None:
        """Keeps what the trainer's own backward will hand back to the scores of this microbatch."""
        weights: dict[str, Tensor] = {}
        self.loss_weights.append(weights)
        self.other_terms |= other_terms

        def keep(name: str, weight: Tensor | None) -> None:
            if weight is not None:  # a score that the loss does not know
                weights[name] = weight

        logps.register_hook(functools.partial(keep, "logps"))
        if entropies.requires_grad:
            entropies.register_hook(functools.partial(keep, "entropies"))

    @contextlib.contextmanager
    def timed(self, probe: Probe) -> Iterator[None]:
        """A context whose time is this probe's."""
        start = time.perf_counter()
        yield
        self.seconds[probe.name] += time.perf_counter() - start


def common_num_folds(probes: Sequence[Probe]) -> int | None:
    """Returns the number of folds that all probes ask for which need any. ValueError when they do not agree."""
    folding = [probe for probe in probes if Need.FOLD_GRADIENTS in probe.needs]
    if len({probe.num_folds for probe in folding}) > 1:
        raise ValueError(f"one set of folds serves all probes: give {[p.name for p in folding]} the same num_folds")
    return folding[0].num_folds if folding else None


def plan_folds(trainer: GRPOTrainer, num_folds: int | None, num_microbatches: int) -> tuple[range, ...]:
    """Returns the rows of this rank's folds: by default one per microbatch, on many ranks one each."""
    sizes = [trainer.args.per_device_train_batch_size] * num_microbatches
    default = 1 if trainer.accelerator.num_processes >= RANKS_THAT_ARE_FOLDS else num_microbatches
    if num_folds is None or num_microbatches != trainer.args.gradient_accumulation_steps:
        num_folds = default  # the last step of an epoch may be short
    return fold_ranges(sizes, num_folds, trainer.num_generations)


def tap_for(probes: Sequence[Probe], parameters: Mapping[str, nn.Parameter]) -> GradientTap | None:
    """Returns the tap that keeps what these probes need, None if they need nothing."""
    needs = functools.reduce(lambda a, b: a | b, (probe.needs for probe in probes), Need.NOTHING)
    if not needs:
        return None
    keep_rows, keep_sq_norms = Need.FOLD_GRADIENTS in needs, Need.MICROBATCH_SQ_NORMS in needs
    device = "cpu" if any(probe.offload for probe in probes) else None
    return GradientTap(parameters, keep_rows, keep_sq_norms, device)


def build_context(
    step: Step,
    trainer: GRPOTrainer,
    sharding: Sharding,
    parameters: Mapping[str, nn.Parameter],
    policy: TrainerPolicy,
    tap: GradientTap | None,
    generation: Generation,
) -> StepContext:
    """Returns what probes see of a step whose gradients are all in. A collective."""
    assert step.optimizer is not None
    reduce = functools.partial(host.sum_over_ranks, trainer)
    rollout, scores, loss_weights = host.join_microbatches(step.microbatches, step.loss_weights)
    microbatch_rows = ranges_of([m.rollout.num_sequences for m in step.microbatches])
    index = rollout.prompt_index
    complete_prompts, whole_prompts = _what_prompts_are(step, index, microbatch_rows, trainer.num_generations, reduce)
    folding = next((probe for probe in step.probes if Need.FOLD_GRADIENTS in probe.needs), None)
    sliced = step.other_terms and len(step.folds) > len(microbatch_rows)  # whose part of those terms is not known
    can_fold = folding is not None and whole_prompts and not sliced
    fold_gradients = tap.fold_gradients if tap is not None and can_fold else None
    if fold_gradients is not None and folding is not None:
        with step.timed(folding):
            score = functools.partial(policy.score, rollout)
            fill_slices(fold_gradients, parameters, step.folds, microbatch_rows, loss_weights, score)
    gradients, optimizer = mean_gradients(sharding, parameters, step.optimizer)
    fold = fold_numbers(step.folds).to(index.device) if whole_prompts else split_prompts(index, len(step.folds))
    return StepContext(
        step=trainer.state.global_step + 1,
        parameters=parameters,
        gradients=gradients,
        fold_gradients=fold_gradients,
        microbatch_sq_norms=tap.sq_norms if tap is not None else None,
        optimizer=optimizer,
        rollout=rollout,
        scores=scores,
        loss_weights=loss_weights,
        other_terms=step.other_terms,
        microbatch_rows=microbatch_rows,
        fold=fold,
        sampled_otherwise="",
        no_fresh_responses="",
        rollout_number=generation.number,
        reused=not generation.learned.isdisjoint(index.tolist()),
        learned_again=trainer.num_iterations > 1,
        autocast=trainer.args.bf16,
        responses_per_prompt=trainer.num_generations,
        complete_prompts=complete_prompts,
        whole_prompts=whole_prompts,
        dr_grpo=host.is_dr_grpo(trainer),
        num_ranks=trainer.accelerator.num_processes,
        reduce=reduce,
        policy=policy,
    )


def _what_prompts_are(
    step: Step,
    index: Tensor,
    microbatch_rows: Sequence[range],
    responses_per_prompt: int,
    reduce: Callable[[Tensor], Tensor],
) -> tuple[bool, bool]:
    """Returns whether every prompt has all its responses in this step, and lies in one microbatch too, on all ranks."""
    prompts, counts = index.unique(return_counts=True)
    num_in_parts = [sum(len(index[r.start : r.stop].unique()) for r in p) for p in (microbatch_rows, step.folds)]
    violations = [bool((counts != responses_per_prompt).any()), max(num_in_parts) > len(prompts)]
    incomplete, split = reduce(torch.tensor(violations, device=index.device).double()).tolist()
    return incomplete == 0, incomplete == 0 and split == 0
