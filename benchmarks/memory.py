"""What probes add to training on 4 processes: peak memory per process, and bytes passed to collectives.

    OMP_NUM_THREADS=1 python benchmarks/memory.py [--layouts ddp fsdp2 fsdp2_last] [--folds 8] [--large]

Trains a Qwen2 with 92 MB of random weights on given rollouts over gloo, without probes and with `simple`, each time in
new processes. The peak is the largest resident memory of any process during the last step. `fsdp2_last` reduces
gradients only at the last microbatch. `--large` treats vectors as large: gradients of folds are in 8 bits, and fewer
vectors are kept. Linux only.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import json
import os
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import rl_training.job.silence  # noqa: F401

import torch
import torch.distributed as dist
from accelerate.utils.other import get_free_port
from torch.distributed.fsdp import fully_shard
from torch.multiprocessing import get_context
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Qwen2Config, Qwen2ForCausalLM

from rl_training import Rollout, measured_loop
from rl_training.parallel import vectors
from rl_training.policy.rollout import take_rows
from rl_training.probes import SimpleEntropyProbe

PROCESSES, STEPS, G, PROMPT, COMPLETION = 4, 3, 4, 4, 8
SHAPE = {"vocab_size": 4096, "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 7,
         "num_attention_heads": 8, "num_key_value_heads": 4, "tie_word_embeddings": True}  # fmt: skip

# glibc raises this threshold to the largest block freed so far. Smaller blocks then come from a heap, where freed ones
# leave holes: up to 100 MB of the peak, depending on the order of requests. With a fixed one, the peak counts tensors.
LIBC, M_MMAP_THRESHOLD = ctypes.CDLL("libc.so.6"), -3


class Collectives(TorchDispatchMode):
    """Counts the bytes passed to each collective: those of its largest argument, a tensor or a list of tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        if name.startswith("c10d."):
            self.bytes[name.split(".")[1]] += max(map(_num_bytes, args), default=0)
        return func(*args, **(kwargs or {}))


def _num_bytes(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    return sum(map(_num_bytes, value)) if isinstance(value, list | tuple) else 0


def peak() -> int:
    """Return the peak resident memory of this process since the last `forget_peak`, in bytes."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.split("VmHWM:")[1].split()[0])


def forget_peak() -> None:
    gc.collect()
    LIBC.malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")


def rollout(number: int, sequences: int) -> Rollout:
    """Return `sequences` responses of random tokens, G to a prompt."""
    generator = torch.Generator().manual_seed(number)
    prompts = torch.randint(4, 4096, (sequences // G, PROMPT), generator=generator).repeat_interleave(G, dim=0)
    completions = torch.randint(4, 4096, (sequences, COMPLETION), generator=generator)
    rewards = torch.randn(sequences // G, G, generator=generator)
    return Rollout(
        prompt_ids=prompts, prompt_mask=torch.ones_like(prompts), completion_ids=completions,
        completion_mask=torch.ones_like(completions), advantages=(rewards - rewards.mean(1, keepdim=True)).flatten(),
        rewards=rewards.flatten(), prompt_index=torch.arange(sequences) // G, untested=True,  # no policy drew these
    )  # fmt: skip


def scores(model: Any, part: Rollout) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.cat([part.prompt_ids, part.completion_ids], dim=1)
    logp = model(input_ids=ids, use_cache=False).logits[:, PROMPT - 1 : -1].float().log_softmax(dim=-1)
    return logp.gather(-1, part.completion_ids.unsqueeze(-1)).squeeze(-1), -(logp.exp() * logp).sum(dim=-1)


def work(rank: int, port: int, layout: str, folds: int, probes: bool, folder: str) -> None:
    """Train as one of the processes. Write the peak of each step, and the last step's bytes by collective."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    LIBC.mallopt(M_MMAP_THRESHOLD, 1 << 18)
    dist.init_process_group("gloo", rank=rank, world_size=PROCESSES)
    torch.manual_seed(0)
    bare = Qwen2ForCausalLM(Qwen2Config(**SHAPE)).train()
    model: Any = bare
    if layout == "ddp":
        model = DistributedDataParallel(bare)
    else:
        for layer in bare.model.layers:
            fully_shard(layer)
        model = fully_shard(bare)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=False)
    size, peaks = G, []  # a fold is one microbatch across all processes
    with measured_loop(
        model, optimizer, [SimpleEntropyProbe()] if probes else [], responses_per_prompt=G, microbatch_size=size,
        microbatches=folds, max_grad_norm=1.0, dr_grpo=True,
    ) as measured:  # fmt: skip
        for number in range(1, STEPS + 1):
            given = rollout(number, folds * size * PROCESSES)
            forget_peak()
            with Collectives() as counted, measured.step(number):
                for m in range(folds):
                    part = take_rows(given, torch.arange(size) + (m * PROCESSES + rank) * size)
                    last = m == folds - 1
                    if layout == "fsdp2_last":
                        model.set_requires_gradient_sync(last)
                    with model.no_sync() if layout == "ddp" and not last else contextlib.nullcontext():
                        logps, entropies = scores(model, part)
                        measured.microbatch(part, logps, entropies.detach())
                        ratios = (logps - logps.detach()).exp()
                        (-(ratios * part.advantages.unsqueeze(1)).sum() / (size * COMPLETION * folds)).backward()
                    del logps, entropies, ratios
                measured.gradients_ready()
                clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            peaks.append(peak())
        answer = {"peaks": peaks, "bytes": counted.bytes, "parameters": sum(p.numel() for p in model.parameters())}
        answer |= {"forward": float(measured.latest["delta_h/forward"].value) if probes else None}
    Path(folder, f"{rank}.json").write_text(json.dumps(answer))
    dist.barrier()
    os._exit(0)


