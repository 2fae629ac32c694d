"""The simple δH probe on a real trainer, compared with a slow plain twin, and its behaviour if it cannot measure."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import pytest
import reference
import torch
from peft import LoraConfig
from seen import Seen
from simple_twin import Answers, Recorder, Twin, per_length, per_sequence, per_token
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from trainers import FEW, L_MAX, graded, trainer_maker

from rl_training import Reading
from rl_training.engine.build_step import StepBuilder
from rl_training.entropy.per_decision import per_decision_change
from rl_training.models.load import load_tiny
from rl_training.optim import adamw
from rl_training.policy.policy import Policy
from rl_training.policy.scores import Scores
from rl_training.probes import EffectiveSampleSizeProbe, GradientNoiseScaleProbe, GroundTruthProbe, SimpleEntropyProbe
from rl_training.statistics.jackknife import JackknifeUnits

K, G = 8, 4
EIGHT_FOLDS = {"per_device_train_batch_size": G, "gradient_accumulation_steps": K}  # each is one prompt
FOUR_FOLDS = {"per_device_train_batch_size": G, "gradient_accumulation_steps": 4}
# Microbatches of three prompts, each split into a fold of one prompt and a fold of two.
UNEQUAL_FOLDS = {"per_device_train_batch_size": 3 * G, "gradient_accumulation_steps": 2}
# A large epsilon makes Adam's first step smooth. Otherwise it is a sign, and fp32 noise decides the sign of a zero.
SMOOTH = {"adam_epsilon": 1e-5, "max_grad_norm": 0.05}


def last_update(trainer: Any) -> Tensor:
    """Return the last step's flat update, which a checkpoint would keep."""
    update = trainer.attachment.driver.states()["engine"].update
    return torch.cat([part.entries for slices in update.slices.values() for part in slices])


@pytest.mark.parametrize(
    ("responses", "temperature", "max_length", "folds", "masked", "both"),
    [
        # Some responses are truncated and not trained on.
        (1, 1.0, L_MAX, UNEQUAL_FOLDS, True, True),
        (4, 0.7, 5, FOUR_FOLDS, False, True),  # hardly any response ends within 5 tokens
        (2, 1.3, L_MAX, FOUR_FOLDS, False, False),
    ],
)
def test_every_estimate_equals_the_plain_twin(
    make_trainer, responses, temperature, max_length, folds, masked, both
) -> None:
    recorder = Recorder()
    probe = Answers(responses_per_prompt=responses, per_sequence=both, num_folds=4)
    make_trainer(
        probes=[probe, recorder],
        dtype=torch.float64,
        temperature=temperature,
        max_completion_length=max_length,
        reward=graded,
        max_steps=3,
        mask_truncated_completions=masked,
        **folds,
        **SMOOTH,
    ).train()
    twins = [Twin(step, responses, temperature, max_length) for step in recorder.steps[:2]]
    for step in recorder.steps[:2] if masked else ():
        of_full_length = step.rollout.completion_mask.sum(dim=1) == max_length
        left_out = of_full_length & (step.rollout.completion_ids[:, -1] != load_tiny()[1].eos_token_id)
        assert 0.1 < float(left_out.float().mean()) < 0.9
        assert (step.rollout.advantages[left_out] == 0).all()
    # TRL's fused head computes in fp32, and if few responses are trained on, much cancels.
    same = {"rel": 1e-3, "abs": 2e-6 if masked else 1e-9}

    def seen(twin: Twin, suffix: str) -> Any:
        """Return the statistic for error bars. It uses each replicate's own H_tok if length has separate products."""
        return per_sequence if suffix else functools.partial(per_token, level=None if both else twin.level)

    for twin, answer in zip(twins, probe.all[:2], strict=True):
        for suffix, statistic in (("", per_token), ("_sequence", per_sequence))[: 1 + both]:
            forward, reuse = (twin.change(updates, statistic) for updates in (twin.update_without, twin.update))
            assert answer[f"delta_h/forward{suffix}"].value == pytest.approx(forward, **same)
            assert answer[f"delta_h/reuse{suffix}"].value == pytest.approx(reuse, **same)
            stderr = twin.stderr(twin.update_without, seen(twin, suffix))
            assert answer[f"delta_h/forward{suffix}"].stderr == pytest.approx(stderr, **same)
        assert answer["entropy/token"].value == pytest.approx(sum(twin.entropy_of) / sum(twin.lengths), **same)
        assert answer["entropy/sequence"].value == pytest.approx(sum(twin.entropy_of) / len(twin.lengths), **same)
        if both:
            length = twin.change(twin.update_without, per_length), twin.stderr(twin.update_without, per_length)
            estimate = answer["delta_length/forward"]
            assert (estimate.value, estimate.stderr) == pytest.approx(length, **same)
            estimate = answer["delta_reward/forward"]
            assert estimate.code == "other_loss" if masked else not estimate.reason
            assert masked or (estimate.value, estimate.stderr) == pytest.approx(twin.reward(), **same)
            cut = twin.step.rollout.truncated.double().mean()
            assert answer["delta_length/truncated"].value == pytest.approx(float(cut))
    first, second, third = probe.all
    rows = twins[1].rows(twins[1].products(twins[0].update))
    backward = twins[1].change(twins[0].update, per_token)
    assert second["delta_h/backward"].value == pytest.approx(backward, **same)
    stderr = reference.jackknife_stderr(seen(twins[1], ""), rows)
    assert second["delta_h/backward"].stderr == pytest.approx(stderr, **same)
    trapezoid = 0.5 * (first["delta_h/forward"].value + backward)
    assert second["delta_h/trapezoid"].value == pytest.approx(trapezoid, **same)
    assert second["delta_h/cumulative_predicted"].value == pytest.approx(trapezoid, **same)
    measured = second["entropy/token"].value - first["entropy/token"].value
    assert second["delta_h/cumulative_measured"].value == pytest.approx(measured, rel=1e-12)
    # Up to the third batch: ½F from the first, ½(F + B) from the second, ½B from the third, with independent noise.
    half_step = twins[1].stderr(twins[1].update_without, seen(twins[1], ""), previous=twins[0].update)
    ends = 0.5 * first["delta_h/forward"].stderr, 0.5 * third["delta_h/backward"].stderr
    assert third["delta_h/cumulative_predicted"].stderr == pytest.approx(math.hypot(half_step, *ends), **same)


