"""Training with interventions agrees with TRL's own setting if there is one, otherwise with weights worked by hand."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable
from pathlib import Path
from types import MethodType, SimpleNamespace
from typing import Any

import pytest
import torch
from other_samplers import OtherSampler
from peft import LoraConfig
from seen import Kept, Seen
from simple_twin import Answers, Recorder, Twin
from since import since
from torch import Tensor
from trainers import (
    FEW,
    L_MAX,
    LORA,
    SGD,
    SHAPE,
    SHORT_LAST_STEP,
    differing,
    graded,
    outcome,
    outcome_without_probes,
    trained_weights,
)  # fmt: skip
from transformers import TrainerCallback

from rl_training import DrGRPOTrainer, Reading
from rl_training.errors import UserError
from rl_training.hosts.trl.settings.sampling import SAMPLING
from rl_training.hosts.trl.trained_loss import with_settings
from rl_training.interventions.named import GROWS, NEEDS, parse_intervention
from rl_training.models.load import load_tiny
from rl_training.policy.scorer import Scorer
from rl_training.probes import InterventionsProbe, SamplerProbe
from rl_training.records.report.set_up import set_up_of
from rl_training.records.table.reading import read_run

NO_DROPOUT = LORA | {"lora_dropout": 0.0}
STALE = OtherSampler("stale", dict(load_tiny()[0].named_parameters()))  # the policy before the first step
REUSED: dict[str, Any] = {"num_iterations": 2, "epsilon": 0.02}  # every second step is off-policy
WITH_BONUS = since("trl 1.8.0")
TRL_S_OWN: list[Any] = [  # names, TRL's setting of the same loss, settings of both
    pytest.param(["bonus:0.1"], {"entropy_coef": 0.1}, {}, marks=WITH_BONUS),
    pytest.param(["bonus:0.1"], {"entropy_coef": 0.1}, {"mask_truncated_completions": True}, marks=WITH_BONUS),
    (["std_norm"], {"scale_rewards": "group"}, {}),
    (["length_norm"], {"loss_type": "grpo"}, {}),
    (["top_entropy:0.05"], {"top_entropy_quantile": 0.05}, {}),
    (["drop_truncated"], {"mask_truncated_completions": True}, {}),
    (["clip_higher:1.0"], {"epsilon_high": 1.0}, REUSED),
    pytest.param(["kl:0.2"], {"beta": 0.2}, {"peft_config": LoraConfig(**NO_DROPOUT)}, marks=since("trl 1.11.0")),
    (["lr:0.5"], {"learning_rate": 0.15}, {}),
    (["max_grad_norm:0.05"], {"max_grad_norm": 0.05}, {}),
    pytest.param(
        ["std_norm", "bonus:0.1", "lr:2"],
        {"scale_rewards": "group", "entropy_coef": 0.1, "learning_rate": 0.6},
        {},
        marks=WITH_BONUS,
    ),
]


def change_by(make_trainer: Callable[..., Any], trainer_class: Any = DrGRPOTrainer, **settings: Any) -> Tensor:
    """Train, and return the change of the weights."""
    torch.manual_seed(0)  # for an adapter's initial weights
    trainer = make_trainer(trainer_class, **settings)
    first = trained_weights(trainer)
    trainer.train()
    return trained_weights(trainer) - first


PLAIN: dict[str, Tensor] = {}  # by settings, the change of the weights by a training without interventions


def plain_change(make_trainer: Callable[..., Any], **settings: Any) -> Tensor:
    """Return the change of the weights by a training without interventions. Each is trained only once."""
    if str(settings) not in PLAIN:
        PLAIN[str(settings)] = change_by(make_trainer, **settings)
    return PLAIN[str(settings)]


@pytest.mark.parametrize(("names", "settings", "common"), TRL_S_OWN, ids=lambda value: str(value)[:30])
def test_training_equals_training_with_trls_own_setting(
    make_trainer: Callable[..., Any], names: list[str], settings: dict[str, Any], common: dict[str, Any]
) -> None:
    """After two steps, the weights' changes agree to 1e-6, and differ from those of the plain training.

    The optimizer is SGD, because a cold Adam makes full-size steps from gradients that are pure rounding.
    """
    common = SHAPE | SGD | common
    ours, theirs = (change_by(make_trainer, **common | changed) for changed in ({"interventions": names}, settings))
    plain = plain_change(make_trainer, **common)
    assert float((ours - theirs).norm() / theirs.norm()) < 1e-6
    assert float((plain - theirs).norm() / theirs.norm()) > 1e-3


class Says(Kept, SamplerProbe):
    """The sampler probe, which keeps its estimates."""


class LikeVLLM(DrGRPOTrainer):
    """Presents its other sampler to TRL as vLLM, so that TRL applies its correction."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.use_vllm = True
        options = {name: getattr(self.args, name) for name in SAMPLING}
        self.vllm_generation = SimpleNamespace(**options, structured_outputs_regex=None, generation_kwargs={})

    def _generate(self, prompts: list[Any]) -> tuple[Any, ...]:
        self.use_vllm = False
        try:
            return super()._generate(prompts)
        finally:
            self.use_vllm = True


