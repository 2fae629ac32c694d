"""U as training's loss sees it: its microbatches, its folds, and the weights of its scores at its first step.

Every ratio is 1, so the derivative of Dr-GRPO's loss by each log-probability of a response with advantage A is
−A/(N L), for N responses and L the longest completion allowed. If the run trains with an entropy bonus or an entropy
quantile, the interventions of these names change these weights (interventions/remedies.py). With both, as in TRL, the
bonus is on the quantile's tokens.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import torch

from rl_training.engine.batch import Batch, Rollout
from rl_training.engine.capabilities import Capabilities, is_first_of_adam
from rl_training.engine.changed_steps import bases_of
from rl_training.engine.entropy_gradients import EntropySettings
from rl_training.engine.loss_weights import LossWeights
from rl_training.engine.memory import StepMemory
from rl_training.engine.step import Gradients, Ranks, Step
from rl_training.hosts.trl.batches import loss_settings
from rl_training.interventions.loss import LossInputs, loss_inputs
from rl_training.interventions.remedies import bonus, highest_entropies
from rl_training.mathematics.folds import ranges_of, split_prompts
from rl_training.mathematics.vectors import Layout
from rl_training.offline.buffers import UpdateBuffer
from rl_training.offline.restored import RestoredTrainer

NEUTRAL_LOSS = {"use_adaptive_entropy": False, "off_policy_mask_threshold": None}
NUM_FOLDS = 8  # of a step in training, of all processes


def loss_weights(restored: RestoredTrainer, update: UpdateBuffer) -> LossWeights:
    """Returns the weights of this process's part of U, (B, T). ValueError for a term of the loss that is not read."""
    args = restored.trainer.args
    if args.entropy_coef != 0.0 or args.top_entropy_quantile != 1.0:
        return batch_of(restored, update).loss_weights
    return _of_advantages(restored, update.rollout)


def batch_of(restored: RestoredTrainer, update: UpdateBuffer) -> Batch:
    """Returns this process's part of U as a batch of training, scored. ValueError as `loss_weights`."""
    trainer, rollout = restored.trainer, update.rollout
    size = math.gcd(rollout.num_sequences, trainer.args.per_device_train_batch_size)
    batch = Batch(
        rollout=rollout,
        scores=restored.policy.score_rollout(rollout),
        loss_weights=_of_advantages(restored, rollout),
        microbatch_rows=ranges_of([size] * (rollout.num_sequences // size)),
        fold=split_prompts(rollout.prompt_index, -(-NUM_FOLDS // restored.num_ranks)),
        responses_per_prompt=update.responses_per_prompt,
        rollout_number=0,
    )
    changed = [_with_terms(part, trainer.args) for part in loss_inputs(batch, restored.reduce)]
    batch = dataclasses.replace(batch, loss_weights=_joined(changed))
    return dataclasses.replace(batch, loss_settings=loss_settings(trainer))


def _with_terms(part: LossInputs, args: Any) -> LossWeights:
    """Returns the weights of a microbatch with the run's quantile of entropies and its bonus, on the same tokens."""
    weights = part.weights
    if args.top_entropy_quantile != 1.0:
        kept = highest_entropies(part, args.top_entropy_quantile)
        weights = LossWeights(weights.logps * kept, weights.entropies)
        part = dataclasses.replace(part, scores=dataclasses.replace(part.scores, mask=kept.long()))
    if args.entropy_coef != 0.0:
        weights = bonus(dataclasses.replace(part, weights=weights), args.entropy_coef).weights or weights
    return weights


def _of_advantages(restored: RestoredTrainer, rollout: Rollout) -> LossWeights:
    for name, neutral in NEUTRAL_LOSS.items():
        value = getattr(restored.trainer.args, name, neutral)
        if value != neutral:
            raise ValueError(
                f"trainer.{name}={value} adds a term to the loss that is not read here: set it to {neutral}"
            )
    unit = 1.0 / (rollout.num_sequences * restored.trainer.max_completion_length)
    return LossWeights(-unit * rollout.advantages.unsqueeze(1) * rollout.completion_mask, None)


def _joined(parts: Sequence[LossWeights]) -> LossWeights:
    """Returns the weights of all microbatches as one, (B, T)."""
    entropies = [part.entropies for part in parts if part.entropies is not None]
    return LossWeights(torch.cat([part.logps for part in parts]), torch.cat(entropies) if entropies else None)


def step_of(restored: RestoredTrainer, batch: Batch) -> Step:
    """Returns the step that U makes as a probe in training sees it: all gradients are in, the step is not taken yet."""
    parameters = restored.parameters
    layout = Layout(parameters)
    known = (batch, restored.policy, list(parameters.values()), layout)
    ((_, plain),) = bases_of(*known, [batch.loss_weights], restored.reduce)
    capabilities = Capabilities(
        sampling_mismatch="",
        no_fresh_responses="",
        no_formula=restored.optimizer.reason,
        complete_prompts=True,
        whole_prompts=True,
        folds_of_gradient=True,
        num_folds=int(restored.reduce(torch.tensor(batch.num_folds, device=restored.device))),
        reused=False,
        multi_epoch=False,
        other_terms=False,
        autocast=restored.trainer.accelerator.mixed_precision != "no",
        dr_grpo=batch.loss_settings is not None and batch.loss_settings.is_dr_grpo,
        first_of_adam=is_first_of_adam(restored.optimizer.states),
    )
    return Step(
        number=restored.step + 1,
        batch=batch,
        gradients=Gradients(parameters, layout.by_name(plain.mean), plain.rows, None),
        optimizer=restored.optimizer,
        policy=restored.policy,
        ranks=Ranks(restored.num_ranks, restored.reduce),
        capabilities=capabilities,
        memory=StepMemory(layout, EntropySettings(), keep_rows=True),
    )