@pytest.fixture(scope="module")
def causes(tmp_path_factory: pytest.TempPathFactory) -> tuple[Recorder, Answers]:
    """Train two steps, the second of them with nonzero moments."""
    recorder, probe = Recorder(), Answers(per_sequence=True, num_folds=4, unclipped=True)
    make = trainer_maker(tmp_path_factory.mktemp("causes"))
    make(probes=[probe, recorder], dtype=torch.float64, **UNEQUAL_FOLDS, **SMOOTH).train()
    return recorder, probe


def test_the_split_by_cause_layer_and_kind_equals_the_plain_twin(causes) -> None:
    (step, answer), same = (kept[1] for kept in (causes[0].steps, causes[1].all)), {"rel": 2e-4, "abs": 1e-9}
    twin = Twin(step, responses=1)
    unclipped = twin.adamw(twin.without, max_grad_norm=math.inf)
    updates = {
        "forward_unclipped": unclipped,
        **{f"part/{cause}": part for cause, part in twin.parts(twin.clipped(twin.without)).items()},
        **{f"layer/{n}": twin.update_without * twin.named(f"layers.{n}.") for n in (0, 1)},
        "layer/embedding": twin.update_without * twin.named("embed_tokens"),
        "kind/mlp": twin.update_without * twin.named("mlp"),
        **{f"group/{cause}/{n}": part * twin.named(f"layers.{n}.")
           for cause, part in twin.parts(twin.clipped(twin.without)).items() for n in (0, 1)},
    }  # fmt: skip
    for suffix, statistic in (("", per_token), ("_sequence", per_sequence)):
        for name, update in updates.items():
            expected, estimate = twin.change(update, statistic), answer[f"delta_h/{name}{suffix}"]
            assert estimate.value == pytest.approx(expected, **same), name
            if name.startswith(("layer", "kind", "group")):  # their errors take the step as given
                given = torch.zeros_like(twin.without)
                stderr = twin.stderr(update, statistic, whole=given[0], leave_out_updates=given)
                assert estimate.stderr == pytest.approx(stderr, **same), name
        whole = twin.adamw(twin.mean(twin.gradients), max_grad_norm=math.inf)
        stderr = twin.stderr(unclipped, statistic, whole=whole, leave_out_updates=unclipped)
        assert answer[f"delta_h/forward_unclipped{suffix}"].stderr == pytest.approx(stderr, rel=1e-3)
        whole, without = (twin.parts(twin.clipped(g)) for g in (twin.mean(twin.gradients), twin.without))
        # In momentum's P, one fold's noise stands for any fold's. This is least exact for a young v, as here.
        for cause, part in whole.items():
            moved = without[cause].expand_as(twin.without)
            stderr = twin.stderr(moved, statistic, whole=part, leave_out_updates=moved)
            assert answer[f"delta_h/part/{cause}{suffix}"].stderr == pytest.approx(stderr, rel=0.1), cause


