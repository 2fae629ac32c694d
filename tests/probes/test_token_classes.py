"""The token classes probe, compared with a slow twin with one backward per token, and what it refuses."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import plain_loop
import pytest
import torch
from example_steps import ALONE, fold_vectors_of
from ranks_in_threads import on_two_ranks
from seen import Kept
from simple_twin import Recorder, Twin
from torch import Tensor
from trainers import graded, trainer_maker

from rl_training import Estimate, Reading, measured_loop
from rl_training.engine.context import StepContext
from rl_training.entropy import token_effects
from rl_training.entropy.changed_steps import ChangedUpdates, Direction
from rl_training.models.load import load_tiny
from rl_training.optim.leave_one_out import FoldMeans, LeaveOneOutUpdates
from rl_training.optim.sgd import SGDState
from rl_training.optim.updates import OptimizerPieces
from rl_training.parallel.state_tensors import from_tensors, to_tensors
from rl_training.parallel.vectors import Layout
from rl_training.policy.scores import Scores
from rl_training.probes import SimpleEntropyProbe, TokenClassesProbe, token_classes
from rl_training.probes.token_classes import CLASSES
from rl_training.step.loss_weights import LossWeights

NUM_FOLDS, LENGTH = 8, 12
# Nine prompts in eight folds: the last fold has two of them.
SETTINGS: dict[str, Any] = {
    "num_generations": 2, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 9, "max_steps": 2,
    "adam_epsilon": 1e-4, "max_completion_length": LENGTH, "max_grad_norm": 0.05, "reward": graded,
    "dtype": torch.float64,
}  # fmt: skip


class Answers(Kept, TokenClassesProbe):
    """The token classes probe, which keeps its estimates."""

    def __init__(self, every: int = 1, num_folds: int | None = NUM_FOLDS) -> None:
        super().__init__(every, num_folds)


class NanInPadding(Answers):
    """The same, with nan for all values in padding."""

    name = "nan_in_padding"

    def measure(self, ctx: Any, state: Any) -> Reading:
        step = ctx.step
        scores, padding = step.batch.scores, step.batch.scores.mask == 0
        assert padding.any()
        logps, entropies, weights = (
            of.masked_fill(padding, math.nan) for of in (scores.logps, scores.entropies, step.batch.loss_weights.logps)
        )
        shown = Scores(logps, entropies, scores.mask)
        batch = dataclasses.replace(step.batch, scores=shown, loss_weights=LossWeights(weights, None))
        return super().measure(dataclasses.replace(ctx, step=dataclasses.replace(step, batch=batch)), state)


class InfiniteWeight(Answers):
    """The same, with infinite loss weights for the tokens of the first response."""

    name = "infinite_weight"

    def measure(self, ctx: Any, state: Any) -> Reading:
        step = ctx.step
        weights = step.batch.loss_weights.logps.clone()
        weights[0] = math.inf
        batch = dataclasses.replace(step.batch, loss_weights=LossWeights(weights, None))
        return super().measure(dataclasses.replace(ctx, step=dataclasses.replace(step, batch=batch)), state)


class TokensTwin(Twin):
    """The classes of a step, computed with one backward per token in float64."""

    def tokens(self) -> Iterator[tuple[int, int]]:
        return ((i, t) for i, length in enumerate(self.lengths) for t in range(length))

    def classes(self) -> dict[str, dict[tuple[int, int], str]]:
        """Return by kind the class of each token."""
        ordered = sorted(self.entropies[i][t].item() for i, t in self.tokens())
        half, most = (ordered[math.ceil(share * len(ordered)) - 1] for share in (0.5, 0.8))
        rollout, pieces = self.step.rollout, load_tiny()[1].convert_ids_to_tokens
        texts: dict[str, dict[tuple[int, int], str]] = {kind: {} for kind in CLASSES}
        for i, t in self.tokens():
            entropy, advantage = self.entropies[i][t].item(), float(rollout.advantages[i])
            quarter = CLASSES["position"][sum(4 * t >= q * self.lengths[i] for q in (1, 2, 3))]
            piece = pieces(int(rollout.completion_ids[i, t]))
            texts["entropy"][i, t] = "lower_half" if entropy <= half else "middle" if entropy <= most else "top_fifth"
            texts["position"][i, t] = quarter
            texts["advantage"][i, t] = "positive" if advantage > 0 else "negative" if advantage < 0 else "zero"
            texts["text"][i, t] = (
                "end" if piece in ("<eos>", "<pad>", "<unk>")
                else "tag" if piece[0] == "<" and len(piece) > 1
                else "space" if piece in ("Ġ", "Ċ")
                else "number" if piece.isdigit()
                else "word" if piece.isalpha() else "sign"
            )  # fmt: skip
        return texts

    def of_tokens(self) -> dict[tuple[int, int], Tensor]:
        """Return each token's contribution to the loss gradient summed over responses, (P,)."""
        advantages = self.step.rollout.advantages.tolist()
        return {(i, t): self.gradient(-advantages[i] / self.max_length * self.logps[i][t]) for i, t in self.tokens()}

    def answer(
        self, members: list[tuple[int, int]], of_tokens: dict[tuple[int, int], Tensor]
    ) -> tuple[float, float, float]:
        """Return ΔH of a class, its delete-one-fold error with the steps fixed, and Σ of the vectors' norm products."""
        zero = torch.zeros_like(self.step.parameters)
        by_fold = [sum((of_tokens[i, t] for i, t in members if i in fold), zero) / len(fold) for fold in self.folds]
        rows = torch.stack(by_fold)
        parts = self.factors * self.means_without(rows)
        x = self.x[0] - self.level * self.x[1]
        sizes = torch.tensor([len(fold) for fold in self.folds]).double()
        tokens = torch.tensor([sum(self.lengths[i] for i in fold) for fold in self.folds]).double()
        products, values = torch.linalg.vecdot(x, parts), []
        for out in range(len(sizes)):
            kept = [k for k in range(len(sizes)) if k != out]
            values.append(float(sizes[kept] @ products[kept] / tokens[kept].sum()))
        mean = sum(values) / len(values)
        variance = (len(values) - 1) / len(values) * sum((v - mean) ** 2 for v in values)
        lengths = x.norm(dim=1) * parts.norm(dim=1)
        return float(sizes @ products / tokens.sum()), math.sqrt(variance), float(sizes @ lengths / tokens.sum())

    @functools.cached_property
    def factors(self) -> Tensor:
        """The factor of optimizer and clipping on each gradient entry without each fold; 0 for unused embeddings."""
        return (self.parts(self.clipped(self.without))["gradient"] / self.without).nan_to_num()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Answers, NanInPadding, Recorder, dict[str, Estimate]]:
    probes = Answers(), NanInPadding(), Recorder()
    trainer = trainer_maker(tmp_path_factory.mktemp("tokens"))(probes=[*probes, SimpleEntropyProbe()], **SETTINGS)
    trainer.train()
    return *probes, dict(trainer.attachment.latest)


