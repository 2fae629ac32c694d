"""Scores of any causal language model, compared with its full logits in float64 for single unpadded sequences."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from trainers import FEW
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from rl_training.policy.linear_head import LogitMap, scores_of_hidden
from rl_training.policy.scorer import Scorer
from rl_training.policy.scores import Scores

VOCABULARY, TEMPERATURE = 61, 0.7
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 48, "initializer_range": 0.3, "pad_token_id": 0,
}  # fmt: skip
# Every way from the body to the logits: (family, its config's fields).
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "tied": ("Qwen2", {"tie_word_embeddings": True}),
    "untied": ("Llama", {"tie_word_embeddings": False}),
    "softcap": ("Gemma2", {"final_logit_softcapping": 3.0, "head_dim": 8, "attn_implementation": "eager"}),
    "multiplied": ("Cohere", {"logit_scale": 0.25}),
    "divided": ("Granite", {"logits_scaling": 3.0}),
    "multiplied by what others divide by": ("HyperCLOVAX", {"logits_scaling": 3.0}),
    "bias": ("Phi", {}),
    "absolute positions": ("GPT2", {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32}),
}


@dataclass(frozen=True)
class Sampled:
    """Five sequences of different lengths. One has an environment's tokens between its own."""

    prompt_ids: Tensor
    prompt_mask: Tensor
    completion_ids: Tensor
    completion_mask: Tensor
    token_mask: Tensor
    images: dict[str, Any] | None = None


def sampled(prompts: tuple[int, ...] = (3, 1, 4, 2, 4), completions: tuple[int, ...] = (5, 7, 1, 4, 6)) -> Sampled:
    torch.manual_seed(1)
    prompt, token = (torch.arange(w) < torch.tensor(n).unsqueeze(1) for w, n in ((6, prompts), (9, completions)))
    mask = token.clone()
    mask[1, 2:4] = False  # written by an environment
    ids = torch.randint(1, VOCABULARY, (5, 15))
    return Sampled(ids[:, :6], prompt.flip(1).long(), ids[:, 6:], mask.long(), token.long())


ROWS = torch.tensor([4, 1, 0])


def model_of(family: str, **settings: Any) -> PreTrainedModel:
    name, config = FAMILIES[family]
    torch.manual_seed(0)
    model = getattr(transformers, "GPT2LMHeadModel" if name == "GPT2" else f"{name}ForCausalLM")(
        getattr(transformers, f"{name}Config")(**{**SIZES, **config, **settings})
    )
    for key, param in model.named_parameters():
        if key.endswith("bias"):
            torch.nn.init.normal_(param, std=0.3)
    return model.eval()


def with_adapter(model: PreTrainedModel, **settings: Any) -> Any:
    torch.manual_seed(2)
    return get_peft_model(model, LoraConfig(r=4, init_lora_weights=False, task_type="CAUSAL_LM", **settings)).eval()