def trained(layout: str, folds: int, probes: bool) -> list[dict[str, Any]]:
    """Run the training in new processes, and return the answer of each."""
    fork, port = get_context("fork"), get_free_port()
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            fork.Process(target=work, args=(rank, port, layout, folds, probes, folder)) for rank in range(PROCESSES)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        return [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(PROCESSES)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layouts", nargs="+", default=["ddp", "fsdp2", "fsdp2_last"])
    parser.add_argument("--folds", type=int, default=8)
    parser.add_argument("--large", action="store_true")
    options = parser.parse_args()
    num_vectors, formula = options.folds + 3, "K + 3"
    if options.large:
        vectors.LARGE, num_vectors, formula = 0, options.folds / 4 + 2, "K/4 + 2"
    for layout in options.layouts:
        bare, measured = (trained(layout, options.folds, probes) for probes in (False, True))
        bytes_of_weights = 4 * bare[0]["parameters"]
        bytes_of_vector = bytes_of_weights / PROCESSES
        samples = options.folds * min(4 * vectors.MAX_SAMPLED, bytes_of_vector)  # by which gradients are checked
        expected = num_vectors * bytes_of_vector + samples
        extra_peak = max(b["peaks"][-1] for b in measured) - max(b["peaks"][-1] for b in bare)
        print(f"{layout}: weights {bytes_of_weights / 1e6:.0f} MB")
        print(f"  4 ({formula}) P/N and samples: {expected / 1e6:.0f} MB")
        print(f"  the probe adds {extra_peak / 1e6:.0f} MB to the peak, {extra_peak / expected:.2f} of that; forward "
              f"{measured[0]['forward']:.3e}")  # fmt: skip
        for name in sorted({*bare[0]["bytes"], *measured[0]["bytes"]}):
            before, after = (run[0]["bytes"].get(name, 0) / bytes_of_weights for run in (bare, measured))
            print(f"  {name}: {before:.3f} of the weights' bytes a step, {after:.3f} with the probe", flush=True)


if __name__ == "__main__":
    main()