def test_a_class_is_the_sum_of_single_token_backwards(run: tuple[Any, ...]) -> None:
    """With unequal folds and a clipped gradient, to 1e-5 of the norms of the multiplied vectors.

    The trainer's scores and the model's norms are in fp32.
    """
    twin = TokensTwin(run[2].steps[-1], responses=1, max_length=LENGTH)
    assert len({len(fold) for fold in twin.folds}) == 2
    assert float(twin.mean(twin.gradients).norm()) > SETTINGS["max_grad_norm"]
    answers, of_tokens, compared = run[0].all[-1], twin.of_tokens(), 0
    for kind, of_kind in twin.classes().items():
        for name in CLASSES[kind]:
            members = [at for at in twin.tokens() if of_kind[at] == name]
            share = answers[f"tokens/{kind}/{name}/share_of_tokens"].value
            assert share == pytest.approx(len(members) / sum(twin.lengths)), (kind, name)
            texts = answers[f"tokens/{kind}/{name}/delta_h"]
            value, stderr, scale = twin.answer(members, of_tokens)
            assert texts.value == pytest.approx(value, abs=1e-5 * scale), (kind, name)
            assert texts.stderr == pytest.approx(stderr, abs=1e-5 * scale), (kind, name)
            compared += value != 0
    assert compared >= 10
    ids, tokens = twin.step.rollout.completion_ids, run[0].state["top_tokens_0"]
    for token, (total, variance, _, occurrences) in zip(tokens.ids.tolist(), tokens.table.tolist(), strict=True):
        members = [(i, t) for i, t in twin.tokens() if token in (-1, int(ids[i, t]))]
        value, stderr, scale = twin.answer(members, of_tokens)
        assert occurrences == len(members)
        assert total == pytest.approx(value, abs=1e-4 * scale), token  # central differences of fp32 scores
        assert math.sqrt(variance) == pytest.approx(stderr, abs=1e-4 * scale), token
    assert len(tokens.ids) > 5


