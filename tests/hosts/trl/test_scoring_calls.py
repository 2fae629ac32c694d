"""A loss may score anything or nothing: the scores of its own batch are measured, and training continues."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from seen import Seen
from trainers import FEW, differing, each_pass_is_timed, graded, outcome
from trl import GRPOTrainer

from rl_training import DrGRPOTrainer, attach
from rl_training.hosts.trl.hooks import loss
from rl_training.hosts.trl.hooks.scoring_calls import ScoringCalls
from rl_training.hosts.trl.versions import NUM_SCORES
from rl_training.probes import SimpleEntropyProbe

FORWARD_PASS = "_get_per_token_logps_and_entropies"
SETTINGS: dict[str, Any] = FEW | {"gradient_accumulation_steps": 4, "max_steps": 1}


def tokens_of(inputs: dict[str, Any], prompts: Any = None) -> tuple[Any, Any, int]:
    prompts = inputs["prompt_ids"] if prompts is None else prompts
    ids = torch.cat([prompts, inputs["completion_ids"]], dim=1)
    return ids, torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1), inputs["completion_ids"].shape[1]


class SecondLook(GRPOTrainer):
    """Scores the responses again after its loss, with partly hidden prompts."""

    with_graph = True

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        loss = super().compute_loss(model, inputs, *args, **kwargs)
        with torch.set_grad_enabled(self.with_graph):
            other = self._get_per_token_logps_and_entropies(
                model, *tokens_of(inputs, inputs["prompt_ids"].roll(1, dims=1)), compute_entropy=True
            )
        return loss - 0.0 * other[0].mean()


class FirstLook(GRPOTrainer):
    """Scores the batch before its loss without using the result, with or without a graph, and entropies or not."""

    with_graph, with_entropies = True, True

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        with torch.set_grad_enabled(self.with_graph):
            self._get_per_token_logps_and_entropies(model, *tokens_of(inputs), None, self.with_entropies)
        return super().compute_loss(model, inputs, *args, **kwargs)


class WithPrompts(GRPOTrainer):
    """Scores the prompts' tokens too, for a term of its own."""

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        loss = super().compute_loss(model, inputs, *args, **kwargs)
        ids, mask, _ = tokens_of(inputs)
        return loss - 0.0 * self._get_per_token_logps_and_entropies(model, ids, mask, ids.shape[1] - 1)[0].mean()


class WithoutEntropies(GRPOTrainer):
    """Computes Dr-GRPO's loss by hand, without asking for entropies."""

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        logps = self._get_per_token_logps_and_entropies(model, *tokens_of(inputs))[0]
        gain = (logps - logps.detach()).exp() * inputs["advantages"].unsqueeze(1) * inputs["completion_mask"]
        return -gain.sum() / len(logps) / self.max_completion_length / self.current_gradient_accumulation_steps


class Thrifty(GRPOTrainer):
    """Makes no forward pass if no response has an advantage."""

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        if not inputs["advantages"].any():
            return torch.zeros((), requires_grad=True)
        return super().compute_loss(model, inputs, *args, **kwargs)


class OwnLoss(GRPOTrainer):
    """A loss that is not TRL's, computed from its own forward pass: plain Dr-GRPO, without TRL's scoring method."""

    scores_too = False  # also score without a graph and without using the result

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        if self.scores_too:
            with torch.no_grad():
                self._get_per_token_logps_and_entropies(model, *tokens_of(inputs), None, True)
        ids, mask, width = tokens_of(inputs)
        table = model(input_ids=ids, attention_mask=mask).logits[:, -width - 1 : -1].float().log_softmax(-1)
        logps = table.gather(-1, inputs["completion_ids"].unsqueeze(-1)).squeeze(-1)
        gain = logps * inputs["advantages"].unsqueeze(1) * inputs["completion_mask"]
        return -gain.sum() / len(logps) / self.max_completion_length / self.current_gradient_accumulation_steps


VARIANTS: dict[str, tuple[type[GRPOTrainer], dict[str, Any]]] = {
    "a second look": (SecondLook, {}),
    "a second look without graph": (SecondLook, {"with_graph": False}),
    "a look at the prompts": (WithPrompts, {}),
    "a first look": (FirstLook, {}),
    "a first look without graph": (FirstLook, {"with_graph": False}),
    "a first look without entropies": (FirstLook, {"with_entropies": False}),
    "by hand without entropies": (WithoutEntropies, {}),
    "no look at silent prompts": (Thrifty, {}),
    "a loss of its own": (OwnLoss, {}),
    "a loss of its own, and a look without graph": (OwnLoss, {"scores_too": True}),
}


def half_silent(completions: list[str], prompts: list[str], **kwargs: Any) -> list[float]:
    """Return equal rewards for the responses to every other prompt."""
    silent = {prompt: number % 2 for number, prompt in enumerate(dict.fromkeys(prompts))}
    return [0.0 if silent[p] else r for p, r in zip(prompts, graded(completions), strict=True)]


