"""Per-sequence gradients equal those of one backward per sequence, or an error names the module."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from transformers import (
    FalconMambaConfig,
    FalconMambaForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)
from trl.trainer.utils import add_fused_lm_head

from rl_training.offline.kernel.sequence_gradients import Recording, SequenceGradients
from rl_training.offline.phases import explain_out_of_memory
from rl_training.parallel.vectors import Layout

BATCH, LENGTH, VOCABULARY, PADDING = 4, 9, 23, 0
SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "pad_token_id": PADDING,
    "initializer_range": 0.3, "bos_token_id": 1, "eos_token_id": 2, "attn_implementation": "eager",
}  # fmt: skip


def model_of(kind: type[nn.Module], config: Any, dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(0)
    model = kind(config).to(dtype).eval()
    with torch.no_grad():  # the initial norm weights of 1 and biases of 0 would hide mistakes
        for name, p in model.named_parameters():
            if "norm" in name or "bias" in name or "ln_" in name:
                p.add_(0.3 * torch.randn_like(p))
    return model


def qwen(dtype: torch.dtype = torch.float64, **settings: Any) -> nn.Module:
    return model_of(Qwen2ForCausalLM, Qwen2Config(**{**SMALL, "tie_word_embeddings": True, **settings}), dtype)


def lora(model: nn.Module, **settings: Any) -> nn.Module:
    torch.manual_seed(1)
    adapted = get_peft_model(model, LoraConfig(**{"r": 2, "target_modules": ["q_proj", "down_proj"], **settings}))
    with torch.no_grad():
        for name, p in adapted.named_parameters():
            if "lora_B" in name:
                p.normal_()  # with its initial value 0 the gradient of A would be 0
    return adapted.eval()


def trained(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


@pytest.fixture(scope="module")
def ids() -> Tensor:
    """Return token ids with some padding in the middle, where the embedding's padding_idx gets no gradient."""
    ids = torch.randint(3, VOCABULARY, (BATCH, LENGTH), generator=torch.Generator().manual_seed(0))
    ids[1, 2] = ids[3, 0] = PADDING
    return ids


def logps(logits: Tensor, ids: Tensor) -> Tensor:
    return torch.log_softmax(logits[:, :-1], dim=-1).gather(2, ids[:, 1:].unsqueeze(2)).squeeze(2)


def scorer(model: nn.Module, ids: Tensor) -> Callable[[], Tensor]:
    return lambda: logps(model(input_ids=ids, use_cache=False).logits, ids)


def fused_scorer(model: nn.Module, ids: Tensor) -> Callable[[], Tensor]:
    return lambda: model(input_ids=ids, labels=ids, fused_lm_head=True).log_probs


