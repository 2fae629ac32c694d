"""Responses that are not samples of the scored policy, or not trained on: what can still be measured is measured."""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from configs import REFUSED
from seen import Seen
from trainers import FEW, trainer_maker
from transformers import GenerationConfig, GPT2Config, GPT2LMHeadModel, Qwen2Config, TrainerCallback
from trl import GRPOTrainer

from rl_training import Estimate, Probe, attach
from rl_training.hosts.trl.generation import max_kv_caches, max_responses
from rl_training.hosts.trl.settings.sampling import SAMPLING, sampling_reason
from rl_training.models.load import load_tiny
from rl_training.offline.restored import restore
from rl_training.probes import (
    EffectiveSampleSizeProbe,
    GradientNoiseScaleProbe,
    GroundTruthProbe,
    SamplerProbe,
    SimpleEntropyProbe,
)
from rl_training.probes.ground_truth import MEASURED
from rl_training.probes.simple import VISITED


def answers_of(trainer: GRPOTrainer, *more: Probe, split_prompts: int = 0) -> tuple[dict, Seen]:
    contexts = Seen()
    probes = [
        SimpleEntropyProbe(),
        *more,
        GradientNoiseScaleProbe(split_prompts=split_prompts),
        EffectiveSampleSizeProbe(),
        contexts,
    ]
    with attach(trainer, probes=probes, whole_prompts=True) as attachment:
        trainer.train()
    return dict(attachment.latest), contexts


def assert_only_simple_is_missing(answers: dict[str, Estimate], way_out: str) -> None:
    missing = {name: e.reason for name, e in answers.items() if math.isnan(e.value)}
    assert {"delta_h/forward", "delta_h/backward", "entropy/token", "ess/importance"} <= set(missing)
    because = {name for name, reason in missing.items() if way_out in reason}
    assert because >= {name for name in missing if name.startswith(("delta_h/", "entropy/"))}
    for name in ("gns/trace_step", "gns/grad_sq_norm_step", "ess/advantage", "ess/zero_advantage_prompts", *VISITED):
        assert math.isfinite(answers[name].value)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return trainer_maker(tmp_path_factory.mktemp("plain"))(GRPOTrainer)


def as_made(args: Any, model: Any, **settings: Any) -> Any:
    """Return a stub with the sampling settings where TRL's trainer keeps them."""
    args = SimpleNamespace(**{**vars(args), **settings})
    sampling = {key: getattr(args, key) for key in SAMPLING}
    kept = sampling | {"do_sample": True} | (args.generation_kwargs or {})
    regex, further = args.vllm_structured_outputs_regex, args.generation_kwargs or {}
    engine = SimpleNamespace(**sampling, structured_outputs_regex=regex, generation_kwargs=further)
    config = GenerationConfig(**kept)
    return SimpleNamespace(
        args=args, model=model, use_vllm=args.use_vllm, temperature=args.temperature, generation_kwargs=kept,
        generation_config=config, vllm_generation=engine,
    )  # fmt: skip


@pytest.mark.parametrize(("settings", "way_out"), [*REFUSED["sampling"], ({}, "")])
def test_every_sampling_option_besides_temperature_is_named(plain, settings, way_out) -> None:
    assert sampling_reason(plain, plain.temperature) is None
    why = sampling_reason(as_made(plain.args, plain.model, **settings), plain.temperature) or ""
    assert why.endswith(way_out)
    assert " in trainer" not in why
    assert bool(why) == bool(settings)


def test_sampling_options_of_the_models_generation_config_are_named(plain) -> None:
    policy = load_tiny()[0]
    policy.generation_config.min_p = 0.2
    why = sampling_reason(as_made(plain.args, policy), plain.temperature)
    assert why.startswith("min_p=0.2 in the model's generation_config.json makes")


def test_a_temperature_set_on_the_engine_later_is_read_from_the_engine(plain) -> None:
    trainer = as_made(plain.args, plain.model, use_vllm=True, top_k=-1)  # vLLM's own word for no top_k
    assert sampling_reason(trainer, trainer.temperature) is None
    trainer.vllm_generation.temperature = 0.7
    assert sampling_reason(trainer, trainer.temperature).startswith("temperature=0.7 in trainer.vllm_generation makes")


class Anneals(TrainerCallback):
    """Sets a sampling temperature for each step."""

    def __init__(self, trainer: Any, temperatures: Sequence[float]) -> None:
        self.trainer, self.temperatures = trainer, temperatures

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.trainer.generation_config.temperature = self.temperatures[state.global_step]


