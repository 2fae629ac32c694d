"""Loss terms other than log-probabilities and entropies are detected in the graph or in the gradient of a fold."""

from __future__ import annotations

import functools
import itertools
import math
from typing import Any

import plain_loop
import pytest
import torch
from example_steps import ALONE
from own_losses import PLAIN, WithSupervision
from seen import Seen
from shared_rollouts import MICROBATCH, G
from torch import Tensor
from trainers import FEW
from trl import GRPOTrainer

from rl_training import Estimate, attach, measured_loop
from rl_training.engine import terms_check
from rl_training.engine.fold_recorder import FoldRecorder
from rl_training.engine.loss_info import OTHER_TERMS, other_terms_in_graph
from rl_training.engine.terms_check import EVERY, OTHER_GRADIENT, TermsCheck
from rl_training.entropy.changed_steps import changes_by_basis
from rl_training.hosts.plain.measured_loop import DR_GRPO_FIX
from rl_training.models.load import load_tiny
from rl_training.policy.scores import Scores
from rl_training.probes import GradientNoiseScaleProbe, SimpleEntropyProbe
from rl_training.step.needs import Need

PROMPTS = 8  # per step
NUMBERS = "of its norm from the one that its log-probabilities and entropies give"


def loop_with(
    term: Any, steps: int = 1, forward: Any = plain_loop.scores_of, **options: Any
) -> list[dict[str, Estimate]]:
    """Return the estimates of a plain loop that adds a term to its loss without declaring it.

    Args:
        term: A function of the model that returns the term.
    """
    torch.manual_seed(0)
    model = load_tiny()[0].float()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    num_folds = options.pop("num_folds", None)
    both = [SimpleEntropyProbe(per_sequence=True, num_folds=num_folds), GradientNoiseScaleProbe(split_prompts=2)]
    probes = options.pop("probes", both)
    measured = measured_loop(
        model, optimizer, probes, responses_per_prompt=G, microbatch_size=MICROBATCH,
        microbatches=PROMPTS * G // MICROBATCH, **options,
    )  # fmt: skip
    return plain_loop.train(
        model, optimizer, measured, steps, clip=None, forward=forward,
        backward=lambda loss: (loss + term(model)).backward(), count=PROMPTS * G // MICROBATCH,
    )  # fmt: skip


def nothing(model: Any) -> Tensor:
    return torch.zeros(())


def penalty(model: Any) -> Tensor:
    return 1e-3 * sum(p.square().sum() for p in model.parameters())


def test_an_undeclared_loss_term_is_detected_in_the_gradient_of_a_fold() -> None:
    (plain,), (other,) = loop_with(nothing), loop_with(penalty)
    for name in ("delta_reward/forward", "gns/trace_between"):
        assert math.isfinite(plain[name].value)
        assert math.isnan(other[name].value)
        assert other[name].code == "other_gradient"
    for name in ("entropy/token", "gns/trace_step"):  # these do not assume that the loss weights are the whole loss
        assert math.isfinite(other[name].value)


def test_folds_are_not_recomputed_from_loss_weights_that_are_not_the_whole_loss() -> None:
    """Folds of single prompts, of which two share a microbatch. The second step's loss has no other term."""
    calls = itertools.count()

    def at_first(model: Any) -> Tensor:
        return penalty(model) if next(calls) < PROMPTS * G // MICROBATCH else nothing(model)

    first, second = loop_with(at_first, steps=2, num_folds=PROMPTS)
    for name in ("delta_h/forward", "gns/trace_step"):
        assert first[name].code == "other_gradient"
        assert math.isfinite(second[name].value)


def test_folds_are_not_recomputed_again_while_an_undeclared_term_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """The term is looked for again at measured steps 2, 4, 8, …; under dropout it may be hidden then, so it is not."""
    passes = []
    recompute = FoldRecorder.recompute
    monkeypatch.setattr(FoldRecorder, "recompute", lambda self, *args: [passes.append(1), recompute(self, *args)])
    for steps_with_passes, strength, forward in (([1, 2, 4], 1, plain_loop.scores_of), ([1], 100, with_dropout)):
        passes.clear()
        answers = loop_with(
            lambda model, strength=strength: strength * penalty(model), forward=forward, num_folds=PROMPTS, steps=5
        )
        assert len(passes) == len(steps_with_passes)
        assert {answer[name].code for answer in answers for name in ("delta_h/forward", "gns/trace_step")} == {
            "other_gradient"
        }


def test_a_step_with_a_declared_term_is_not_advised_to_recompute_folds() -> None:
    model = load_tiny()[0].float()
    optimizer = torch.optim.AdamW(model.parameters())
    whole_step: dict[str, int] = {"responses_per_prompt": G, "microbatch_size": PROMPTS * G, "microbatches": 1}
    measured = measured_loop(model, optimizer, SimpleEntropyProbe(), **whole_step)
    measured.microbatch = functools.partial(measured.microbatch, other_terms=True)  # type: ignore[method-assign]
    (declared,) = plain_loop.train(model, optimizer, measured, 1, size=PROMPTS * G, count=1, clip=None)
    assert declared["delta_h/forward"].code == "one_fold"
    assert "num_folds" not in declared["delta_h/forward"].reason


