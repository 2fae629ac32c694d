"""The measured change of entropy on real training steps is right, and does not affect training."""

from __future__ import annotations

import dataclasses
import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import forks
import numpy as np
import pytest
import reference
import torch
from datasets import Dataset
from seen import Kept, Seen
from torch import Tensor
from trainers import FEW, L_MAX, differing, outcome, trainer_maker
from transformers import PreTrainedModel
from trl import GRPOTrainer

from rl_training import Reading
from rl_training.engine.context import StepContext
from rl_training.entropy.data import EntropySettings
from rl_training.hosts.trl.policy import TrainerPolicy
from rl_training.hosts.trl.settings.sampling import STREAM
from rl_training.models.load import load_tiny
from rl_training.policy.policy import Policy
from rl_training.policy.rollout import Rollout
from rl_training.policy.scores import Scores
from rl_training.probes import GroundTruthProbe
from rl_training.probes.ground_truth import _prediction_and_error
from rl_training.statistics.jackknife import Replicates

ONE_BATCH = {"per_device_train_batch_size": 32, "gradient_accumulation_steps": 1}  # the truth's sequences 32 at a time
LONGER = {"max_completion_length": 24, "max_steps": 1, **ONE_BATCH}
METRICS = {
    "delta_h/true", "delta_h/true_sequence", "delta_h/true_snis", "delta_h/true_floor", "delta_h/true_resampled",
    "delta_h/ess", "delta_h/weight_max", "delta_h/weight_min",
}  # fmt: skip


class TruthProbe(Kept, GroundTruthProbe):
    """The probe at every step, which keeps its estimates."""

    name = GroundTruthProbe.name

    def __init__(self, sequences: int = 512, every: int = 1) -> None:
        super().__init__(every, sequences)


class AtEveryStep(Seen):
    """Calls a function before each optimizer step and keeps its results."""

    def __init__(self, what: Callable[[StepContext], Any]) -> None:
        super().__init__()
        self.what = what
        self.given: list[Any] = []

    def measure(self, ctx: Any, state: Any) -> Reading:
        self.given.append(self.what(ctx))
        return super().measure(ctx, state)


class Validated(TruthProbe):
    """The probe, which keeps scores and slopes of all tokens in this rank's sequences of E."""

    entropy = EntropySettings(per_sequence=True)

    def __init__(self, sequences: int) -> None:
        super().__init__(sequences)
        self.kept: list[dict[str, Any]] = []  # by step

    def measure(self, ctx: Any, state: Any) -> Reading:
        step = ctx.step
        reading = super().measure(ctx, state)
        self.rollout = self._sample(ctx)[0]
        self.before = ctx.policy.score_rollout(self.rollout)
        size, sides, weights = 1 / 16, [], ctx.policy.shard.copy_local_weights()
        update = ctx.prediction.update
        along = step.gradients.layout.by_name(update) if update is not None else {}
        for shift in (-2, -1, 1, 2):
            with ctx.policy.with_weights({n: w + shift * size * along.get(n, 0.0) for n, w in weights.items()}):
                sides.append(ctx.policy.score_rollout(self.rollout))
        tables = [[getattr(side, name) for side in sides] for name in ("logps", "entropies")]
        self.slopes = [(a - 8 * b + 8 * c - d) / (12 * size) for a, b, c, d in tables]  # error O(size⁴)
        return reading

    def after_step(self, ctx: Any, reading: Reading) -> Reading:
        reading = super().after_step(ctx, reading)
        answers = {name: (e.value, e.stderr, e.reason) for name, e in reading.estimates.items()}
        after, lengths = ctx.policy.score_rollout(self.rollout), self.before.mask.sum(dim=1).tolist()
        tables = [self.before.logps, self.before.entropies, after.logps, after.entropies, *self.slopes]
        tokens = [[table[i, :length].tolist() for table in tables] for i, length in enumerate(lengths)]
        self.kept.append(
            {"sequences": dict(zip(self.rollout.prompt_index.tolist(), tokens, strict=True)), "answers": answers}
        )
        return reading