def test_a_temperature_set_by_a_callback_applies_from_the_next_rollout(make_trainer) -> None:
    """Two steps train on each rollout. At the second of them the temperature has changed, but nothing is sampled."""
    answers: list[dict[str, Estimate]] = []
    trainer = make_trainer(**FEW | {"max_steps": 5, "steps_per_generation": 4})
    trainer.attachment.remove()
    trainer.add_callback(Anneals(trainer, [1.0, 1.5, 1.5, 1.0, 1.0]))
    with attach(
        trainer, probes=[SimpleEntropyProbe(), EffectiveSampleSizeProbe(), SamplerProbe()], whole_prompts=True
    ) as attachment:
        trainer.add_callback(Said(attachment, answers))
        trainer.train()
    for name in ("entropy/token", "ess/importance"):
        assert [math.isfinite(answer[name].value) for answer in answers] == [True, True, False, False, True], name
    assert answers[2]["delta_h/forward"].code == "sampling_mismatch"
    assert "temperature=1.5" in answers[2]["delta_h/forward"].reason
    assert answers[2]["sampler/ess"].reason == answers[2]["delta_h/forward"].reason  # their ratios are unknown
    assert math.isfinite(answers[4]["delta_h/forward"].value)
    assert answers[4]["delta_h/backward"].reason == answers[2]["delta_h/forward"].reason.prefixed("step 4")


class Heats(GRPOTrainer):
    """Raises the temperature just when it samples, and its own, which its loss may not read again."""

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
        self.generation_config.temperature = 1.5
        self.temperature = 1.5
        return super()._generate_single_turn(*args, **kwargs)


def test_a_temperature_set_while_sampling_applies_to_those_responses(make_trainer) -> None:
    trainer = make_trainer(Heats, **FEW, max_steps=1)
    with attach(trainer, probes=[SimpleEntropyProbe()], whole_prompts=True) as attachment:
        trainer.train()
    assert attachment.latest["entropy/token"].code == "sampling_mismatch"
    assert "temperature=1.5" in attachment.latest["entropy/token"].reason


class Said(TrainerCallback):
    """Keeps the latest estimates of each step."""

    def __init__(self, attachment: Any, answers: list[dict[str, Estimate]]) -> None:
        self.attachment, self.found = attachment, answers

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.found.append(dict(self.attachment.latest))


def test_under_top_p_only_the_entropy_change_is_missing(make_trainer) -> None:
    trainer = make_trainer(top_p=0.8, per_device_train_batch_size=4, gradient_accumulation_steps=8)
    trainer.attachment.remove()
    answers, contexts = answers_of(trainer, GroundTruthProbe(every=1, sequences=8), split_prompts=1)
    assert_only_simple_is_missing(answers, "top_p=0.8 makes the sampled policy differ")
    for name in (*MEASURED, "delta_h/evaluation", "gns/trace_between"):
        assert "set top_p=1.0" in answers[name].reason
    # The entropy at the visited prefixes, and its jackknife error over 8 folds of one prompt, from their definitions.
    batch = contexts.kept_steps[-1].batch
    mask, entropies = batch.scores.mask.tolist(), batch.scores.entropies.tolist()
    prompts = batch.rollout.prompt_index.tolist()
    sums = []
    for prompt in sorted(set(prompts)):
        rows = [i for i, p in enumerate(prompts) if p == prompt]
        visited = [h for i in rows for h, real in zip(entropies[i], mask[i], strict=True) if real]
        sums.append((math.fsum(visited), len(visited), len(rows)))

    def ratio(rows: list, divisor: int) -> float:
        return math.fsum(row[0] for row in rows) / sum(row[divisor] for row in rows)

    for name, divisor in zip(VISITED, (1, 2), strict=True):
        without = [ratio(sums[:k] + sums[k + 1 :], divisor) for k in range(8)]
        mean = math.fsum(without) / 8
        stderr = math.sqrt(7 / 8 * math.fsum((x - mean) ** 2 for x in without))
        assert answers[name].value == pytest.approx(ratio(sums, divisor), rel=1e-6)
        assert answers[name].stderr == pytest.approx(stderr, rel=1e-5)
        assert answers[name].num_samples == 8


