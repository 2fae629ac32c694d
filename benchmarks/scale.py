"""What probes cost in a large training: the figures of docs/explanation/at_size.md, from shapes alone, on any machine.

    python benchmarks/scale.py --models 7B                        # the rows of the page; without --models, others too
    python benchmarks/scale.py --models 7B --processes 64 --probes simple --fold-dtype bfloat16 --folds 4

One process of several (a fake process group) runs the engine and FSDP2 on a simulated GPU (pretend_gpu.py), with
parameters of these models' shapes at full depth. The computation inside layers and the product with the head are left
out, so activations take no memory. Weights are still gathered, and gradients created and reduced, as in training.
FSDP2's own launches and waits are not counted. The cost of the models' passes is calculated: per parameter and token 2
operations forward and 4 backward, or 2 backward if only adapters are trained.
"""

from __future__ import annotations

import argparse
import functools
import gc
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast
from unittest import mock

import rl_training.job.silence  # noqa: F401

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from pretend_gpu import GPU, PretendGpu
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoModelForCausalLM, Qwen2Config
from transformers.modeling_outputs import BaseModelOutputWithPast

from rl_training import Rollout, measured_loop
from rl_training.engine import build_step, gradient_check, terms_check
from rl_training.entropy import reward_gradient
from rl_training.hosts.plain import refusals
from rl_training.hosts.plain.calls import MeasuredLoop
from rl_training.optim.formula import OptimizerState
from rl_training.policy import linear_head
from rl_training.probes import GradientNoiseScaleProbe, InterventionsProbe, SimpleEntropyProbe
from rl_training.step.batch import Batch

# hidden size, intermediate size, layers, attention heads, key-value heads, tied embeddings, rank of a LoRA
MODELS = {
    "1.5B-LoRA": (1536, 8960, 28, 12, 2, True, 16),
    "1.5B": (1536, 8960, 28, 12, 2, True, 0),
    "7B": (3584, 18944, 28, 28, 4, False, 0),
    "32B": (5120, 27648, 64, 40, 8, False, 0),
    "70B": (8192, 29568, 80, 64, 8, False, 0),
}
PROMPTS, RESPONSES, PROMPT_TOKENS, TOKENS = 8, 8, 64, 512  # per step on each process; each prompt is a microbatch
MAX_GRAD_NORM = 0.5  # simulated norms are 1, so every step is clipped, the more expensive case
PROBES = ("simple", "gns", "interventions")
HEAD = """| model | processes | probe | launches | waits | GB without | GB more | vectors | GB sent | passes | PFLOP |
|---|---|---|---|---|---|---|---|---|---|---|"""


@dataclass
class Counts:
    """What a step costs on one process."""

    launches: int
    waits: int
    peak: int  # bytes
    sent: Counter[str]  # bytes by collective
    sequences: int  # sequences that went through forward and backward


class Bodies:
    """Replaces the model's layers: each returns its hidden states unchanged and gives its parameters gradients."""

    def __init__(self, gpu: PretendGpu, model: Any) -> None:
        self._gpu, self._lm = gpu, model.get_base_model() if hasattr(model, "get_base_model") else model
        self.sequences = 0
        self._lm.model.forward = self._forward
        for layer in self._lm.model.layers:
            layer.forward = functools.partial(self._through, layer)

    def _forward(self, input_ids: Tensor, **kwargs: Any) -> BaseModelOutputWithPast:
        body = self._lm.model
        self.sequences += len(input_ids) if torch.is_grad_enabled() else 0
        with self._gpu.uncounted():
            hidden = torch.ones(*input_ids.shape, self._lm.config.hidden_size, device=GPU)
            hidden = self._through(body.embed_tokens, hidden)
            for layer in body.layers:
                hidden = layer(hidden)
            hidden = self._through(body.norm, hidden)
        return BaseModelOutputWithPast(last_hidden_state=hidden)  # type: ignore[arg-type]

    def _through(self, module: nn.Module, hidden: Tensor) -> Tensor:
        trained = [param for param in module.parameters() if param.requires_grad]
        return cast(Tensor, _Layer.apply(hidden, self._gpu, *trained))  # type: ignore[no-untyped-call]


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
    """Return a model of this shape on the meta device, without values."""
    hidden, intermediate, layers, heads, kv_heads, tied, rank = MODELS[name]
    config = Qwen2Config(
        hidden_size=hidden, intermediate_size=intermediate, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=kv_heads, vocab_size=151936, tie_word_embeddings=tied,
    )  # fmt: skip
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    if rank:
        return get_peft_model(model, LoraConfig(r=rank, target_modules="all-linear"), low_cpu_mem_usage=True)
    return model