@since("trl 1.15.0")  # whose _generate_single_turn the other sampler calls
@pytest.mark.parametrize(
    ("name", "mode", "bounds"),
    [
        ("none", "", ()),
        ("tis:1.002", "token_truncate", (None, 1.002)),
        ("mis:0.995,1.01", "token_mask", (0.995, 1.01)),
        ("seq_mask:1.01", "sequence_mask", (None, 1.01)),
    ],
)
def test_training_with_a_correction_equals_training_with_trls_own(
    make_trainer: Callable[..., Any], name: str, mode: str, bounds: tuple[float | None, ...]
) -> None:
    """The second step's responses come from the policy before the first step."""
    settings: dict[str, Any] = {"vllm_importance_sampling_correction": bool(mode)}
    if mode:
        settings["vllm_importance_sampling_mode"] = mode
        settings |= dict(
            zip(("vllm_importance_sampling_clip_min", "vllm_importance_sampling_clip_max"), bounds, strict=True)
        )
    common = SHAPE | SGD | {"trainer_arguments": {"rollout_func": STALE}}
    probe = Says()
    ours = change_by(make_trainer, **common, interventions=[name])
    theirs = change_by(make_trainer, LikeVLLM, **common | settings, probes=[probe])
    plain = plain_change(make_trainer, **common)
    assert float((ours - theirs).norm() / theirs.norm()) < 1e-6
    assert (float((plain - theirs).norm() / theirs.norm()) > 1e-4) == (name != "none")
    assert 0 < probe.all[-1]["sampler/kl"].value < 0.2
    assert (probe.all[-1]["sampler/corrected_share"].value > 0) == (name != "none")


def test_a_correction_without_another_sampler_is_refused(make_trainer: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match=re.escape(NEEDS["sampler"])):
        make_trainer(interventions=["tis"], **SHAPE)


class Weights(Seen):
    """Keeps the loss weights and the rollout of each step."""

    def measure(self, ctx: Any, state: Any) -> Reading:
        step = ctx.step
        reading = super().measure(ctx, state)
        self.rollout, self.weights = step.batch.rollout, step.batch.loss_weights
        self.rows, self.mask = step.batch.microbatch_rows, step.batch.scores.mask
        return reading


def test_interventions_are_applied_one_after_another(make_trainer: Callable[..., Any], tmp_path: Path) -> None:
    """Positive samples only, with half their weight, and a bonus: −½ A / (b M L) where A > 0, and −β / (M tokens).

    Records have them as they were given, so that a report can say which ones to train with.
    """
    file = tmp_path / "mine.py"
    file.write_text(
        "from rl_training.interventions.reweighting import scaled\n"
        "import torch\n"
        "def softer(loss, strength):\n    return scaled(loss, torch.full((8, 1), strength))\n",
        encoding="utf-8",
    )
    probe = Weights()
    names = ["psr", f"{file}:softer:0.5", "bonus:0.1"]
    make_trainer(probes=[probe], interventions=names, records=tmp_path / "run" / "logs", **SHAPE, max_steps=1).train()
    assert set_up_of(read_run(tmp_path / "run")).interventions == names
    positive = probe.rollout.advantages.clamp(min=0).unsqueeze(1) * probe.mask
    assert positive.any()
    torch.testing.assert_close(probe.weights.logps, -0.5 * positive / (8 * 2 * L_MAX), rtol=1e-5, atol=1e-12)
    for rows in probe.rows:
        part_rows = slice(rows.start, rows.stop)
        expected = -0.1 * probe.mask[part_rows] / (2 * probe.mask[part_rows].sum())
        torch.testing.assert_close(probe.weights.entropies[part_rows], expected, rtol=1e-5, atol=1e-12)