def plain_truth(sequences: list[Any]) -> tuple[float, float]:
    """Return ΔH per token and per sequence by PDIS, by definition, one position at a time."""
    ratios = [[math.exp(sum(n[:k]) - sum(o[:k])) for k in range(L_MAX)] for o, _, n, *_ in sequences]
    entropy = length = 0.0
    for k in range(L_MAX):
        alive = [i for i, (old, *_) in enumerate(sequences) if k < len(old)]
        total = sum(row[k] for row in ratios)
        entropy += sum(ratios[i][k] * sequences[i][3][k] for i in alive) / total
        length += sum(ratios[i][k] for i in alive) / total
    old, tokens = sum(sum(s[1]) for s in sequences), sum(len(s[1]) for s in sequences)
    return entropy / length - old / tokens, entropy - old / len(sequences)


def plain_snis(sequences: list[Any]) -> float:
    weights = [math.exp(sum(n) - sum(o)) for o, _, n, *_ in sequences]
    after = sum(w * sum(s[3]) for w, s in zip(weights, sequences, strict=True))
    length = sum(w * len(s[3]) for w, s in zip(weights, sequences, strict=True))
    return after / length - sum(sum(s[1]) for s in sequences) / sum(len(s[1]) for s in sequences)


def plain_comparison(sequences: list[Any], size: int) -> dict[str, tuple[float, float]]:
    """Return X_E·δθ and its difference from PDIS, from the slopes of all tokens. Errors leave out blocks of `size`."""
    _, entropies, _, _, *slopes = zip(*sequences, strict=True)
    lengths = [len(row) for row in entropies]
    blocks = [range(i, min(i + size, len(lengths))) for i in range(0, len(lengths), size)]
    said = {}
    for number, (target, suffix) in enumerate((("token", ""), ("sequence", "_sequence"))):
        w, u = reference.surrogate_weights(entropies, [0] * len(lengths), target)
        of_one = [
            sum(a * x + b * y for a, b, x, y in zip(*rows, strict=True)) for rows in zip(w, u, *slopes, strict=True)
        ]
        share = [t / sum(lengths) if target == "token" else 1 / len(lengths) for t in lengths]
        first = sum(of_one) / len(lengths)
        without = [(first - sum(of_one[i] for i in b) / len(lengths)) / (1 - sum(share[i] for i in b)) for b in blocks]
        truth = plain_truth(sequences)[number]
        others = [[s for i, s in enumerate(sequences) if i not in b] for b in blocks]
        errors = [x - plain_truth(rest)[number] for x, rest in zip(without, others, strict=True)]
        for name, value, left_out in (("evaluation", first, without), ("evaluation_error", first - truth, errors)):
            said[f"delta_h/{name}{suffix}"] = (value, math.sqrt((len(blocks) - 1) * np.var(left_out)))
    return said


def assert_as_defined(answers: dict[str, Any], sequences: list[Any], size: int) -> None:
    token, sequence = plain_truth(sequences)
    assert answers["delta_h/true"][0] == pytest.approx(token, rel=1e-9)
    assert answers["delta_h/true_sequence"][0] == pytest.approx(sequence, rel=1e-9)
    assert answers["delta_h/true_snis"][0] == pytest.approx(plain_snis(sequences), rel=1e-9)
    assert abs(token - plain_snis(sequences)) > 1e-3 * abs(token)
    for name, (value, stderr) in plain_comparison(sequences, size).items():
        assert answers[name][0] == pytest.approx(value, rel=1e-3, abs=0.01 * stderr), name  # slopes are rounded in fp32
        assert answers[name][1] == pytest.approx(stderr, rel=0.01), name


class ScoredBy(Policy):
    """A policy whose rollouts are scored by a given function. Everything else is delegated to the policy."""

    def __init__(self, policy: Policy, score_rollout: Callable[..., Scores]) -> None:
        super().__init__(policy.model, policy.scorer, batch_size=4)
        self._policy = policy
        self.score_rollout = score_rollout

    def sample(self, num_sequences: int, seed: int) -> Rollout:
        return self._policy.sample(num_sequences, seed)

    def decode(self, ids: Tensor) -> str:
        return self._policy.decode(ids)