def test_the_classes_of_each_kind_add_up_to_the_gradient_part_of_forward(run: tuple[Any, ...]) -> None:
    whole = run[3]["delta_h/part/gradient"].value
    for kind, names in CLASSES.items():
        answers = [run[0].all[-1][f"tokens/{kind}/{name}/delta_h"] for name in names]
        assert sum(answer.value for answer in answers) == pytest.approx(whole, rel=1e-9)
        assert all(answer.num_samples == NUM_FOLDS for answer in answers)


def test_values_in_padded_positions_do_not_matter(run: tuple[Any, ...]) -> None:
    assert run[0].all[-1]["tokens/entropy/top_fifth/delta_h"].value != 0
    assert repr(run[0].all) == repr(run[1].all)


def test_a_non_finite_gradient_is_reported_and_not_averaged(make_trainer: Callable[..., Any]) -> None:
    probe = InfiniteWeight()
    make_trainer(probes=[probe], max_completion_length=8, reward=graded).train()
    estimates = {name: e for name, e in probe.all[-1].items() if name.startswith("tokens/position/first_quarter/d")}
    assert [estimate.code for estimate in estimates.values()] == ["not_finite_gradient"]
    assert probe.state["position/first_quarter"].num_steps == 0


def test_a_step_whose_shifts_never_fit_is_in_no_sum_of_single_tokens(
    make_trainer: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token_effects, "RANGE", 1.0)  # so no shift is near enough to TARGET
    probe = Answers()
    make_trainer(probes=[probe], **SETTINGS).train()
    assert [probe.state[f"top_tokens_{half}"].num_steps for half in (0, 1)] == [0, 0]
    assert probe.state["position/first_quarter"].num_steps == 1


def test_the_leave_out_parts_of_a_basis_equal_those_by_hand() -> None:
    """One parameter, SGD with rate .1, folds of size 1 and 3 with X = 1 and 2, and D = 2 and 0.

    Without fold 1 the part is −.1 · 0, without fold 2 it is −.1 · 2.
    """
    layout = Layout.of({"w": torch.zeros(1).double()})
    state = SGDState(None, lr=0.1, momentum=0.0, dampening=0.0, weight_decay=0.0, nesterov=False)
    pieces = OptimizerPieces(layout, {"w": torch.zeros(1).double()}, {"w": state})
    weight, vectors = torch.ones(1).double(), torch.tensor([[4.0], [0.0]]).double()
    sizes = torch.tensor([1.0, 3.0]).double()
    steps = LeaveOneOutUpdates(
        pieces, FoldMeans.of([weight], fold_vectors_of(layout, [vectors]), sizes), math.inf, ALONE
    )
    basis = FoldMeans.of([0.5 * weight], fold_vectors_of(layout, [0.5 * vectors]), sizes)
    direction = Direction(fold_vectors_of(layout, [torch.tensor([[1.0], [2.0]]).double()]))
    products = ChangedUpdates(steps, basis).products_of_part(direction)
    assert products.flatten().tolist() == pytest.approx([0.0, 2 * -0.2])