@pytest.mark.parametrize("settings", [{"weight_decay": 0.0}, {"optim": "sgd", "weight_decay": 0.0, "max_steps": 2}])
def test_a_part_that_is_the_whole_step_has_its_error_bar(make_trainer, settings: dict[str, Any]) -> None:
    """Adam's first step has no momentum part, and SGD without momentum never has one."""
    probe = Answers(num_folds=K)
    make_trainer(probes=[probe], **{"max_steps": 1} | settings, **EIGHT_FOLDS).train()
    for answer in probe.all:
        forward, part = answer["delta_h/forward"], answer["delta_h/part/gradient"]
        assert (part.value, part.stderr) == pytest.approx((forward.value, forward.stderr), rel=1e-6)
        assert answer["delta_h/part/momentum"].stderr == answer["delta_h/part/decay"].stderr == 0.0


def test_each_split_of_forward_adds_up_to_forward(causes) -> None:
    for answer in causes[1].all:
        for suffix in ("", "_sequence"):
            for split in ("part", "layer", "kind", "group"):
                names = [
                    n for n in answer if n.startswith(f"delta_h/{split}/") and n.endswith("_sequence") == bool(suffix)
                ]
                total = sum(answer[name].value for name in names)
                assert total == pytest.approx(answer[f"delta_h/forward{suffix}"].value, rel=1e-6), split


def test_a_lora_update_is_the_change_of_its_matrices_and_splits_by_layer(make_trainer) -> None:
    recorder, probe = Recorder(), Answers(per_sequence=True)
    adapter = LoraConfig(r=2, lora_dropout=0.0, target_modules="all-linear", init_lora_weights=False)
    trainer = make_trainer(probes=[probe, recorder], peft_config=adapter, dtype=torch.float64, **FEW)
    trainer.train()
    real = recorder.steps[-1].update
    torch.testing.assert_close(last_update(trainer).double(), real, rtol=1e-4, atol=1e-9)
    forward = probe.all[1]["delta_h/forward"].value
    assert forward != 0
    assert sum(probe.all[1][f"delta_h/layer/{n}"].value for n in (0, 1)) == pytest.approx(forward, rel=1e-6)
    assert {n for n in probe.all[1] if n.startswith("delta_h/kind/")} == {
        f"delta_h/kind/{kind}{suffix}" for kind in ("attention", "mlp") for suffix in ("", "_sequence")
    }


def test_a_number_of_folds_that_splits_prompts_is_refused_with_one_that_does_not(make_trainer) -> None:
    with pytest.raises(ValueError, match="use num_folds=8"):
        make_trainer(probes=[SimpleEntropyProbe(num_folds=16)])  # there are 4 microbatches of 2 prompts