def scored_by(ctx: StepContext, score_rollout: Callable[..., Scores]) -> StepContext:
    return dataclasses.replace(ctx, passes=dataclasses.replace(ctx.passes, policy=ScoredBy(ctx.policy, score_rollout)))


def test_two_processes_train_unchanged_and_agree_on_the_truth(tmp_path: Path) -> None:
    forks.start_ranks(train_twice, (tmp_path,), 2)
    said = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in (0, 1)]
    for rank in (0, 1):
        assert said[rank]["world_size"] == 2
        assert said[rank]["differing"] == []
        assert said[rank]["shares"] == [[*range(rank, 13, 2)]] * 2  # this rank's share of 13 sequences
    assert said[0]["answers"] == said[1]["answers"]
    for step in (0, 1):
        first, second = (ranks["validated"][step] for ranks in said)
        assert first["answers"] == second["answers"]
        together = {int(i): tokens for i, tokens in (first["sequences"] | second["sequences"]).items()}
        assert_as_defined(first["answers"], [together[i] for i in range(13)], size=1)
    answer = said[0]["answers"][0]
    assert 1 < answer["delta_h/ess"] <= 13
    assert answer["delta_h/true"] != 0


def train_twice(rank: int, out: Path) -> None:
    """Train with and without the ground truth on this rank, and save the results."""
    make = trainer_maker(out / str(rank))

    def share(ctx: StepContext) -> list[int]:
        return ctx.policy.sample(13, ctx.step.number).prompt_index.tolist()

    shares, validated = AtEveryStep(share), Validated(13)
    plain = outcome(make(**FEW))
    trainer = make(probes=[shares, validated], **FEW)
    said = {
        "world_size": trainer.accelerator.num_processes,
        "differing": differing(plain, outcome(trainer)),
        "shares": shares.given,
        "answers": [{name: e.value for name, e in answers.items() if name in METRICS} for answers in validated.all],
        "validated": validated.kept,
    }
    (out / f"rank{rank}.json").write_text(json.dumps(said))


# --- the measured change is right -------------------------------------------------------------------------------------


def plain_sequences(model: PreTrainedModel, trainer: GRPOTrainer, seed: int) -> Tensor:
    """Return (512, 2): H and T of fresh responses to random prompts, with transformers' generate and logits."""
    tokenizer, rows = trainer.processing_class, []
    prompts = random.Random(seed).choices(trainer.train_dataset["prompt"], k=512)
    batch = tokenizer(prompts, padding=True, padding_side="left", return_tensors="pt")
    with torch.no_grad(), torch.random.fork_rng():
        torch.manual_seed(seed)
        ids = model.eval().generate(
            **batch, do_sample=True, top_k=0, max_new_tokens=trainer.max_completion_length, use_cache=True
        )
        width = batch["input_ids"].shape[1]
        mask = torch.cat([batch["attention_mask"], torch.ones_like(ids[:, width:])], dim=1)
        logps = model(ids, attention_mask=mask).logits[:, width - 1 : -1].log_softmax(dim=-1)
    entropies = -(logps.exp() * logps).sum(dim=-1)
    for tokens, h in zip(ids[:, width:].tolist(), entropies.tolist(), strict=True):
        length = tokens.index(tokenizer.eos_token_id) + 1 if tokenizer.eos_token_id in tokens else len(tokens)
        rows.append([sum(h[:length]), length])
    return torch.tensor(rows, dtype=torch.float64)


