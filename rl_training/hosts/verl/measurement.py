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
from rl_training.hosts.step_warnings import StepWarnings
from rl_training.hosts.verl.batch import ResponseTokens, flat_entropies, read_rollout
from rl_training.hosts.verl.probes import NUM_STEPS, make_probes
from rl_training.hosts.verl.rollout_settings import RolloutSettings
from rl_training.policy.scores import Scores
from rl_training.records.checkpoint_states import load_probe_states, read_notes, save_probe_states
from rl_training.records.jsonl import Records
from rl_training.records.made_by import MADE_BY, VERL

logger = logging.getLogger(__name__)

ENTROPIES = "entropies of probes"  # key of a model output, used if verl computes no entropies
SKIPPED = (
    "a gradient is not finite, so verl does not make this optimizer step: it has no number and no line, and the line "
    "of step {number} counts it (`skipped`)"
)


class Measurement:
    """Probes on an engine, from its first optimizer step on.

    A step is `begin`, `plan`, `microbatch` for each, `step`, `finish`. Collective from the start on.

    Args:
        loop: verl's loop.
        settings: What only the trainer knows, with the first rollout.
        end_tokens: Token ids that end a response.
        resumed_from: The folder of the checkpoint that training resumes from, or None.
    """

    def __init__(
        self, loop: LoopSpec, settings: RolloutSettings, end_tokens: Sequence[int], resumed_from: Path | None
    ) -> None:
        probes = make_probes(settings["probes"])
        self.driver = StepDriver(probes)
        self._loop, self._max_length, self._end_tokens = loop, settings["max_response_length"], end_tokens
        self._steps = 0  # number of optimizer steps made
        self._rollout = 0  # number of the rollout that the last one learned from
        self._is_fresh = False  # no step has learned from the rollout, and the present weights sampled it
        self._is_skipped = False  # verl has not made the open step
        self._num_skipped = 0  # steps that verl has not made since the last one that it made
        self._metrics: dict[str, Any] = {}  # of the open step
        states, run_id = None, ""
        if resumed_from is not None:
            states = load_probe_states(self.driver.initial_states() | {NUM_STEPS: 0}, resumed_from)
            self._steps, run_id = states[NUM_STEPS], read_notes(resumed_from).get("run", "")
        records = Records(settings["folder"], settings["rollouts_every"]) if loop.ranks.number == 0 else None
        self.claim = FolderClaim(records, run_id)  # until the process ends
        self.claim.take(self._steps + 1, loop.shard.layout.device)
        if records is not None:
            recorded = {**settings_of_loop(loop), **settings["recorded"], MADE_BY: VERL}
            records.start(after_step=self._steps, settings=recorded)
        self._writer = EstimateWriter(probes, records, loop.policy.decode)
        self._warnings = StepWarnings()
        self.driver.start(loop, states)

    def begin(self, settings: RolloutSettings) -> bool:
        """Begin an optimizer step on the rollout that has these settings, and return whether a probe measures it."""
        self._metrics, self._is_skipped = {}, False
        if settings["rollout_number"] != self._rollout:
            self._rollout, self._is_fresh = settings["rollout_number"], settings["is_fresh"]
        self.driver.begin(self._steps + 1)
        return self.driver.needs_scores

    def plan(self, sizes: Sequence[int]) -> None:
        """Plan the folds of a measured step, whose microbatches on this rank have so many sequences. Collective."""
        self.driver.plan(sizes)

    def entropies(self, logits: Tensor, data: TensorDict) -> dict[str, Tensor]:
        """Return entropies for a microbatch without verl's own. Empty if no probe measures the step."""
        if not self.driver.needs_scores:
            return {}
        lengths = data["input_ids"].offsets().diff().tolist()
        return {ENTROPIES: flat_entropies(logits, lengths, self._loop.policy.scorer.temperature)}

    def microbatch(self, model_output: dict[str, Tensor], data: TensorDict) -> dict[str, Tensor]:
        """Register a microbatch, and return the output that the loss must be computed from: same numbers, watched.

        Args:
            model_output: verl's; loses the entry that `entropies` made, since verl returns the rest to callers.
            data: verl's microbatch.
        """
        tokens = ResponseTokens(data)
        rollout = read_rollout(data, self._is_fresh, self._max_length, self._end_tokens)
        logps = tokens.padded(model_output["log_probs"].values())
        watched = {"log_probs": tokens.to_nested(logps, model_output["log_probs"])}
        if "entropy" in model_output:
            entropies = tokens.padded(model_output["entropy"].values())
            watched["entropy"] = tokens.to_nested(entropies, model_output["entropy"])
        else:
            flat = model_output.pop(ENTROPIES, None)
            entropies = torch.full_like(logps, torch.nan) if flat is None else tokens.padded(flat)
        self.driver.microbatch(rollout, Scores(logps, entropies, rollout.completion_mask), LossInfo())
        return model_output | watched

    def step(self, optimizer_step: Callable[[], float], gradient_norm: Callable[[], Tensor]) -> float:
        """Run the probes and the optimizer's step, and return what the step returns, the gradient's norm.

        verl does not step with a gradient that is not finite.

        Args:
            optimizer_step: verl's: clips the gradient and makes the step.
            gradient_norm: Returns the norm of the gradient. Called only if a probe measures the step: verl computes
                the norm itself, but too late for probes.
        """
        if self.driver.needs_scores and not math.isfinite(gradient_norm()):
            self.driver.skip_step()
            self._skip()
            return optimizer_step()
        self.driver.gradients_ready(self._rollout)
        norm = optimizer_step()
        was_taken = math.isfinite(norm)
        self.driver.stepped(was_taken)
        if was_taken:
            self._metrics |= {"grad_norm": norm, "learning_rate": self._loop.shard.optimizer.param_groups[0]["lr"]}
            self._steps, self._is_fresh = self._steps + 1, False
        else:
            self._skip()
        return norm

    def _skip(self) -> None:
        """Note that verl does not make the open step, which has no number."""
        if self._num_skipped == 0 and self._loop.ranks.number == 0:
            logger.warning(SKIPPED.format(number=self._steps + 1))
        self._is_skipped, self._num_skipped = True, self._num_skipped + 1

    def fail(self) -> None:
        """Drop what was caught of a step that ended in an error, perhaps on this rank alone."""
        self.driver.fail_step()

    def finish(self, outputs: Mapping[str, Any]) -> dict[str, list[float]]:
        """Write the records, and return the numbers for verl's loggers, each in a list like verl's own. Collective.

        Args:
            outputs: What verl's `train_batch` returns.
        """
        result, ranks = self.driver.finish(), self._loop.ranks
        if self._is_skipped:
            return {}
        if self._num_skipped:
            self._metrics["skipped"], self._num_skipped = self._num_skipped, 0
        loss = ranks.reduce(torch.tensor(outputs["loss"], device=result.scores[0].logps.device).sum())
        self._metrics |= {"loss": float(loss) / ranks.count, "training/global_step": self._rollout}
        self._warnings.warn(self._steps, result)
        self._writer.write(self._steps, result)
        self._writer.write_line(self._steps, self._metrics, result)
        return {name: [value] for name, value in result.numbers.items() if not math.isnan(value)}

    def save(self, folder: Path) -> None:
        """Write the probes' states into a folder in which verl has saved its checkpoint. Collective."""
        ranks = self._loop.ranks
        states = self.driver.states() | {NUM_STEPS: self._steps}
        save_probe_states(states, folder, ranks.count, ranks.number, run=self.claim.run_id)
        torch.distributed.barrier()
