"""The gradient noise scale in a real trainer, compared with a slow twin that computes every response's gradient."""

from __future__ import annotations

import copy
import gc
import math
from typing import Any

import pytest
import torch
from peft import LoraConfig
from seen import Kept, Seen
from torch import Tensor
from trainers import FEW, LORA, graded
from transformers import TrainerCallback
from trl import GRPOTrainer

from rl_training import Reading, attach
from rl_training.models.load import load_tiny
from rl_training.probes import GradientNoiseScaleProbe
from rl_training.probes.gns import SPLIT

G, L_MAX, NUM_PROMPTS = 4, 12, 8
RAW = ("gns/trace_step", "gns/grad_sq_norm_step")
NO_DROPOUT = {**LORA, "lora_dropout": 0.0}  # so that a gradient can be recomputed


class Answers(Kept, GradientNoiseScaleProbe):
    """The probe, which keeps its estimates and the state before the first step."""

    def measure(self, ctx: Any, state: Any) -> Reading:
        step = ctx.step
        if step.number == 1:
            trained = dict(ctx.policy.model.named_parameters())
            self.parameters = {name: trained[name].detach().double().clone() for name in step.weights}
            self.rollout = copy.deepcopy(step.batch.rollout)
        return super().measure(ctx, state)


def response_gradients(probe: Answers) -> Tensor:
    """Return r_i = −A_i ∂S_i / L_max of each response, (B, P), from the full logits. Their mean is the gradient."""
    model = load_tiny()[0].double()
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name, value in probe.parameters.items():
            parameters[name].copy_(value)
    rollout, rows = probe.rollout, []
    for i in range(len(rollout.advantages)):
        prompt = rollout.prompt_ids[i][rollout.prompt_mask[i].bool()]
        completion = rollout.completion_ids[i][rollout.completion_mask[i].bool()]
        table = model(input_ids=torch.cat([prompt, completion]).unsqueeze(0)).logits[0].log_softmax(dim=-1)
        logp = table[len(prompt) - 1 : -1].gather(1, completion.unsqueeze(1)).sum()
        loss = -rollout.advantages[i].double() * logp / L_MAX
        gradient = torch.autograd.grad(loss, [parameters[name] for name in probe.parameters])
        rows.append(torch.cat([g.flatten() for g in gradient]))
    return torch.stack(rows)


def moments_of_blocks(by_prompt: Tensor, num_blocks: int) -> tuple[float, float]:
    """Return (tr Σ, |G|²) from the prompts' gradients, (prompts, P), using the variance between blocks."""
    blocks = by_prompt.view(num_blocks, -1, by_prompt.shape[1]).mean(dim=1)
    mean = blocks.mean(dim=0)
    variance = float((blocks - mean).square().sum()) / (num_blocks - 1)  # variance of one block
    return variance * len(by_prompt) / num_blocks, float(mean.square().sum()) - variance / num_blocks


def test_moments_equal_those_from_single_responses_for_any_split_into_microbatches(make_trainer) -> None:
    """With the same rollouts in 2, 4 and 8 microbatches, |g_B|² = |G|²^ + tr Σ^ / B must not depend on the split."""
    batch_sq_norms = []
    for num_blocks in (2, 4, 8):
        size = NUM_PROMPTS * G // num_blocks
        probe = Answers(split_prompts=NUM_PROMPTS)
        split = {"per_device_train_batch_size": size, "gradient_accumulation_steps": num_blocks}
        split["max_completion_length"] = L_MAX
        make_trainer(probes=[probe], dtype=torch.float64, reward=graded, max_steps=1, **split).train()
        if num_blocks == 2:
            of_responses = response_gradients(probe).view(NUM_PROMPTS, G, -1)
            by_prompt = of_responses.mean(dim=1)
        trace, grad_sq_norm = moments_of_blocks(by_prompt, num_blocks)
        answer = {name: estimate.value for name, estimate in probe.all[0].items()}
        assert answer[RAW[0]] == pytest.approx(trace, rel=1e-5)  # TRL's fused head computes in fp32
        assert answer[RAW[1]] == pytest.approx(grad_sq_norm, rel=1e-5, abs=1e-5 * trace / NUM_PROMPTS)
        product = sum(float(p[i] @ p[j]) for p in of_responses for i in (0, 1) for j in (2, 3)) / (4 * NUM_PROMPTS)
        between = product * (G - 1) ** 2 / ((G - 1) ** 2 + 1) - grad_sq_norm
        scale = 1e-5 * trace
        assert [answer[name] for name in SPLIT] == pytest.approx([between, trace - between], rel=1e-5, abs=scale)
        batch_sq_norms.append(answer[RAW[1]] + answer[RAW[0]] / NUM_PROMPTS)
    assert batch_sq_norms == pytest.approx([float(by_prompt.mean(dim=0).square().sum())] * 3, rel=1e-5)
    assert batch_sq_norms == pytest.approx([batch_sq_norms[0]] * 3, rel=1e-6)