def plain_change_and_errors(before: Tensor, after: Tensor) -> dict[str, tuple[float, float, float]]:
    """Return ΔH per sequence, and per token by the delta method, with errors as paired and as independent samples."""
    (h, t), (new_h, new_t) = before.unbind(dim=1), after.unbind(dim=1)
    ratio, new_ratio = h.sum() / t.sum(), new_h.sum() / new_t.sum()
    said = {}
    for name, change, x, y in (
        ("delta_h/true_sequence", new_h.mean() - h.mean(), h, new_h),
        ("delta_h/true", new_ratio - ratio, (h - ratio * t) / t.mean(), (new_h - new_ratio * new_t) / new_t.mean()),
    ):
        errors = (float(s) / math.sqrt(len(x)) for s in ((y - x).std(), (x.var() + y.var()).sqrt()))
        said[name] = (float(change), *errors)
    return said


@pytest.fixture(scope="module")
def before_training(tmp_path_factory: pytest.TempPathFactory) -> Tensor:
    """Return samples from the policy that every training in these tests starts from."""
    trainer = trainer_maker(tmp_path_factory.mktemp("before"))(**LONGER)
    return plain_sequences(trainer.model, trainer, seed=0)


@pytest.mark.parametrize(("learning_rate", "resampled"), [(3e-4, 0), (1.5e-3, 1)])
def test_the_measured_change_agrees_with_many_fresh_samples(
    make_trainer, before_training: Tensor, learning_rate, resampled
) -> None:
    probe, before = TruthProbe(320), before_training
    trainer = make_trainer(probes=[probe], learning_rate=learning_rate, **LONGER)
    trainer.train()
    twin = type(trainer.model)(trainer.model.config)
    twin.load_state_dict(trainer.model.state_dict())
    after = plain_sequences(twin, trainer, seed=0)  # the same prompts and random numbers as before, not those of E
    answers = probe.all[0]
    assert answers["delta_h/true_resampled"].value == resampled
    plain = plain_change_and_errors(before, after)
    for name, (change, stderr, _) in plain.items():
        got = answers[name]
        assert abs(got.value - change) < 4 * math.hypot(got.stderr, stderr), name
    change, stderr, of_two_samples = plain["delta_h/true"]
    assert abs(change) > 4 * stderr  # so that an estimate of 0 would fail
    assert answers["delta_h/true"].stderr < 0.8 * of_two_samples * math.sqrt(
        len(before) / 320
    )  # the precision gained by sharing E


def test_truth_and_prediction_on_one_buffer_equal_their_definitions(make_trainer) -> None:
    """Training uses attention dropout, but neither truth nor prediction does."""
    probe = Validated(65)  # blocks of two sequences, and one block of one
    model, _ = load_tiny()
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.1
    make_trainer(model=model, probes=[probe], max_steps=1, **ONE_BATCH).train()
    for kept in probe.kept:
        assert_as_defined(kept["answers"], [kept["sequences"][i] for i in range(65)], size=2)
        value, stderr, _ = kept["answers"]["delta_h/evaluation_error"]
        assert stderr < kept["answers"]["delta_h/true"][1]
        assert value != 0


def test_a_truth_on_fresh_samples_is_compared_in_pairs(make_trainer) -> None:
    probe = Validated(24)
    make_trainer(probes=[probe], learning_rate=1e-2, max_steps=1, **ONE_BATCH).train()
    answers = probe.kept[0]["answers"]
    assert answers["delta_h/true_resampled"][0] == 1
    for suffix in ("", "_sequence"):
        predicted, true, error = (answers[f"delta_h/{n}{suffix}"] for n in ("evaluation", "true", "evaluation_error"))
        assert error[0] == pytest.approx(predicted[0] - true[0], rel=1e-9)
        assert 0 < error[1] < predicted[1] + true[1] + 1e-9


def test_a_step_without_a_formula_has_a_truth_but_no_prediction(make_trainer) -> None:
    probe = Validated(12)
    make_trainer(probes=[probe], optim="adafactor", max_steps=1, **FEW).train()
    answers = probe.kept[0]["answers"]
    assert math.isfinite(answers["delta_h/true"][0])
    for name in ("evaluation", "evaluation_sequence", "evaluation_error", "evaluation_error_sequence"):
        value, _, reason = answers[f"delta_h/{name}"]
        assert math.isnan(value)
        assert "Adafactor has no formula here" in reason


