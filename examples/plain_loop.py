"""Dr-GRPO in plain PyTorch on the default task, measured.

    python examples/plain_loop.py --steps 40 --out runs/plain

In two processes that share the prompts of a step (DDP, gloo, CPU): torchrun --nproc_per_node 2 examples/plain_loop.py …
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from tqdm import tqdm

from rl_training import (
    EffectiveSampleSizeProbe,
    GradientNoiseScaleProbe,
    Records,
    Rollout,
    SimpleEntropyProbe,
    measured_loop,
    print_summary,
    take_rows,
    write_report,
)
from rl_training.tasks.arithmetic import arithmetic
from rl_training.tasks.models import load_tiny

PROMPTS, G, MICROBATCH, MAX_TOKENS = 32, 8, 32, 36  # of a step; responses to each; sequences of a backward; tokens
MAX_GRAD_NORM, LEARNING_RATE = 1.0, 3e-4


def sample_rollout(model: Any, tokenizer: Any, task: Any, rows: list[dict[str, Any]]) -> Rollout:
    """Return G responses to each prompt with Dr-GRPO's advantages: reward less the mean of its group."""
    rows = [row for row in rows for _ in range(G)]
    asked = tokenizer([row["prompt"] for row in rows], return_tensors="pt", padding=True)  # on the left
    sequences = model.generate(**asked, max_new_tokens=MAX_TOKENS, do_sample=True, temperature=1.0, top_k=0, top_p=1.0)
    completion_ids = sequences[:, asked.input_ids.shape[1] :]
    ended = (completion_ids == tokenizer.eos_token_id).long()
    mask = (ended.cumsum(dim=1) - ended == 0).long()  # up to the first end-of-sequence token, which counts
    texts = tokenizer.batch_decode(completion_ids, skip_special_tokens=True)
    rewards = torch.tensor(task.reward(texts, answer=[row["answer"] for row in rows]))
    advantages = rewards - rewards.view(-1, G).mean(dim=1).repeat_interleave(G)
    return Rollout(
        prompt_ids=asked.input_ids, prompt_mask=asked.attention_mask, completion_ids=completion_ids,
        completion_mask=mask, advantages=advantages, rewards=rewards, prompt_index=torch.arange(len(rows)) // G,
    )  # fmt: skip


def scores(model: Any, part: Rollout) -> tuple[Tensor, Tensor]:
    """Return log-probabilities, with graph, and entropies of the completions, (B, T): a forward pass of one's own."""
    ids = torch.cat([part.prompt_ids, part.completion_ids], dim=1)
    there = torch.cat([part.prompt_mask, part.completion_mask], dim=1)
    logits = model(input_ids=ids, attention_mask=there, use_cache=False).logits
    logp = logits[:, part.prompt_ids.shape[1] - 1 : -1].log_softmax(dim=-1)
    entropies = -(logp.detach().exp() * logp.detach()).sum(dim=-1)
    return logp.gather(-1, part.completion_ids.unsqueeze(-1)).squeeze(-1), entropies


def train(steps: int, out: Path, seed: int) -> None:
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    policy, tokenizer = load_tiny()
    model = DistributedDataParallel(policy) if world > 1 else policy
    model.train()
    task, prompts = arithmetic(), PROMPTS // world
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.99), weight_decay=0.0)
    microbatches = prompts * G // MICROBATCH
    probes = [SimpleEntropyProbe(), GradientNoiseScaleProbe(), EffectiveSampleSizeProbe()]
    order = torch.Generator().manual_seed(seed)  # the same on every process, each of which takes its share
    torch.manual_seed(seed * world + rank)
    with measured_loop(
        model, optimizer, probes, responses_per_prompt=G, microbatch_size=MICROBATCH, microbatches=microbatches,
        max_grad_norm=MAX_GRAD_NORM, dr_grpo=True, records=Records(out / "logs"),
    ) as measured:  # fmt: skip
        bar = tqdm(range(1, steps + 1), disable=rank > 0, unit="step")
        for number in bar:
            chosen = torch.randperm(len(task.train_dataset), generator=order)[:PROMPTS].tolist()
            rows = [task.train_dataset[i] for i in chosen[rank * prompts : (rank + 1) * prompts]]
            rollout = sample_rollout(policy, tokenizer, task, rows)
            with measured.step(number) as metrics:
                losses = []
                for some in torch.arange(prompts * G).split(MICROBATCH):
                    part = take_rows(rollout, some)
                    logps, entropies = scores(model, part)
                    measured.microbatch(part, logps, entropies)
                    ratios = (logps - logps.detach()).exp()
                    gains = ratios * part.advantages.unsqueeze(1) * part.completion_mask
                    loss = -gains.sum() / (MICROBATCH * MAX_TOKENS * microbatches)
                    loss.backward()
                    losses.append(loss.item())
                measured.gradients_ready()  # all of them, averaged over processes, not clipped yet
                metrics["loss"] = sum(losses)
                metrics["grad_norm"] = clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
                optimizer.step()
                optimizer.zero_grad()
            bar.set_postfix(reward=f"{metrics['reward']:.3f}", entropy=f"{metrics['entropy/token']:.3f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Dr-GRPO in plain PyTorch on the default task, with probes.")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--out", type=Path, required=True, help="a folder, for logs/ and report/")
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    if dist.is_torchelastic_launched():
        dist.init_process_group("gloo")
    train(chosen.steps, chosen.out, chosen.seed)
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(f"Report: {write_report(chosen.out)}")
        print_summary(chosen.out)
    if dist.is_initialized():
        dist.destroy_process_group()
