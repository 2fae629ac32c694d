"""The filtered buffer draws and keeps prompts with mixed rewards, and training stays exact."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import forks
import pytest
import torch
from configs import quick_run
from datasets import Dataset
from seen import Seen
from since import since
from torch import Tensor
from trainers import logged_numbers, trainer_maker
from trl import GRPOConfig, GRPOTrainer

from rl_training import attach
from rl_training.hosts.trl.attempt_metrics import merge_metrics
from rl_training.hosts.trl.buffer import FilteredBuffer, prompt_weights
from rl_training.hosts.trl.fill_rollout import fill_slots, start_buffer
from rl_training.hosts.trl.policy import TrainerPolicy
from rl_training.hosts.trl.settings.spelling import COMMAND_LINE, PYTHON
from rl_training.job.run.training import TrainingRun
from rl_training.policy.rollout import Rollout, are_mixed
from rl_training.probes import EffectiveSampleSizeProbe, GroundTruthProbe, SimpleEntropyProbe
from rl_training.records.checkpoint_flaws import find_flaw
from rl_training.records.checkpoint_states import BUFFER_STATE, save_buffer_state
from rl_training.records.report.summary import summarize
from rl_training.records.table.reading import read_run
from rl_training.tasks.arithmetic import arithmetic, arithmetic_reward

ROOT = Path(__file__).parents[3]
SMALL = [
    "trainer.max_steps=1",
    "trainer.save_steps=1",
    "batch.sequences_per_step=16",
    "batch.microbatch_size=8",
    "probe=none",
]
Make = Callable[..., GRPOTrainer]


class Rollouts(Seen):
    """Keeps this process's rollout at every step, as training gets it."""

    @property
    def seen(self) -> list[Rollout]:
        return [step.batch.rollout for step in self.kept_steps]


class Asked:
    """The default task's reward, or a constant one. It remembers every attempt."""

    def __init__(self, constant: float | None = None) -> None:
        self.__name__ = "asked"
        self.constant = constant
        self.prompts: list[list[str]] = []
        self.rewards: list[list[float]] = []
        self.num_tokens: list[int] = []

    def __call__(self, prompts: Any, completions: Any, completion_ids: Any, **columns: Any) -> list[float]:
        right = arithmetic_reward(completions, columns["answer"])
        self.prompts.append(prompts[::4])
        self.rewards.append(right if self.constant is None else [self.constant] * len(right))
        self.num_tokens.append(sum(map(len, completion_ids)))
        return self.rewards[-1]


def parameters_after(trainer: GRPOTrainer, **how: Any) -> dict[str, Tensor]:
    trainer.train(**how)
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters()}


def assert_equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert a.keys() == b.keys()
    assert [name for name in a if not torch.equal(a[name], b[name])] == []


# --- which prompts are drawn --------------------------------------------------------------------------------------


def test_prompt_weights_are_the_expected_variance_of_success() -> None:
    """By hand: 12 successes of 24, so m = 1/2; Beta(1, 1), Beta(5, 5), Beta(9, 1), Beta(1, 9)."""
    weights = prompt_weights(torch.tensor([0.0, 4, 8, 0]), torch.tensor([0.0, 8, 8, 8]), floor=0.1)
    expected = [4 * 1 / 6, 4 * 25 / 110, 4 * 9 / 110, 4 * 9 / 110]
    assert weights.tolist() == pytest.approx([0.1 + 0.9 * w for w in expected])


def buffer_that_learned(rewards: Tensor, **options: Any) -> FilteredBuffer:
    buffer = FilteredBuffer(**options)
    buffer.start(len(rewards) + 1)  # the last prompt was never tried
    buffer.learn(range(len(rewards)), rewards)
    return buffer


def test_a_resumed_buffer_restores_the_range_of_rewards() -> None:
    """By hand: 2 successes of 4, so m = 1/2; Beta(1 + 1, 1 + 1), Beta(1 + 1, 1 + 1), and Beta(1, 1) if never tried."""
    before = buffer_that_learned(torch.tensor([[-1.0, 3.0], [3.0, -1.0]]), floor=0.1)
    again = FilteredBuffer(floor=0.1)
    again.start(3)
    again.load_state_dict(before.state_dict())
    known = 0.1 + 0.9 * 4 * 4 / 20
    assert again.weights().tolist() == pytest.approx([known, known, 0.7])


