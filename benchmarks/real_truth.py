"""Measures what the steps of a run on SmolLM2 did, on fresh responses, with plain transformers and without the engine.

At every second checkpoint k the policy draws responses to held-out prompts. They are scored with the weights of the
checkpoints k − 1, k and k + 1, so each step is measured once. Let h be the entropy (nats) of a token's distribution,
and r the product of the new / old probability ratios of the tokens before it, normalized to mean 1 at each position:

    H(new) = Σ r h_new / Σ r        H(old) = Σ h_old / Σ 1        over all tokens of the responses drawn at k

Errors come from a jackknife that leaves out one prompt at a time. All steps of a run share the prompts, so the
jackknife of a sum over steps leaves the same prompt out of all its terms.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from peft import PeftModel
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, PreTrainedModel

from rl_training.models.smollm2 import default_folder
from rl_training.tasks.three_words import three_words

PROMPTS = 48  # per sample
RESPONSES = 4  # per prompt
MAX_TOKENS = 40  # per response, as in training
PART = 16  # responses whose logits are computed at once
SHRUNK = 0.8  # once fewer rows than this share are live, the others are removed from the cache, which copies it
ADAPTED = 210  # linear layers of the model, each of which has an adapter


class Sample:
    """Responses of one state to the held-out prompts, ordered by prompt, with scores under several states' weights.

    Attributes:
        tokens: Token ids, (PROMPTS × RESPONSES, MAX_TOKENS).
        mask: Where a token was drawn, same shape.
        scores: For each state, the entropies and the log-probabilities of the tokens, both of the same shape.
        texts: The decoded responses.
        rewards: The task's reward for each response, (PROMPTS × RESPONSES,).
    """

    def __init__(self, tokens: Tensor, mask: Tensor) -> None:
        self.tokens = tokens
        self.mask = mask
        self.scores: dict[str, tuple[Tensor, Tensor]] = {}
        self.texts: list[str] = []
        self.rewards = torch.zeros(len(tokens))


class Truth:
    """Draws and scores responses to the same held-out prompts with any weights of SmolLM2.

    Args:
        autocast: Draw and score under bf16 autocast, like training with bf16=True, except for the head.
    """

    def __init__(self, autocast: bool = False) -> None:
        self.autocast = autocast
        self.tokenizer = AutoTokenizer.from_pretrained(default_folder())
        self.task = three_words()
        self.rows = [self.task.eval_dataset[index] for index in range(PROMPTS)]
        texts = [
            self.tokenizer.apply_chat_template(row["prompt"], tokenize=False, add_generation_prompt=True)
            for row in self.rows
        ]
        self.prompts = torch.tensor(self.tokenizer(texts, add_special_tokens=False).input_ids)  # all of equal length
        differ = (self.prompts != self.prompts[0]).any(dim=0)
        self.num_shared = int(differ.nonzero()[0, 0])  # tokens that all prompts start with: the worked example

    @torch.no_grad()
    def draw(self, model: PreTrainedModel, state: str, seed: int) -> Sample:
        """Draw RESPONSES responses to each prompt at temperature 1, scored with the weights that drew them."""
        generator = torch.Generator().manual_seed(seed)
        count = PROMPTS * RESPONSES
        sample = Sample(
            torch.full((count, MAX_TOKENS), self.tokenizer.eos_token_id),
            torch.zeros(count, MAX_TOKENS, dtype=torch.bool),
        )
        entropies = torch.zeros(count, MAX_TOKENS)
        logps = torch.zeros(count, MAX_TOKENS)
        hidden, cache = self._read_prompts(model)
        rows = torch.arange(count)  # rows still computed
        live = torch.ones(count, dtype=torch.bool)  # which of these have not ended
        for place in range(MAX_TOKENS):
            entropy, logp_of_all = _distribution(model.lm_head(hidden.float()))
            chosen = torch.multinomial(logp_of_all.exp(), 1, generator=generator)
            sample.tokens[rows[live], place] = chosen[live, 0]
            sample.mask[rows[live], place] = True
            entropies[rows[live], place] = entropy[live]
            logps[rows[live], place] = logp_of_all.gather(1, chosen)[live, 0]
            live &= chosen[:, 0] != self.tokenizer.eos_token_id
            if place == MAX_TOKENS - 1 or not live.any():
                break
            if live.sum() < SHRUNK * len(live):
                cache.batch_select_indices(live.nonzero()[:, 0])
                rows, chosen, live = rows[live], chosen[live], live[live]
            hidden = self._hidden(model, chosen, cache)[:, -1]
        sample.scores[state] = (entropies, logps)
        self._judge(sample)
        return sample

    @torch.no_grad()
    def score(self, model: PreTrainedModel, sample: Sample) -> tuple[Tensor, Tensor]:
        """Return entropies and log-probabilities of a sample's tokens under other weights; 0 after a response ends."""
        hidden, cache = self._read_prompts(model)
        length = int(sample.mask.sum(dim=1).max())
        rest = self._hidden(model, sample.tokens[:, : length - 1], cache)
        hidden = torch.cat([hidden[:, None], rest], dim=1)
        entropies = torch.zeros(sample.tokens.shape)
        logps = torch.zeros(sample.tokens.shape)
        for first in range(0, len(hidden), PART):
            part = slice(first, first + PART)
            entropies[part, :length], logp_of_all = _distribution(model.lm_head(hidden[part].float()))
            logps[part, :length] = logp_of_all.gather(2, sample.tokens[part, :length, None])[..., 0]
        return entropies * sample.mask, logps * sample.mask

    def _read_prompts(self, model: PreTrainedModel) -> tuple[Tensor, DynamicCache]:
        """Return the last hidden state of each prompt, (PROMPTS × RESPONSES, hidden), and the keys and values."""
        cache = DynamicCache(config=model.config)
        self._hidden(model, self.prompts[:1, : self.num_shared], cache)
        cache.batch_repeat_interleave(PROMPTS)
        hidden = self._hidden(model, self.prompts[:, self.num_shared :], cache)[:, -1]
        cache.batch_repeat_interleave(RESPONSES)
        return hidden.repeat_interleave(RESPONSES, dim=0), cache

    def _hidden(self, model: PreTrainedModel, tokens: Tensor, cache: DynamicCache) -> Tensor:
        """Return the last hidden states of tokens that follow those in the cache, and add these tokens to it."""
        with torch.autocast("cpu", torch.bfloat16, enabled=self.autocast):
            return model.model(input_ids=tokens, past_key_values=cache).last_hidden_state

    def _judge(self, sample: Sample) -> None:
        lengths = sample.mask.sum(dim=1).tolist()
        ids = [tokens[:length].tolist() for tokens, length in zip(sample.tokens, lengths, strict=True)]
        sample.texts = self.tokenizer.batch_decode(ids, skip_special_tokens=True)
        words = [row["words"] for row in self.rows for _ in range(RESPONSES)]
        sample.rewards = torch.tensor(self.task.reward(completions=sample.texts, words=words))