@pytest.mark.parametrize("make_optimizer", [
    lambda parameters: None,  # the trainer's own optimizer
    lambda parameters: torch.optim.Adam(parameters, lr=1e-3, weight_decay=0.1, eps=1e-5),
    lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, weight_decay=0.1, foreach=True),
    lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, weight_decay=0.1, fused=True),
    lambda parameters: torch.optim.SGD(parameters, lr=1.0, momentum=0.9, weight_decay=0.01),
    lambda parameters: torch.optim.SGD(parameters, lr=1.0, momentum=0.9, dampening=0.5),
    lambda parameters: torch.optim.SGD(parameters, lr=1.0, momentum=0.9, nesterov=True),
    lambda parameters: torch.optim.SGD(parameters, lr=1.0),
    lambda parameters: torch.optim.AdamW(
        [{"params": [p], "lr": 1e-4 * (i + 1), "weight_decay": 0.1 * (i % 2)} for i, p in enumerate(parameters)]
    ),
])  # fmt: skip
def test_the_step_of_each_known_optimizer_is_the_change_of_the_parameters(make_trainer, make_optimizer) -> None:
    class Watch(Seen):
        def measure(self, ctx: Any, state: Any) -> Reading:
            step = ctx.step
            reading = super().measure(ctx, state)
            self.before = {n: w.clone() for n, w in step.weights.items()}
            return reading

        def after_step(self, ctx: Any, reading: Reading) -> Reading:
            step = ctx.step
            self.change = torch.cat([w - self.before[n] for n, w in step.weights.items()])
            return reading

    policy, watch = load_tiny()[0].double(), Watch()
    optimizer = make_optimizer(list(policy.parameters()))
    settings = {"dtype": torch.float64, "max_grad_norm": 0.05}  # small enough to clip
    probes = [SimpleEntropyProbe(), watch]
    trainer = make_trainer(probes=probes, model=policy, optimizers=(optimizer, None), **settings, **FEW)
    trainer.train()
    torch.testing.assert_close(last_update(trainer), watch.change, rtol=1e-6, atol=1e-12)


def test_without_a_formula_forward_is_nan_and_backward_uses_the_parameter_difference(make_trainer) -> None:
    class Sgd(torch.optim.SGD):
        """An optimizer whose step has no formula."""

    probe = Answers(responses_per_prompt=2)
    policy = load_tiny()[0]
    optimizer = Sgd(policy.parameters(), lr=1.0)
    make_trainer(probes=[probe], model=policy, optimizers=(optimizer, None), **FEW).train()
    second = probe.all[1]
    for name in ("forward", "reuse", "trapezoid"):
        assert math.isnan(second[f"delta_h/{name}"].value)
        assert second[f"delta_h/{name}"].code == "no_formula"
    assert math.isfinite(second["delta_h/backward"].value)
    assert second["delta_h/backward"].value != 0


def test_off_policy_tokens_are_weighted_by_the_ratio_of_their_prefix(make_trainer) -> None:
    """Step 2 trains on the second half of the rollout, whose first half step 1 used."""
    recorder, probe = Recorder(), Answers(per_sequence=True)
    make_trainer(probes=[probe, recorder], dtype=torch.float64, max_steps=2, steps_per_generation=8, **SMOOTH).train()
    step, answer = recorder.steps[1], probe.all[1]
    twin = Twin(step, responses=1, weighted=True)
    assert any(abs(length - len(row)) > 0.01 for length, row in zip(twin.lengths, twin.logps, strict=True))
    assert answer["entropy/token"].value == pytest.approx(twin.level, rel=1e-4)
    assert answer["entropy/sequence"].value == pytest.approx(sum(twin.entropy_of) / len(twin.lengths), rel=1e-4)
    mask = step.rollout.completion_mask
    now = [pad_sequence(list(map(torch.detach, rows)), batch_first=True) for rows in (twin.logps, twin.entropies)]
    width, units = now[0].shape[1], JackknifeUnits(step.fold, int(step.fold.max()) + 1)
    sampled = Scores(step.rollout.sampling_logps[:, :width], torch.zeros_like(now[0]), mask[:, :width])
    level = per_decision_change(sampled, Scores(*now, mask[:, :width]), units)
    assert answer["entropy/token"].value == pytest.approx(float(level.value[0]), rel=1e-5)
    assert answer["entropy/token"].stderr == pytest.approx(float(level.stderr[0]), rel=0.05)
    # The loss has per-token ratios and clipping, so the real step is the reference.
    reuse = twin.change(step.update, per_sequence)
    assert answer["delta_h/reuse_sequence"].value == pytest.approx(reuse, rel=1e-3)
    assert math.isfinite(answer["delta_h/forward"].value)
    assert math.isfinite(answer["delta_h/backward"].value)


