"""If a subclass makes a different batch from a rollout, that batch is measured, and what it contradicts is nan."""

from __future__ import annotations

import math
import pickle
from typing import Any

import pytest
import torch
from own_losses import PLAIN, DrawsAgain, KeepsSome, Replay
from peft import LoraConfig
from seen import Seen
from torch import Tensor
from trainers import LORA, differing, each_pass_is_timed, graded, outcome
from transformers import TrainerCallback
from trl import GRPOTrainer

from rl_training import Reading, attach
from rl_training.hosts.trl.rollouts import generated
from rl_training.hosts.trl.rollouts.generated import GeneratedResponses
from rl_training.probes import (
    EffectiveSampleSizeProbe,
    GradientNoiseScaleProbe,
    InterventionsProbe,
    MeasuredStepProbe,
    SamplerProbe,
    SimpleEntropyProbe,
)
from rl_training.statistics.kish import kish_size

G = 4
# Eight microbatches of one prompt each.
STEP: dict[str, Any] = PLAIN | {
    "per_device_train_batch_size": 4, "gradient_accumulation_steps": 8, "max_completion_length": 8, "reward": graded,
    "max_steps": 2, "learning_rate": 3e-3,
}  # fmt: skip


def few_probes() -> list[Any]:
    return [SimpleEntropyProbe(per_sequence=True), EffectiveSampleSizeProbe(), GradientNoiseScaleProbe(split_prompts=2)]


def probes() -> list[Any]:
    return [*few_probes(), SamplerProbe(), MeasuredStepProbe(), InterventionsProbe(["lr", "psr"], every=1)]


class SeenRewards(Seen):
    """Keeps each step's rewards, and the true rewards of its rows as the subclass knows them."""

    def __init__(self, trainer: Any) -> None:
        super().__init__()
        self._trainer = trainer
        self.rewards: list[tuple[list[float], list[float]]] = []

    def measure(self, ctx: Any, state: Any) -> Reading:
        step = ctx.step
        reading = super().measure(ctx, state)
        if hasattr(self._trainer, "rewards_of_rows"):
            self.rewards.append((step.batch.rollout.rewards.tolist(), self._trainer.rewards_of_rows.tolist()))
        return reading


def measured(trainer: Any, by: Any = probes) -> tuple[dict[str, Any], list[Any]]:
    """Train, and return the last step's estimates, and all steps as probes see them with the rows' true rewards."""
    seen = SeenRewards(trainer)
    with attach(trainer, probes=[*by(), seen], whole_prompts=True) as attachment, each_pass_is_timed(attachment):
        trainer.train()
    assert all(logged == reward for logged, reward in seen.rewards)
    return dict(attachment.latest), seen.kept_steps