def plain(model: Any, sequences: Sampled, rows: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Return log-probabilities and entropies of each row's sampled tokens, from the full logits of that row alone."""
    scores = []
    for row in rows.tolist():
        prompt, token = sequences.prompt_mask[row].bool(), sequences.token_mask[row].bool()
        ids = torch.cat([sequences.prompt_ids[row][prompt], sequences.completion_ids[row][token]])
        logits = model(input_ids=ids.unsqueeze(0)).logits[0, int(prompt.sum()) - 1 : -1]
        p = (logits.to(torch.promote_types(logits.dtype, torch.float32)) / TEMPERATURE).softmax(-1)
        is_sampled = sequences.completion_mask[row][token].bool()
        at_targets = p.log().gather(-1, sequences.completion_ids[row][token].unsqueeze(-1)).squeeze(-1)
        scores.append((at_targets[is_sampled], torch.special.entr(p).sum(-1)[is_sampled]))
    return scores


def of_tokens(scores: Scores) -> tuple[Tensor, Tensor]:
    there = scores.mask.bool()
    return scores.logps[there], scores.entropies[there]


def weighted(logps: Tensor, entropies: Tensor) -> Tensor:
    w, u = torch.linspace(-1, 2, len(logps)), torch.linspace(1, -0.5, len(logps))
    return (w * logps).sum() + (u * entropies).sum()


def gradients(model: nn.Module, values: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
    trained = {name: param for name, param in model.named_parameters() if param.requires_grad}
    taken = torch.autograd.grad(weighted(*values), list(trained.values()), allow_unused=True, materialize_grads=True)
    return dict(zip(trained, taken, strict=True))


def assert_close(a: dict[str, Tensor], b: dict[str, Tensor], tolerance: float) -> None:
    size = max(float(gradient.abs().max()) for gradient in b.values())
    assert size > 0.1
    for name, gradient in a.items():
        assert float((gradient - b[name]).abs().max()) <= tolerance * size, name


def assert_like_plain(model: Any, scorer: Scorer, sequences: Sampled, tolerance: float = 3e-7) -> None:
    """Compare values, and the gradient of a weighted sum. The model is float64, but its norms round to fp32."""
    twin = plain(model, sequences, ROWS)
    expected = torch.cat([pair[0] for pair in twin]), torch.cat([pair[1] for pair in twin])
    scores = of_tokens(scorer.score(sequences, ROWS))
    torch.testing.assert_close(scores, expected, rtol=tolerance, atol=tolerance)
    assert_close(gradients(model, scores), gradients(model, expected), tolerance)


@pytest.mark.parametrize("call_head", [False, True], ids=["weight", "called"])
@pytest.mark.parametrize("family", FAMILIES)
def test_scores_and_gradients_equal_those_of_all_logits_in_float64(family: str, call_head: bool) -> None:
    model = model_of(family).double()
    scorer = Scorer(model, TEMPERATURE, call_head=call_head, chunk_logits=3 * VOCABULARY)
    assert scorer.full_logits_reason() == ""
    assert_like_plain(model, scorer, sampled())


@pytest.mark.parametrize("family", FAMILIES)
def test_fp32_scores_and_gradients_equal_those_of_float64_to_1e_6(family: str) -> None:
    model = model_of(family, initializer_range=0.1)
    exact = copy.deepcopy(model).double()
    twin = plain(exact, sampled(), ROWS)
    expected = torch.cat([pair[0] for pair in twin]), torch.cat([pair[1] for pair in twin])
    scores = of_tokens(Scorer(model, TEMPERATURE).score(sampled(), ROWS))
    torch.testing.assert_close(scores, tuple(x.float() for x in expected), rtol=1e-6, atol=2e-6)
    assert_close(gradients(model, scores), {n: g.float() for n, g in gradients(exact, expected).items()}, 2e-6)


@pytest.mark.parametrize(
    "adapter",
    [
        {"target_modules": ["q_proj", "v_proj"]},
        {"target_modules": "all-linear"},
        {"target_modules": ["q_proj", "lm_head"]},
        {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    ],
    ids=["q and v", "all linear", "on the head", "saved head"],
)
def test_adapters_including_those_on_the_head_are_scored(adapter: dict[str, Any]) -> None:
    model = with_adapter(model_of("untied"), **adapter).double()
    if "modules_to_save" in adapter:
        for name, param in model.named_parameters():
            if "lm_head.modules_to_save" in name:
                torch.nn.init.normal_(param, std=0.3)
    scorer = Scorer(model, TEMPERATURE, chunk_logits=2 * 3 * VOCABULARY)
    assert_like_plain(model, scorer, sampled())
    with model.disable_adapter():
        base = of_tokens(scorer.score(sampled(), ROWS, graph=False))
        expected = torch.cat([pair[0] for pair in plain(model, sampled(), ROWS)])
    torch.testing.assert_close(base[0], expected)


def test_a_saved_head_in_fp32_on_a_bf16_model_has_the_logits_that_its_scores_are_made_of() -> None:
    model = with_adapter(model_of("untied"), target_modules=["q_proj"], modules_to_save=["lm_head"]).bfloat16()
    for parameter in model.parameters():
        parameter.data = parameter.data.float() if parameter.requires_grad else parameter.data
    scorer = Scorer(model, TEMPERATURE, autocast=lambda: torch.autocast("cpu", torch.bfloat16))
    with scorer.measuring():
        expected = of_tokens(scorer.score(sampled(), ROWS, graph=False))
        logps = scorer.token_logits(sampled(), ROWS).log_softmax(-1)
    torch.testing.assert_close(torch.special.entr(logps.exp()).sum(-1), expected[1], rtol=1e-5, atol=1e-5)


def test_four_bit_weights_are_scored_like_the_model_does() -> None:
    bitsandbytes = pytest.importorskip("bitsandbytes")
    model = model_of("untied", hidden_size=64, intermediate_size=128, vocab_size=64)  # multiples of the block size
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear):  # the head too
            quantised = bitsandbytes.nn.Linear4bit(
                module.in_features, module.out_features, bias=False, compute_dtype=torch.float32, quant_type="nf4"
            )
            quantised.weight = bitsandbytes.nn.Params4bit(module.weight.data, quant_type="nf4", requires_grad=False)
            model.set_submodule(name, quantised)
    model = with_adapter(model.to("cpu"), target_modules=["q_proj", "v_proj"]).train()
    scorer = Scorer(model, TEMPERATURE, chunk_logits=2 * 3 * 64)
    assert scorer.full_logits_reason() == "" == scorer.rounding_reason
    measurement(scorer, sampled())  # no layer may repack its weights
    assert_like_plain(model, scorer, sampled(), tolerance=1e-5)
    next(m for m in model.modules() if isinstance(m, bitsandbytes.nn.Linear4bit)).compute_dtype = torch.bfloat16
    assert "computes in bfloat16" in scorer.rounding_reason


def test_token_types_are_passed_to_the_model_and_image_counts_are_not() -> None:
    model = model_of("untied")
    sequences = sampled()
    tokens = torch.cat([sequences.prompt_ids, sequences.completion_ids], dim=1)
    sizes = torch.arange(5)
    images = {"mm_token_type_ids": tokens, "image_sizes": sizes, "num_images": [1] * 5}
    scorer = Scorer(model)
    scorer.full_logits_reason()
    given: dict[str, Any] = {}
    model.model.register_forward_pre_hook(lambda module, args, kwargs: given.update(kwargs), with_kwargs=True)
    scorer.score(dataclasses.replace(sequences, images=images), ROWS, graph=False)
    assert given.keys() == {"input_ids", "use_cache", "mm_token_type_ids", "image_sizes"}
    assert torch.equal(given["mm_token_type_ids"], given["input_ids"])
    assert torch.equal(given["image_sizes"], ROWS)


class Louder(transformers.LlamaForCausalLM):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        output.logits = output.logits * 1.5
        return output


class Cut(transformers.LlamaForCausalLM):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        output.logits = output.logits.clamp(max=2.0)
        return output


class Pivoted(transformers.LlamaForCausalLM):
    def forward(self, input_ids: Tensor, **kwargs: Any) -> Any:
        hidden = self.model(input_ids=input_ids).last_hidden_state.flip(-1)
        return transformers.modeling_outputs.CausalLMOutput(logits=self.lm_head(hidden))


class Fused(transformers.LlamaForCausalLM):
    def forward(self, input_ids: Tensor, **kwargs: Any) -> Any:
        logits = self.model(input_ids=input_ids).last_hidden_state @ self.lm_head.weight.T * 2
        return transformers.modeling_outputs.CausalLMOutput(logits=logits)


class Bodiless(transformers.LlamaForCausalLM):
    base_model_prefix = ""


@pytest.mark.parametrize("family", [Louder, Cut, Pivoted, Fused, Bodiless, transformers.MiniCPM3ForCausalLM])
def test_a_model_with_its_own_head_computation_is_scored_by_its_logits(family: Any) -> None:
    torch.manual_seed(0)
    of_minicpm = {"kv_lora_rank": 8, "q_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8}
    of_minicpm |= {"num_key_value_heads": 4, "dim_model_base": 16}  # it halves what goes into its head
    config = family.config_class(**{**SIZES, **(of_minicpm if "MiniCPM" in family.__name__ else {})})
    model = family(config).double().eval()
    scorer = Scorer(model, TEMPERATURE)
    with pytest.warns(UserWarning, match="logits"):
        scorer.full_logits_reason()
    assert_like_plain(model, scorer, sampled())


@pytest.mark.parametrize("options", [{}, {"whole_logits": True}, {"call_head": True}], ids=str)
@pytest.mark.parametrize("family", ["tied", "softcap", "divided"])
def test_token_logits_are_divided_by_the_temperature_like_the_scores(family: str, options: dict[str, Any]) -> None:
    model, sequences = model_of(family).double(), sampled()
    logps = Scorer(model, TEMPERATURE, **options).token_logits(sequences, ROWS).log_softmax(-1)
    twin = plain(model, sequences, ROWS)
    ids = [sequences.completion_ids[row][sequences.completion_mask[row].bool()] for row in ROWS]
    at_targets = logps.gather(-1, torch.cat(ids).unsqueeze(-1)).squeeze(-1)
    torch.testing.assert_close(at_targets, torch.cat([pair[0] for pair in twin]), rtol=3e-7, atol=3e-7)
    entropies = torch.special.entr(logps.exp()).sum(-1)
    torch.testing.assert_close(entropies, torch.cat([pair[1] for pair in twin]), rtol=3e-7, atol=3e-7)


def test_prompt_learning_is_refused() -> None:
    tuned = get_peft_model(model_of("untied"), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2))
    with pytest.raises(ValueError, match="LoRA"):
        Scorer(tuned)


class Largest(TorchDispatchMode):
    """Records the size of the largest tensor that any operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.size = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        for tensor in output if isinstance(output, tuple | list) else [output]:
            if isinstance(tensor, Tensor):  # a view counts as large as its storage
                self.size = max(self.size, tensor.untyped_storage().nbytes() // tensor.itemsize)
        return output


@pytest.mark.parametrize("call_head", [False, True], ids=["weight", "called"])
def test_forward_and_backward_hold_one_chunk_of_logits_at_a_time(call_head: bool) -> None:
    model = model_of("untied", vocab_size=3000)
    rows = ROWS.repeat(6)
    scorer = Scorer(model, call_head=call_head, chunk_logits=len(rows) * 3000)  # one column if the head is called
    scorer.full_logits_reason()
    weights, logits = model.lm_head.weight.numel(), int(sampled().completion_mask[rows].sum()) * 3000
    model.requires_grad_(False).model.embed_tokens.weight.requires_grad_()
    with Largest() as largest:
        gradients(model, of_tokens(scorer.score(sampled(), rows)))
    assert largest.size <= weights < logits / 2


@pytest.mark.parametrize("call_head", [False, True], ids=["weight", "called"])
def test_logits_are_converted_one_chunk_at_a_time_in_the_order_of_the_tokens(call_head: bool) -> None:
    model, rows = model_of("untied", vocab_size=3000), ROWS.repeat(6)
    scorer = Scorer(model, call_head=call_head, chunk_logits=10 * 3000 + 1)
    scorer.full_logits_reason()
    with Largest() as largest:
        parts = scorer.map_logits(sampled(), rows, lambda z: (len(z), z.logsumexp(dim=1)))
    assert {length for length, _ in parts[:-1]} == {5}
    assert largest.size <= model.lm_head.weight.numel()
    expected = scorer.token_logits(sampled(), rows).logsumexp(dim=1)
    torch.testing.assert_close(torch.cat([sums for _, sums in parts]), expected, rtol=1e-6, atol=1e-6)


def test_a_graph_can_be_used_twice_and_unrelated_parameters_get_zero() -> None:
    model = model_of("tied").double()
    beside = torch.ones(3, requires_grad=True)
    values = of_tokens(Scorer(model).score(sampled(), ROWS))
    ends = [model.model.embed_tokens.weight, beside]
    first = torch.autograd.grad(values[0].sum(), ends, retain_graph=True, allow_unused=True, materialize_grads=True)
    second = torch.autograd.grad(values[1].sum(), ends, retain_graph=True, allow_unused=True, materialize_grads=True)
    both = torch.autograd.grad(values[0].sum() + values[1].sum(), ends, allow_unused=True, materialize_grads=True)
    torch.testing.assert_close(first[0] + second[0], both[0], rtol=1e-5, atol=1e-5)
    assert torch.equal(both[1], torch.zeros(3))


def test_hooks_on_a_called_head_see_each_sequence_separately() -> None:
    model = model_of("untied").double()
    scorer = Scorer(model, call_head=True, chunk_logits=2 * 3 * VOCABULARY)
    scorer.full_logits_reason()
    rows: list[Tensor] = []

    def on_forward(module: nn.Module, args: tuple[Tensor], y: Tensor) -> None:
        x = args[0].detach()
        y.register_hook(lambda dy: rows.append(torch.einsum("btv,bth->bvh", dy, x)))

    handle = model.lm_head.register_forward_hook(on_forward)
    scores = scorer.score(sampled(), ROWS)
    handle.remove()
    (scores.logps * scores.mask).sum().backward()
    assert len(rows) == 4  # chunks of two columns, seven tokens
    for i, row in enumerate(ROWS):
        alone = scorer.score(sampled(), row.view(1))
        (expected,) = torch.autograd.grad((alone.logps * alone.mask).sum(), model.lm_head.weight)
        torch.testing.assert_close(sum(rows)[i], expected)


# Precision, and what must stay unchanged.


def measurement(scorer: Scorer, sequences: Any) -> Scores:
    with scorer.measuring():
        return scorer.score(sequences, ROWS, graph=False)


def state_of(model: nn.Module) -> tuple[Any, ...]:
    return torch.get_rng_state().tolist(), [module.training for module in model.modules()]


def test_dropout_affects_training_scores_alone_and_measuring_leaves_no_trace() -> None:
    model = model_of("absolute positions", resid_pdrop=0.3).train()
    model.transformer.h[0].eval()  # this module's mode must be kept
    scorer, sequences = Scorer(model), sampled()
    before = state_of(model)
    first, second = (of_tokens(scorer.score(sequences, ROWS, graph=False))[0] for _ in range(2))
    measured = of_tokens(measurement(scorer, sequences))[0]
    assert state_of(model) == before
    assert torch.equal(first, second)  # the same random numbers: measuring consumed none
    expected = of_tokens(Scorer(copy.deepcopy(model).eval()).score(sampled(), ROWS, graph=False))[0]
    assert torch.equal(measured, expected)
    assert float((first - measured).abs().max()) > 0.1


def bf16() -> contextlib.AbstractContextManager[Any]:
    return torch.autocast("cpu", torch.bfloat16)


def test_autocast_affects_training_scores_alone() -> None:
    model = model_of("untied")
    plainly = of_tokens(Scorer(model).score(sampled(), ROWS, graph=False))[0]
    scorer = Scorer(model, autocast=bf16)
    rounded = of_tokens(scorer.score(sampled(), ROWS, graph=False))[0]
    assert 1e-3 < float((rounded - plainly).abs().max()) < 0.3
    with bf16():
        measured = of_tokens(measurement(scorer, sampled()))[0]
    assert torch.equal(measured, plainly)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_checkpointing_stays_on_in_a_measurement_unless_there_is_dropout(dropout: float) -> None:
    model = model_of("untied", attention_dropout=dropout)
    expected = gradients(model, of_tokens(Scorer(model).score(sampled(), ROWS)))
    model.train().gradient_checkpointing_enable({"use_reentrant": False})
    scorer = Scorer(model)
    scorer.full_logits_reason()
    calls = []
    handle = model.model.layers[0].mlp.register_forward_pre_hook(lambda *of: calls.append(of))
    with scorer.measuring():
        scores = gradients(model, of_tokens(scorer.score(sampled(), ROWS)))
    handle.remove()
    assert len(calls) == (2 if dropout == 0 else 1)
    assert_close(scores, expected, 1e-6)
    assert all(module.training for module in model.modules())


SETTINGS = {
    "cuda.matmul": torch.backends.cuda.matmul, "cudnn.conv": torch.backends.cudnn.conv,
    "mkldnn.matmul": torch.backends.mkldnn.matmul,
}  # fmt: skip


@pytest.fixture
def tf32() -> Iterator[None]:
    """Switch TF32 on with torch's old setting, as many users do."""
    torch.set_float32_matmul_precision("high")
    yield
    torch.set_float32_matmul_precision("highest")


@pytest.mark.parametrize("fails", [False, True], ids=["", "after an error"])
def test_a_measurement_is_in_ieee_fp32_and_restores_the_settings(tf32: None, fails: bool) -> None:
    model = model_of("untied").train()
    scorer = Scorer(model)
    scorer.full_logits_reason()
    before = {name: setting.fp32_precision for name, setting in SETTINGS.items()}
    assert before["cuda.matmul"] == "tf32"
    seen = []

    def on_forward(*_: Any) -> None:
        seen.append({name: setting.fp32_precision for name, setting in SETTINGS.items()})
        if fails:
            raise RuntimeError("planted")

    model.model.layers[0].register_forward_hook(on_forward)
    with pytest.raises(RuntimeError, match="planted") if fails else contextlib.nullcontext():
        measurement(scorer, sampled())
    assert seen == [dict.fromkeys(SETTINGS, "ieee")]
    assert {name: setting.fp32_precision for name, setting in SETTINGS.items()} == before
    assert torch.get_float32_matmul_precision() == "high"  # raises if old and new settings disagree
    assert all(module.training for module in model.modules())


def refuses_fp32(module: nn.Module, query: Tensor, *args: Any, **kwargs: Any) -> Any:
    if query.dtype == torch.float32 and not torch.is_autocast_enabled("cpu"):
        raise RuntimeError("no fp32 here")
    return sdpa_attention_forward(module, query, *args, **kwargs)


@pytest.mark.parametrize("adapter", [False, True], ids=["bare", "adapter"])
def test_an_attention_without_fp32_is_replaced_in_a_measurement(adapter: bool) -> None:
    AttentionInterface.register("flash_stand_in", refuses_fp32)
    AttentionMaskInterface.register("flash_stand_in", sdpa_mask)
    model: Any = model_of("untied")
    model = with_adapter(model, target_modules=["q_proj"]) if adapter else model
    expected = of_tokens(Scorer(model).score(sampled(), ROWS, graph=False))
    model.config._attn_implementation = "flash_stand_in"
    with pytest.raises(RuntimeError, match="no fp32 here"):
        model(input_ids=torch.ones(1, 2, dtype=torch.long))
    scorer = Scorer(model, autocast=bf16)
    assert torch.equal(of_tokens(measurement(scorer, sampled()))[0], expected[0])
    assert model.config._attn_implementation == "flash_stand_in"
    rounded = of_tokens(scorer.score(sampled(), ROWS, graph=False))[0]
    torch.testing.assert_close(rounded, expected[0], rtol=0.1, atol=0.1)


def test_the_reason_for_rounded_scores_names_the_weights() -> None:
    assert Scorer(model_of("untied")).rounding_reason == ""
    half = with_adapter(model_of("untied").bfloat16(), target_modules=["q_proj"])
    assert "embed_tokens.weight is bfloat16" in Scorer(half).rounding_reason  # the adapters are fp32
    for name, param in half.named_parameters():
        if "layers.1" in name and "lora_B" in name:
            param.data = param.data.bfloat16()
    assert re.search(r"layers\.1.*lora_B", Scorer(half).rounding_reason)  # trained weights come first


def test_a_small_entropy_of_large_logits_does_not_cancel() -> None:
    hidden, weight = torch.tensor([[100.0]]), torch.tensor([[1.0], [0.86], [0.86]])
    _, entropy = scores_of_hidden(hidden, weight, None, torch.tensor([0]), LogitMap(chunk=100))
    z = hidden.double() @ weight.double().T
    expected = torch.special.entr(z.softmax(-1)).sum(-1)  # 2.5e-5; a unit in the last place of z is 8e-6
    torch.testing.assert_close(entropy.double(), expected, rtol=0.01, atol=0)


def test_a_bias_is_rounded_like_the_factors() -> None:
    """bf16 cannot represent 1.001, so the logits are 1 and 0."""
    bias = torch.tensor([1.001, 0.0])
    logps, _ = scores_of_hidden(
        torch.zeros(1, 3), torch.ones(2, 3), bias, torch.tensor([0]), LogitMap(dtype=torch.bfloat16, chunk=100)
    )
    assert float(logps) == pytest.approx(-math.log(1 + math.exp(-1.0)), rel=1e-6)


def test_a_head_whose_forward_is_patched_is_called() -> None:
    model = model_of("untied").double()
    head = model.get_output_embeddings()
    head.forward = lambda hidden: 2.0 * nn.Linear.forward(head, hidden)
    assert_like_plain(model, Scorer(model, TEMPERATURE), sampled())


# Compared with TRL's own head, on a trainer.


def of_trl(trainer: Any, sequences: Sampled, rows: Tensor) -> Scores:
    ids = torch.cat([sequences.prompt_ids[rows], sequences.completion_ids[rows]], dim=1)
    mask = torch.cat([sequences.prompt_mask[rows], sequences.token_mask[rows]], dim=1)
    width = sequences.completion_ids.shape[1]
    logps, entropies, _ = trainer._get_per_token_logps_and_entropies(
        trainer.model, ids, mask, width, compute_entropy=True
    )
    return Scores(logps, entropies, sequences.completion_mask[rows])


# Under bf16, TRL rounds the logits, of size 8 here, to bf16: by 1/32 at most. The scorer does not.
@pytest.mark.parametrize(("half", "tolerance"), [(False, 1e-6), (True, 3e-2)], ids=["fp32", "bf16 autocast"])
def test_scores_equal_those_of_training(make_trainer: Callable[..., Any], half: bool, tolerance: float) -> None:
    trainer = make_trainer(**FEW, bf16=half, temperature=TEMPERATURE)
    sequences = sampled(prompts=(6,) * 5)  # TRL pads on the left, which shifts positions and with them the rounding
    scorer = Scorer(trainer.model, TEMPERATURE, autocast=trainer.accelerator.autocast)
    theirs = of_tokens(of_trl(trainer, sequences, ROWS))
    scores = of_tokens(scorer.score(sequences, ROWS))
    torch.testing.assert_close(scores[0], theirs[0], rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(scores[1], theirs[1], rtol=tolerance, atol=4 * tolerance)  # small ones cancel in TRL
    assert_close(gradients(trainer.model, scores), gradients(trainer.model, theirs), tolerance)


def test_a_head_that_training_keeps_in_fp32_is_multiplied_in_fp32(make_trainer: Callable[..., Any]) -> None:
    trainer = make_trainer(**FEW, bf16=True, temperature=TEMPERATURE, cast_lm_head_to_fp32=True)
    sequences = sampled(prompts=(6,) * 5)
    theirs = of_tokens(of_trl(trainer, sequences, ROWS))
    settings: dict[str, Any] = {"temperature": TEMPERATURE, "autocast": trainer.accelerator.autocast}
    for call_head in (False, True):
        scorer = Scorer(trainer.model, **settings, fp32_head=True, call_head=call_head)
        torch.testing.assert_close(of_tokens(scorer.score(sequences, ROWS)), theirs, rtol=1e-5, atol=1e-5)
    rounded = of_tokens(Scorer(trainer.model, **settings).score(sequences, ROWS))[0]
    assert float((rounded - theirs[0]).detach().abs().max()) > 1e-3
