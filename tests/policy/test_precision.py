"""The arithmetic of a measurement: torch's settings of TF32, dropout, and sums of half-precision products in fp32."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, FalconConfig, GPT2Config, GPTNeoConfig, LlamaConfig
from trl.trainer.utils import disable_dropout_in_model

from rl_training.policy import linear_head
from rl_training.policy.dropout import dropout_remark, has_dropout
from rl_training.policy.linear_head import LogitMap, scores_of_hidden
from rl_training.policy.precision import ieee_fp32, isolated_from_training

BACKENDS: Any = torch.backends
SETTINGS = {
    f"{backend}.{operation}": getattr(owner, operation)
    for backend, owner, operations in (
        ("cuda", BACKENDS.cuda, ("matmul",)),
        ("cudnn", BACKENDS.cudnn, ("conv", "rnn")),
        ("mkldnn", BACKENDS.mkldnn, ("matmul", "conv", "rnn")),
    )
    for operation in operations
}
OLD_SETTINGS: dict[str, Callable[[], Any]] = {
    "cuda.matmul.allow_tf32": lambda: BACKENDS.cuda.matmul.allow_tf32,
    "cudnn.allow_tf32": lambda: BACKENDS.cudnn.allow_tf32,
    "get_float32_matmul_precision": torch.get_float32_matmul_precision,
}


def precision_settings() -> dict[str, Any]:
    """Return all settings of TF32, with "raises" for those that torch refuses to read."""
    settings: dict[str, Any] = {name: setting.fp32_precision for name, setting in SETTINGS.items()}
    for name, read in OLD_SETTINGS.items():
        try:
            settings[name] = read()
        except RuntimeError:
            settings[name] = "raises"
    return settings


def switch_on_new() -> None:
    BACKENDS.cuda.matmul.fp32_precision = BACKENDS.mkldnn.rnn.fp32_precision = "tf32"


def switch_off_old() -> None:
    BACKENDS.cuda.matmul.allow_tf32 = BACKENDS.cudnn.allow_tf32 = False


def mix_new() -> None:
    BACKENDS.cudnn.conv.fp32_precision = "ieee"  # rnn keeps TF32, torch's default


SWITCHES: dict[str, Callable[[], object]] = {
    "by default": lambda: None,
    "old": lambda: torch.set_float32_matmul_precision("high"),
    "old, medium": lambda: torch.set_float32_matmul_precision("medium"),
    "old, all off": switch_off_old,
    "new": switch_on_new,
    "new, mixed": mix_new,
}


@pytest.fixture
def settings_restored() -> Iterator[None]:
    before = {name: setting.fp32_precision for name, setting in SETTINGS.items()}
    yield
    torch.set_float32_matmul_precision("highest")
    BACKENDS.cudnn.allow_tf32 = True
    for name, setting in SETTINGS.items():
        setting.fp32_precision = before[name]


@pytest.mark.parametrize("switch", SWITCHES)
def test_old_and_new_settings_of_tf32_can_be_read_in_a_measurement_and_are_restored(
    settings_restored: None, switch: str
) -> None:
    """A model's own code may read either. torch raises if one says otherwise than the other."""
    SWITCHES[switch]()
    before = precision_settings()
    with ieee_fp32(), ieee_fp32():  # a probe's measurement scores, which is one too
        inside = precision_settings()
    off = dict.fromkeys(OLD_SETTINGS, False) | {"get_float32_matmul_precision": "highest"}
    assert inside == dict.fromkeys(SETTINGS, "ieee") | off
    assert precision_settings() == before


GPT2 = functools.partial(GPT2Config, vocab_size=32, n_embd=16, n_layer=1, n_head=2, n_positions=16, eos_token_id=1)
SMALL = {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "eos_token_id": 1}
NO_LAYER = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
NEO = {"vocab_size": 32, "hidden_size": 16, "num_layers": 1, "attention_types": [[["global"], 1]], "num_heads": 2,
       "eos_token_id": 1, "bos_token_id": 1}  # fmt: skip
# By name: a model's config, and whether TRL's disable_dropout is applied to it.
DROPOUTS: dict[str, tuple[Callable[[], Any], bool]] = {
    "layers": (GPT2, False),
    "an option that nothing reads": (lambda: GPT2(**NO_LAYER, summary_first_dropout=0.5), False),
    "layers switched off": (GPT2, True),
    "layers of an option's name switched off": (lambda: GPTNeoConfig(**NEO, attention_dropout=0.5), True),
    "a module's number": (lambda: LlamaConfig(**SMALL, intermediate_size=16, attention_dropout=0.5), True),
    "an option read in the forward pass": (lambda: FalconConfig(**SMALL, hidden_dropout=0.5), True),
}


@pytest.mark.parametrize("kind", DROPOUTS)
def test_only_dropout_that_acts_counts(kind: str) -> None:
    make, is_switched_off = DROPOUTS[kind]
    model = AutoModelForCausalLM.from_config(make()).train()
    if is_switched_off:
        disable_dropout_in_model(model)
    ids = torch.arange(2, 14).unsqueeze(0)
    first, second = model(ids).logits, model(ids).logits
    assert has_dropout(model) == bool(dropout_remark(model)) == (not torch.equal(first, second))
    model.eval()
    assert not has_dropout(model)