def weights_of(ids: Tensor) -> Tensor:
    shape = (len(ids), ids.shape[1] - 1)
    return torch.randn(shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


def by_hooks(model: nn.Module, score: Callable[[], Tensor], weights: Tensor) -> Tensor:
    parameters = trained(model)
    scored, recording = SequenceGradients(model, parameters).record(score)
    rows = room_for(parameters)
    recording.fill(rows, [scored], [weights.to(scored)])
    return rows


def room_for(parameters: Mapping[str, Tensor]) -> Tensor:
    """Return a matrix for a batch's rows, with old contents that must not matter."""
    layout = Layout.of(parameters)
    return torch.full((BATCH, layout.num_entries), torch.nan, dtype=layout.dtype)


def one_by_one(model: nn.Module, score_of: Callable[[nn.Module, Tensor], Callable[[], Tensor]], ids: Tensor) -> Tensor:
    parameters, rows = list(trained(model).values()), []
    for i, w in enumerate(weights_of(ids)):
        scored = score_of(model, ids[i : i + 1])()
        rows.append(torch.cat([g.reshape(-1) for g in torch.autograd.grad(scored, parameters, w[None].to(scored))]))
    return torch.stack(rows)


def by_vmap(model: nn.Module, ids: Tensor) -> Tensor:
    parameters = {name: p.detach() for name, p in trained(model).items()}

    def total(parameters: dict[str, Tensor], ids: Tensor, weights: Tensor) -> Tensor:
        logits = functional_call(model, parameters, kwargs={"input_ids": ids[None], "use_cache": False}).logits
        return (weights * logps(logits, ids[None])[0]).sum()

    rows = vmap(grad(total), in_dims=(None, 0, 0))(parameters, ids, weights_of(ids))
    return torch.cat([rows[name].flatten(1) for name in parameters], dim=1)


def assert_equal(rows: Tensor, expected: Tensor, limit: float) -> None:
    """Assert that each row is close to the expected one, relative to the row's norm."""
    error = (rows - expected).norm(dim=1) / expected.norm(dim=1)
    assert float(error.max()) <= limit, error


def gpt2() -> nn.Module:
    return model_of(GPT2LMHeadModel, GPT2Config(vocab_size=VOCABULARY, n_embd=16, n_layer=1, n_head=2))


def without_positions(model: nn.Module) -> nn.Module:
    model.get_submodule("transformer.wpe").requires_grad_(False)
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {
    "tied head": qwen,
    "head of its own": lambda: qwen(tie_word_embeddings=False),
    "adapter": lambda: lora(qwen()),
    "adapter with biases": lambda: lora(qwen(), lora_bias=True, target_modules="all-linear"),
    "norms of 1 + w, scaled embedding": lambda: model_of(Gemma2ForCausalLM, Gemma2Config(**SMALL)),
    "adapter beside a head of its own": lambda: lora(qwen(), modules_to_save=["lm_head"]),
    "linear maps of another class": lambda: without_positions(gpt2()),
}


@pytest.mark.parametrize("name", MODELS)
def test_rows_are_the_gradients_of_each_sequence_alone(name: str, ids: Tensor) -> None:
    """Compared with a backward per sequence and with vmap(grad), in fp64 up to rounding.

    Gemma's norms always round to fp32.
    """
    model, limit = MODELS[name](), 1e-6 if "norms" in name else 1e-12
    rows = by_hooks(model, scorer(model, ids), weights_of(ids))
    assert_equal(rows, one_by_one(model, scorer, ids), limit)
    assert_equal(rows, by_vmap(model, ids), limit)
    assert rows.abs().amin(dim=1).max() < rows.abs().amax(dim=1).min()  # entries of a row are not all alike


def test_rows_are_right_for_a_layer_norm_with_a_bias_and_a_zero_weight(ids: Tensor) -> None:
    torch.manual_seed(0)
    embed, norm = nn.Embedding(VOCABULARY, 4).double(), nn.LayerNorm(4).double()
    with torch.no_grad():
        norm.weight.copy_(torch.tensor([0.5, -1.5, 2.0, 0.0]))
        norm.bias.copy_(torch.tensor([1.0, -2.0, 0.5, 3.0]))
    model = nn.Sequential(embed, norm)
    model.get_input_embeddings = lambda: embed  # type: ignore[assignment]
    parameters = dict(norm.named_parameters())
    room, weights = room_for(parameters), torch.randn(BATCH, LENGTH, 4, dtype=torch.float64)
    y, recording = SequenceGradients(model, parameters).record(lambda: model(ids))
    recording.fill(room, [y], [weights])
    rows = [torch.autograd.grad(model(ids)[i], list(parameters.values()), weights[i]) for i in range(BATCH)]
    expected = torch.stack([torch.cat(row) for row in rows])
    assert_equal(room, expected, 1e-12)


def test_modules_recomputed_by_checkpointing_are_not_counted_twice(ids: Tensor) -> None:
    for model in (qwen(), lora(qwen())):
        expected = one_by_one(model, scorer, ids)
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.train()  # checkpointing is inactive in evaluation mode; there is no dropout here
        assert_equal(by_hooks(model, scorer(model, ids), weights_of(ids)), expected, 1e-12)


def test_several_backward_payloads_share_one_forward(ids: Tensor) -> None:
    """Also under checkpointing, where each backward recomputes the middle."""
    model = lora(qwen())
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    parameters, weights = trained(model), weights_of(ids)
    room = room_for(parameters)
    scored, recording = SequenceGradients(model, parameters).record(scorer(model, ids))
    rows = []
    for outputs, payload in (([scored], [weights]), ([scored, scored.exp()], [weights, 2 * weights])):
        recording.fill(room, outputs, payload, keep_graph=True)
        rows.append(room.clone())
    twice = weights + 2 * weights * scored.detach().exp()
    assert_equal(rows[0], by_hooks(model, scorer(model, ids), weights), 1e-12)
    assert_equal(rows[1], by_hooks(model, scorer(model, ids), twice), 1e-12)


def test_no_hook_is_left_on_the_model_and_no_parameter_gradient_is_touched(ids: Tensor) -> None:
    model = lora(qwen())
    fired: list[str] = []
    for name, p in trained(model).items():
        p.register_hook(lambda _, name=name: fired.append(name))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    by_hooks(model, scorer(model, ids), weights_of(ids))
    assert not fired
    assert all(p.grad is None for p in model.parameters())
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    assert not any(module._forward_hooks for module in model.modules())
    with pytest.raises(RuntimeError, match="broken"):
        SequenceGradients(model, trained(model)).record(broken)
    assert not any(module._forward_hooks for module in model.modules())


def broken() -> Tensor:
    raise RuntimeError("broken")


# --- mistakes that would otherwise be silent --------------------------------------------------------------------------


def test_a_fused_head_is_accepted_only_where_the_head_is_frozen(ids: Tensor) -> None:
    """It never calls lm_head. For a tied weight only part of the gradient would be seen, without any sign of this."""
    model = qwen(torch.float32)
    add_fused_lm_head(model)
    with pytest.raises(ValueError, match=r"^lm_head .*embed_tokens\.weight "):
        by_hooks(model, fused_scorer(model, ids), weights_of(ids))
    adapted = lora(model)
    rows = by_hooks(adapted, fused_scorer(adapted, ids), weights_of(ids))
    assert_equal(rows, one_by_one(adapted, scorer, ids), 1e-5)


@pytest.mark.parametrize("reentrant", [True, False])
def test_an_output_without_graph_is_refused(reentrant: bool, ids: Tensor) -> None:
    """Reentrant checkpointing runs its forward without a graph, so hooks would see only its inputs and outputs."""
    model = lora(qwen())
    score = scorer(model, ids)
    if reentrant:
        model.gradient_checkpointing_enable({"use_reentrant": True})
        model.train()
    else:
        score = torch.no_grad()(score)
    with pytest.raises(ValueError, match=r"no_grad.*use_reentrant"):
        by_hooks(model, score, weights_of(ids))


def test_a_module_that_gets_no_gradient_is_named(ids: Tensor) -> None:
    model = lora(qwen())
    _, recording = SequenceGradients(model, trained(model)).record(scorer(model, ids))
    other = model.get_input_embeddings()(ids)
    assert isinstance(recording, Recording)
    aside = recording._embedding_outputs[0].sum(dim=2) + other.sum(dim=2)  # bypasses the layers
    with pytest.raises(ValueError, match=r"model\.layers.*lora_A"):
        recording.fill(room_for(trained(model)), [aside], [torch.ones_like(aside)])


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "experts in one tensor": (
        lambda: model_of(MixtralForCausalLM, MixtralConfig(**SMALL, num_local_experts=2)).float(),  # all they accept
        r"^model.layers.0.mlp\S* was given .* batch of",
    ),
    "DoRA": (lambda: lora(qwen(), use_dora=True), r"lora_A.default was given \(16, 16\)"),
    "adapter on the embedding": (lambda: lora(qwen(), target_modules=["embed_tokens"]), "embedding_A was not called"),
    "convolution": (
        lambda: model_of(
            FalconMambaForCausalLM,
            FalconMambaConfig(vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=1, state_size=4),
        ),
        r"^backbone.layers.0.mixer\S* was not called",
    ),
    "learned positions": (gpt2, "^transformer.wpe was given"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_modules_whose_gradients_cannot_be_split_by_sequence_are_refused_by_name(what: str, ids: Tensor) -> None:
    make, message = REFUSED[what]
    model = make()
    with pytest.raises(ValueError, match=message):
        SequenceGradients(model, trained(model)).record(scorer(model, ids))


class FlatHead(nn.Linear):
    """A head that flattens all tokens into one dimension."""


class Positions(nn.Module):
    """Learned positions, and a head on flattened tokens: two ways to lose the sequence dimension."""

    def __init__(self, flat: bool) -> None:
        super().__init__()
        self.embed, self.positions = nn.Embedding(VOCABULARY, 6), nn.Embedding(LENGTH, 6)
        self.head, self.flat = FlatHead(6, VOCABULARY), flat
        if flat:
            self.positions.requires_grad_(False)

    def get_input_embeddings(self) -> nn.Module:
        return self.embed

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) + self.positions(torch.arange(ids.shape[1])[None])
        return self.head(x.flatten(0, 1)).view(*ids.shape, -1) if self.flat else self.head(x)


@pytest.mark.parametrize("flat", [True, False])
def test_modules_without_a_batch_dimension_are_refused_by_name(flat: bool, ids: Tensor) -> None:
    model = Positions(flat)
    recorder = SequenceGradients(model, trained(model))
    with pytest.raises(ValueError, match=rf"^{'head' if flat else 'positions'} was given .* batch of {BATCH}"):
        recorder.record(lambda: logps(model(ids), ids))
    with pytest.raises(ValueError, match=r"^(head|positions) .*sequences"):  # with as many tokens as sequences
        recorder.record(lambda: model(ids[:, :1] if flat else ids))


class Scaled(nn.Module):
    """A module with two inputs between an embedding and its head."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6))

    def forward(self, x: Tensor, factor: Tensor) -> Tensor:
        return x * self.weight * factor


def test_an_unknown_module_with_several_inputs_is_refused_by_name(ids: Tensor) -> None:
    model = nn.ModuleDict({"embed": nn.Embedding(VOCABULARY, 6), "scaled": Scaled(), "head": nn.Linear(6, VOCABULARY)})
    model.get_input_embeddings = lambda: model["embed"]  # type: ignore[assignment]
    with pytest.raises(ValueError, match=r"scaled\.weight .*Scaled \(scaled\)"):
        by_hooks(model, lambda: logps(model["head"](model["scaled"](model["embed"](ids), ids[..., None])), ids),
                 weights_of(ids))  # fmt: skip


class Full(Scaled):
    """Runs out of memory when it is called again for its gradient."""

    called = 0

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        self.called += 1
        if self.called > 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return x * self.weight


def test_running_out_of_memory_is_not_reported_as_an_unknown_gradient(ids: Tensor) -> None:
    model = nn.ModuleDict({"embed": nn.Embedding(VOCABULARY, 6), "full": Full(), "head": nn.Linear(6, VOCABULARY)})
    model.get_input_embeddings = lambda: model["embed"]  # type: ignore[assignment]
    said = pytest.raises(ValueError, match=r"phase 'kernel': .*kernel")
    with said, explain_out_of_memory("kernel"):
        by_hooks(model, lambda: logps(model["head"](model["full"](model["embed"](ids))), ids), weights_of(ids))


def test_a_parameter_of_another_model_is_named() -> None:
    with pytest.raises(ValueError, match=r"^'model\.\S+' "):
        SequenceGradients(qwen(), trained(qwen()))
