"""What processes tell each other about U, and what U's filter knows, by hand and without a model."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from datasets import Dataset
from ranks_in_threads import on_two_ranks

from rl_training.hosts.trl.buffer import FilteredBuffer
from rl_training.offline.buffers import _filter_of, _in_update, sample_evaluation, sample_update
from rl_training.offline.restored import RestoredTrainer
from rl_training.offline.settings import EvaluationSettings, UpdateSettings


def test_a_prompt_counts_as_in_u_if_any_process_has_it() -> None:
    """Rank 0 has the prompts "5" and "7 7", rank 1 has "9", and no rank has "7". Padding is on the left."""
    prompts = {0: [[0, 5], [7, 7]], 1: [[9]]}

    def on_rank(rank: int, reduce: Any) -> torch.Tensor:
        ids = torch.tensor(prompts[rank])
        trainer = SimpleNamespace(_tokenize_prompts=lambda texts: ([[int(i) for i in text.split()] for text in texts],))
        restored: Any = SimpleNamespace(device=torch.device("cpu"), reduce=reduce, trainer=trainer)
        update: Any = SimpleNamespace(rollout=SimpleNamespace(prompt_ids=ids, prompt_mask=(ids > 0).long()))
        return torch.tensor(_in_update(restored, update, ["5", "7", "7 7", "9"]))

    for in_update in on_two_ranks(on_rank):
        assert in_update.tolist() == [True, False, True, True]


def test_the_filter_of_u_copies_the_trained_buffer_and_has_its_own_random_stream() -> None:
    known = FilteredBuffer(max_attempts=5, floor=0.3, half_life=7.0, seed=1)
    known.start(3)
    known.learn([0, 1], torch.tensor([[0.0, 1.0], [1.0, 1.0]]))
    trainer = SimpleNamespace(
        buffer=known, tools=None, environment_factories=None, rollout_func=None,
        multi_objective_aggregation="sum_then_normalize", train_dataset=Dataset.from_dict({"prompt": ["a", "b", "c"]}),
        args=SimpleNamespace(generation_batch_size=8), num_generations=4,
    )  # fmt: skip
    before = known.state_dict()["generator"].clone()
    buffer_filter = _filter_of(SimpleNamespace(trainer=trainer), seed=9)  # type: ignore[arg-type]
    assert (buffer_filter.max_attempts, buffer_filter.floor, buffer_filter.half_life) == (5, 0.3, 7.0)
    assert torch.equal(buffer_filter.weights(), known.weights())
    assert len(buffer_filter.weights().unique()) == 3  # mixed, all right, never tried
    buffer_filter.draw(2, [])
    assert torch.equal(known.state_dict()["generator"], before)
    assert torch.equal(buffer_filter.state_dict()["generator"], drawn_from(9, 3))


def drawn_from(seed: int, num_prompts: int) -> torch.Tensor:
    """Return the state of a generator with this seed after drawing two of `num_prompts` prompts."""
    generator = torch.Generator().manual_seed(seed)
    torch.multinomial(torch.ones(num_prompts, dtype=torch.float64), 2, generator=generator)
    return generator.get_state()


# --- the buffers ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("overlap", ["forbidden", "wanted"])
def test_prompts_of_e_can_exclude_or_repeat_those_of_u(restored, analyzed, overlap: str) -> None:
    update, total = analyzed.update_buffer, len(restored.trainer.train_dataset)
    evaluation = sample_evaluation(restored, EvaluationSettings(64, overlap=overlap), update, 64)  # type: ignore[arg-type]
    ids = restored.trainer._tokenize_prompts([row["prompt"] for row in evaluation.rows])[0]
    rollout = update.rollout
    in_update = {tuple(i[m.bool()].tolist()) for i, m in zip(rollout.prompt_ids, rollout.prompt_mask, strict=True)}
    assert {tuple(i) in in_update for i in ids} == {overlap == "wanted"}
    assert len(in_update) == 8 <= total


def test_e_may_be_the_evaluation_split_or_given_rows_with_several_responses(restored: RestoredTrainer) -> None:
    data = restored.trainer.train_dataset
    given = sample_evaluation(restored, EvaluationSettings(responses=2, source=[5, 7]), None, 64)
    assert given.rows == (data[5], data[5], data[7], data[7])  # the reward needs the rows' other columns
    held_out = sample_evaluation(restored, EvaluationSettings(4, source="eval"), None, 64)
    assert {row["prompt"] for row in held_out.rows} <= set(restored.trainer.eval_dataset["prompt"])
    with pytest.raises(ValueError, match=r"^evaluation.source: row 99999 "):
        sample_evaluation(restored, EvaluationSettings(responses=2, source=[99999]), None, 64)


def test_u_has_the_rewards_and_the_filter_of_training(restored, analyzed) -> None:
    rollout = analyzed.update_buffer.rollout
    assert rollout.rewards is not None
    rewards = rollout.rewards.view(8, 4)
    torch.testing.assert_close(rollout.advantages.view(8, 4), rewards - rewards.mean(dim=1, keepdim=True))
    filtered = sample_update(restored, UpdateSettings(8, filtered=True), 64).rollout
    idle = [float((r.advantages.view(8, 4) == 0).all(dim=1).double().mean()) for r in (rollout, filtered)]
    assert idle[1] < idle[0]
    assert restored.trainer.buffer is None