class ReadInForward(nn.Module):
    """A model that applies the dropout of its config itself; its subclasses read the option in other places."""

    def __init__(self, option: str) -> None:
        super().__init__()
        self.config = LlamaConfig(**SMALL, **{option: 0.5})
        self.weight = nn.Linear(8, 8)

    def drop(self, rows: Tensor, share: float) -> Tensor:
        return nn.functional.dropout(self.weight(rows), share, self.training)

    def forward(self, rows: Tensor) -> Tensor:
        return self.drop(rows, self.config.mlp_dropout)


class ReadInHelper(ReadInForward):
    @functools.cached_property
    def share(self) -> float:
        return self.config.other_dropout

    def forward(self, rows: Tensor) -> Tensor:
        return self.drop(rows, self.share)


class ReadByText(ReadInForward):
    @torch.no_grad()
    def forward(self, rows: Tensor) -> Tensor:
        return self.drop(rows, getattr(self.config, "other_dropout", 0.0))


class ReadInFunction(ReadInForward):
    def forward(self, rows: Tensor) -> Tensor:
        return (lambda inner: self.drop(inner, self.config.other_dropout))(rows)


class ReadByBase(ReadInForward):
    def forward(self, rows: Tensor) -> Tensor:
        return super().forward(rows)


class ReadNowhere(ReadInForward):
    def forward(self, rows: Tensor) -> Tensor:
        return self.weight(rows)


@pytest.mark.parametrize(
    ("model", "option", "drops_out"),
    [
        (ReadInHelper, "other_dropout", True),
        (ReadByText, "other_dropout", True),
        (ReadInFunction, "other_dropout", True),
        (ReadByBase, "mlp_dropout", True),
        (ReadNowhere, "other_dropout", False),
    ],
)
def test_dropout_is_found_wherever_a_class_reads_the_option(
    model: type[ReadInForward], option: str, drops_out: bool
) -> None:
    module, rows = model(option).train(), torch.ones(4, 8)
    assert has_dropout(module) == (not torch.equal(module(rows), module(rows))) == drops_out


def test_dropout_is_found_in_a_forward_that_is_replaced_on_one_module() -> None:
    module, rows = ReadNowhere("mlp_dropout").train(), torch.ones(4, 8)
    module.forward = functools.partial(ReadInForward.forward, module)  # type: ignore[method-assign]
    assert not torch.equal(module(rows), module(rows))
    assert has_dropout(module)


def test_a_module_whose_code_cannot_be_read_is_taken_to_apply_the_dropout_of_the_config() -> None:
    model = ReadNowhere("other_dropout").train()
    model.weight = torch.jit.script(nn.GELU())
    assert has_dropout(model)
    model.config.other_dropout = 0.0
    assert not has_dropout(model)


def half_precision_scores() -> list[Tensor]:
    """Return scores of bf16 factors with their gradients, in chunks of one position."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(rows, 8, generator=generator).requires_grad_() for rows in (3, 50))
    scores = scores_of_hidden(hidden, weight, None, torch.tensor([3, 1, 4]), LogitMap(dtype=torch.bfloat16, chunk=50))
    return [*scores, *torch.autograd.grad([sum(scores).sum()], [hidden, weight])]


def product_of_torch(product: Callable[..., Tensor], is_allowed: bool, used: set[str]) -> Callable[..., Tensor]:
    """Return torch's product as a GPU runs it, with or without support for fp32 sums of half-precision factors."""

    def multiply(*factors: Tensor, out_dtype: torch.dtype | None = None, **options: Any) -> Tensor:
        if out_dtype is None:
            return product(*factors, **options)
        if not is_allowed:
            raise RuntimeError("self and mat2 must have the same dtype")
        if len(factors[-1]) != 16:  # the matrix that decides has 16 rows
            used.add(product.__name__)
        return product(*(factor.to(out_dtype) for factor in factors), **options)

    return multiply


@pytest.mark.parametrize("allowed", [set(), {"mm"}, {"mm", "addmm"}], ids=["none", "mm", "mm and addmm"])
def test_scores_do_not_depend_on_which_products_torch_mm_allows_fp32(
    allowed: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU, mm was allowed before addmm. The factors have the same bits in all cases."""
    expected = half_precision_scores()
    used: set[str] = set()
    for name in ("mm", "addmm"):
        monkeypatch.setattr(torch, name, product_of_torch(getattr(torch, name), name in allowed, used))
    for decide in (linear_head._mm_allows, linear_head._addmm_allows):  # anew, and not for the tests that follow
        monkeypatch.setattr(linear_head, decide.__name__, decide.__wrapped__)
    for score, other in zip(half_precision_scores(), expected, strict=True):
        torch.testing.assert_close(score, other, rtol=1e-2, atol=1e-2)  # gradients of logits are rounded to bf16
    assert used == allowed


class Counts(nn.Module):
    """Counts its passes in a buffer that it changes, and in one that it replaces."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("changed", torch.zeros(()))
        self.register_buffer("replaced", torch.zeros(()))

    def forward(self) -> None:
        self.changed.add_(1.0)
        self.replaced = self.replaced + 1.0


def test_buffers_that_a_probes_pass_changes_or_replaces_are_restored() -> None:
    module = Counts()
    module()
    before = dict(module.named_buffers())
    with isolated_from_training(module, torch.device("cpu")):
        module()
    assert all(buffer is before[name] and buffer == 1.0 for name, buffer in module.named_buffers())