def test_prompts_without_advantage_are_counted_over_the_whole_rollout(make_trainer: Callable[..., Any]) -> None:
    """One of four prompts has advantages, so its weights become four times as large."""

    def only_one(prompts: list[str], completions: list[str], **kwargs: Any) -> list[float]:
        return [r * (p == prompts[0]) for p, r in zip(prompts, graded(completions), strict=True)]

    probe = Weights()
    settings = SHAPE | {"reward": only_one, "max_steps": 1}
    make_trainer(probes=[probe], interventions=["dynamic_sampling"], **settings).train()
    advantages = probe.rollout.advantages.unsqueeze(1) * probe.mask
    assert advantages.any()
    torch.testing.assert_close(probe.weights.logps, -4 * advantages / (8 * 2 * L_MAX), rtol=1e-5, atol=1e-12)


def test_a_rollout_without_any_advantage_trains_by_weight_decay_alone(make_trainer: Callable[..., Any]) -> None:
    settings = SHAPE | {"reward": lambda completions, **kwargs: [1.0] * len(completions), "max_steps": 1}
    trainer = make_trainer(interventions=["dynamic_sampling"], **settings)
    first = trained_weights(trainer)
    trainer.train()
    assert torch.isfinite(trained_weights(trainer)).all()
    assert float((trained_weights(trainer) - first).norm() / first.norm()) < 1e-3  # only weight decay


def test_predictions_are_for_the_loss_changed_by_the_intervention(make_trainer: Callable[..., Any]) -> None:
    """The float64 twin trains only on positive advantages. Its steps and its `forward` agree with ours."""
    probe, recorder = Answers(every=1, num_folds=4), Recorder()
    trainer = make_trainer(probes=[probe, recorder], interventions=iter(["psr"]), max_steps=2)
    trainer.train()
    assert trainer.loss_description == "Dr-GRPO except for intervention=psr"
    made = recorder.steps[-1]
    advantages = made.rollout.advantages
    assert (advantages < 0).any()
    twin = Twin(
        dataclasses.replace(made, rollout=dataclasses.replace(made.rollout, advantages=advantages.clamp(min=0))),
        responses=1,
    )
    assert made.update is not None
    assert float((twin.update - made.update).norm() / made.update.norm()) < 1e-3
    x = twin.x[0] - twin.level * twin.x[1]
    sizes = torch.tensor([len(fold) for fold in twin.folds]).double()
    forward = float(sizes @ torch.linalg.vecdot(x, twin.update_without) / sum(twin.lengths))
    assert probe.all[-1]["delta_h/forward"].value == pytest.approx(forward, rel=1e-3)


def test_training_with_intervention_none_is_bitwise_plain_training(make_trainer: Callable[..., Any]) -> None:
    """On-policy, interventions on ratios change nothing either, and a message says so."""
    assert differing(outcome(make_trainer(**SHAPE)), outcome(make_trainer(interventions=["kl_cov"], **SHAPE))) == []


def step_on(trainer: Any, loss: Tensor) -> Tensor:
    trainer.accelerator.backward(loss / trainer.current_gradient_accumulation_steps)
    trainer._step += 1
    return loss.detach()


class OwnStep(DrGRPOTrainer):
    """Never calls compute_loss."""

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        batch = self._prepare_inputs(inputs)
        ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
        return step_on(self, model(input_ids=ids, labels=ids).loss)


class ReplacedStep(DrGRPOTrainer):
    """Its training_step is replaced once probes are attached."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.training_step = MethodType(OwnStep.training_step, self)


class EverySecond(OwnStep):
    """Calls compute_loss for the first of two microbatches."""

    def training_step(self, *args: Any) -> Tensor:
        step = super() if self._step % 2 else super(OwnStep, self)
        return step.training_step(*args)


class InEvaluationMode(DrGRPOTrainer):
    """Computes the loss in evaluation mode, which switches dropout off."""

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        batch = self._prepare_inputs(inputs)
        model.eval()
        loss = self.compute_loss(model, batch)
        model.train()
        return step_on(self, loss)


class AfterTheGradients(DrGRPOTrainer):
    """Adds to the gradients of a step once more when they are complete."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.add_callback(AddsToGradients(self))


