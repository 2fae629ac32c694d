"""Measures verl's optimizer steps: holds the driver, its records and its place in verl's checkpoints, on each rank.

engine.py calls it at the moments of a step. verl tells its engine of no end of training: each step is complete by
itself, and what a checkpoint needs is written with it.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from rl_training.engine.driver import StepDriver
from rl_training.engine.loop_spec import LoopSpec
from rl_training.engine.loss_info import LossInfo
from rl_training.hosts.estimate_writer import EstimateWriter
from rl_training.hosts.folder_claim import FolderClaim
from rl_training.hosts.recorded_settings import settings_of_loop
from rl_training.hosts.verl.batch import ResponseTokens, read_rollout, response_entropies
from rl_training.hosts.verl.message import RolloutFacts
from rl_training.hosts.verl.probes import NUM_STEPS, make_probes
from rl_training.hosts.verl.training_settings import TrainingSettings
from rl_training.policy.scores import Scores
from rl_training.records.checkpoint_states import load_probe_states, read_notes, save_probe_states
from rl_training.records.made_by import MADE_BY, VERL
from rl_training.records.writer import Records

logger = logging.getLogger(__name__)

ENTROPIES = "entropies of probes"  # key of a model output, used if verl computes no entropies
SKIPPED = (
    "step {number}: a gradient is not finite, so verl does not make this optimizer step. Its line has `skipped` and no "
    "estimates, like those of any further ones"
)


class Measurement:
    """Probes on an engine, from its first optimizer step on.

    A step is `begin`, `microbatch` for each, `optimizer_step`, `finish`. Collective from the start on.

    Args:
        loop: verl's loop.
        settings: What only the trainer knows of the training.
        end_tokens: Token ids that end a response.
        resumed_from: The folder of the checkpoint that training resumes from, or None.
    """

    def __init__(
        self, loop: LoopSpec, settings: TrainingSettings, end_tokens: Sequence[int], resumed_from: Path | None
    ) -> None:
        self.driver = StepDriver(make_probes(settings["probes"]))
        self._loop, self._settings, self._end_tokens = loop, settings, end_tokens
        self._number = 0  # of the latest optimizer step, made or skipped
        self._rollout_number = 0  # of the rollout that it learned from
        self._is_fresh = False  # no step has learned from the rollout, and the present weights sampled it
        self._metrics: dict[str, Any] = {}  # of the open step
        self._has_warned_of_skipped = False
        states, run_id = None, ""
        if resumed_from is not None:
            states = load_probe_states(self.driver.initial_states() | {NUM_STEPS: 0}, resumed_from)
            self._number, run_id = states[NUM_STEPS], read_notes(resumed_from).get("run", "")
        records = Records(settings["folder"], settings["rollouts_every"]) if loop.ranks.number == 0 else None
        self.claim = FolderClaim(records, run_id)  # until the process ends
        self.claim.take(self._number + 1, loop.shard.layout.device)
        if records is not None:
            recorded = {**settings_of_loop(loop), **settings["recorded"], MADE_BY: VERL}
            records.start(after_step=self._number, settings=recorded)
        self._writer = EstimateWriter(self.driver, records, loop.policy.decode)
        self.driver.start(loop, states)

    def begin(self, rollout: RolloutFacts, microbatch_sizes: Callable[[], Sequence[int]]) -> None:
        """Begin an optimizer step.

        Args:
            rollout: What only the trainer knows of the rollout that the step learns from.
            microbatch_sizes: Returns the number of sequences in each microbatch on this rank. Collective, and called
                only if a probe measures the step.
        """
        self._metrics = {}
        if rollout["number"] != self._rollout_number:
            self._rollout_number, self._is_fresh = rollout["number"], rollout["is_fresh"]
        self.driver.begin(self._number + 1)
        self.driver.plan(microbatch_sizes() if self.driver.needs_scores else None)

    def entropies(self, logits: Tensor, data: TensorDict) -> dict[str, Tensor]:
        """Return entropies for a microbatch without verl's own. Empty if no probe measures the step."""
        if not self.driver.needs_scores:
            return {}
        with self.driver.costs.timed():
            return {ENTROPIES: response_entropies(logits, ResponseTokens(data), self._loop.policy.scorer.temperature)}

    def microbatch(self, model_output: dict[str, Tensor], data: TensorDict) -> dict[str, Tensor]:
        """Register a microbatch, and return the output that the loss must be computed from: same numbers, watched.

        Args:
            model_output: verl's; loses the entry that `entropies` made, since verl returns the rest to callers.
            data: verl's microbatch.
        """
        tokens = ResponseTokens(data)
        rollout = read_rollout(data, self._is_fresh, self._settings["max_response_length"], self._end_tokens)
        logps = tokens.padded(model_output["log_probs"].values())
        watched = {"log_probs": tokens.to_nested(logps, model_output["log_probs"])}
        if "entropy" in model_output:
            entropies = tokens.padded(model_output["entropy"].values())
            watched["entropy"] = tokens.to_nested(entropies, model_output["entropy"])
        else:
            entropies = model_output.pop(ENTROPIES, Scores.unknown(rollout.completion_mask).entropies)
        self.driver.microbatch(rollout, Scores(logps, entropies, rollout.completion_mask), LossInfo())
        return model_output | watched

    def optimizer_step(self, step: Callable[[], float], gradient_norm: Callable[[], Tensor]) -> float:
        """Run the probes and the optimizer's step, and return what the step returns, the gradient's norm.

        verl skips a step whose gradient is not finite. It keeps its number.

        Args:
            step: verl's: clips the gradient and makes the step.
            gradient_norm: Returns the norm of the gradient. Called only if a probe measures the step: verl computes
                the norm itself, but too late for probes.
        """
        is_finite = True
        if self.driver.needs_scores:
            with self.driver.costs.timed():
                is_finite = math.isfinite(gradient_norm())
        if not is_finite:
            self.driver.skip_step()
            norm = step()
        else:
            self.driver.gradients_ready(self._rollout_number)
            norm = step()
            self.driver.stepped(was_taken=math.isfinite(norm))
        self._number += 1
        if math.isfinite(norm):
            self._is_fresh = False
            self._metrics |= {"grad_norm": norm, "learning_rate": self._loop.shard.optimizer.param_groups[0]["lr"]}
        else:
            self._metrics["skipped"] = 1
            self._warn_of_skipped()
        return norm

    def _warn_of_skipped(self) -> None:
        """Say once that verl has not made a step."""
        if not self._has_warned_of_skipped and self._loop.ranks.number == 0:
            logger.warning(SKIPPED.format(number=self._number))
        self._has_warned_of_skipped = True

    def fail(self) -> None:
        """Drop what was caught of a step that ended in an error, perhaps on this rank alone."""
        self.driver.fail_step()

    def finish(self, outputs: Mapping[str, Any]) -> dict[str, list[float]]:
        """Write the records, and return the numbers for verl's loggers, each in a list like verl's own. Collective.

        Args:
            outputs: What verl's `train_batch` returns.
        """
        result, ranks = self._writer.finish(self._number), self._loop.ranks
        local_loss = torch.tensor(outputs["loss"], device=self._loop.shard.layout.device).sum()
        loss = float(ranks.reduce(local_loss)) / ranks.count
        self._metrics["training/global_step"] = self._rollout_number
        if math.isfinite(loss):
            self._metrics["loss"] = loss
        self._writer.write_line(self._number, self._metrics, result)
        return {name: [value] for name, value in result.numbers.items() if not math.isnan(value)}

    def save(self, folder: Path) -> None:
        """Write the probes' states into a folder in which verl has saved its checkpoint. Collective."""
        ranks = self._loop.ranks
        states = self.driver.states() | {NUM_STEPS: self._number}
        save_probe_states(states, folder, ranks.count, ranks.number, run=self.claim.run_id)
        torch.distributed.barrier()
