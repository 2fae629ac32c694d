"""TRL's batch dictionaries: read as rollouts, put in order, and given what TRL leaves out. Written against trl 1.16."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor
from trl import GRPOConfig, GRPOTrainer
from trl.trainer import grpo_trainer
from trl.trainer.utils import split_pixel_values_by_grid

from rl_training.engine.batch import Correction, LossSettings, Rollout, in_one_width
from rl_training.engine.capabilities import Fixes
from rl_training.errors import UserError
from rl_training.hosts.trl.patches import SHUFFLE, wrap
from rl_training.hosts.trl.policy import TrainerPolicy, why_sampling_mismatch
from rl_training.mathematics.scores import Scores

# Keys that ride along in TRL's batch dictionaries.
ROLLOUT_ROW = "rollout_row"  # the row before TRL's shuffle
REWARD = "rollout_reward"
POLICY_MASK = "written_by_policy"  # the mask of tools before truncated responses are taken out of it
ALL_OLD_LOGPS = "all_old_logps"  # OLD_LOGPS where truncated responses are hidden, theirs included
RIDING_ALONG = (ROLLOUT_ROW, REWARD, POLICY_MASK, ALL_OLD_LOGPS)
# What TRL hands to the model beside tokens.
IMAGE_INPUTS = (
    *("pixel_values", "num_images", "image_grid_thw", "image_position_ids", "image_sizes", "num_tiles"),
    *("spatial_shapes", "pixel_attention_mask", "token_type_ids", "mm_token_type_ids"),
)
# TRL's own: of the trainer's policy when the rollout was made, and of the engine that sampled, where that is another.
OLD_LOGPS, SAMPLING_LOGPS = "old_per_token_logps", "sampling_per_token_logps"
# What makes a loss Dr-GRPO's: no division by a group's standard deviation or a length, no other term, no mask.
DR_GRPO: dict[str, Any] = {
    "loss_type": "dr_grpo",
    "scale_rewards": "none",
    "multi_objective_aggregation": "sum_then_normalize",
    "beta": 0.0,
    "importance_sampling_level": "token",
    "entropy_coef": 0.0,
    "use_adaptive_entropy": False,
    "top_entropy_quantile": 1.0,
    "delta": None,
    "off_policy_mask_threshold": None,
}


WHOLE_PROMPTS = (
    "use DrGRPOTrainer, or attach(..., whole_prompts=True), with a multiple of num_generations sequences in an "
    "optimizer step of each process"
)


def loss_settings(trainer: GRPOTrainer) -> LossSettings:
    """Returns what the loss is set to, TRL's own: interventions on it are not in this."""
    return LossSettings(
        max_length=trainer.max_completion_length,
        epsilon_low=trainer.epsilon_low,
        epsilon_high=trainer.epsilon_high,
        hides_truncated=trainer.mask_truncated_completions,
        correction=_correction(trainer),
        differs=frozenset(name for name, value in DR_GRPO.items() if getattr(trainer.args, name) != value),
    )


def fixes(settings: LossSettings, *, is_typed: bool = False) -> Fixes:
    """Returns what to do so that more can be measured of a training whose loss is set so.

    is_typed  settings are those of a command, typed as trainer.NAME=VALUE, and not of a script
    """
    others = {name: value for name, value in DR_GRPO.items() if name in settings.differs}
    others |= {"mask_truncated_completions": False} if settings.hides_truncated else {}
    others |= {"vllm_importance_sampling_correction": False} if settings.correction is not None else {}
    if is_typed:
        words = [f"trainer.{name}={_as_typed(value)}" for name, value in others.items()]
        words += ["intervention=null"] * ("intervention" in settings.differs)
        typed = "batch.microbatch_size={size} batch.sequences_per_step={sequences}", "probes.{name}.num_folds={folds}"
        return Fixes(WHOLE_PROMPTS, f"set {' '.join(words)}" if words else "", *typed)
    words = [f"{name}={value!r}" for name, value in others.items()]
    words += ["no intervention"] * ("intervention" in settings.differs)
    return Fixes(
        WHOLE_PROMPTS,
        f"set {', '.join(words)}" if words else "",
        "per_device_train_batch_size={size}, gradient_accumulation_steps={count}",
    )


