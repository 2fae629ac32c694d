"""Models with image inputs: each response is scored with the images of its own row, with whole prompts or without."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from datasets import Dataset
from PIL import Image
from seen import Seen
from since import since
from trainers import FEW, Outcome, differing, outcome
from transformers import CLIPVisionConfig, LlavaConfig, LlavaForConditionalGeneration, LlavaProcessor, Qwen2Config
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from trl import GRPOTrainer
from trl.trainer.utils import unsplit_pixel_values_by_grid

from rl_training import Reading, attach
from rl_training.hosts.trl.rollouts import batches
from rl_training.hosts.trl.rollouts.prompt_numbers import PROMPT
from rl_training.models.load import load_tiny
from rl_training.policy.rollout import Rollout, images_of, join_rollouts
from rl_training.policy.scores import Scores
from rl_training.probes import EffectiveSampleSizeProbe, GradientNoiseScaleProbe, GroundTruthProbe, SimpleEntropyProbe

TEMPLATE = (
    "{%- for message in messages -%}{%- for part in message.content -%}"
    "{%- if part.type == 'image' -%}<image>{%- else -%}{{ part.text }}{%- endif -%}"
    "{%- endfor -%}{%- endfor -%}"
)


def seeing() -> tuple[LlavaForConditionalGeneration, LlavaProcessor]:
    """Return a float64 LLaVA with the tiny model as language model and a random vision tower, and its processor."""
    policy, tokenizer = load_tiny()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    images = CLIPImageProcessorPil(size={"shortest_edge": 8}, crop_size={"height": 8, "width": 8})
    processor = LlavaProcessor(images, tokenizer, 4, "default", TEMPLATE, num_additional_image_tokens=1)
    text = Qwen2Config(**{**policy.config.to_dict(), "vocab_size": len(tokenizer)})
    eyes = CLIPVisionConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2, image_size=8, patch_size=4,
        initializer_range=0.5,
    )  # fmt: skip
    config = LlavaConfig(vision_config=eyes, text_config=text, image_token_id=processor.image_token_id)
    torch.manual_seed(0)
    model = LlavaForConditionalGeneration(config)
    weights = dict(policy.model.state_dict())
    table = weights["embed_tokens.weight"]
    extra = len(tokenizer) - len(table)
    weights["embed_tokens.weight"] = torch.cat([table, table[2].expand(extra, -1)])  # <unk> is never sampled
    model.model.language_model.load_state_dict(weights)
    model.lm_head.weight = model.model.language_model.embed_tokens.weight
    for name, param in model.model.multi_modal_projector.named_parameters():
        torch.nn.init.normal_(param, std=0.5 if name.endswith("weight") else 0.0)
    model.model.vision_tower.requires_grad_(False)
    model.config.eos_token_id = model.generation_config.eos_token_id = tokenizer.eos_token_id
    return model.double(), processor


class Contexts(Seen):
    """Keeps each step, and the policy's scores for its rows, asked for in another order and two at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.scored: list[tuple[dict[int, Any], Any]] = []

    def measure(self, ctx: Any, state: Any) -> Reading:
        step = ctx.step
        reading = super().measure(ctx, state)
        rows = torch.arange(step.batch.rollout.num_sequences).view(2, -1).T  # pairs of different prompts
        asked = {int(row): (scores, i) for pair in rows for scores in [score(ctx, step.batch.rollout, pair)]
                 for i, row in enumerate(pair)}  # fmt: skip
        others = {name: values[8:] + values[:8] if isinstance(values, list) else values.roll(-8, 0)
                  for name, values in step.batch.rollout.images.items()}  # fmt: skip
        swapped = score(ctx, dataclasses.replace(step.batch.rollout, images=others), torch.arange(2))
        self.scored.append((asked, swapped))
        return reading


def score(ctx: Any, rollout: Rollout, rows: torch.Tensor) -> Scores:
    scores = ctx.policy.score(rollout, rows)
    return Scores(scores.logps.detach(), scores.entropies.detach(), scores.mask)


def trained(make_trainer: Any, probes: list[Any]) -> tuple[Outcome, Any]:
    model, processor = seeing()
    colours = [(40 * i % 256, 255 - 30 * i % 256, 90 * i % 256) for i in range(16)]
    rows = {
        "prompt": [[{"role": "user", "content": f"{i}+{i % 7}="}] for i in range(16)],
        "image": [Image.new("RGB", (8, 8), colour) for colour in colours],
    }
    settings = FEW | {"reward": graded_texts, "per_device_train_batch_size": 8, "max_completion_length": 12}
    trainer = make_trainer(
        GRPOTrainer, model=model, dtype=torch.float64, processing_class=processor,
        train_dataset=Dataset.from_dict(rows), **settings,
    )  # fmt: skip
    attachment = attach(trainer, probes=probes, whole_prompts=True)
    return outcome(trainer), attachment


def graded_texts(completions: list[Any], **kwargs: Any) -> list[float]:
    return [float(len(str(c)) % 5) for c in completions]