def test_a_prompt_that_never_succeeds_keeps_the_floor_weight_and_is_still_drawn() -> None:
    buffer = buffer_that_learned(torch.tensor([[0.0, 1.0] * 500, [0.0] * 1000]), floor=0.2)
    weights = buffer.weights()
    assert weights[1] == pytest.approx(0.2, abs=0.01)
    drawn = [buffer.draw(1, tried=[2])[0] for _ in range(2000)]
    assert drawn.count(1) / 2000 == pytest.approx(float(weights[1] / weights[:2].sum()), abs=0.03)


def test_prompt_weights_ignore_scale_and_offset_of_rewards() -> None:
    rewards = torch.tensor([[0.0, 1.0, 1.0, 0.0], [1.0, 1.0, 1.0, 1.0], [0.0, 0.25, 0.5, 0.0]])
    weights = [buffer_that_learned(scale * rewards - 3.0).weights() for scale in (1.0, 20.0)]
    torch.testing.assert_close(weights[0], weights[1])
    torch.testing.assert_close(weights[0], buffer_that_learned(rewards).weights())


def test_prompts_are_drawn_uniformly_while_all_rewards_are_equal() -> None:
    assert buffer_that_learned(torch.full((3, 4), 0.1)).weights().unique().tolist() == [1.0]


def test_a_response_counts_half_after_the_half_life() -> None:
    buffer = buffer_that_learned(torch.tensor([[0.0, 1.0], [1.0, 1.0]]), half_life=3.0)
    for _ in range(3):
        buffer.forget()
    assert buffer.state_dict()["responses"].tolist() == pytest.approx([1.0, 1.0, 0.0])
    weights = prompt_weights(torch.tensor([0.5, 1.0, 0.0]), torch.tensor([1.0, 1.0, 0.0]), floor=0.1)
    torch.testing.assert_close(buffer.weights(), weights.double())


def test_draws_are_distinct_and_exclude_prompts_already_tried() -> None:
    buffer = FilteredBuffer(seed=3)
    buffer.start(20)
    tried = list(range(0, 20, 2))
    assert sorted(buffer.draw(10, tried)) == list(range(1, 20, 2))


def test_rewards_that_differ_only_by_rounding_are_not_mixed() -> None:
    rewards = torch.tensor([[0.1 + 0.2, 0.3], [0.3, 0.31], [0.0, 0.0], [-1.0, 1.0]])
    assert are_mixed(rewards).tolist() == [False, True, False, True]