def shortest_half(out: dict[str, Any]) -> Tensor:
    lengths = out["completion_mask"].sum(dim=1).view(-1, G)
    return (lengths.argsort(dim=1)[:, : G // 2] + G * torch.arange(len(lengths)).unsqueeze(1)).flatten()


def half_of_the_prompts(out: dict[str, Any]) -> Tensor:
    return torch.arange(len(out["advantages"]) // 2)


def copied(count: int) -> Any:
    """Return the rows of a batch that is filled up with copies of its first `count` prompts."""
    return lambda out: torch.arange(len(out["advantages"])) % (G * count)


def copied_in_turns(count: int) -> Any:
    """Return the rows of such a batch in which groups and their copies take turns, response by response."""
    return lambda out: copied(count)(out).view(-1, G).t().flatten()


def unlike_numbers(out: dict[str, Any]) -> Tensor:
    return torch.tensor([row for row in range(len(out["advantages"])) if row % 8 not in (1, 5, 6, 7)])


def reversed_rows(out: dict[str, Any]) -> Tensor:
    return torch.arange(len(out["advantages"])).flip(0)


def keeps(make_trainer: Any, rows: Any, **settings: Any) -> Any:
    trainer = make_trainer(KeepsSome, **STEP | settings)
    trainer.rows = rows
    return trainer


def test_replayed_responses_keep_their_rewards_and_get_importance_weights(
    make_trainer: Any,
) -> None:
    trainer = make_trainer(Replay, **STEP)
    estimates, steps = measured(trainer)
    assert trainer.replayed > 0
    assert trainer.true_ess < 31.5
    assert estimates["ess/importance"].value == pytest.approx(trainer.true_ess, rel=1e-4)
    assert estimates["sampler/ess"].value == pytest.approx(trainer.true_ess / 32, rel=1e-4)
    assert [step.batch.rollout.on_policy for step in steps] == [True, False]
    assert steps[0].batch.rollout.sampling_logps is None
    for name in ("delta_h/forward", "delta_h/backward", "intervention/lr/delta_h"):
        assert estimates[name].code == "reused"


def test_replayed_responses_without_log_probabilities_have_no_known_policy(make_trainer: Any) -> None:
    trainer = make_trainer(Replay, **STEP)
    trainer.keeps_logps = False
    estimates, _ = measured(trainer)
    assert trainer.replayed > 0
    for name in ("entropy/token", "delta_h/forward", "ess/importance", "measured/delta_h"):
        assert (
            f"{trainer.replayed} of the 32 responses in this batch were not generated for it" in estimates[name].reason
        )
    assert math.isfinite(estimates["entropy/visited_prefixes"].value)


def test_replayed_responses_of_a_hotter_rollout_are_not_samples_of_the_policy(make_trainer: Any) -> None:
    """This holds even though the current rollout is sampled as it is scored, and has log-probabilities for them."""
    trainer = make_trainer(Replay, **STEP)

    class Cools(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            trainer.generation_config.temperature = [1.5, 1.0][state.global_step]

    trainer.add_callback(Cools())
    estimates, _ = measured(trainer)
    assert trainer.replayed > 0
    for name in ("entropy/token", "ess/importance"):
        assert estimates[name].code == "sampling_mismatch"
        assert "temperature=1.5 in trainer.generation_config" in estimates[name].reason


def test_resampled_prompts_keep_their_rewards_and_are_measured(make_trainer: Any) -> None:
    trainer = make_trainer(
        DrawsAgain, **STEP | {"reward": lambda completions, **k: [float(len(c) > 4) for c in completions]}
    )
    estimates, steps = measured(trainer, few_probes)
    assert all(step.batch.rollout.on_policy for step in steps)
    for name in ("entropy/token", "delta_h/forward", "delta_reward/forward", "gns/trace_between"):
        assert math.isfinite(estimates[name].value)


def test_a_selection_of_a_prompts_responses_is_not_a_sample_of_the_policy(make_trainer: Any) -> None:
    """Estimates that describe the batch and its gradient are measured, from the folds of the smaller batch."""
    estimates, steps = measured(keeps(make_trainer, shortest_half, max_steps=1))
    for name in ("entropy/token", "delta_h/forward", "delta_reward/forward", "ess/importance", "measured/delta_h"):
        assert estimates[name].code == "not_all_kept"
    for name in ("entropy/visited_prefixes", "ess/zero_advantage_prompts", "gns/trace_step"):
        assert math.isfinite(estimates[name].value)
    assert steps[-1].batch.fold_sizes.tolist() == [2.0] * 8
    assert steps[-1].batch.responses_per_prompt == 2


def test_a_step_without_some_whole_prompts_is_measured_at_its_smaller_size(make_trainer: Any) -> None:
    """Each microbatch has two responses, so a fold needs two of them."""
    estimates, steps = measured(keeps(make_trainer, half_of_the_prompts, learning_rate=3e-4))
    for name in (
        "entropy/token",
        "delta_h/forward",
        "delta_h/backward",
        "delta_reward/forward",
        "measured/delta_reward",
    ):
        assert math.isfinite(estimates[name].value), estimates[name].reason
    assert steps[-1].batch.fold_sizes.tolist() == [4.0] * 4
    assert steps[-1].batch.rollout.num_sequences == 16
    assert estimates["sampler/residual"].code == "untested"  # half of them may have been chosen by what was drawn


def test_prompts_with_unequal_numbers_of_responses_are_reported(make_trainer: Any) -> None:
    estimates, _ = measured(keeps(make_trainer, unlike_numbers, max_steps=1), few_probes)
    for name in ("entropy/token", "delta_h/forward", "gns/trace_step", "ess/zero_advantage_prompts"):
        assert estimates[name].code == "uneven_prompts"
    assert math.isfinite(estimates["ess/zero_advantage"].value)


def test_errors_are_of_distinct_groups_in_a_batch_filled_up_with_copies(make_trainer: Any) -> None:
    """Each of four prompts is there twice. Without copies the same four prompts give the same numbers and errors.

    The rows of a group and of its copy take turns, so that one looks like the other's next responses.
    """
    eight, four = (
        measured(keeps(make_trainer, rows, max_steps=1), few_probes)
        for rows in (copied_in_turns(4), lambda out: torch.arange(4 * G))
    )
    for name in ("entropy/token", "delta_h/forward", "delta_h/reuse", "ess/advantage", "ess/importance"):
        estimate, expected = (estimates[name] for estimates, _ in (eight, four))
        assert estimate.value == pytest.approx(expected.value, rel=1e-4), name
        assert estimate.stderr == pytest.approx(expected.stderr, rel=1e-4, nan_ok=True), name
    assert math.isfinite(eight[0]["delta_h/forward"].stderr)
    assert eight[1][0].batch.fold_sizes.tolist() == [2.0 * G] * 4
    assert eight[0]["gns/trace_step"].code == "copied_groups"


def test_a_step_that_goes_through_its_rollout_twice_has_the_numbers_and_errors_of_one_pass(make_trainer: Any) -> None:
    """With num_iterations=2 and rollouts of half a step, it learns twice from each response, at the same weights."""
    once = STEP | {"max_steps": 1, "gradient_accumulation_steps": 4, "steps_per_generation": 4}
    twice = once | {"gradient_accumulation_steps": 8, "num_iterations": 2}
    two_passes, one_pass = (measured(make_trainer(GRPOTrainer, **settings), few_probes) for settings in (twice, once))
    for name in ("entropy/token", "delta_h/forward", "delta_h/reuse", "ess/advantage", "ess/importance"):
        estimate, expected = (estimates[name] for estimates, _ in (two_passes, one_pass))
        assert estimate.value == pytest.approx(expected.value, rel=1e-4), (name, estimate.reason)
        assert estimate.stderr == pytest.approx(expected.stderr, rel=1e-4, nan_ok=True), name
    assert two_passes[0]["gns/trace_step"].code == "copied_groups"


def test_too_few_distinct_groups_give_no_error_bar(make_trainer: Any) -> None:
    """The rows lie anywhere. In `ess` a response weighs what its copies do: two of the third prompt, else three."""
    advantages: list[Tensor] = []

    def copied_and_shuffled(out: dict[str, Any]) -> Tensor:
        advantages.append(out["advantages"][: 3 * G])
        return copied(3)(out)[torch.randperm(8 * G, generator=torch.Generator().manual_seed(0))]

    estimates, _ = measured(keeps(make_trainer, copied_and_shuffled, max_steps=1))
    assert math.isfinite(estimates["entropy/token"].value)
    for name in ("entropy/token", "delta_h/forward", "sampler/kl"):
        assert math.isnan(estimates[name].stderr)
    assert estimates["entropy/token"].code == estimates["delta_h/forward"].code == "copied_groups"
    expected = kish_size(advantages[0] * torch.tensor([3, 3, 2]).repeat_interleave(G))
    assert estimates["ess/advantage"].value == pytest.approx(expected, rel=1e-5)


def test_rows_in_another_order_are_the_same_responses(make_trainer: Any) -> None:
    """Each keeps its own reward. The sums over folds are the same as in the order of generation."""
    plain, other = (
        measured(keeps(make_trainer, rows, max_steps=1), few_probes)[0]
        for rows in (lambda out: slice(None), reversed_rows)
    )
    for name in ("entropy/token", "delta_reward/forward", "ess/advantage", "gns/trace_step"):
        assert other[name].value == pytest.approx(plain[name].value, rel=1e-3), name
    for estimates in (plain, other):
        assert abs(estimates["sampler/residual"].value) < 4 * estimates["sampler/residual"].stderr


def with_logps(make_trainer: Any, change: Any, **settings: Any) -> Any:
    """Return a trainer whose batch has the policy's log-probabilities, changed, under TRL's `old` key."""

    class Handed(Replay):
        def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
            out = GRPOTrainer._generate_and_score_completions(self, inputs)
            logps = self.scores_of(out)
            out["old_per_token_logps"] = change(logps)
            logs = ((logps - out["old_per_token_logps"]) * out["completion_mask"]).sum(dim=1).double()
            self.true_ess = float(logs.exp().sum() ** 2 / (2 * logs).exp().sum())
            return out

    return make_trainer(Handed, **STEP | {"max_steps": 1} | settings)


def test_old_log_probabilities_equal_to_the_policys_leave_the_step_on_policy(make_trainer: Any) -> None:
    estimates, steps = measured(with_logps(make_trainer, torch.clone))
    assert steps[0].batch.rollout.on_policy
    assert steps[0].batch.rollout.sampling_logps is None
    assert estimates["ess/importance"].value == 32.0
    assert math.isfinite(estimates["intervention/psr/delta_h"].value)


def test_old_log_probabilities_of_another_policy_are_kept(make_trainer: Any) -> None:
    trainer = with_logps(make_trainer, lambda logps: logps + 0.1 * torch.sin(1e4 * logps))
    estimates, steps = measured(trainer)
    assert not steps[0].batch.rollout.on_policy
    assert 16 < trainer.true_ess < 31.9
    assert estimates["ess/importance"].value == pytest.approx(trainer.true_ess, rel=1e-4)


@pytest.mark.parametrize(("change", "is_own"), [(0.0, True), (0.4, False)])
def test_with_dropout_old_log_probabilities_are_anothers_if_they_lie_farther_off(
    make_trainer: Any, change: float, is_own: bool
) -> None:
    """The policy's own are of another pass, with other masks, and differ by .1 to .2 nats per token."""
    adapter = LoraConfig(**LORA, lora_alpha=1, init_lora_weights=False)
    trainer = with_logps(
        make_trainer, lambda logps: logps + change * torch.sin(1e4 * logps), peft_config=adapter, disable_dropout=False
    )
    estimates, steps = measured(trainer, lambda: ["ess"])
    rollout, scores = steps[0].batch.rollout, steps[0].batch.scores
    assert rollout.on_policy == is_own
    assert (estimates["ess/importance"].value == 32.0) == is_own
    if not is_own:
        off = (scores.logps - rollout.old_logps)[rollout.completion_mask.bool()].abs().mean()
        assert 0.1 < float(off) < 0.6


def test_a_response_that_the_policy_did_not_write_is_detected(make_trainer: Any) -> None:
    class Shown(GRPOTrainer):
        def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
            out = super()._generate_and_score_completions(inputs)
            out["completion_ids"][0, 0] = 7 if out["completion_ids"][0, 0] != 7 else 8
            return out

    estimates, _ = measured(make_trainer(Shown, **STEP | {"max_steps": 1}))
    for name in ("entropy/token", "measured/delta_reward"):
        assert estimates[name].code == "not_generated"
        assert estimates[name].reason.startswith("1 of the 32 ")


def test_a_batch_rebuilt_by_a_subclass_keeps_its_prompts_and_has_no_rewards(make_trainer: Any) -> None:
    class Anew(GRPOTrainer):
        def _prepare_inputs(self, generation_batch: Any) -> Any:
            inputs = super()._prepare_inputs(generation_batch)
            return {key: value for key, value in inputs.items() if not key.startswith("rollout_")}

    plain, other = (
        measured(make_trainer(kind, **STEP | {"max_steps": 1}), few_probes)[0] for kind in (GRPOTrainer, Anew)
    )
    for name in ("entropy/token", "delta_h/forward", "gns/trace_step", "ess/zero_advantage_prompts"):
        assert other[name].value == pytest.approx(plain[name].value, rel=1e-6)
    assert other["delta_reward/forward"].code == "no_rewards"


def test_folds_of_microbatches_of_unexpected_sizes_add_up_to_the_gradient_of_the_step(
    make_trainer: Any,
) -> None:
    class Shrinks(GRPOTrainer):
        def _prepare_inputs(self, generation_batch: Any) -> Any:
            inputs = super()._prepare_inputs(generation_batch)
            rows = 4 if self._step % 4 == 3 else 8
            return {key: value[:rows] if value.ndim else value for key, value in inputs.items()}

    settings = STEP | {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 4, "max_grad_norm": 0.0}
    estimates, steps = measured(make_trainer(Shrinks, **settings), few_probes)
    assert steps[-1].batch.rollout.num_sequences == 28
    for name in ("delta_h/forward", "gns/trace_step", "entropy/token"):
        assert math.isfinite(estimates[name].value)
    gradients, sizes = steps[-1].gradients, steps[-1].batch.fold_sizes
    assert sizes.sum() == 28
    for vectors, name in zip(gradients.by_fold.means(), gradients.layout.buckets, strict=True):
        mean = torch.cat([gradients.mean[entry].reshape(-1) for entry in name.names])
        of_folds = (sizes.to(vectors).unsqueeze(1) * vectors).sum(dim=0) / 28
        assert float((of_folds - mean).norm()) < 1e-5 * float(mean.norm())


def test_a_step_whose_loss_is_not_observed_has_no_estimates_and_warns_once(make_trainer: Any, caplog: Any) -> None:
    class OwnStep(GRPOTrainer):
        def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
            inputs = self._prepare_inputs(inputs)
            ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
            loss = model(input_ids=ids, labels=ids).loss / self.current_gradient_accumulation_steps
            self.accelerator.backward(loss)
            self._step += 1
            return loss.detach()

    trainer = make_trainer(OwnStep, **STEP)
    with attach(trainer, probes=probes()) as attachment:
        trainer.train()
    assert not attachment.latest
    assert trainer.state.global_step == 2
    assert [line.message.count("does not call compute_loss") for line in caplog.records].count(1) == 1


@pytest.mark.parametrize("kind", ["replay", "drawn again", "unlike numbers"])
def test_training_on_another_batch_is_bitwise_the_training_without_probes(make_trainer: Any, kind: str) -> None:
    def trainer() -> Any:
        if kind == "unlike numbers":
            return keeps(make_trainer, unlike_numbers, gradient_accumulation_steps=4)
        kinds = {"replay": Replay, "drawn again": DrawsAgain}
        return make_trainer(kinds[kind], **STEP | {"gradient_accumulation_steps": 4})

    bare = outcome(trainer())
    with attach(probed := trainer(), probes=probes(), whole_prompts=False):
        assert differing(outcome(probed), bare) == []


# --- responses by their tokens ----------------------------------------------------------------------------------------


def keys_of(responses: GeneratedResponses, rows: list[tuple[list[int], list[int]]]) -> list[bytes]:
    responses.add([prompt for prompt, _ in rows], [completion for _, completion in rows], None)
    return [*responses._order]


def test_moved_rows_with_equal_tokens_and_different_rewards_have_no_reward() -> None:
    responses = GeneratedResponses()
    keys = keys_of(responses, [([1], [2, 3]), ([1], [2, 3]), ([1, 2], [3])])
    responses.reward([0.0, 1.0, 5.0])
    in_place, _ = responses.find(keys)
    assert [response.reward for response in in_place] == [0.0, 1.0, 5.0]
    moved, fresh = responses.find(keys[::-1])
    assert [response.reward for response in moved] == [5.0, None, None]
    assert fresh == [True] * 3


def test_responses_of_earlier_rollouts_are_recognized_until_the_memory_is_full(monkeypatch: Any) -> None:
    monkeypatch.setattr(generated, "MAX_PAST_RESPONSES", 3)
    responses = GeneratedResponses()
    first = keys_of(responses, [([1], [2]), ([1], [3])])
    responses.reward([1.0, 2.0])
    responses.begin_next(first[:1])
    assert not responses
    second = keys_of(responses, [([1], [2]), ([1], [4])])
    places, fresh = responses.find([first[1], second[0], first[0]])
    assert fresh == [False, True, True]  # the same tokens sampled again are a fresh sample
    assert [response.learned for response in places] == [False, False, False]
    responses.begin_next(second)
    keys_of(responses, [([9], [9])])
    assert responses.find([first[0]])[0][0].learned
    responses.begin_next([])
    kept, _ = responses.find(first)
    assert [response is not None for response in kept] == [True, False]  # the first was generated again, and is later
    keys_of(responses, [([8], [8])])
    responses.begin_next([])
    assert responses.find([first[0]]) == ([None], [False])


def test_the_tool_mask_of_a_past_response_is_kept_in_a_bit_per_token() -> None:
    """A training of many long turns keeps thousands of them. After its last token, a mask is 0."""
    responses = GeneratedResponses()
    mask = [1, 0, 0, 1, 1] * 1001
    responses.add([[1]], [[2] * len(mask)], [mask])
    responses.begin_next([])
    (kept,) = responses._past.values()
    assert len(pickle.dumps(kept)) < len(mask) / 8 + 300
    assert kept.tool_bits is not None
    unpacked = generated.tool_mask(kept.tool_bits)[0].tolist()
    assert unpacked == mask + [0] * (len(unpacked) - len(mask))


def test_a_response_once_learned_from_stays_so_when_generated_again_without_learning() -> None:
    responses = GeneratedResponses()
    for learned in (1, 0):
        responses.begin_next(keys_of(responses, [([1], [2]), ([1], [3])])[:learned])
    places, _ = responses.find(keys_of(GeneratedResponses(), [([1], [2]), ([1], [3])]))
    assert [response is not None and response.learned for response in places] == [True, False]


def test_rewards_for_another_number_of_rows_are_ignored() -> None:
    responses = GeneratedResponses()
    keys = keys_of(responses, [([1], [2]), ([1], [3])])
    responses.reward([1.0, 2.0, 3.0])
    assert [response.reward for response in responses.find(keys)[0]] == [None, None]
