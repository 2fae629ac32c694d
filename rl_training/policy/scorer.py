"""Scores of sequences under the causal language model that wrote them: log-probabilities and exact entropies.

Any Hugging Face model works: bare or with adapters, quantised, with scaled or softcapped logits, with images. The body
runs as the model runs it. The head is applied in chunks, at the sampled tokens only, so that a batch's logits,
(B, T, V), never exist. One test on two tokens finds out whether head(body(ids)) gives the model's logits. If it does
not, the model's full logits are used, and one warning says so.

Every sequence starts in the first column, and a batch is as wide as the longest of its rows. A causal model does not
attend to anything to the right of a sequence, so no attention mask is needed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from rl_training.errors import UserError
from rl_training.policy.forward import replaced_forward, run_inside_forward
from rl_training.policy.inputs import ModelInputs, left_padded_inputs, right_padded_inputs
from rl_training.policy.linear_head import CHUNK_LOGITS, LogitMap, logit_chunks, scores_of_hidden, scores_of_logits
from rl_training.policy.precision import attention_in_fp32, ieee_fp32, rounding_reason, without_dropout
from rl_training.policy.rng import preserve_rng
from rl_training.policy.rollout import Rollout
from rl_training.policy.scores import Scores

Converted = TypeVar("Converted")


class Scorer:
    """Scores sequences with a model's parameters at the moment of the call. Training is not affected.

    Args:
        model: The causal language model itself, not wrapped by DDP or an engine; or PEFT's model around it.
        temperature: The temperature at which the responses were sampled. It divides the logits.
        autocast: Returns the autocast context of training's forward pass.
        fp32_head: Whether training's head multiplies in fp32, outside autocast.
        call_head: Call the head's module, for the hooks on it. Otherwise its weight is read if that is equivalent.
        chunk_logits: The number of logits to hold at once; at least one position's.
        run_inside_forward: Score inside the model's forward pass, whose hooks gather sharded weights. Collective.
        whole_logits: Use the model's full logits, because its head is gathered only while it is called.

    Raises:
        UserError: If the adapters are tokens before the prompt (PEFT's prompt learning).
    """

    def __init__(
        self,
        model: nn.Module,
        temperature: float = 1.0,
        *,
        autocast: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext,
        fp32_head: bool = False,
        call_head: bool = False,
        chunk_logits: int = CHUNK_LOGITS,
        run_inside_forward: bool = False,
        whole_logits: bool = False,
    ) -> None:
        if getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False):
            raise UserError("prompt learning puts tokens of its own before every prompt: train a LoRA adapter instead")
        self._model = model
        self._lm: Any = cast(Any, model).get_base_model() if hasattr(model, "get_base_model") else model
        self.temperature = temperature
        self._logit_map = LogitMap.from_config(self._lm.config, temperature, chunk_logits)
        self._autocast = autocast
        self._fp32_head = fp32_head
        self._call_head = call_head
        self._measuring = 0  # how many `measuring` contexts are open
        self._inside_forward = run_inside_forward
        self.layer_rounding = ""  # why layers compute in lower precision than the weights'; set once training has begun
        self._full_logits_reason: str | None = "its weights are sharded" if whole_logits else None

    @property
    def rounding_reason(self) -> str:
        """The reason why a measurement does not run in fp32, or ""."""
        return self.layer_rounding or rounding_reason(self._model)

    @property
    def training_rounding(self) -> str:
        """The reason why training's forward pass does not run in fp32, or ""."""
        with self._autocast():
            autocast = torch.is_autocast_enabled(self._device.type)
        return self.rounding_reason or ("training's forward pass runs under autocast" if autocast else "")

    def score(self, rollout: Rollout, rows: Tensor, *, graph: bool = True, varentropy: bool = False) -> Scores:
        """Score the completions of some rows, (B, T), with T the longest of these rows.

        Autocast and dropout are training's; inside `measuring()` there is neither, and arithmetic is IEEE fp32. RNG
        states are restored. The graph allows any number of backwards, but no second derivatives. With `varentropy` the
        scores have varentropies, from the same logits.
        """
        with preserve_rng(self._device):
            self.full_logits_reason()
            as_training = contextlib.nullcontext() if self._measuring else self._autocast()
            with as_training, torch.set_grad_enabled(graph):
                batch = right_padded_inputs(rollout, rows, varentropy)
                logps, entropies, *varentropies = self._calculate(batch)
        return Scores(logps, entropies, batch.mask, *(values.detach() for values in varentropies))

    def token_logits(self, rollout: Rollout, rows: Tensor) -> Tensor:
        """Return the logits, divided by the temperature, behind each sampled token of some rows: (tokens, V), no graph.

        All of them are held at once, in at least fp32, so pass few rows.
        """
        return torch.cat(self.map_logits(rollout, rows, lambda z: z))

    def map_logits(self, rollout: Rollout, rows: Tensor, convert: Callable[[Tensor], Converted]) -> list[Converted]:
        """Convert the logits behind the sampled tokens of some rows chunk by chunk, without a graph.

        Args:
            convert: Is given the logits of the next tokens, (n, V), divided by the temperature and in at least fp32.

        Returns:
            What `convert` has returned for each chunk, in the order of the tokens.
        """
        with preserve_rng(self._device), torch.no_grad():
            self.full_logits_reason()
            batch = right_padded_inputs(rollout, rows)
            # Half a chunk of logits at once: what `convert` makes of them takes as much again.
            parts = batch.at_tokens(batch.sampled_tokens()).split(
                max(1, self._logit_map.chunk // (2 * self._vocabulary))
            )
            converted: list[Converted] = self._gathered(lambda: list(map(convert, self._logit_chunks(batch, parts))))
        return converted

    def _gathered(self, calculate: Callable[[], Any]) -> Any:
        """Call `calculate`, with `run_inside_forward` inside the model's forward pass."""
        return run_inside_forward(self._model, calculate) if self._inside_forward else calculate()

    def score_padded(self, rollout: Rollout, rows: Tensor) -> Scores:
        """Score some rows left-padded, with an attention mask and no position ids, as trainers pass them.

        This is a measurement without graph, (B, T), as wide as the rollout's completions.
        """
        batch = left_padded_inputs(rollout, rows)
        # Half-precision layers accept fp32 inputs only under autocast.
        rounded = self._autocast() if self.rounding_reason else contextlib.nullcontext()
        with self.measuring(), rounded, torch.no_grad():
            self.full_logits_reason()
            logps, entropies = self._calculate(batch)
        return Scores(logps, entropies, batch.mask)

    @contextlib.contextmanager
    def measuring(self) -> Iterator[None]:
        """Make scores inside the context measurements, as exact as the weights allow; then restore everything.

        They are in IEEE fp32, without autocast and dropout. Run backwards in it too. Graphs are built as outside.
        """
        model = self._model
        autocast_off = torch.autocast(next(model.parameters()).device.type, enabled=False)
        self._measuring += 1
        try:
            with ieee_fp32(), without_dropout(model), attention_in_fp32(model), autocast_off:
                yield
        finally:
            self._measuring -= 1

    def full_logits_reason(self) -> str:
        """Return the reason why the model's full logits are used; "" if its body and head are used instead.

        The answer is cached. The first score calls this. Call it before hooking modules, because it runs two small
        forward passes.
        """
        if self._full_logits_reason is None:
            with preserve_rng(self._device), self.measuring(), torch.no_grad():
                self._full_logits_reason = self._gathered(self._head_mismatch)
            if self._full_logits_reason:
                warnings.warn(
                    f"{self._full_logits_reason}: all logits of a batch are in memory at once, "
                    "so score few rows at a time",
                    stacklevel=2,
                )
        return self._full_logits_reason

    def _head_mismatch(self) -> str:
        """Return the reason why head(body(ids)), scaled as the config says, is not the model's logits; "" if it is."""
        head = self._lm.get_output_embeddings()
        if head is None:
            return "the model does not name its head (get_output_embeddings)"
        if self._lm.base_model is self._lm:
            return "the model does not name its body (base_model_prefix)"
        ids = torch.arange(2, device=self._device).unsqueeze(0)
        # Known logits replace the head's, which may be too small to show what the model does to them.
        ramp = torch.linspace(-50.0, 50.0, self._vocabulary, device=self._device)
        given: list[Tensor] = []

        def known_logits(x: Tensor) -> Tensor:
            given.append(x)
            return ramp.expand(*x.shape[:-1], -1)

        with replaced_forward(head, known_logits):
            logits = self._full_logits(ids, {})
        if not given:
            return "the model's forward pass does not call its head"
        if not _close(self._hidden(ids, {}), given[0], 1e-2 if self.rounding_reason else 1e-4):
            return "the head's input is not the body's output"
        expected = self._logit_map(ramp) * self.temperature
        return "" if _close(expected.expand(1, 2, -1), logits, 1e-4) else "the logits are not scaled as the config says"

    def _calculate(self, batch: ModelInputs) -> tuple[Tensor, ...]:
        calculate = self._by_full_logits if self._full_logits_reason else self._by_body_and_head
        values: tuple[Tensor, ...] = self._gathered(lambda: calculate(batch))
        return values

    def _by_body_and_head(self, batch: ModelInputs) -> tuple[Tensor, ...]:
        head = self._lm.get_output_embeddings()
        hidden = self._hidden(batch.ids, batch.inputs)
        if not self._reads_weight(head):
            columns = batch.columns.unsqueeze(-1).expand(-1, -1, hidden.shape[-1])
            return self._by_called_head(head, hidden.gather(1, columns), batch)
        sampled = batch.sampled_tokens()
        x = hidden.flatten(0, 1).index_select(0, batch.at_tokens(sampled)).to(head.weight.device)
        targets = batch.targets.flatten()[sampled].to(x.device)
        logit_map = dataclasses.replace(self._logit_map, dtype=self._dtype_of_product(x, head))
        values = scores_of_hidden(x, head.weight, head.bias, targets, logit_map, batch.varentropy)
        mask = batch.mask.bool()
        empty = [torch.zeros_like(mask, dtype=value.dtype) for value in values]
        return tuple(t.masked_scatter(mask, v.to(mask.device)) for t, v in zip(empty, values, strict=True))

    def _reads_weight(self, head: Any) -> bool:
        """Whether the head's weight is multiplied here, instead of calling the head."""
        patched = "forward" in vars(head) and not self._fp32_head  # training patches forward to get an fp32 head
        return not (self._call_head or type(head) is not nn.Linear or patched)

    def _by_called_head(self, head: Any, hidden: Tensor, batch: ModelInputs) -> tuple[Tensor, ...]:
        """Call the head on chunks of columns, (B, t, H), so that hooks on it can tell sequences apart."""

        def apply(x: Tensor, targets: Tensor) -> tuple[Tensor, ...]:
            logits = self._logits_of_called_head(head, x)
            return scores_of_logits(logits, targets.to(logits.device), batch.varentropy)

        width = max(1, self._logit_map.chunk // (len(hidden) * self._vocabulary))
        chunks = zip(hidden.split(width, dim=1), batch.targets.split(width, dim=1), strict=True)
        if torch.is_grad_enabled():
            parts = [checkpoint(apply, x, targets, use_reentrant=False) for x, targets in chunks]
        else:
            parts = [apply(x, targets) for x, targets in chunks]
        return tuple(torch.cat(values, dim=1) for values in zip(*parts, strict=True))

    def _logits_of_called_head(self, head: Any, x: Tensor) -> Tensor:
        """Call the head in training's precision, and return the logits divided by the temperature, in at least fp32."""
        rounded = torch.is_autocast_enabled(x.device.type) and not self._fp32_head
        if not rounded and head.weight.is_floating_point():
            x = x.to(head.weight.dtype)
        with torch.autocast(x.device.type, enabled=False) if self._fp32_head else contextlib.nullcontext():
            logits = head(x)
        return self._logit_map(_at_least_fp32(logits))

    def _by_full_logits(self, batch: ModelInputs) -> tuple[Tensor, ...]:
        logits = self._full_logits(batch.ids, batch.inputs)
        logits = logits.gather(1, batch.columns.unsqueeze(-1).expand(-1, -1, logits.shape[-1]))
        return scores_of_logits(_at_least_fp32(logits) / self.temperature, batch.targets, batch.varentropy)

    def _logit_chunks(self, batch: ModelInputs, parts: Sequence[Tensor]) -> Iterator[Tensor]:
        """Yield the logits at each of some parts of all B·W columns, (n, V)."""
        if self._full_logits_reason:
            logits = self._full_logits(batch.ids, batch.inputs).flatten(0, 1)
            return (_at_least_fp32(logits[part]) / self.temperature for part in parts)
        head = self._lm.get_output_embeddings()
        hidden = self._hidden(batch.ids, batch.inputs).flatten(0, 1)
        if not self._reads_weight(head):
            return (self._logits_of_called_head(head, hidden[part]) for part in parts)
        x = torch.cat([hidden[part] for part in parts]).to(head.weight.device)
        dtype = self._dtype_of_product(x, head)
        chunk = len(parts[0]) * len(head.weight)
        logit_map = dataclasses.replace(self._logit_map, dtype=dtype, chunk=chunk)
        return (z for _, z, _, _ in logit_chunks(x, head.weight, head.bias, logit_map))

    def _hidden(self, ids: Tensor, inputs: Mapping[str, Any]) -> Tensor:
        hidden = self._lm.base_model(input_ids=ids, use_cache=False, **inputs).last_hidden_state
        return hidden.to(ids.device)  # the model may be spread over devices

    def _full_logits(self, ids: Tensor, inputs: Mapping[str, Any]) -> Tensor:
        """Return (B, W, V) logits from the forward of the model's class: a trainer may have patched the instance's."""
        return type(self._lm).forward(self._lm, input_ids=ids, use_cache=False, **inputs).logits

    def _dtype_of_product(self, x: Tensor, head: nn.Linear) -> torch.dtype:
        if torch.is_autocast_enabled(x.device.type) and not self._fp32_head:
            return torch.get_autocast_dtype(x.device.type)
        dtype = torch.promote_types(x.dtype, head.weight.dtype)
        return torch.promote_types(dtype, torch.float32) if self._fp32_head else dtype

    @property
    def _device(self) -> torch.device:
        return self._lm.get_input_embeddings().weight.device

    @property
    def _vocabulary(self) -> int:
        size = getattr(self._lm.get_output_embeddings(), "out_features", None)
        return size or self._lm.config.get_text_config().vocab_size


def _at_least_fp32(logits: Tensor) -> Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def _close(a: Tensor, b: Tensor, tolerance: float) -> bool:
    return a.shape == b.shape and bool((a - b).abs().max() <= tolerance * b.abs().max())