@pytest.mark.parametrize(
    ("option", "message"),
    [({"max_attempts": 0}, "max_attempts=0"), ({"floor": 0.0}, "floor=0.0"), ({"half_life": 0}, "half_life=0")],
)
def test_invalid_buffer_options_are_refused(option: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FilteredBuffer(**option)


# --- which prompt fills which slot --------------------------------------------------------------------------------


def test_a_mixed_prompt_replaces_only_a_rejected_one() -> None:
    """By hand, for two processes with three slots each. Group 4 of the second process is surplus."""
    first, other = torch.tensor([[0, 1, 0, 0, 1, 1], [1, 1, 0, 1, 1, 1]]).bool()
    filled = [[fill_slots(mixed[:generated], 3) for generated in (3, 5, 6)] for mixed in (first, other)]
    assert [[(groups.tolist(), empty) for groups, empty in of_process] for of_process in filled] == [
        [([0, 1, 2], 2), ([4, 1, 2], 1), ([4, 1, 5], 0)],
        [([0, 1, 2], 1), ([0, 1, 3], 0), ([0, 1, 3], 0)],
    ]


def test_metrics_of_several_attempts_are_merged_over_all_their_sequences() -> None:
    attempts = [
        {
            "reward": [0.5], "completions/min_length": [4.0], "completions/max_length": [9.0], "seldom": [2.0],
            "completions/clipped_ratio": [0.5], "completions/mean_terminated_length": [6.0],
            "completions/min_terminated_length": [4.0],
        },
        {
            "reward": [1.0], "completions/min_length": [3.0], "completions/max_length": [5.0], "reward/x": [math.nan],
            "completions/clipped_ratio": [1.0], "completions/mean_terminated_length": [0.0],
            "completions/min_terminated_length": [0.0],
        },
    ]  # fmt: skip
    merged = merge_metrics(attempts, [30, 10])
    assert math.isnan(merged.pop("reward/x"))
    assert merged == {
        "reward": 0.625, "completions/min_length": 3.0, "completions/max_length": 9.0, "seldom": 2.0,
        "completions/clipped_ratio": 0.625, "completions/mean_terminated_length": 6.0,
        "completions/min_terminated_length": 4.0,
    }  # fmt: skip


# --- a rollout ----------------------------------------------------------------------------------------------------


def test_a_filled_rollout_has_only_mixed_prompts_and_each_row_its_own_reward(make_trainer: Make) -> None:
    """The rewards are recomputed from the texts of prompt and completion."""
    rollouts, asked = Rollouts(), Asked()
    trainer = make_trainer(probes=[rollouts], buffer=FilteredBuffer(max_attempts=20), reward=asked, max_steps=3)
    trainer.train()
    answers = {row["prompt"]: row["answer"] for row in trainer.train_dataset}
    assert len(asked.prompts) > len(rollouts.seen) == 3  # at least one rollout was refilled
    for rollout in rollouts.seen:
        rows = zip(rollout.prompt_ids, rollout.prompt_mask, rollout.completion_ids, strict=True)
        decode = trainer.processing_class.decode
        texts = [[decode(t, skip_special_tokens=True) for t in (p[m.bool()], c)] for p, m, c in rows]
        prompts, completions = zip(*texts, strict=True)
        rewards = torch.tensor(arithmetic_reward(list(completions), [answers[p] for p in prompts]))
        assert torch.equal(rollout.rewards, rewards)
        groups = rewards.view(-1, 4)
        torch.testing.assert_close(rollout.advantages, (groups - groups.mean(dim=1, keepdim=True)).flatten())
        assert (rollout.advantages.view(-1, 4).abs().amax(dim=1) > 0).all()
        assert prompts[::4] == prompts[1::4] == prompts[3::4]
        assert len(set(prompts)) == 8
        assert (rollout.completion_ids[rollout.completion_mask == 0] == trainer.processing_class.pad_token_id).all()
    indices = [rollout.prompt_index.tolist() for rollout in rollouts.seen]
    assert [len(set(index)) for index in indices] == [8, 8, 8]
    assert not set(indices[0]) & set(indices[1])


def test_metrics_cover_all_generated_responses(make_trainer: Make) -> None:
    asked = Asked()
    trainer = make_trainer(buffer=FilteredBuffer(max_attempts=3), reward=asked, max_steps=2)
    trainer.train()
    first = 0
    for row in trainer.state.log_history[:2]:
        calls = slice(first, first + int(row["buffer/attempts"]))
        first = calls.stop
        rewards = [reward for call in asked.rewards[calls] for reward in call]
        mixed = [len(set(rewards[i : i + 4])) > 1 for i in range(0, len(rewards), 4)]
        assert row["reward"] == pytest.approx(sum(rewards) / len(rewards))
        assert row["frac_reward_zero_std"] == pytest.approx(1 - sum(mixed) / len(mixed))
        assert row["buffer/acceptance"] == pytest.approx(sum(mixed) / len(mixed))
        assert row["buffer/filled"] == pytest.approx(sum(mixed) / 8)  # a single process has no surplus
        assert row["buffer/generated_tokens"] == sum(asked.num_tokens[calls])
        assert row["completions/mean_length"] == pytest.approx(sum(asked.num_tokens[calls]) / len(rewards))
    assert first == len(asked.rewards) > 2
    asked_tokens = [len(ids) for call in asked.prompts for ids in trainer._tokenize_prompts(call)[0]]
    assert trainer.state.log_history[1]["num_tokens"] == 4 * sum(asked_tokens) + sum(asked.num_tokens)


def test_an_unfilled_slot_keeps_a_rejected_prompt_without_advantages(make_trainer: Make) -> None:
    """With a constant reward: three attempts, then a step of weight decay alone."""
    rollouts, asked = Rollouts(), Asked(constant=1.0)
    trainer = make_trainer(
        probes=[rollouts], buffer=FilteredBuffer(max_attempts=3), reward=asked, max_steps=1, weight_decay=0.0
    )
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    assert_equal(before, parameters_after(trainer))
    assert [len(prompts) for prompts in asked.prompts] == [8, 8, 8]
    assert len({prompt for prompts in asked.prompts for prompt in prompts}) == 24
    assert rollouts.seen[0].advantages.abs().max() == 0
    state = trainer.buffer.state_dict()
    assert state["responses"].tolist().count(4.0) == state["reward_sums"].tolist().count(4.0) == 24
    row = trainer.state.log_history[0]
    assert (row["buffer/filled"], row["buffer/acceptance"], row["buffer/attempts"]) == (0, 0, 3)


def test_refilling_stops_when_no_prompts_are_left_to_try(make_trainer: Make) -> None:
    asked = Asked(constant=0.0)
    few = arithmetic(num_train=20, num_eval=8).train_dataset
    trainer = make_trainer(buffer=FilteredBuffer(max_attempts=99), reward=asked, train_dataset=few, logging_steps=2)
    trainer.train()
    assert [len(prompts) for prompts in asked.prompts] == [8, 8] * 2  # 4 are left, each time
    row = trainer.state.log_history[0]  # the mean over both rollouts, except for a count
    assert (row["buffer/attempts"], row["num_tokens"]) == (2, trainer.state.num_input_tokens_seen)


@pytest.mark.parametrize("reuse", [{"steps_per_generation": 4}, {"num_iterations": 2}], ids=lambda d: next(iter(d)))
def test_the_filter_acts_once_per_rollout(make_trainer: Make, reuse: dict[str, int]) -> None:
    """Here a rollout serves two steps. With old_per_token_logps of the wrong rows, ratios would not be near 1."""
    trainer = make_trainer(buffer=FilteredBuffer(), max_steps=3, gradient_accumulation_steps=2, **reuse)
    trainer.train()
    logged = ["buffer/attempts" in row for row in trainer.state.log_history[:3]]
    assert logged == [True, False, True]
    assert trainer.state.log_history[0]["buffer/attempts"] > 1
    assert trainer.state.log_history[0]["clip_ratio/region_mean"] == 0


# --- what does not change -----------------------------------------------------------------------------------------


def test_probes_do_not_change_filtered_training(make_trainer: Make) -> None:
    probes = [SimpleEntropyProbe(), GroundTruthProbe(every=2, sequences=16), EffectiveSampleSizeProbe()]
    bare = make_trainer(buffer=FilteredBuffer(), gradient_accumulation_steps=2)
    ended = parameters_after(bare)
    probed = make_trainer(buffer=FilteredBuffer(), gradient_accumulation_steps=2, probes=probes)
    assert_equal(ended, parameters_after(probed))
    assert_equal(bare.buffer.state_dict(), probed.buffer.state_dict())


def test_without_a_buffer_training_is_bitwise_equal_to_trls(make_trainer: Make, tmp_path: Path) -> None:
    ours = parameters_after(make_trainer(save_strategy="steps", save_steps=2))
    settings = {"loss_type": "dr_grpo", "scale_rewards": "none", "beta": 0.0, "use_cpu": True, "bf16": False}
    plain = make_trainer(GRPOTrainer, config_class=GRPOConfig, gradient_checkpointing=False, **settings)
    with attach(plain, probes=[], whole_prompts=True):
        assert_equal(ours, parameters_after(plain))
    assert not (tmp_path / "state" / "checkpoint-2" / BUFFER_STATE).exists()


def test_evaluation_is_never_filtered(make_trainer: Make) -> None:
    rewards = []
    for buffer in (None, FilteredBuffer()):
        asked = Asked()
        trainer = make_trainer(buffer=buffer, reward=asked, per_device_eval_batch_size=16)
        if buffer is not None:
            buffer.learn(range(256), torch.eye(2)[torch.arange(256) % 2])
            before = buffer.state_dict()
        torch.manual_seed(1)
        trainer.evaluate(arithmetic(num_train=8, num_eval=8).eval_dataset)
        rewards.append((asked.prompts, asked.rewards))
    assert rewards[0] == rewards[1]
    assert_equal(before, trainer.buffer.state_dict())


def test_ground_truth_sequences_are_sampled_without_the_filter(make_trainer: Make) -> None:
    """They are drawn from all prompts with equal probability, whatever the buffer has learned about them."""
    buffer = FilteredBuffer(floor=0.01)
    bare, filtered = make_trainer(), make_trainer(buffer=buffer)
    buffer.learn(range(256), torch.tensor([0.0, 1.0]).repeat(256, 1).where(torch.arange(256)[:, None] < 8, 1.0))
    assert buffer.weights()[8:].max() < buffer.weights()[:8].min()
    fresh = [TrainerPolicy(trainer).sample(32, seed=5) for trainer in (bare, filtered)]
    assert torch.equal(fresh[0].prompt_ids, fresh[1].prompt_ids)
    assert torch.equal(fresh[0].completion_ids, fresh[1].completion_ids)


# --- resuming -----------------------------------------------------------------------------------------------------


def test_a_resumed_run_ends_bitwise_equal_to_the_uninterrupted_one(make_trainer: Make, tmp_path: Path) -> None:
    settings = {"save_strategy": "steps", "save_steps": 1, "max_steps": 2, "gradient_accumulation_steps": 2}
    whole, resumed = (
        make_trainer(buffer=FilteredBuffer(seed=7), probes=[SimpleEntropyProbe()], **settings) for _ in range(2)
    )
    ended = parameters_after(whole)
    checkpoint = tmp_path / "state" / "checkpoint-1"
    assert find_flaw(checkpoint) == ""
    assert_equal(ended, parameters_after(resumed, resume_from_checkpoint=str(checkpoint)))
    assert logged_numbers(resumed) == logged_numbers(whole)
    assert_equal(whole.buffer.state_dict(), resumed.buffer.state_dict())
    (checkpoint / "model.safetensors").unlink()  # the buffer's state must not be mistaken for weights
    assert "no weights" in find_flaw(checkpoint)


def test_a_checkpoint_without_the_state_of_this_buffer_is_refused(make_trainer: Make, tmp_path: Path) -> None:
    trainer = make_trainer(buffer=FilteredBuffer())
    with pytest.raises(ValueError, match=r"FilteredBuffer: .*command line: buffer=plain"):
        trainer._load_optimizer_and_scheduler(str(tmp_path))
    other = FilteredBuffer()
    other.start(300)
    save_buffer_state(other, tmp_path)
    with pytest.raises(ValueError, match=r"300 prompts .* 256.*on the command line: model=hub"):
        trainer._load_optimizer_and_scheduler(str(tmp_path))


# --- what is refused ----------------------------------------------------------------------------------------------


def seven_prompts() -> Dataset:
    return arithmetic(num_train=7, num_eval=8).train_dataset


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            lambda: {"train_dataset": seven_prompts()},
            "7 prompts.* 8 .*: use per_device_train_batch_size x steps_per_generation x processes = 28 or less",
        ),
        pytest.param(
            lambda: {"train_dataset": seven_prompts().to_iterable_dataset()},
            "streaming",
            marks=since("trl 1.9.0"),
        ),
        (
            lambda: {"multi_objective_aggregation": "normalize_then_sum"},
            "'sum_then_normalize', or train without a buffer",
        ),
    ],
)
def test_a_training_that_the_filter_does_not_support_is_refused(make_trainer: Make, settings: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        make_trainer(buffer=FilteredBuffer(), **settings())


@pytest.mark.parametrize("column", ["image", "images"])
def test_prompts_with_images_are_refused(make_trainer: Make, column: str) -> None:
    rows = arithmetic(num_train=64, num_eval=8).train_dataset
    trainer = make_trainer()
    trainer.train_dataset = rows.add_column(column, ["a picture"] * len(rows))
    for spelling, fix in ((COMMAND_LINE, "use buffer=plain"), (PYTHON, "train without a buffer")):
        with pytest.raises(ValueError, match=f"images: {fix}"):
            start_buffer(trainer, FilteredBuffer(), spelling)


def test_a_filtered_run_is_resumed_with_the_same_options_only(tmp_path: Path) -> None:
    def built(*overrides: str) -> TrainingRun:
        return quick_run(tmp_path / "run", *SMALL, *overrides)

    run = built("buffer=filtered", "buffer.floor=0.3", "seed=5")
    assert (run.trainer.buffer.floor, run.trainer.buffer.seed) == (0.3, 5)
    run.train()
    run.end()
    (row,) = [row for row in summarize(read_run(run.run_dir)) if row.label == "accepted prompts"]
    acceptance = run.trainer.state.log_history[0]["buffer/acceptance"]
    assert (row.value, row.note) == (f"{acceptance:.2f}", "share of the prompts generated")
    with pytest.raises(ValueError, match=r"buffer\.floor=0\.2 \(was 0\.3\)"):
        built("buffer=filtered", "buffer.floor=0.2", "seed=5", "resume=latest", "trainer.max_steps=2")
    assert built("seed=5", f"run_dir={tmp_path / 'plain'}").trainer.buffer is None


# --- two processes ------------------------------------------------------------------------------------------------


def one_rank(rank: int, folder: Path) -> None:
    """Write FOLDER/<run>_<rank>.pt for each run. In `one_sided` all responses of rank 1 get the same reward."""
    for run in ("one_sided", "both"):
        asked, rollouts = Asked(0.0 if (run, rank) == ("one_sided", 1) else None), Rollouts()
        buffer = FilteredBuffer(max_attempts=3, seed=11)
        trainer = trainer_maker(folder)(probes=[rollouts], buffer=buffer, reward=asked, gradient_accumulation_steps=2)
        trainer.train()
        assert trainer.accelerator.num_processes == 2
        saved = {
            "asked": asked.prompts, "advantages": [rollout.advantages for rollout in rollouts.seen],
            "log": trainer.state.log_history, "buffer": trainer.buffer.state_dict(),
            "parameters": {name: p.detach().clone() for name, p in trainer.model.named_parameters()},
        }  # fmt: skip
        torch.save(saved, folder / f"{run}_{rank}.pt")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """Return by run what each rank saw."""
    folder = tmp_path_factory.mktemp("ranks")
    forks.start_ranks(one_rank, (folder,), 2)
    return {run: [torch.load(folder / f"{run}_{rank}.pt") for rank in (0, 1)] for run in ("one_sided", "both")}


def test_a_rank_whose_prompts_are_all_rejected_stays_in_step_with_the_other(
    ranks: dict[str, list[dict[str, Any]]],
) -> None:
    full, empty = ranks["one_sided"]
    assert [len(attempt) for attempt in empty["asked"]] == [4] * 6  # 2 steps of 3 attempts, each for 4 missing prompts
    assert [len(attempt) for attempt in full["asked"]] == [4] * 6
    assert all(advantages.abs().max() == 0 for advantages in empty["advantages"])
    mixed = [advantages.view(-1, 4).abs().amax(dim=1) > 0 for advantages in full["advantages"]]
    assert [row["buffer/filled"] for row in full["log"][:2]] == [float(m.sum()) / 8 for m in mixed]
    assert float(torch.stack(mixed).float().mean()) > 0.8


@pytest.mark.parametrize("run", ["one_sided", "both"])
def test_ranks_share_the_buffer_state_and_draw_different_prompts(
    ranks: dict[str, list[dict[str, Any]]], run: str
) -> None:
    first, second = ranks[run]
    assert_equal(first["buffer"], second["buffer"])
    assert_equal(first["parameters"], second["parameters"])
    assert len(first["asked"]) == len(second["asked"])
    for a, b in zip(first["asked"], second["asked"], strict=True):
        assert len({*a, *b}) == len(a) + len(b)
