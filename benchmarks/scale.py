"""What probes take of a large training: the page docs/explanation/at_size.md, from shapes alone, on any machine.

    python benchmarks/scale.py                          # about ten minutes
    python benchmarks/scale.py --models 1.5B-LoRA 7B

One process of several (a fake process group) runs the engine on a GPU that is not there (pretend_gpu.py), on parameters
of these models' shapes, with the bodies of the models left out: bytes, bytes sent, launches and waits are those of the
probes' own work, a step with them less one without. What the models' passes take is calculated, by 2 operations for
each parameter and token forward, 4 backward, 2 where only adapters are trained.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, cast
from unittest import mock

import rl_training.job.silence  # noqa: F401

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from pretend_gpu import GPU, PretendGpu
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoModelForCausalLM, Qwen2Config
from transformers.modeling_outputs import BaseModelOutputWithPast

from rl_training import Rollout, measured_loop
from rl_training.engine import step_check
from rl_training.hosts.loop import MeasuredLoop
from rl_training.mathematics import linear_head
from rl_training.probes import GradientNoiseScaleProbe, InterventionsProbe, SimpleEntropyProbe

# hidden size, intermediate size, layers, attention heads, key-value heads, tied embeddings, rank of a LoRA
MODELS = {
    "1.5B-LoRA": (1536, 8960, 28, 12, 2, True, 16),
    "1.5B": (1536, 8960, 28, 12, 2, True, 0),
    "7B": (3584, 18944, 28, 28, 4, False, 0),
    "32B": (5120, 27648, 64, 40, 8, False, 0),
    "70B": (8192, 29568, 80, 64, 8, False, 0),
}
PROMPTS, RESPONSES, PROMPT_TOKENS, TOKENS = 8, 8, 64, 512  # of a step on each process; a prompt is a microbatch
PROBES = ("simple", "gns", "interventions")
MAX_GRAD_NORM = 0.5  # where the pretended norms are 1: all steps are clipped, which is dearer


@dataclass
class Counts:
    """What a step takes on one process."""

    launches: int
    waits: int
    peak: int  # bytes
    sent: int  # bytes
    sequences: int  # that went through a forward and backward


@dataclass
class Bodies:
    """In the place of the model's layers: each passes the hidden states on, and gives its parameters gradients."""

    gpu: PretendGpu
    model: Any
    sequences: int = 0
    _layers: list[list[Tensor]] = field(default_factory=list)

    def __post_init__(self) -> None:
        lm = self.model.get_base_model() if hasattr(self.model, "get_base_model") else self.model
        self._hidden_size = lm.config.hidden_size
        parts = (lm.model.embed_tokens, *lm.model.layers, lm.model.norm)
        self._layers = [[p for p in part.parameters() if p.requires_grad] for part in parts]
        lm.model.forward = self.forward

    def forward(self, input_ids: Tensor, **kwargs: Any) -> BaseModelOutputWithPast:
        with self.gpu.uncounted():
            hidden = torch.ones(*input_ids.shape, self._hidden_size, device=GPU)
            self.sequences += len(input_ids) if torch.is_grad_enabled() else 0
            for parameters in self._layers:
                hidden = cast(Tensor, _Layer.apply(hidden, self.gpu, *parameters))  # type: ignore[no-untyped-call]
        return BaseModelOutputWithPast(last_hidden_state=hidden)  # type: ignore[arg-type]


class _Layer(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, gpu: PretendGpu, *parameters: Tensor) -> Tensor:
        ctx.gpu, ctx.parameters = gpu, parameters
        return hidden.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        with ctx.gpu.uncounted():
            return gradient, None, *map(torch.empty_like, ctx.parameters)


def model_of(name: str) -> Any:
    """Returns a model of this shape without values."""
    hidden, intermediate, layers, heads, kv_heads, tied, rank = MODELS[name]
    config = Qwen2Config(
        hidden_size=hidden, intermediate_size=intermediate, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=kv_heads, vocab_size=151936, tie_word_embeddings=tied,
    )  # fmt: skip
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    if rank:
        return get_peft_model(model, LoraConfig(r=rank, target_modules="all-linear"), low_cpu_mem_usage=True)
    for number, layer in enumerate(model.model.layers):  # as one parameter each: it takes this machine minutes less
        joined = nn.Module()
        joined.weight = nn.Parameter(torch.empty(sum(p.numel() for p in layer.parameters()), device="meta"))
        model.model.layers[number] = joined
    return model