@pytest.mark.parametrize(("factor", "is_seen"), [(1.0, True), (0.01, False)])
def test_a_small_undeclared_term_is_detected_and_a_negligible_one_is_not(factor: float, is_seen: bool) -> None:
    """Also if probes need only the folds' norms and keep no fold gradient."""

    def bias(model: Any) -> Tensor:
        """Return a term whose gradient has a fixed size and direction."""
        return 0.02 * factor * model.model.norm.weight.sum() / PROMPTS

    for probes in (SimpleEntropyProbe(per_sequence=True), GradientNoiseScaleProbe(split_prompts=2)):
        (answer,) = loop_with(bias, probes=[probes, Terms()])
        name = "delta_reward/forward" if "delta_reward/forward" in answer else "gns/trace_between"
        assert (answer[name].code == "other_gradient") == is_seen, answer[name]


def test_folds_are_checked_in_turn(monkeypatch: Any) -> None:
    compared: list[int] = []
    compare = terms_check._compare_folds

    def kept(batch: Any, passes: Any, by_fold: Any, group: Any, squares: Tensor) -> Any:
        compared.append(group.folds.start)
        return compare(batch, passes, by_fold, group, squares)

    monkeypatch.setattr(terms_check, "_compare_folds", kept)
    monkeypatch.setattr(terms_check, "EVERY", 2)
    loop_with(nothing, steps=6, probes=[GradientNoiseScaleProbe(split_prompts=2)])
    assert len(compared) == 4
    assert len({*compared}) == 4


def with_dropout(model: Any, part: Any) -> tuple[Tensor, Tensor]:
    model.train()  # loaded models are in evaluation mode, without dropout
    model.config.attention_dropout = 0.3
    for module in model.modules():
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.3
    return plain_loop.scores_of(model, part)


def test_dropout_hides_no_undeclared_loss_term_from_recomputed_folds() -> None:
    settings: dict[str, Any] = {"forward": with_dropout, "num_folds": PROMPTS, "steps": 3}
    for answer in loop_with(nothing, **settings):
        assert math.isfinite(answer["delta_h/forward"].value)
    for answer in loop_with(lambda model: 100 * penalty(model), **settings):
        assert answer["delta_h/forward"].code == "other_gradient"


def test_dropout_neither_hides_an_undeclared_loss_term_nor_is_one() -> None:
    """With dropout two passes differ for any loss, and this noise is not a loss term."""
    for answer in loop_with(nothing, forward=with_dropout, steps=4):  # of which three compare a fold
        assert math.isfinite(answer["delta_reward/forward"].value)
    calls = itertools.count()

    def at_first(model: Any) -> Tensor:
        return 100 * penalty(model) if next(calls) < PROMPTS * G // MICROBATCH else nothing(model)

    # Dropout does not hide a term that is larger than its noise, and a later step could hide it, so it stays found.
    for answer in loop_with(at_first, forward=with_dropout, steps=3):
        assert answer["delta_reward/forward"].code == "other_gradient"


def test_a_loop_that_declares_dr_grpo_with_other_loss_weights_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def per_length(logps: Tensor, part: Any, microbatches: int, loss_of: Any = plain_loop.loss_of) -> Tensor:
        return loss_of(logps / part.completion_mask.sum(dim=1, keepdim=True), part, microbatches)

    monkeypatch.setattr(plain_loop, "loss_of", per_length)
    (answer,) = loop_with(nothing, dr_grpo=True)
    assert math.isnan(answer["delta_reward/forward"].value)
    assert answer["delta_reward/forward"].code == "other_loss"
    assert answer["delta_reward/forward"].reason.fix == DR_GRPO_FIX


class Terms(Seen):
    """Keeps the reason of other loss terms at each step."""

    needs = Need.FOLD_GRADIENTS | Need.TERMS_CHECK

    @property
    def found(self) -> list[str | None]:
        return [step.reasons.other_terms for step in self.kept_steps]


def test_a_term_added_at_one_step_is_detected_at_that_step_alone(make_trainer: Any) -> None:
    """The graph is searched at every step, not only at steps that compare a fold's gradient."""
    probe, trainer = Terms(), make_trainer(WithSupervision, **PLAIN | FEW | {"max_steps": 4})
    trainer.at = (3,)
    with attach(trainer, probes=[probe], whole_prompts=True):
        trainer.train()
    assert probe.found == [None, None, OTHER_TERMS, None]