def test_fewer_than_eight_blocks_give_a_prediction_without_an_error(make_trainer) -> None:
    probe = Validated(6)
    make_trainer(probes=[probe], max_steps=1, **FEW).train()
    value, stderr, reason = probe.kept[0]["answers"]["delta_h/evaluation"]
    assert math.isfinite(value)
    assert math.isnan(stderr)
    assert "6 blocks of sequences: an error bar needs 8" in reason


def test_a_nan_error_is_not_attributed_to_too_few_blocks() -> None:
    without = torch.zeros(8, 2, dtype=torch.float64)
    true = Replicates(without[0], without)
    predicted = Replicates(without[0], without.index_fill(0, torch.tensor([3]), math.nan))
    estimate = _prediction_and_error(predicted, true)["delta_h/evaluation"]
    assert (estimate.value, estimate.num_samples) == (0.0, 8)
    assert math.isnan(estimate.stderr)
    assert estimate.code == "not_finite_evaluation"


def test_ess_and_weights_follow_from_the_two_scorings(make_trainer) -> None:
    class Keeps(TruthProbe):
        def measure(self, ctx: Any, state: Any) -> Reading:
            step = ctx.step
            reading = super().measure(ctx, state)
            self.rollout = ctx.policy.sample(16, (self.seed << 32) + step.number)
            self.before = ctx.policy.score_rollout(self.rollout)
            return reading

        def after_step(self, ctx: Any, reading: Reading) -> Reading:
            self.after = ctx.policy.score_rollout(self.rollout)
            return super().after_step(ctx, reading)

    probe = Keeps(16)
    make_trainer(probes=[probe], max_steps=1, **FEW).train()
    weights = []
    for old, new, mask in zip(
        *(x.tolist() for x in (probe.before.logps, probe.after.logps)), probe.before.mask.tolist(), strict=True
    ):
        weights.append(math.exp(sum((b - a) * m for a, b, m in zip(old, new, mask, strict=True))))
    answers = probe.all[0]
    assert answers["delta_h/ess"].value == pytest.approx(sum(weights) ** 2 / sum(w * w for w in weights), rel=1e-5)
    assert answers["delta_h/weight_max"].value == pytest.approx(max(weights), rel=1e-5)
    assert answers["delta_h/weight_min"].value == pytest.approx(min(weights), rel=1e-5)
    assert max(weights) > 1.01


def test_the_noise_floor_is_rounding_and_higher_in_bf16(make_trainer) -> None:
    floors = {}
    for dtype in (torch.float32, torch.bfloat16):
        probe = TruthProbe(40)
        make_trainer(probes=[probe], dtype=dtype, **LONGER).train()
        floors[dtype] = max(abs(answers["delta_h/true_floor"].value) for answers in probe.all)
    assert floors[torch.float32] < 1e-7
    assert floors[torch.bfloat16] > max(1e-7, 10 * floors[torch.float32])


class Listens(TruthProbe):
    """The probe, which keeps what was scored before each step: the prompts' texts and the sequences of each batch."""

    def __init__(self, sequences: int) -> None:
        super().__init__(sequences)
        self.prompts: list[set[str]] = []
        self.batches: list[list[list[int]]] = []

    def measure(self, ctx: Any, state: Any) -> Reading:
        def listening(rollout: Rollout, batches: Any = None) -> Scores:
            self.prompts[-1] |= {ctx.policy.decode(ids) for ids in rollout.prompt_ids}
            for rows in batches or [slice(None)]:
                self.batches[-1].append(rollout.prompt_index[rows].tolist())
            return ctx.policy.score_rollout(rollout, batches=batches)

        self.prompts.append(set())
        self.batches.append([])
        return super().measure(scored_by(ctx, listening), state)


def test_the_noise_floor_rescores_in_smaller_batches_and_each_step_draws_new_prompts(
    make_trainer,
) -> None:
    """Also if all sequences fit into one batch."""
    probe = Listens(8)
    make_trainer(probes=[probe], **FEW | {"per_device_train_batch_size": 8}).train()
    for whole, *parts in probe.batches:
        assert whole == [*range(8)]
        assert [len(part) for part in parts] == [4, 4]
        assert sorted(parts[0] + parts[1]) == whole
    first, second = probe.prompts
    assert len(first - second) > 4