def counted_steps(name: str, settings: argparse.Namespace) -> Iterator[tuple[str, Counts]]:
    """Yield the costs of each kind of step: "" without probes, then one with each probe."""
    # There are no real values, so checks that compare values are switched off.
    gradient_check.TOLERANCE = gradient_check.TOLERANCE_ROUNDED = terms_check.TOLERANCE = math.inf
    OptimizerState.max_error = math.inf  # nothing moves, which is not the optimizer's formula
    terms_check.SAME_SCORES = terms_check.SAME_SCORES_ROUNDED = math.inf
    reward_gradient.TOLERANCE = math.inf  # also the check that the loss is the reward's; Dr-GRPO's is
    refusals.MAX_ENTROPY_DIFFERENCE = -math.inf  # the values in place of entropies are below 0
    build_step.Batch = as_on_all_processes  # type: ignore[misc, assignment]
    simple = SimpleEntropyProbe(
        num_folds=settings.folds, fold_dtype=settings.fold_dtype, keep_gathered=settings.keep_gathered
    )
    further = [p for p in (GradientNoiseScaleProbe(), InterventionsProbe()) if p.name in settings.probes]
    probes, kind = [simple, *further], ""
    for probe in probes:
        probe.measures_at = lambda step, probe_name=probe.name: probe_name == kind  # type: ignore[method-assign, misc]
    model = model_of(name).train()
    with PretendGpu() as gpu, gpu.leave_out(linear_head._LinearHead, "forward", "backward"):
        gpu.hold(model)
        bodies = Bodies(gpu, model)
        if not MODELS[name][-1]:
            shard(model, settings.bf16)
        optimizer = optimizer_of([p for p in model.parameters() if p.requires_grad])
        loop = measured_loop(
            model, optimizer, probes, responses_per_prompt=RESPONSES, microbatch_size=RESPONSES, microbatches=PROMPTS,
            max_grad_norm=MAX_GRAD_NORM, dr_grpo=True,
        )  # fmt: skip
        with loop:
            # The first step has checks of its own, and the first measured one allocates what is kept for later ones.
            for number, kind in enumerate(("", "", "simple", *settings.probes), start=1):
                counts = one_step(gpu, bodies, loop, optimizer, number)
                limited = kind and loop.latest["delta_h/forward"].code
                assert not limited, f"the step was not predicted, so it costs less than a real one: {limited}"
                if number not in (1, 3):
                    yield kind, counts


def as_on_all_processes(fold_sizes: Tensor, **fields: Any) -> Batch:
    """Return a batch whose folds on other processes, whose sizes no one sends, are as large as this one's."""
    return Batch(fold_sizes=fold_sizes.where(fold_sizes > 0, fold_sizes.max()), **fields)


def shard(model: Any, bf16: bool) -> None:
    """Shard a model with FSDP2 over all processes, layer by layer."""
    mesh = init_device_mesh(GPU.type, (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if bf16 else MixedPrecisionPolicy()
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)


def optimizer_of(parameters: Sequence[nn.Parameter]) -> torch.optim.AdamW:
    """Return an AdamW optimizer whose states are allocated, as after twenty steps."""
    optimizer = torch.optim.AdamW(parameters, foreach=False)
    for param in parameters:
        param.grad = torch.zeros_like(param)
    with mock.patch("torch.optim.adam.adam"):
        optimizer.step()
    optimizer.zero_grad()
    for state in optimizer.state.values():
        state["step"].fill_(20.0)
    return optimizer


def one_step(
    gpu: PretendGpu, bodies: Bodies, loop: MeasuredLoop, optimizer: torch.optim.Optimizer, number: int
) -> Counts:
    """Return the costs of an optimizer step, without the model's layers and the optimizer's own launches."""
    gc.collect()
    gc.freeze()
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
        with mock.patch("torch.optim.adam.adam"):  # nothing moves
            optimizer.step()
        optimizer.zero_grad()
    return Counts(gpu.launches, gpu.waits.total(), gpu.peak, gpu.sent, bodies.sequences)


def random_rollout(prompt: int) -> Rollout:
    """Return the responses to one prompt, all of full length."""
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


def print_model(name: str, settings: argparse.Namespace) -> None:
    """Print a table row for each probe."""
    parameters = list(model_of(name).parameters())
    weights = sum(p.numel() for p in parameters)
    trained = sum(p.numel() for p in parameters if p.requires_grad)
    steps = counted_steps(name, settings)
    _, bare = next(steps)
    for kind, step in steps:
        more, passes = step.peak - bare.peak, (step.sequences - bare.sequences) / (PROMPTS * RESPONSES)
        tokens = (step.sequences - bare.sequences) * (PROMPT_TOKENS + TOKENS)
        operations = (6 if trained == weights else 4) * weights * tokens
        cells = (
            name, settings.processes, f"`{kind}`", step.launches - bare.launches, step.waits - bare.waits,
            f"{bare.peak / 1e9:.1f}", f"{more / 1e9:.2f}", f"{more / (4 * trained / settings.processes):.1f}",
            f"{(step.sent - bare.sent).total() / 1e9:.2f}", f"{passes:.3f}", f"{operations / 1e15:.2f}",
        )  # fmt: skip
        print("|", *(f"{cell} |" for cell in cells), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=tuple(MODELS))
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--probes", nargs="+", choices=PROBES, default=PROBES)
    parser.add_argument("--folds", type=int, help="num_folds of simple")
    parser.add_argument(
        "--fold-dtype", choices=("auto", "float32", "bfloat16", "int8"), default="auto", help="of simple"
    )
    parser.add_argument("--keep-gathered", action="store_true", help="keep_gathered of simple")
    parser.add_argument("--bf16", action="store_true", help="FSDP2 gathers weights in bf16; it reduces in fp32")
    settings = parser.parse_args()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=settings.processes)
    print(f"{PROMPTS} prompts × {RESPONSES} responses of {TOKENS} tokens on each process\n")
    print(HEAD)
    for name in settings.models:
        print_model(name, settings)


if __name__ == "__main__":
    main()