def test_an_undeclared_term_is_known_however_prompts_are_cut_into_microbatches() -> None:
    """Folds of microbatches, and of prompts that share one: these are recomputed at steps 1 and 2, not at 3."""
    for folds, steps in ((None, 1), (PROMPTS, 3)):
        probe = Terms()
        probe.num_folds = folds
        loop_with(penalty, probes=[probe], steps=steps)
        for step in probe.kept_steps:
            assert [step.reasons.other_terms.code, bool(step.reasons.no_folds)] == [
                "other_gradient",
                bool(folds),
            ]
            assert (step.gradients.by_fold is None) == bool(folds)  # no probe may take them for the folds' gradients


def test_a_loss_that_goes_backward_in_two_parts_has_the_estimates_of_one_where_folds_are_recomputed() -> None:
    def in_two_parts(loss: Tensor) -> None:
        (0.75 * loss).backward(retain_graph=True)
        (0.25 * loss).backward()

    answers = []
    whole_step: dict[str, int] = {"responses_per_prompt": G, "microbatch_size": PROMPTS * G, "microbatches": 1}
    for backward in (Tensor.backward, in_two_parts):
        torch.manual_seed(0)
        model = load_tiny()[0].float()
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
        measured = measured_loop(model, optimizer, [SimpleEntropyProbe(per_sequence=True)], **whole_step)
        answers += plain_loop.train(
            model, optimizer, measured, 1, size=PROMPTS * G, count=1, clip=None, backward=backward
        )
    for name in ("delta_h/forward", "delta_reward/forward"):
        whole, parts = (answer[name] for answer in answers)
        assert parts.value == pytest.approx(whole.value, rel=1e-4), parts


def test_a_hook_that_changes_a_gradient_is_detected_where_a_fold_is_compared(make_trainer: Any) -> None:
    """The graph does not show it: a hook on a layer's output doubles its gradient in the trainer's backward only."""
    probe, trainer = Terms(), make_trainer(GRPOTrainer, **PLAIN | FEW | {"max_steps": 1})

    def forward(module: Any, args: Any, output: Tensor, calls: list[int] = []) -> None:  # noqa: B006
        if torch.is_grad_enabled() and len(calls) < 2:  # only in training's own two microbatches
            calls.append(1)
            output.register_hook(lambda gradient: 2 * gradient)

    trainer.model.model.norm.register_forward_hook(forward)
    with attach(trainer, probes=[probe], whole_prompts=True):
        trainer.train()
    assert NUMBERS in probe.found[0]


def test_a_coefficient_learned_beside_the_model_is_not_an_undeclared_term() -> None:
    weight, coefficient = torch.ones(2, requires_grad=True), torch.ones((), requires_grad=True)
    hidden = 2 * weight
    scores = Scores(hidden.view(1, 2), (3 * hidden).view(1, 2), torch.ones(1, 2))
    loss = (scores.logps * scores.entropies * coefficient).sum()
    assert other_terms_in_graph(loss, scores, [weight]) is None
    assert other_terms_in_graph(loss + hidden.sum(), scores, [weight]) == OTHER_TERMS  # bypasses the scores
    assert other_terms_in_graph(scores.logps.detach().sum(), scores, [weight]) is None


def test_a_loss_on_another_output_of_the_scoring_node_counts_as_another_term() -> None:
    weight = torch.ones(2, 3, requires_grad=True)
    logps, entropies, third = (2 * weight).unbind(dim=1)
    scores = Scores(logps.unsqueeze(0), entropies.unsqueeze(0), torch.ones(1, 2))
    whole = Scores(logps, entropies, torch.ones(2))
    for given in (scores, whole):
        assert other_terms_in_graph(given.logps.sum() + given.entropies.sum(), given, [weight]) is None
    assert other_terms_in_graph(whole.logps.sum() + third.sum(), whole, [weight]) == OTHER_TERMS


def test_folds_are_checked_at_steps_that_double_and_then_at_regular_intervals() -> None:
    check, due = TermsCheck(), []
    for number in range(1, 2 * EVERY + 2):
        check.begin_step()
        due += [number] * check.is_due
    assert due == [1, 2, 4, 8, EVERY, 2 * EVERY]


def test_what_a_loop_tells_of_its_loss_comes_before_what_gradients_show_where_they_are_asked() -> None:
    check = TermsCheck(distance=0.5)
    assert check.reason_of_step(OTHER_TERMS, is_asked=True) is OTHER_TERMS
    assert check.reason_of_step(None, is_asked=True) == OTHER_GRADIENT.formatted(distance=0.5)
    assert check.reason_of_step(None, is_asked=False) is None


def test_a_multiple_of_the_loss_weights_needs_its_own_basis_where_the_loss_has_other_terms() -> None:
    plain = torch.tensor([[[1.0, 2.0]], [[0.0, 0.0]]])
    for known, without_basis in ((plain, {"half"}), (None, set())):
        changes, by_basis = changes_by_basis({"half": -0.5 * plain}, known, ALONE)
        assert changes.keys() == without_basis
        assert by_basis.keys() == {"half"} - without_basis