def _distribution(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return the entropy of each distribution, and all log-probabilities."""
    logps = logits.float().log_softmax(dim=-1)
    return -(logps.exp() * logps).sum(dim=-1), logps


def load(checkpoint: Path | None, merged: bool = True) -> PreTrainedModel:
    """Load the policy of a checkpoint.

    Args:
        checkpoint: None loads the original SmolLM2.
        merged: Add the adapters to the weights by hand. Otherwise peft's layers add their products to the outputs as in
            training, which is the same except for rounding.
    """
    if checkpoint is not None and (checkpoint / "model.safetensors").is_file():
        return AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    model = AutoModelForCausalLM.from_pretrained(default_folder(), dtype=torch.float32).eval()
    if checkpoint is None:
        return model
    if not merged:
        return PeftModel.from_pretrained(model, checkpoint).eval().base_model.model
    settings = json.loads((checkpoint / "adapter_config.json").read_text(encoding="utf-8"))
    adapters = load_file(checkpoint / "adapter_model.safetensors")
    weights = dict(model.named_parameters())
    names = [name for name in adapters if name.endswith("lora_A.weight")]
    assert len(names) == ADAPTED
    with torch.no_grad():
        for name in names:
            weight = weights[name.removeprefix("base_model.model.").replace(".lora_A.weight", ".weight")]
            product = adapters[name.replace("lora_A", "lora_B")] @ adapters[name]
            weight += settings["lora_alpha"] / settings["r"] * product
    return model


# --- from scores to changes -------------------------------------------------------------------------------------------


def entropy_under(sample: Sample, drawn: str, state: str, kept: Tensor) -> float:
    """Return a state's entropy per token, from responses that the state `drawn` sampled for the kept prompts."""
    mask = _kept(sample.mask.double(), kept)
    entropies = _kept(sample.scores[state][0].double(), kept)
    if state == drawn:
        return float(entropies.sum() / mask.sum())
    ratios = _kept(sample.scores[state][1].double() - sample.scores[drawn][1].double(), kept)
    before = ratios.cumsum(dim=1) - ratios  # sum over the tokens before each token
    weights = before.exp()
    weights = weights / weights.mean(dim=0)
    return float((weights * entropies).sum() / (weights * mask).sum())


def reward_under(sample: Sample, drawn: str, state: str, kept: Tensor) -> float:
    """Return a state's mean reward, from responses that the state `drawn` sampled for the kept prompts."""
    log_weights = _kept((sample.scores[state][1].double() - sample.scores[drawn][1].double()).sum(dim=1), kept)
    weights = log_weights.exp()
    return float((weights * _kept(sample.rewards.double(), kept)).sum() / weights.sum())


def kl_of(sample: Sample, drawn: str, state: str) -> float:
    """Return KL(drawn ‖ state) in nats per token, as the mean of r − 1 − log r."""
    log_ratios = sample.scores[state][1].double() - sample.scores[drawn][1].double()
    return float((log_ratios.exp() - 1 - log_ratios).sum() / sample.mask.sum())


def ess_of(sample: Sample, drawn: str, state: str) -> float:
    """Return the effective sample size as a share of the responses, from the weights of whole responses."""
    weights = (sample.scores[state][1].double() - sample.scores[drawn][1].double()).sum(dim=1).exp()
    return float(weights.sum() ** 2 / weights.square().sum() / len(weights))


def jackknife(statistic: Callable[[Tensor], float]) -> tuple[float, float]:
    """Return a statistic over all prompts and its delete-one-prompt jackknife standard error."""
    everyone = torch.ones(PROMPTS, dtype=torch.bool)
    without = []
    for prompt in range(PROMPTS):
        kept = everyone.clone()
        kept[prompt] = False
        without.append(statistic(kept))
    values = torch.tensor(without, dtype=torch.float64)
    squares = (values - values.mean()).square().sum()
    return statistic(everyone), float((squares * (PROMPTS - 1) / PROMPTS).sqrt())


def change_of_step(samples: dict[int, Sample], step: int, kept: Tensor) -> float:
    """Return the change of entropy per token in a step, from the sample drawn at the step's start or end."""
    drawn = step if step in samples else step - 1
    after, before = (entropy_under(samples[drawn], str(drawn), str(end), kept) for end in (step, step - 1))
    return after - before


def change_between(samples: dict[int, Sample], first: int, last: int, kept: Tensor) -> float:
    """Return the change of entropy per token between two states, each measured on the responses that it drew itself."""
    after, before = (entropy_under(samples[state], str(state), str(state), kept) for state in (last, first))
    return after - before


def _kept(values: Tensor, kept: Tensor) -> Tensor:
    return values[kept.repeat_interleave(RESPONSES)]


def measured_steps(samples: dict[int, Sample]) -> Sequence[int]:
    """Return the steps with a sample drawn at their start or end that has scores at both."""
    steps = {step for drawn, sample in samples.items() for step in (drawn, drawn + 1)
             if {str(step), str(step - 1)} <= set(sample.scores)}  # fmt: skip
    return sorted(steps)
