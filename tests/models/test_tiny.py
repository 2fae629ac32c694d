"""Claims on the shipped model: its checkpoint, its tokenizer, and how both are rebuilt."""

import logging
import string
import warnings
from itertools import islice
from pathlib import Path
from typing import Any

import forks
import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerFast

from rl_training.errors import UserError
from rl_training.models.load import TINY_PATH
from rl_training.models.tiny import build_model, build_tokenizer, warm_start
from rl_training.tasks.arithmetic import arithmetic, arithmetic_reward, worked_examples


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(TINY_PATH)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    loaded = AutoTokenizer.from_pretrained(TINY_PATH)
    assert isinstance(loaded, PreTrainedTokenizerFast)
    return loaded


def test_shipped_checkpoint_loads_without_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    transformers.logging.enable_propagation()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            AutoModelForCausalLM.from_pretrained(TINY_PATH)
            AutoTokenizer.from_pretrained(TINY_PATH)
    finally:
        transformers.logging.disable_propagation()
    assert [record.message for record in caplog.records if record.levelno >= logging.WARNING] == []


def test_model_has_105472_parameters_in_fp32(model: PreTrainedModel) -> None:
    assert model.num_parameters() == 105_472
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


def test_the_shipped_tokenizer_equals_the_built_one(tokenizer: PreTrainedTokenizerFast) -> None:
    built = build_tokenizer()
    assert tokenizer.get_vocab() == built.get_vocab()
    assert len(tokenizer) == 103
    text = string.digits + " \n\n  don't <think> 7+2-3=?</think>" + string.punctuation + string.ascii_letters
    for thing in (tokenizer, built):
        assert thing.decode(thing(text).input_ids, skip_special_tokens=True) == text
    assert tokenizer(text).input_ids == built(text).input_ids


def test_every_printable_character_is_its_own_token(tokenizer: PreTrainedTokenizerFast) -> None:
    characters = "\n" + "".join(map(chr, range(ord(" "), ord("~") + 1)))
    ids = tokenizer(characters).input_ids
    assert len(ids) == len(set(ids)) == len(characters) == 96


def test_tags_are_single_tokens_and_survive_decoding(tokenizer: PreTrainedTokenizerFast) -> None:
    tags = "<think></think><answer></answer>"
    ids = tokenizer(tags + "<eos><pad>").input_ids
    assert len(ids) == 6
    assert tokenizer.decode(ids, skip_special_tokens=True) == tags


def test_model_and_generation_configs_have_the_end_and_padding_tokens(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast
) -> None:
    assert tokenizer.padding_side == "left"
    assert tokenizer.eos_token_id != tokenizer.pad_token_id
    assert {tokenizer.eos_token_id, tokenizer.pad_token_id} <= set(tokenizer.all_special_ids)
    for config in (model.config, model.generation_config):
        assert (config.eos_token_id, config.pad_token_id) == (tokenizer.eos_token_id, tokenizer.pad_token_id)


def test_the_shipped_model_has_learned_something_and_has_more_to_learn(
    model: Any, tokenizer: PreTrainedTokenizerFast
) -> None:
    rows = arithmetic(num_train=0, num_eval=256).eval_dataset[:]
    prompts = tokenizer(rows["prompt"], padding=True, return_tensors="pt")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        tokens = model.generate(**prompts, max_new_tokens=36, do_sample=True, temperature=1.0, top_k=0)
    texts = tokenizer.batch_decode(tokens[:, prompts.input_ids.shape[1] :], skip_special_tokens=True)
    rewards = arithmetic_reward(texts, answer=rows["answer"])
    assert 0.3 < sum(rewards) / len(rewards) < 0.65
    assert 0.3 < sum(text.startswith("</think>") for text in texts) / len(texts) < 0.7


def test_the_warm_start_loss_is_the_mean_over_completion_tokens_and_eos_alone() -> None:
    """The first loss is recomputed by definition, one example at a time, so without padding or labels."""
    tokenizer = build_tokenizer()
    model = build_model(tokenizer, seed=0)
    nll, num_tokens = 0.0, 0
    for example in islice(worked_examples(seed=5), 32):
        num_prompt = len(tokenizer(example.prompt).input_ids)
        text = example.prompt + example.completion
        ids = torch.tensor([*tokenizer(text).input_ids, tokenizer.eos_token_id])
        with torch.no_grad():
            logps = model(ids[None]).logits[0].log_softmax(-1)
        nll -= sum(logps[place - 1, ids[place]].item() for place in range(num_prompt, len(ids)))
        num_tokens += len(ids) - num_prompt
    assert warm_start(model, tokenizer, worked_examples(5), num_steps=1) == [pytest.approx(nll / num_tokens, rel=1e-5)]


def test_a_worked_example_may_have_the_maximum_length_of_the_tokenizer() -> None:
    tokenizer = build_tokenizer()
    model = build_model(tokenizer, seed=0)
    with pytest.raises(UserError, match="128 tokens"):
        warm_start(model, tokenizer, worked_examples(0, 24, 24), num_steps=1)
    tokenizer.model_max_length = 256
    assert len(warm_start(model, tokenizer, worked_examples(0, 24, 24), num_steps=1)) == 1


def test_rebuilding_is_bitwise_reproducible_and_keeps_the_random_state() -> None:
    def weights(seed: int) -> torch.Tensor:
        tokenizer = build_tokenizer()
        model = build_model(tokenizer, seed)
        losses = warm_start(model, tokenizer, worked_examples(seed), num_steps=12)
        assert losses[-1] < losses[0]
        return torch.nn.utils.parameters_to_vector(model.parameters())

    state = torch.get_rng_state()
    first = weights(seed=1)
    torch.rand(7)
    assert torch.equal(weights(seed=1), first)
    assert not torch.equal(weights(seed=2), first)
    torch.set_rng_state(state)
    weights(seed=1)
    assert torch.equal(torch.get_rng_state(), state)


def test_the_command_reports_a_mistake_in_one_line(tmp_path: Path) -> None:
    ended = forks.run("rl_training/job/make_tiny.py", "--task", "chain_summ", "--output", str(tmp_path / "model"))
    assert ended.returncode == 2
    assert ended.stderr.strip().splitlines()[-1].startswith("error: data.task=chain_summ is not in reasoning-gym: use ")
    assert "Traceback" not in ended.stderr
    assert not (tmp_path / "model").exists()