def test_the_noise_scale_is_of_unclipped_gradients(make_trainer) -> None:
    answers = []
    for threshold in (0.0, 1e-3):
        probe = Answers()
        make_trainer(probes=[probe], max_steps=1, max_grad_norm=threshold, **FEW).train()
        answers.append(repr(probe.all))
    assert answers[0] == answers[1]
    assert probe.all[0]["gns/trace_step"].value > 1e-3  # large enough for clipping to show


class Rebuilder(Seen):
    """Recomputes this rank's gradient from `score` and the step's loss weights."""

    def measure(self, ctx: Any, state: Any) -> Reading:
        step = ctx.step
        reading = super().measure(ctx, state)
        scores = ctx.policy.score(step.batch.rollout, torch.arange(step.batch.rollout.num_sequences))
        outputs, weights = [scores.logps], [step.batch.loss_weights.logps[:, : scores.logps.shape[1]]]
        self.knows_entropies = step.batch.loss_weights.entropies is not None
        if self.knows_entropies:
            outputs.append(scores.entropies)
            weights.append(step.batch.loss_weights.entropies[:, : scores.logps.shape[1]])
        trained = [p for p in ctx.policy.model.parameters() if p.requires_grad]
        rebuilt = torch.autograd.grad(outputs, trained, weights)
        whole = torch.cat([g.flatten() for g in step.gradients.mean.values()])
        self.error = float((torch.cat([g.flatten() for g in rebuilt]) - whole).norm() / whole.norm())
        return reading


OWN_LOSS = [
    {"peft_config": adapter, **settings}
    for adapter in (None, LoraConfig(**NO_DROPOUT))
    for settings in ({}, {"activation_checkpointing": True}, {"steps_per_generation": 4})
]
OTHER_LOSSES = [
    {"loss_type": "grpo", "beta": 0.05},
    {"loss_type": "dapo", "beta": 0.05},
    {"entropy_coef": 0.1},
    {"use_adaptive_entropy": True, "entropy_coef": 0.1, "entropy_target": 5.0},
    {"entropy_coef": 0.1, "top_entropy_quantile": 0.5},
]


@pytest.mark.parametrize("settings", [*OWN_LOSS, *OTHER_LOSSES], ids=str)
def test_the_gradient_of_every_loss_can_be_rebuilt_from_its_loss_weights(
    make_trainer, settings: dict[str, Any]
) -> None:
    probe = Rebuilder()
    trainer = make_trainer(GRPOTrainer, **settings, **FEW)
    with attach(trainer, probes=[probe], whole_prompts=settings in OWN_LOSS):
        trainer.train()
    assert probe.error < 1e-5
    assert probe.knows_entropies == ("entropy_coef" in settings)


class LargeTensors(TrainerCallback):
    """Counts, at the end of the last step, the tensors in memory that have the size of the largest parameter."""

    def __init__(self, trainer: GRPOTrainer) -> None:
        self.size = max(p.numel() for p in trainer.model.parameters())

    def on_step_end(self, args: Any, state: Any, *others: Any, **kwargs: Any) -> None:
        if state.global_step == args.max_steps:
            gc.collect()
            tensors = [o for o in gc.get_objects() if type(o) is Tensor and o.numel() >= self.size]
            self.count = sum(tensor.is_floating_point() for tensor in tensors)  # not the sampled entries' indices


def test_no_parameter_sized_tensor_is_kept_after_a_step(make_trainer) -> None:
    counts = []
    for probes in ([], [GradientNoiseScaleProbe(split_prompts=2)]):
        trainer = make_trainer(probes=probes, **FEW)
        counter = LargeTensors(trainer)
        trainer.add_callback(counter)  # it runs after the probes' own callback
        trainer.train()
        assert counter.count >= 2  # at least AdamW's moments, so it does find tensors
        counts.append(counter.count)
        del trainer, counter
    assert counts[0] == counts[1]


def test_a_step_that_reuses_responses_is_nan_with_the_reason(make_trainer) -> None:
    probe = Answers()
    make_trainer(probes=[probe], num_iterations=2, **FEW).train()
    assert math.isfinite(probe.all[0]["gns/trace_step"].value)
    assert all(math.isnan(e.value) and e.code == "reused" for e in probe.all[1].values())


def test_a_later_step_of_a_rollout_that_learns_from_fresh_prompts_is_measured(make_trainer) -> None:
    probe = Answers()
    make_trainer(probes=[probe], steps_per_generation=4, **FEW).train()
    assert all(math.isfinite(answer["gns/trace_step"].value) for answer in probe.all)


def test_mixed_prompts_in_microbatches_give_nan_with_the_fix(make_trainer) -> None:
    probe = Answers(split_prompts=1)
    trainer = make_trainer(GRPOTrainer, **FEW)
    with attach(trainer, probes=[probe], whole_prompts=False):
        trainer.train()
    assert set(SPLIT) < set(probe.all[0])
    assert all(math.isnan(e.value) and e.code == "mixed_prompts" for e in probe.all[0].values())