def test_each_response_is_scored_with_its_own_image_and_training_is_unchanged(make_trainer) -> None:
    contexts = Contexts()
    probes = [SimpleEntropyProbe(), GroundTruthProbe(every=1, sequences=8), GradientNoiseScaleProbe()]
    probes += [EffectiveSampleSizeProbe(), contexts]
    probed, attachment = trained(make_trainer, probes)
    assert differing(probed, trained(make_trainer, [])[0]) == []
    for name in ("delta_h/forward", "delta_h/backward", "gns/trace_step", "ess/advantage"):
        assert math.isfinite(attachment.latest[name].value)
    assert "text" in attachment.latest["delta_h/true"].reason
    for step, (asked, swapped) in zip(contexts.kept_steps, contexts.scored, strict=True):
        assert not step.reasons.no_folds
        mask = step.batch.rollout.completion_mask.bool()
        for row, (scores, i) in asked.items():
            length = int(mask[row].sum())
            for name in ("logps", "entropies"):
                trained_on = getattr(step.batch.scores, name)[row, :length]
                again = getattr(scores, name)[i, :length].to(trained_on)  # TRL's fused head computes in fp32
                torch.testing.assert_close(again, trained_on, rtol=1e-3, atol=1e-4)
        width = swapped.logps.shape[1]
        difference = (swapped.logps - step.batch.scores.logps[:2, :width])[mask[:2, :width]].abs().max()
        assert float(difference) > 0.05  # the images matter


# --- rows of other models' image inputs -------------------------------------------------------------------------------

PATCHES = torch.arange(22.0).view(11, 2)  # four images with 1·2·1, 1·1·3, 1·2·2 and 1·1·2 patches
GRIDS = torch.tensor([[1, 2, 1], [1, 1, 3], [1, 2, 2], [1, 1, 2]])
LAYOUTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    # by layout: the inputs of three rows, and those expected for rows 2 and 0
    "one tensor of patches (Qwen2-VL)": (
        {"pixel_values": PATCHES, "image_grid_thw": GRIDS, "num_images": [1, 2, 1]},
        {"pixel_values": torch.cat([PATCHES[9:], PATCHES[:2]]), "image_grid_thw": GRIDS[[3, 0]], "num_images": [1, 1]},
    ),
    "an image a row (LLaVA)": (
        {"pixel_values": PATCHES[:4], "num_images": [1, 2, 1], "image_sizes": GRIDS},
        {"pixel_values": PATCHES[[3, 0]], "num_images": [1, 1], "image_sizes": GRIDS[[3, 0]]},
    ),
    "tiles (InternVL)": (
        {"pixel_values": PATCHES[:6], "num_images": [1, 1, 1], "num_tiles": [3, 1, 2]},
        {"pixel_values": PATCHES[[4, 5, 0, 1, 2]], "num_images": [1, 1], "num_tiles": [2, 3]},
    ),
    "padded to a row (SmolVLM)": (
        {"pixel_values": PATCHES[:3], "num_images": [2, 1, 1], "pixel_attention_mask": GRIDS[:3]},
        {"pixel_values": PATCHES[[2, 0]], "num_images": [1, 2], "pixel_attention_mask": GRIDS[[2, 0]]},
    ),
}


def rollout_of(batch: dict[str, Any], rows: int = 3) -> Rollout:
    ids = torch.ones(rows, 2, dtype=torch.long)
    whole = {"prompt_ids": ids, "prompt_mask": ids, "completion_ids": ids, "completion_mask": ids}
    whole |= {"advantages": torch.zeros(rows), PROMPT: torch.arange(rows), **batch}
    return batches.read_rollout(whole, 0, on_policy=True)


def assert_same(got: dict[str, Any], expected: dict[str, Any]) -> None:
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(torch.as_tensor(got[name]), torch.as_tensor(value)), name


@since("trl 1.11.0")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_are_selected_from_every_image_layout_of_trl(layout: str) -> None:
    batch, expected = LAYOUTS[layout]
    rollout = rollout_of(batch)
    assert_same(unsplit_pixel_values_by_grid(images_of(rollout, torch.tensor([2, 0]))), expected)
    twice = join_rollouts([rollout, rollout])
    assert_same(unsplit_pixel_values_by_grid(images_of(twice, torch.tensor([5, 0]))), expected)


def test_token_types_are_padded_with_prompts_and_completions() -> None:
    def part(prompt: int, completion: int) -> Rollout:
        rollout = rollout_of({"token_type_ids": torch.ones(3, prompt + completion, dtype=torch.long)})
        return dataclasses.replace(
            rollout,
            prompt_ids=torch.ones(3, prompt, dtype=torch.long),
            completion_ids=torch.ones(3, completion, dtype=torch.long),
        )

    joined = join_rollouts([part(2, 3), part(4, 1)])
    assert joined.images["token_type_ids"][[0, 3]].tolist() == [[0, 0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 0, 0]]


@since("trl 1.11.0")
def test_inputs_that_cannot_be_assigned_to_rows_are_named() -> None:
    with pytest.raises(ValueError, match=r"image_sizes .*4 .*3 "):
        rollout_of({"pixel_values": PATCHES[:3], "num_images": [2, 1, 1], "image_sizes": GRIDS})
    with pytest.raises(ValueError, match="images"):
        join_rollouts([rollout_of({}), rollout_of(LAYOUTS["an image a row (LLaVA)"][0])])