def trainer_of(make_trainer: Any, trainer_class: type[GRPOTrainer], **facts: Any) -> Any:
    reward = half_silent if trainer_class is Thrifty else graded
    trainer = make_trainer(GRPOTrainer, **SETTINGS | {"reward": reward})
    trainer.__class__ = type(trainer_class.__name__, (trainer_class,), facts)
    return trainer


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_step_has_the_scores_of_its_whole_batch_whatever_the_loss_scores(make_trainer: Any, variant: str) -> None:
    """Compared with this test's own forward pass over the model as it was before the step. Training is unchanged."""
    trainer_class, facts = VARIANTS[variant]
    bare = trainer_of(make_trainer, trainer_class, **facts)
    with attach(bare, probes=[], whole_prompts=True):  # the same order of microbatches
        expected = outcome(bare)
    trainer, seen = trainer_of(make_trainer, trainer_class, **facts), Seen()
    policy = make_trainer(GRPOTrainer, **SETTINGS)
    probes = ["simple", "gns", seen]
    with attach(trainer, probes=probes, whole_prompts=True) as attachment, each_pass_is_timed(attachment):
        assert differing(outcome(trainer), expected) == []
    (step,), latest = seen.kept_steps, attachment.latest
    rollout, mask = step.batch.rollout, step.batch.rollout.completion_mask.bool()
    rows = {name: getattr(rollout, name) for name in ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")}
    with torch.no_grad():
        logps, entropies, *_ = getattr(policy, FORWARD_PASS)(policy.model, *tokens_of(rows), compute_entropy=True)
    torch.testing.assert_close(step.batch.scores.logps[mask], logps[mask], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(step.batch.scores.entropies[mask], entropies[mask], rtol=1e-4, atol=1e-4)
    assert latest["entropy/token"].value == pytest.approx(float(entropies[mask].mean()), rel=1e-4)
    for name in ("delta_h/forward", "gns/trace_step"):
        assert math.isfinite(latest[name].value), latest[name].reason
    silent, weights = step.batch.rollout.advantages == 0, step.batch.loss_weights.logps[mask]
    if trainer_class is not OwnLoss:  # loss weights are caught on the scores that the loss uses
        expected_weights = (step.batch.rollout.advantages.unsqueeze(1) * mask)[mask]
        torch.testing.assert_close(weights * expected_weights.norm(), -expected_weights * weights.norm())
        assert weights.norm() > 0.0
    if trainer_class is Thrifty:
        assert 0 < silent.sum() < len(silent)
        assert not step.batch.loss_weights.logps[silent].any()
    if trainer_class is OwnLoss:
        assert step.reasons.other_terms.code == "own_forward_pass"
        assert FORWARD_PASS in step.reasons.other_terms.fix


def of_another_order(
    self: Any, model: Any, compute_entropy: bool, input_ids: Any, attention_mask: Any, logits_to_keep: int
) -> None:
    """Take the arguments of the forward pass in another order, as a version to come may."""


@pytest.mark.parametrize("asked", [True, False])
@pytest.mark.parametrize("changed", [False, True])
def test_positional_arguments_are_read_in_the_order_of_the_installed_forward_pass(
    monkeypatch: pytest.MonkeyPatch, asked: bool, changed: bool
) -> None:
    """Today compute_entropy comes after the batch size, which has nothing to do with entropies."""
    ids, ones = torch.ones(2, 3, dtype=torch.long), torch.ones(2, 1, requires_grad=True)
    calls, scores = ScoringCalls({"prompt_ids": ids[:, :2], "completion_ids": ids[:, 2:]}), 2.0 * ones
    output = (scores, scores if asked else None, None)[:NUM_SCORES]
    given: list[Any] = [None, ids, ids, 1, 2, asked]
    if changed:
        monkeypatch.setattr(GRPOTrainer, FORWARD_PASS, of_another_order)
        given = [None, asked, ids, ids, 1]
    call_of_forward_pass = calls.around_forward_pass(*given, added_by_a_subclass=True)
    next(call_of_forward_pass)
    with pytest.raises(StopIteration):
        call_of_forward_pass.send(output)
    call = calls.scores_behind(scores.sum())
    assert call is not None
    assert (call[0] is scores, call[1] is not None) == (True, asked)


class NoGraph(GRPOTrainer):
    """Returns log-probabilities without a graph, as if the adapter were still merged and not trainable."""

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
        logps, *others = super()._get_per_token_logps_and_entropies(*args, **kwargs)
        return logps.detach(), *others


def test_a_loss_without_a_graph_is_refused_with_a_likely_cause(make_trainer: Any) -> None:
    trainer = trainer_of(make_trainer, NoGraph)
    with (
        attach(trainer, probes=[SimpleEntropyProbe()]),
        pytest.raises(ValueError, match=r"no graph .*adapter"),
    ):
        trainer.train()


def test_training_a_loss_without_scores_with_an_intervention_is_refused(make_trainer: Any) -> None:
    class Own(OwnLoss, DrGRPOTrainer):
        pass

    trainer = make_trainer(Own, interventions=["bonus"], **SETTINGS)
    with pytest.raises(ValueError, match=r"^Own.compute_loss .* super\(\).compute_loss"):
        trainer.train()


@pytest.mark.parametrize("trainer_class", [OwnLoss, WithoutEntropies])
def test_a_loss_without_scores_is_refused_where_no_further_pass_is_possible(
    make_trainer: Any, monkeypatch: pytest.MonkeyPatch, trainer_class: type[GRPOTrainer]
) -> None:
    trainer = trainer_of(make_trainer, trainer_class)
    with attach(trainer, probes=[SimpleEntropyProbe()], whole_prompts=True):
        monkeypatch.setattr(loss, "has_sharded_weights", lambda trainer: True)
        with pytest.raises(ValueError, match=r"FSDP2 and ZeRO-3 .* super\(\).compute_loss"):
            trainer.train()
