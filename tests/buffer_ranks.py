"""Filtered training on two processes, for tests/hosts/trl/test_buffer.py: python tests/buffer_ranks.py FOLDER

Rank r writes FOLDER/<run>_<r>.pt for each of the runs

    one_sided   on rank 1 all responses get the same reward, always: its places stay empty
    whole       4 steps of the default task
    resumed     the last 2 of them, from the checkpoint between
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}

import torch
import torch.distributed as dist
import torch.multiprocessing

from rl_training import DrGRPOConfig, DrGRPOTrainer, Estimate, Probe
from rl_training.engine.batch import Rollout
from rl_training.engine.step import Step
from rl_training.hosts.trl.buffer import FilteredBuffer
from rl_training.tasks.arithmetic import arithmetic, arithmetic_reward
from rl_training.tasks.models import load_tiny

G = 4


class Rollouts(Probe):
    """Keeps the rollout of every step of this process, as training gets it."""

    name = "rollouts"

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Rollout] = []

    def prepare(self, step: Step) -> None:
        self.seen.append(step.batch.rollout)

    def results(self) -> dict[str, Estimate]:
        return {"rollouts/sequences": Estimate(float(self.seen[-1].num_sequences))}


def train(folder: Path, run: str, rank: int) -> None:
    asked: list[list[str]] = []

    def reward(prompts: Any, completions: Any, answer: Any, **columns: Any) -> list[float]:
        asked.append(prompts[::G])
        if run == "one_sided" and rank == 1:
            return [0.0] * len(prompts)
        return arithmetic_reward(completions, answer)

    policy, tokenizer = load_tiny()
    rollouts = Rollouts()
    buffer = FilteredBuffer(max_attempts=3, seed=11)
    trainer = DrGRPOTrainer(
        model=policy,
        reward_funcs=reward,
        args=DrGRPOConfig(
            output_dir=str(folder / ("task" if run != "one_sided" else run)),
            use_cpu=True,
            per_device_train_batch_size=8,
            gradient_accumulation_steps=2,
            num_generations=G,
            max_completion_length=24,
            max_steps=2 if run == "one_sided" else 4,
            learning_rate=3e-4,
            lr_scheduler_type="constant",
            logging_steps=1,
            save_strategy="steps" if run == "whole" else "no",
            save_steps=2,
            report_to=[],
            disable_tqdm=True,
        ),
        train_dataset=arithmetic(num_train=128, num_eval=8).train_dataset,
        processing_class=tokenizer,
        probes=[rollouts],
        buffer=buffer,
    )
    trainer.train(resume_from_checkpoint=str(folder / "task" / "checkpoint-2") if run == "resumed" else None)
    assert trainer.accelerator.num_processes == 2
    saved = {
        "asked": asked,
        "advantages": [rollout.advantages for rollout in rollouts.seen],
        "log": trainer.state.log_history,
        "buffer": buffer.state_dict(),
        "parameters": {name: p.detach().clone() for name, p in trainer.model.named_parameters()},
    }
    torch.save(saved, folder / f"{run}_{rank}.pt")


def main(rank: int, folder: Path, port: int) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
                   "MASTER_PORT": str(port)}  # fmt: skip
    for run in ("one_sided", "whole", "resumed"):
        train(folder, run, rank)
    dist.barrier()
    os._exit(0)  # no teardown: freeing DDP's gloo group holds the GIL and waits for a thread that may want it


if __name__ == "__main__":
    from replay import free_port

    torch.multiprocessing.start_processes(main, args=(Path(sys.argv[1]), free_port()), nprocs=2, start_method="fork")