class AddsToGradients(TrainerCallback):
    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer

    def on_pre_optimizer_step(self, *others: Any, **kwargs: Any) -> None:
        self.trainer.compute_loss(self.trainer.model, self.trainer._buffered_inputs[0]).backward()


@pytest.mark.parametrize(
    ("trainer_class", "change"),
    [
        (OwnStep, {"interventions": ["psr"]}),
        (OwnStep, {"target_kl_share": 1e-2}),
        (ReplacedStep, {"interventions": ["psr"]}),
        (ReplacedStep, {"target_kl_share": 1e-2}),
        (EverySecond, {"interventions": ["psr"]}),
        (InEvaluationMode, {"interventions": ["psr"]}),
        (InEvaluationMode, {"target_kl_share": 1e-2}),
        (AfterTheGradients, {"interventions": ["psr"]}),
        (AfterTheGradients, {"target_kl_share": 1e-2}),
    ],
    ids=lambda value: getattr(value, "__name__", None) or next(iter(value)),
)
def test_no_training_goes_on_with_a_loss_that_its_change_does_not_act_on(
    make_trainer: Callable[..., Any], trainer_class: Any, change: dict[str, Any]
) -> None:
    trainer = make_trainer(trainer_class, **FEW, **change)
    first = trained_weights(trainer)
    (name,) = change
    with pytest.raises(UserError, match=rf"^step 1: {trainer_class.__name__} .*{name}.* super\(\)\.training_step"):
        trainer.train()
    assert torch.equal(trained_weights(trainer), first)


@pytest.mark.parametrize(
    ("names", "settings", "said"),
    [
        (["bonnus"], {}, "bonus?"),
        (["kl"], {}, "set beta=0.04, for which TRL keeps one, or give the trainer a peft_config"),
        (["keep_truncated"], {"mask_truncated_completions": True}, "set mask_truncated_completions=False"),
        (["std_norm"], {"scale_rewards": "group"}, "interventions=['std_norm']: "),
    ],
)
def test_interventions_that_cannot_be_trained_with_are_refused_before_a_step(
    make_trainer: Callable[..., Any], names: list[str], settings: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(said)) as error:
        make_trainer(interventions=names, **SHAPE | settings).train()
    assert "\n" not in str(error.value)


def test_the_bonus_in_the_short_last_step_of_an_epoch_counts_its_microbatches(make_trainer) -> None:
    """The weight is −β / (M tokens) with M = 2, and M = 4 in other steps. The logged loss stays the trainer's own."""
    probe, losses = Weights(), []
    for names in ([], ["bonus:0.1"]):
        rows = make_trainer().train_dataset.select(range(12))
        settings = SHORT_LAST_STEP | {"train_dataset": rows, "probes": [probe], "interventions": names}
        trainer = make_trainer(**settings)
        trainer.train()
        losses.append(trainer.state.log_history[0]["loss"])
    assert len(probe.rows) == 2
    for rows in probe.rows:
        part_rows = slice(rows.start, rows.stop)
        expected = -0.1 * probe.mask[part_rows] / (2 * probe.mask[part_rows].sum())
        torch.testing.assert_close(probe.weights.entropies[part_rows], expected, rtol=1e-5, atol=1e-12)
    assert losses[0] == losses[1]


def test_a_bonus_that_is_too_strong_is_named_beside_the_learning_rate(make_trainer: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match=r"learning_rate=0\.003 .*interventions=\['bonus:1e30'\]"):
        make_trainer(interventions=["bonus:1e30"], **SHAPE).train()


def test_a_resumed_training_has_the_requested_learning_rate(make_trainer, tmp_path) -> None:
    """With lr:0.5, a plain run's checkpoint continues at half the rate, and its own as if never stopped, bitwise."""
    settings = SHAPE | {"max_steps": 2, "save_strategy": "steps", "save_steps": 1, "lr_scheduler_type": "linear"}
    halved = {"interventions": ["lr:0.5"]}
    whole = make_trainer(**settings, **halved, output_dir=str(tmp_path / "halved"))
    whole.train()
    make_trainer(**settings, output_dir=str(tmp_path / "plain")).train()
    resumed, branched = (make_trainer(**settings, **halved) for _ in range(2))
    resumed.train(resume_from_checkpoint=str(tmp_path / "halved" / "checkpoint-1"))
    branched.train(resume_from_checkpoint=str(tmp_path / "plain" / "checkpoint-1"))
    assert torch.equal(trained_weights(resumed), trained_weights(whole))
    rates = [trainer.state.log_history[1]["learning_rate"] for trainer in (whole, branched)]
    assert rates == [0.25 * SHAPE["learning_rate"]] * 2  # half of the scheduled rate at the second of two steps