@pytest.mark.parametrize(("known", "measured"), [(16, True), (15, False)])
def test_importance_weights_are_used_down_to_an_effective_sample_size_of_half_the_batch(
    make_trainer, monkeypatch, known, measured
) -> None:
    build = StepBuilder.build

    def reweighted(*args: Any) -> Any:
        step = build(*args)
        sampling_logps = step.batch.scores.logps.double().clone()
        sampling_logps[known:, 0] += 80.0  # only the first `known` of 32 sequences keep a weight
        rollout = dataclasses.replace(step.batch.rollout, sampling_logps=sampling_logps, on_policy=False)
        return dataclasses.replace(step, batch=dataclasses.replace(step.batch, rollout=rollout))

    monkeypatch.setattr(StepBuilder, "build", reweighted)
    probe = Answers()
    make_trainer(probes=[probe], max_completion_length=8, max_steps=1).train()
    assert math.isfinite(probe.all[0]["delta_h/reuse"].value) == measured
    assert ("0.47 of the sequences, below 0.5" in probe.all[0]["delta_h/reuse"].reason) != measured


def test_a_step_that_reuses_responses_has_no_prediction_but_a_reason(make_trainer) -> None:
    """Each rollout serves two steps. Estimates that need only X continue, and so do steps on a fresh rollout."""
    probe = Answers()
    trainer = make_trainer(probes=[probe, EffectiveSampleSizeProbe()], max_steps=4, num_iterations=2, **FEW)
    trainer.train()
    assert [math.isfinite(answer["delta_h/forward"].value) for answer in probe.all] == [True, False, True, False]
    assert [math.isfinite(answer["delta_h/backward"].value) for answer in probe.all] == [False, False, True, False]
    for name in ("forward", "backward", "part/momentum"):
        assert probe.all[3][f"delta_h/{name}"].code == "reused"
    assert all(math.isfinite(probe.all[3][name].value) for name in ("entropy/token", "delta_h/reuse"))
    assert math.isfinite(trainer.attachment.latest["ess/advantage"].value)


def nan_in_padding(scores: Any) -> Any:
    nan = torch.zeros_like(scores.logps).masked_fill(scores.mask == 0, math.nan)
    return dataclasses.replace(scores, logps=scores.logps + nan, entropies=scores.entropies + nan)


class NanInPadding(Policy):
    """A policy whose scores are nan in padded positions."""

    def __init__(self, policy: Policy) -> None:
        super().__init__(policy.model, policy.scorer, batch_size=4)
        self._policy = policy

    def score(self, rollout: Any, rows: Tensor, **options: bool) -> Any:
        return nan_in_padding(self._policy.score(rollout, rows, **options))

    def score_rollout(self, rollout: Any, **options: Any) -> Any:
        return nan_in_padding(self._policy.score_rollout(rollout, **options))

    def sample(self, num_sequences: int, seed: int) -> Any:
        return self._policy.sample(num_sequences, seed)

    def decode(self, ids: Tensor) -> str:
        return self._policy.decode(ids)


def test_values_in_padded_positions_do_not_matter(make_trainer, monkeypatch) -> None:
    """In one of two trainings probes see nan in padded positions. All their estimates are the same."""
    build = StepBuilder.build

    def shown(builder: StepBuilder, *args: Any) -> Any:
        step = build(builder, *args)
        object.__setattr__(builder.passes, "policy", NanInPadding(builder.loop.policy))
        return dataclasses.replace(
            step, batch=dataclasses.replace(step.batch, scores=nan_in_padding(step.batch.scores))
        )

    said = []
    for hidden in (False, True):
        if hidden:
            monkeypatch.setattr(StepBuilder, "build", shown)
        probes = [
            SimpleEntropyProbe(per_sequence=True),
            GroundTruthProbe(every=1, sequences=12),
            GradientNoiseScaleProbe(split_prompts=1),
            EffectiveSampleSizeProbe(),
        ]
        settings = {"per_device_train_batch_size": 4, "reward": graded}
        trainer = make_trainer(probes=probes, steps_per_generation=8, **settings)
        trainer.train()  # the second step is off-policy
        said.append(dict(trainer.attachment.latest))
    assert said[0]["delta_h/true"].value != 0
    assert repr(said[0]) == repr(said[1])