def _as_typed(value: object) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _correction(trainer: GRPOTrainer) -> Correction | None:
    """Returns what TRL does about an engine whose policy is not quite the trainer's; None without one, or nothing."""
    if not trainer.use_vllm or not trainer.vllm_importance_sampling_correction:
        return None
    level, kind = trainer.vllm_importance_sampling_mode.split("_")
    low, high = trainer.vllm_importance_sampling_clip_min, trainer.vllm_importance_sampling_clip_max
    bounds = 0.0 if low is None else low, math.inf if high is None else high
    return Correction(level == "sequence", kind == "mask", *bounds)


def steps_per_rollout(args: GRPOConfig) -> int:
    """Returns after how many optimizer steps a rollout is used up.

    In between, TRL holds sampled sequences that it does not save: training cannot be resumed exactly from there.
    """
    microbatches = args.steps_per_generation * args.num_iterations
    return math.lcm(microbatches, args.gradient_accumulation_steps) // args.gradient_accumulation_steps


def total_rewards(trainer: GRPOTrainer, by_function: Tensor) -> Tensor:
    """Returns the weighted sums (sequences,) of what each reward function says, (sequences, functions).

    nan where none says anything: TRL leaves such a response out of its group's mean.
    """
    totals = (by_function * trainer.reward_weights.to(by_function.device)).nansum(dim=1)
    return totals.masked_fill(by_function.isnan().all(dim=1), math.nan)


def image_inputs(inputs: Mapping[str, Any]) -> dict[str, Any] | None:
    """Returns what a batch dictionary holds for the model beside tokens, row by row; None for text alone.

    ValueError, naming it, for an input that cannot be split by rows.
    """
    present = {name: inputs[name] for name in IMAGE_INPUTS if inputs.get(name) is not None}
    if not present:
        return None
    by_row = split_pixel_values_by_grid(present)
    for name, values in by_row.items():
        if len(values) != len(inputs["completion_ids"]):
            raise UserError(
                f"{name} has {len(values)} entries for {len(inputs['completion_ids'])} sequences, and nothing says "
                "which belong to which: probes cannot measure this model, train without them (probe=none)"
            )
    return by_row


def read_rollout(
    inputs: Mapping[str, Any],
    first_prompt: int,
    responses_per_prompt: int,
    on_policy: bool,
    begun: int = 0,
    pad_token_id: int | None = None,
    ends: Sequence[int] = (),
    sampling_mismatch: str | None = None,
) -> Rollout:
    """Returns the sequences of one of TRL's batch dictionaries. Its prompts are numbered from `first_prompt`.

    begun         how many responses of the first prompt are on the previous process
    pad_token_id  where truncated responses may be hidden from the loss (mask_truncated_completions): they are read too
    ends          tokens that end a response, and the padding token: a response that ends with none is truncated
    sampling_mismatch  why the responses are no samples of the trainer's policy
    """
    tokens, advantages, old_logps = inputs["completion_mask"], inputs["advantages"], inputs.get(OLD_LOGPS)
    written_by_policy = inputs.get(POLICY_MASK, inputs.get("tool_mask"))
    if pad_token_id is not None:
        hidden = are_hidden(inputs)
        tokens = torch.where(hidden.unsqueeze(1), _up_to_last_token(inputs["completion_ids"], pad_token_id), tokens)
        advantages = advantages.masked_fill(hidden, 0.0)
        old_logps = inputs.get(ALL_OLD_LOGPS)  # TRL's are none of hidden responses
    policy = tokens if written_by_policy is None else tokens * written_by_policy
    old_logps = None if on_policy else old_logps  # else they are of this very policy
    return Rollout(
        prompt_ids=inputs["prompt_ids"],
        prompt_mask=inputs["prompt_mask"],
        completion_ids=inputs["completion_ids"],
        completion_mask=policy,
        advantages=advantages,
        rewards=inputs.get(REWARD),
        prompt_index=first_prompt + (begun + inputs[ROLLOUT_ROW]) // responses_per_prompt,
        sampling_logps=inputs.get(SAMPLING_LOGPS, old_logps),
        on_policy=on_policy,
        old_logps=old_logps,
        environment_mask=None if written_by_policy is None else tokens - policy,
        images=image_inputs(inputs),
        truncated=_are_truncated(inputs["completion_ids"], tokens, ends) if ends else None,
        sampling_mismatch=sampling_mismatch,
    )


def are_hidden(inputs: Mapping[str, Any]) -> Tensor:
    """Returns which responses the loss does not see, (B,): TRL masks all tokens of a truncated one."""
    return inputs["completion_mask"].sum(dim=1) == 0


