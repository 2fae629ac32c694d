"""What is known of a rollout as a whole.

TRL shuffles the rows of a fresh batch and splits them into microbatches. What differs from row to row is therefore in
the batch's dictionary, under keys that are added to TRL's (batches.py): each row takes it along. What holds for all
rows is in the rollout's record, which is made when the rollout begins and never changes.
"""

from __future__ import annotations

from dataclasses import dataclass

from rl_training.policy.rollout import Origin


@dataclass(frozen=True)
class RolloutRecord:
    """What holds for all rows of a rollout."""

    number: int  # 1 for the first rollout of the attachment; 0 before it
    sampled_at: int  # global_step when it was sampled; -1 before the first rollout
    responses_per_prompt: int
    is_fresh: bool  # whether all its responses were generated for it, as far as known
    is_rewarded: bool  # whether all its rewards are known, on all ranks
    is_untested: bool  # whether rows were chosen by what they contain: not tested as the policy's draws
    origin: Origin
    # With dropout: whether its old log-probabilities are the trained policy's own. None: each microbatch tells.
    has_own_old_logps: bool | None = None

    def is_on_policy(self, global_step: int) -> bool:
        """Return whether the policy at this step sampled it, and no step has learned from it."""
        return self.is_fresh and self.sampled_at == global_step