def counted_steps(name: str) -> Iterator[tuple[str, Counts]]:
    """Yields what each kind of step takes: "" without probes, and with each of PROBES."""
    step_check.LIMIT = step_check.LIMIT_ROUNDED = math.inf  # there are no values that could agree
    probes: list[Any] = [SimpleEntropyProbe(), GradientNoiseScaleProbe(), InterventionsProbe()]
    kind = ""
    for probe in probes:
        probe.measures_at = lambda step, own=probe.name: own == kind
    model = model_of(name).train()
    with PretendGpu() as gpu, head_left_out(gpu):
        gpu.hold(model)
        bodies = Bodies(gpu, model)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], foreach=False)
        loop = measured_loop(
            model, optimizer, probes, responses_per_prompt=RESPONSES, microbatch_size=RESPONSES, microbatches=PROMPTS,
            max_grad_norm=MAX_GRAD_NORM, dr_grpo=True,
        )  # fmt: skip
        with loop:
            # The first step makes Adam's states, the first that is measured what is kept for those after it.
            for number, kind in enumerate(("", "", PROBES[0], *PROBES), start=1):
                counts = one_step(gpu, bodies, loop, optimizer, number)
                for state in optimizer.state.values():
                    state["step"].fill_(20.0)  # Adam is warm
                if number not in (1, 3):
                    yield kind, counts


@contextlib.contextmanager
def head_left_out(gpu: PretendGpu) -> Iterator[None]:
    """A context in which the product with the head is counted as the model's layers are."""

    def left_out(call: Callable[..., Any]) -> Any:
        @functools.wraps(call)
        def uncounted(*args: Any) -> Any:
            with gpu.uncounted():
                return call(*args)

        return staticmethod(uncounted)

    head = linear_head._LinearHead
    with mock.patch.multiple(head, forward=left_out(head.forward), backward=left_out(head.backward)):
        yield


def one_step(
    gpu: PretendGpu, bodies: Bodies, loop: MeasuredLoop, optimizer: torch.optim.Optimizer, number: int
) -> Counts:
    """Returns what an optimizer step takes, without the model's layers and the optimizer's own launches."""
    gc.collect()
    gpu.start_counting()
    bodies.sequences = 0
    with loop.step(number):
        for prompt in range(PROMPTS):
            rollout = random_rollout(prompt)
            scores = loop.scorer.score(rollout, torch.arange(RESPONSES, device=GPU))
            loop.microbatch(rollout, scores.logps, scores.entropies.detach())
            (scores.logps * rollout.advantages.unsqueeze(1)).sum().backward()  # type: ignore[no-untyped-call]
            del scores
        gc.collect()
        loop.gradients_ready()
        with mock.patch("torch.optim.adam.adam"):  # its states are made, and nothing moves
            optimizer.step()
        optimizer.zero_grad()
    return Counts(gpu.launches, gpu.waits.total(), gpu.peak, gpu.sent, bodies.sequences)


def random_rollout(prompt: int) -> Rollout:
    """Returns a prompt's responses, all of full length."""
    with torch.device(GPU):
        return Rollout(
            prompt_ids=torch.ones(RESPONSES, PROMPT_TOKENS, dtype=torch.long),
            prompt_mask=torch.ones(RESPONSES, PROMPT_TOKENS, dtype=torch.long),
            completion_ids=torch.ones(RESPONSES, TOKENS, dtype=torch.long),
            completion_mask=torch.ones(RESPONSES, TOKENS, dtype=torch.long),
            advantages=torch.arange(RESPONSES) - (RESPONSES - 1) / 2,
            rewards=torch.arange(RESPONSES).float(),
            prompt_index=torch.full((RESPONSES,), prompt),
        )


def print_model(name: str) -> None:
    """Prints a row for each probe."""
    model = model_of(name)
    weights = sum(p.numel() for p in model.parameters())
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    sequences = PROMPTS * RESPONSES
    per_token = 6 if trained == weights else 4
    bare: Counts | None = None
    for kind, step in counted_steps(name):
        if bare is None:
            bare = step
            continue
        own = step.sequences - bare.sequences
        operations = per_token * weights * own * (PROMPT_TOKENS + TOKENS)
        print(
            f"| {name} | {trained / 1e9:.3f} | `{kind}` | {step.launches - bare.launches} | {step.waits - bare.waits} "
            f"| {(step.peak - bare.peak) / 1e9:.2f} | {(step.sent - bare.sent) / 1e9:.2f} "
            f"| {own / sequences:.3f} | {operations / 1e15:.2f} |",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=tuple(MODELS))
    parser.add_argument("--processes", type=int, default=8)
    options = parser.parse_args()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=options.processes)
    print(f"{PROMPTS} prompts × {RESPONSES} responses of {TOKENS} tokens on each of {options.processes} processes\n")
    print("| model | trained, 1e9 | probe | launches | waits | GB | GB sent | passes, of training's | PFLOP |")
    print("|---|---|---|---|---|---|---|---|---|")
    for name in options.models:
        print_model(name)


if __name__ == "__main__":
    main()