def test_a_non_finite_score_gives_nan_with_its_reason(make_trainer) -> None:
    class Broken(TruthProbe):
        def after_step(self, ctx: Any, reading: Reading) -> Reading:
            def broken(rollout: Rollout, batches: Any = None) -> Scores:
                scores = ctx.policy.score_rollout(rollout, batches=batches)
                return dataclasses.replace(scores, logps=scores.logps * math.nan)

            return super().after_step(scored_by(ctx, broken), reading)

    probe = Broken(8)
    make_trainer(probes=[probe], max_steps=1, **FEW).train()
    for name in ("delta_h/true", "delta_h/true_sequence", "delta_h/ess", "delta_h/weight_max"):
        assert math.isnan(probe.all[0][name].value)
        assert probe.all[0][name].code == "not_finite_evaluation"


# --- sampling ---------------------------------------------------------------------------------------------------------


def sample(trainer: GRPOTrainer, number: int, seed: int) -> Rollout:
    return TrainerPolicy(trainer).sample(number, seed)


def test_the_same_seed_at_nearby_parameters_gives_mostly_the_same_responses(make_trainer) -> None:
    trainer = make_trainer(per_device_train_batch_size=8, gradient_accumulation_steps=1, max_completion_length=48)
    before = sample(trainer, 64, seed=5)
    noise = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            parameter += 0.003 * torch.randn(parameter.shape, generator=noise)
    after = sample(trainer, 64, seed=5)
    assert torch.equal(before.prompt_ids, after.prompt_ids)
    texts = [trainer.processing_class.batch_decode(r.completion_ids, skip_special_tokens=True) for r in (before, after)]
    same = sum(a == b for a, b in zip(*texts, strict=True))
    assert 56 <= same < 64  # 52 if random numbers continued across batches, because their lengths differ


def test_responses_equal_those_of_trl_with_the_same_random_state(make_trainer) -> None:
    trainer = make_trainer(temperature=0.8)
    rollout = sample(trainer, 32, seed=3)
    prompts = [ids[mask.bool()].tolist() for ids, mask in zip(rollout.prompt_ids, rollout.prompt_mask, strict=True)]
    torch.manual_seed(int(np.random.SeedSequence([3, 1, 0]).generate_state(1, np.uint64)[0]))
    trainer.model.eval()
    theirs, _ = trainer._generate_single_turn(prompts, None, {}, 4)
    mine = zip(rollout.completion_ids, rollout.completion_mask, strict=True)
    assert [ids[mask.bool()].tolist() for ids, mask in mine] == theirs
    assert any(ids[-1] != trainer.processing_class.eos_token_id for ids in theirs) or len(set(map(len, theirs))) > 1


def test_conversations_go_through_the_chat_template(make_trainer) -> None:
    trainer = make_trainer()
    trainer.processing_class.chat_template = (
        "{% for m in messages %}{{ m.role }}:{{ m.content }}{% endfor %}{% if add_generation_prompt %}!{% endif %}"
    )
    trainer.train_dataset = Dataset.from_dict({"prompt": [[{"role": "user", "content": "7+2=?"}]]})
    rollout = sample(trainer, 2, seed=0)
    assert trainer.processing_class.batch_decode(rollout.prompt_ids) == ["user:7+2=?!"] * 2


def test_a_streaming_dataset_has_no_truth_and_training_goes_on(make_trainer) -> None:
    stream = make_trainer().train_dataset.to_iterable_dataset()
    trainer = make_trainer(probes=[GroundTruthProbe(every=1, sequences=8)], train_dataset=stream, max_steps=1)
    trainer.train()
    assert trainer.attachment.latest["delta_h/true"].code == "streamed"
    with pytest.raises(ValueError, match=STREAM):
        sample(trainer, 2, seed=0)