def test_the_arguments_of_a_trainer_are_not_modified(make_trainer: Callable[..., Any]) -> None:
    """Also the token, which a copy by pickling would lose: the trainer needs it to push to the Hub."""
    args = make_trainer(**SHAPE, hub_token="hf_abc").args
    changed = with_settings(args, [parse_intervention("lr:0.5"), parse_intervention("max_grad_norm:0.2")])
    assert (changed.learning_rate, changed.max_grad_norm) == (0.5 * SHAPE["learning_rate"], 0.2)
    assert (args.learning_rate, args.max_grad_norm) == (SHAPE["learning_rate"], 1.0)
    assert args.hub_token == changed.hub_token == "hf_abc"
    assert with_settings(args, [parse_intervention("psr")]) is args


def test_a_custom_function_may_draw_and_write_in_place(make_trainer: Callable[..., Any], tmp_path: Path) -> None:
    """If only measured, training is bitwise unchanged. If trained with, halving in place halves the loss weights."""
    (tmp_path / "mine.py").write_text(
        "import random\nimport numpy as np\nimport torch\n"
        "def drawing(loss, strength):\n"
        "    noise = torch.rand(()) + np.random.rand() + random.random()\n"
        "    loss.weights.logps.mul_(noise)\n    loss.scores.logps.zero_()\n    return loss.weights\n"
        "def halving(loss, strength):\n    loss.weights.logps.mul_(0.5)\n    return loss.weights\n",
        encoding="utf-8",
    )
    probe = InterventionsProbe([f"{tmp_path}/mine.py:drawing", "psr"], every=1, num_folds=8)
    trainer = make_trainer(probes=[probe])
    assert differing(outcome(trainer), outcome_without_probes()) == []
    assert trainer.attachment.latest["intervention/drawing/delta_h"].value != 0.0
    probe = Weights()
    settings = SHAPE | {"max_steps": 1}
    make_trainer(probes=[probe], interventions=[f"{tmp_path}/mine.py:halving"], **settings).train()
    expected = -0.5 * probe.rollout.advantages.unsqueeze(1) * probe.mask / (8 * 2 * L_MAX)
    torch.testing.assert_close(probe.weights.logps, expected, rtol=1e-5, atol=1e-12)


def test_kl_to_trls_reference_model_is_predicted_with_one_scorer(
    make_trainer: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    probe, scored = InterventionsProbe(["kl:5", "psr"], every=1, num_folds=8), []

    def counted(scorer: Scorer, model: Any, *args: Any, made: Any = Scorer.__init__, **options: Any) -> None:
        scored.append(model)
        made(scorer, model, *args, **options)

    monkeypatch.setattr(Scorer, "__init__", counted)
    trainer = make_trainer(probes=[probe], beta=0.1, learning_rate=3e-3)
    trainer.train()
    assert sum(model is trainer.ref_model for model in scored) == 1
    answers = trainer.attachment.latest
    assert abs(answers["intervention/kl:5/delta_h"].value) > 1e-5  # the second step, already away from the first model
    assert GROWS in answers["intervention/kl:5/delta_h"].reason
    assert math.isfinite(answers["intervention/kl:5/delta_reward"].value)
    assert "trainer.beta=0" in answers["intervention/psr/delta_h"].reason


def test_interventions_that_need_whole_groups_are_missing_where_prompts_span_microbatches(
    make_trainer,
) -> None:
    """Part of a group has a different standard deviation, and a single response has none."""
    shape = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 8, "max_completion_length": 8}
    probe = InterventionsProbe(["std_norm", "lr:0.5"], every=1)
    trainer = make_trainer(probes=[probe], reward=graded, max_steps=1, **shape)
    trainer.train()
    estimates = trainer.attachment.latest
    assert estimates["intervention/std_norm/delta_h"].code == "intervention_needs_whole_prompts"
    assert math.isfinite(estimates["intervention/lr:0.5/delta_h"].value)
    with pytest.raises(ValueError, match=re.escape(f"['std_norm']: {NEEDS['whole_prompts']}")):
        make_trainer(interventions=["std_norm"], reward=graded, max_steps=1, **shape).train()