def test_class_weights_include_entropy_weights_and_sum_in_absolute_value() -> None:
    """Two tokens of a class have opposite weights. Absolute weights add up: 2 · 2, and 2 · .5 from entropies."""
    loss = LossWeights(torch.tensor([[2.0, -2.0, 1.0]]), torch.tensor([[0.5, -0.5, 0.25]]))
    step: Any = SimpleNamespace(batch=SimpleNamespace(loss_weights=loss))
    passes: Any = SimpleNamespace(ranks=SimpleNamespace(reduce=lambda x: x))
    classes = torch.tensor([[0, 0, 2]])
    sums = token_classes._sums(StepContext(step, passes), "advantage", classes)
    assert sums.tolist() == [[2.0, 0.0, 1.0], [5.0, 0.0, 1.25]]
    chosen = loss.where(classes == 0)
    assert chosen.entropies is not None
    assert (chosen.logps.tolist(), chosen.entropies.tolist()) == ([[2.0, -2.0, 0.0]], [[0.5, -0.5, 0.0]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_quantiles_are_exact_over_the_tokens_of_all_processes(dtype: torch.dtype) -> None:
    """On two processes, with ties, zeros, slightly negative values, and values that differ only in the last bit."""
    generator = torch.Generator().manual_seed(0)
    for size in (1, 2, 7, 400):
        entropies = torch.rand(2, size, generator=generator).exp().sub(1.0).to(dtype)
        entropies[:, ::3] = entropies[0, 0]
        entropies[1, -1] = torch.nextafter(entropies[0, 0], entropies[0, 0] + 1)
        entropies[0, 1::5] = 0.0
        entropies[1, 1::7] = -1e-9
        ordered = entropies.flatten().sort().values
        limits = [ordered[math.ceil(share * len(ordered)) - 1] for share in token_classes.QUANTILES]
        expected = torch.stack([entropies > limit for limit in limits]).sum(dim=0)

        def classes(rank: int, reduce: Callable[[Tensor], Tensor], entropies: Tensor = entropies) -> Tensor:
            local = entropies[rank : rank + 1]
            return token_classes.entropy_classes(local, torch.ones_like(local).bool(), reduce)

        assert torch.equal(torch.cat(on_two_ranks(classes)), expected)


def test_means_continue_from_their_state_as_if_never_stopped(run: tuple[Any, ...]) -> None:
    assert repr(from_tensors(Answers().init(), to_tensors(run[0].state))) == repr(run[0].state)
    only = run[0].all[-1]  # Adam's first step is not measured, so this is a mean over one step
    for name in ("entropy/top_fifth", "text/number"):
        once, mean = only[f"tokens/{name}/delta_h"], only[f"tokens/{name}/mean_delta_h"]
        assert (mean.value, mean.stderr) == pytest.approx((once.value, once.stderr))
        assert mean.detail == {"measured_steps": 1}


@pytest.mark.parametrize(
    ("settings", "code"),
    [
        ({"max_steps": 1}, "goes_by_sign"),
        ({"steps_per_generation": 8}, "off_policy_classes"),
        ({"num_iterations": 2}, "reused"),
        ({"optim": "adafactor"}, "no_formula"),
    ],
)
def test_without_a_prediction_classes_have_a_reason_and_their_share_of_tokens(
    make_trainer: Callable[..., Any], settings: dict[str, Any], code: str
) -> None:
    probe = Answers(num_folds=NUM_FOLDS)
    make_trainer(probes=[probe], max_completion_length=8, reward=graded, **settings).train()
    for kind, names in CLASSES.items():
        shares = [probe.all[-1][f"tokens/{kind}/{name}/share_of_tokens"].value for name in names]
        assert sum(shares) == pytest.approx(1.0)
        for name in names:
            for quantity in ("delta_h", "mean_delta_h"):
                estimate = probe.all[-1][f"tokens/{kind}/{name}/{quantity}"]
                assert math.isnan(estimate.value)
                assert estimate.code == code


def test_too_few_folds_give_no_class_estimates_but_a_reason(make_trainer: Callable[..., Any]) -> None:
    probe = Answers(num_folds=2)
    make_trainer(probes=[probe], max_completion_length=8).train()
    assert probe.all[-1]["tokens/entropy/middle/delta_h"].code == "few_folds"


def in_a_loop(decode: Callable[[Tensor], str] | None) -> dict[str, Estimate]:
    """Return the estimates after two steps of a plain loop."""
    torch.manual_seed(0)
    model, probe = load_tiny()[0], Answers()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    loop = measured_loop(
        model, optimizer, [probe], responses_per_prompt=plain_loop.G, microbatch_size=plain_loop.MICROBATCH,
        microbatches=4, max_grad_norm=plain_loop.CLIP, dr_grpo=True, decode=decode,
    )  # fmt: skip
    plain_loop.train(model, optimizer, loop, steps=2, count=4)
    return probe.all[-1]


def test_without_a_tokenizer_only_text_classes_are_missing_with_the_fix() -> None:
    estimates = in_a_loop(None)
    missing = {name.split("/")[1] for name, estimate in estimates.items() if math.isnan(estimate.value)}
    assert missing == {"text"}
    assert estimates["tokens/text/word/delta_h"].code == "no_text"


def test_decoded_texts_equal_to_their_token_ids_are_accepted() -> None:
    """This happens with a vocabulary of digits."""
    estimates = in_a_loop(lambda ids: str(int(ids[0])))
    assert estimates["tokens/text/number/share_of_tokens"].value == 1.0
    assert math.isfinite(estimates["tokens/text/number/delta_h"].value)