def test_the_entropy_of_visited_prefixes_has_no_error_bar_where_prompts_are_spread_over_steps(make_trainer) -> None:
    """Its folds would not be independent."""
    trainer = make_trainer(GRPOTrainer, top_p=0.8, steps_per_generation=8, max_completion_length=8)
    with attach(trainer, probes=[SimpleEntropyProbe()]) as attachment:
        trainer.train()
    for name in VISITED:
        assert math.isfinite(attachment.latest[name].value)
        assert math.isnan(attachment.latest[name].stderr)
        assert attachment.latest[name].code == "split_prompts"


def test_a_model_whose_scores_depend_on_padding_keeps_estimates_that_need_no_policy(make_trainer) -> None:
    tokenizer = load_tiny()[1]
    config = GPT2Config(
        vocab_size=len(tokenizer), n_positions=128, n_embd=16, n_layer=1, n_head=2,
        eos_token_id=tokenizer.eos_token_id, bos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
        initializer_range=0.5,
    )  # fmt: skip

    def length(completions: list[str], **kwargs: Any) -> list[float]:
        return [float(len(text)) for text in completions]

    trainer = make_trainer(GRPOTrainer, model=GPT2LMHeadModel(config), reward=length)
    answers, _ = answers_of(trainer)
    assert_only_simple_is_missing(answers, "absolute position embeddings")


def test_a_step_that_masks_every_response_is_pure_decay_with_the_entropy_of_all(make_trainer) -> None:
    trainer = make_trainer(mask_truncated_completions=True, max_completion_length=3)  # all responses are truncated
    trainer.attachment.remove()
    answers, contexts = answers_of(trainer, split_prompts=1)
    step = contexts.kept_steps[-1]
    assert (step.batch.rollout.completion_mask.sum(dim=1) == 3).all()
    assert all(not gradient.any() for gradient in step.gradients.mean.values())
    assert answers["entropy/token"].value == pytest.approx(float(step.batch.scores.entropies.mean()), rel=1e-6)
    policy = contexts.contexts[-1].policy  # with the weights after the step, which is small
    fresh = policy.score_rollout(step.batch.rollout)
    torch.testing.assert_close(step.batch.scores.entropies, fresh.entropies, rtol=0, atol=0.02)
    assert answers["delta_h/forward"].value == pytest.approx(answers["delta_h/part/decay"].value, rel=1e-9)
    assert answers["delta_h/forward"].value != 0.0
    assert answers["ess/zero_advantage"].value == 1.0
    assert "zero" in answers["ess/advantage"].reason
    assert answers["gns/noise_scale_prompts"].code == "no_gradient"
    assert answers["gns/trace_between"].value == 0.0  # no reward differs, and no loss weight is left


@pytest.mark.parametrize(
    ("settings", "way_out"),
    [
        ({"min_p": 0.1}, "set min_p=0.0"),
        ({"mask_truncated_completions": True}, "mask_truncated_completions=false"),
        ({"loss_type": "bnpo"}, "this one differs in loss_type: give .*trainer.loss_type=dr_grpo"),
        ({"interventions": ["bonus"]}, "this one differs in entropy_coef: .*intervention=null"),
    ],
)
def test_checkpoint_analysis_refuses_other_sampling_and_other_losses(make_trainer, tmp_path, settings, way_out) -> None:
    with pytest.raises(ValueError, match=way_out):
        restore(make_trainer(**settings), tmp_path)


def test_kv_caches_of_one_generation_batch_fit_an_eighth_of_the_gpu(plain) -> None:
    """A 7B model has 28 layers with 4 key-value heads of width 128: 114,688 bytes per token in fp32.

    Prompts count, too.
    """
    shape = {"num_hidden_layers": 28, "num_attention_heads": 28, "hidden_size": 3584}
    config = Qwen2Config(**shape, num_key_value_heads=4)
    assert max_kv_caches(config, 16384, 80e9) == 10_000_000_000 // (114_688 * 16384) == 5
    assert max_kv_caches(GPT2Config(n_layer=28, n_head=28, n_embd=3584), 16384, 80e9) == 1
    prompts = ["1+1=", "1+" * 1000 + "1="]
    (short, long), *_ = plain._tokenize_prompts(prompts)
    caches = [max_responses(plain, chosen, 80e9) for chosen in (prompts[:1], prompts)]
    ratio = (len(long) + plain.max_completion_length) / (len(short) + plain.max_completion_length)
    assert ratio > 50
    assert caches[0] / caches[1] == pytest.approx(ratio, rel=1e-3)