def test_a_step_of_two_prompts_has_no_forward_estimate_but_a_fix(make_trainer) -> None:
    probe = Answers()
    make_trainer(probes=[probe], gradient_accumulation_steps=1, max_completion_length=8, max_steps=1).train()
    assert "steps of at least 8 prompts" in probe.all[0]["delta_h/forward"].reason
    assert math.isfinite(probe.all[0]["delta_h/reuse"].value)


def test_a_step_dominated_by_one_prompt_is_predicted(make_trainer) -> None:
    """Without its fold hardly any gradient is left. Its norm must not be the root of a negative rounding error."""

    def one_of_eight(prompts: list[str], completions: list[str], **kwargs: Any) -> list[float]:
        return [r if p == prompts[0] else 1e-5 * r for r, p in zip(graded(completions), prompts, strict=True)]

    probe = Answers(num_folds=K)
    make_trainer(probes=[probe], reward=one_of_eight, max_steps=4, max_completion_length=8, **EIGHT_FOLDS).train()
    for answer in probe.all:
        assert math.isfinite(answer["delta_h/forward"].value)
        assert math.isfinite(answer["delta_h/forward"].stderr)


def test_fewer_than_four_folds_give_no_error_bar_and_need_fewer_bytes(make_trainer) -> None:
    probe = Answers(num_folds=2)
    trainer = make_trainer(probes=[probe], max_completion_length=8, max_steps=2)
    trainer.train()
    forward = probe.all[0]["delta_h/forward"]
    assert math.isfinite(forward.value)
    assert math.isnan(forward.stderr)
    assert forward.code == "few_folds"
    parameters = sum(p.numel() for p in trainer.model.parameters())
    held = [line["probe_cost/buffer_bytes"] for line in trainer.state.log_history if "loss" in line]
    # For each of 2 folds gradient and entropy gradient; the latter's sum; the update; then also the previous one.
    assert held == [4 * parameters * (2 + 2 + 2), 4 * parameters * (2 + 2 + 3)]


def test_two_neighbouring_steps_in_three_have_a_trapezoid_and_sums(make_trainer) -> None:
    """Sums contain the measured change over the third step, and say so."""
    probe = Answers(every=3, steps=2)
    make_trainer(probes=[probe], max_completion_length=8, **{"max_steps": 5}, **EIGHT_FOLDS).train()
    steps = dict(zip((1, 2, 4, 5), probe.all, strict=True))
    trapezoids = []
    for before, after in ((1, 2), (4, 5)):
        parts = steps[before]["delta_h/forward"].value, steps[after]["delta_h/backward"].value
        trapezoids.append(steps[after]["delta_h/trapezoid"].value)
        assert trapezoids[-1] == pytest.approx(sum(parts) / 2)
    for name in ("backward", "trapezoid"):
        assert math.isnan(steps[4][f"delta_h/{name}"].value)
    assert "step 3 was not measured" in steps[4]["delta_h/backward"].reason
    predicted = steps[5]["delta_h/cumulative_predicted"]
    between = steps[4]["entropy/token"].value - steps[2]["entropy/token"].value
    assert predicted.value == pytest.approx(sum(trapezoids) + between)
    assert predicted.reason == "bridged: 2 steps by the measured change, the last of them 3"


def test_gradients_in_8_bits_move_estimates_by_less_than_a_fiftieth_of_their_errors(make_trainer, monkeypatch) -> None:
    """From the third step on, here, the jackknife's corrections are products with the fold gradients too."""
    monkeypatch.setattr(adamw, "SMOOTH_STEPS", 2)
    exact, rounded = Answers(), Answers(fold_dtype="int8")
    for probe in (exact, rounded):
        make_trainer(probes=[probe], max_completion_length=8, **{"max_steps": 3}, **EIGHT_FOLDS).train()
    for before, after in zip(exact.all, rounded.all, strict=True):
        for name in ("forward", "part/gradient"):
            old, new = before[f"delta_h/{name}"], after[f"delta_h/{name}"]
            assert old.value != new.value
            assert abs(new.value - old.value) < 0.02 * old.stderr
            assert new.stderr == pytest.approx(old.stderr, rel=0.02)