def _are_truncated(ids: Tensor, tokens: Tensor, ends: Sequence[int]) -> Tensor:
    """Returns which responses end with none of these tokens, (B,): TRL calls them truncated."""
    last = (tokens * torch.arange(1, ids.shape[1] + 1, device=ids.device)).argmax(dim=1, keepdim=True)
    return ~torch.isin(ids.gather(1, last).squeeze(1), ids.new_tensor(ends))


def _up_to_last_token(ids: Tensor, pad_token_id: int) -> Tensor:
    """Returns 1 on the tokens of truncated responses, (B, T): the last one of such a response is no padding token."""
    real = (ids != pad_token_id).long()
    return (real.flip(1).cumsum(dim=1).flip(1) > 0).to(real)


def _in_whole_prompts(shuffle: Callable[[dict], dict], generation_batch: dict) -> dict:
    """Returns a generation batch in rollout order, where prompts are contiguous; draws the numbers of TRL's shuffle."""
    shuffle(generation_batch)
    return generation_batch


class Rollouts:
    """The rollouts of a trainer: adds to TRL's batches what TRL leaves out, and reads it back.

    whole_prompts  the responses of a prompt are put side by side
    """

    def __init__(self, trainer: GRPOTrainer, policy: TrainerPolicy, whole_prompts: bool) -> None:
        self._trainer, self._policy, self.whole_prompts = trainer, policy, whole_prompts
        self._tool_mask: list[list[int]] | None = None  # of the latest rollout, this rank's
        self._rewards: Tensor | None = None  # of the latest rollout, all ranks
        self.number = 0  # of the rollout that training learns from at present
        self._sampled_at = -1  # global_step
        self._mismatch = ""  # why its responses are no samples of the policy that is scored
        self._next_mismatch = ""  # and those of the next one, of which some are there

    def on_turns(self, original: Callable[..., tuple], prompts: list) -> tuple:
        before = why_sampling_mismatch(self._trainer)
        generated = original(prompts)
        self._tool_mask = generated[2]
        if self._trainer.model.training:
            self._next_mismatch = self._next_mismatch or before or why_sampling_mismatch(self._trainer)
        return generated

    def on_rewards(self, original: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        by_function = original(*args, **kwargs)
        self._rewards = total_rewards(self._trainer, by_function)
        return by_function

    def begin(self, output: dict, keep_logps: bool) -> None:
        """Begins with a fresh rollout, TRL's batch of this rank, and adds to it what TRL does not hand on."""
        trainer, ids = self._trainer, output["completion_ids"]
        if self._tool_mask is not None and trainer.mask_truncated_completions:
            rows = [torch.tensor([mask], device=ids.device) for mask in self._tool_mask]
            output[POLICY_MASK] = in_one_width(rows, at_least=ids.shape[1])
        output[ROLLOUT_ROW] = torch.arange(len(ids), device=ids.device)
        if self._rewards is not None and REWARD not in output:  # a buffer has put its own there
            first = trainer.accelerator.process_index * len(ids)  # rewards are of all ranks
            output[REWARD] = self._rewards[first : first + len(ids)].to(ids.device)
        self.number, self._sampled_at = self.number + 1, trainer.state.global_step
        self._mismatch, self._next_mismatch = self._next_mismatch, ""
        if keep_logps and trainer.mask_truncated_completions and steps_per_rollout(trainer.args) > 1:
            rollout, logps = self.read(output), output[OLD_LOGPS]
            scores = Scores(logps, torch.zeros_like(logps), rollout.completion_mask)
            output[ALL_OLD_LOGPS] = self._policy.with_hidden(scores, rollout, are_hidden(output)).logps

    def on_prepare_inputs(self, original: Callable[..., dict], generation_batch: Any) -> dict:
        with ExitStack() as undo:
            if self.whole_prompts:
                wrap(grpo_trainer, SHUFFLE, _in_whole_prompts, undo)
            return original(generation_batch)

    def read(self, inputs: dict) -> Rollout:
        """Returns the sequences of one of TRL's batch dictionaries, a microbatch or the whole rollout of this rank."""
        trainer = self._trainer
        size = trainer.args.per_device_train_batch_size * trainer.args.steps_per_generation
        return read_rollout(
            inputs,
            first_prompt=self.number * size,
            responses_per_prompt=trainer.num_generations,
            on_policy=self._sampled_at == trainer.state.global_step,
            begun=trainer.accelerator.process_index * size % trainer.num_generations,
            pad_token_id=trainer._tokenizer.pad_token_id if trainer.mask_truncated_completions else None,
            ends=[*trainer.eos_token_ids, trainer._tokenizer.pad_token_id],
            sampling_mismatch=self._mismatch,
        )
