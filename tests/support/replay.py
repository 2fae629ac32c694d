"""Trains on given rollouts under several launches: python tests/support/replay.py FOLDER RUN...

A RUN is KIND_PROCESSES: plain_1, plain_2 (DDP), zero1_2, zero2_2, zero3_2, fsdp2_2; then optionally `_gpu` or `_bf16`.
It may end with one of these:

    _bare       has no probes
    _lora       trains an adapter
    _resumed    resumes after the first of its two steps
    _continued  resumes after the first step of the run with two processes
    _remedied   trains with interventions, without probes
    _bounded    the learning rate of its only step follows from the KL, without probes

Every run gets the same prompts, completions and advantages, each process a contiguous share. Rank r writes
FOLDER/RUN/r.pt. ZeRO and FSDP2 with probes save a checkpoint of their first step.

Everything is imported once, then processes are forked; nothing has used autograd or threads before. Runs of the same
kind and number of processes are trained in the same processes, one after another.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rl_training import Reading

os.environ |= {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "HF_HUB_OFFLINE": "1"}

import torch
import torch.distributed as dist
import torch.multiprocessing
from accelerate import PartialState
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils import DistributedType
from accelerate.utils.launch import prepare_multi_gpu_env
from accelerate.utils.other import get_free_port
from peft import LoraConfig
from shared_rollouts import L_MAX, ZERO_STEP, G, given_rollout, rewards_of
from torch.distributed.tensor import DTensor
from trainers import trainer_maker
from transformers.integrations.deepspeed import unset_hf_deepspeed_config
from trl import GRPOTrainer

from rl_training import DrGRPOTrainer, Estimate, Probe, attach
from rl_training.hosts.trl.policy import TrainerPolicy
from rl_training.hosts.trl.rollouts.batches import BUFFER_REWARD
from rl_training.parallel.ranks import all_ranks
from rl_training.probes import (
    EffectiveSampleSizeProbe,
    GradientNoiseScaleProbe,
    GroundTruthProbe,
    InterventionsProbe,
    MeasuredStepProbe,
    SimpleEntropyProbe,
    TokenClassesProbe,
)
from rl_training.records.writer import Records
from rl_training.step.needs import Need

ROOT = Path(__file__).parents[2]
STEPS, PROMPTS = 2, 8  # at the first step the second half of the sequences has zero advantage
MICROBATCH = 8  # two of them on each of two processes
TWO_LINES = ("zero2_2", "fsdp2_2")  # these use a trl.GRPOTrainer with `attach` around its training
LORA = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
# At the first step one process has no advantages, so dynamic_sampling doubles the weights of the other's prompts.
REMEDIES = ("dynamic_sampling", "w_reinforce:0.5", "top_entropy:0.5", "bonus:0.1", "lr:0.5")
COLLECTIVES = ("all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_object", "broadcast", "reduce_scatter")


def deepspeed_settings(kind: str) -> dict[str, Any]:
    """Return launch/KIND.json. For ZeRO-3, shard small parameters too, which would otherwise stay whole."""
    settings = json.loads((ROOT / "launch" / f"{kind}.json").read_text(encoding="utf-8"))
    if kind == "zero3":
        settings["zero_optimization"]["stage3_param_persistence_threshold"] = 0
    return settings


def ask_for_fsdp2() -> None:
    """Set the environment variables that accelerate's launcher sets for launch/fsdp2.yaml."""
    asked = ["--config_file", str(ROOT / "launch" / "fsdp2.yaml"), "--num_processes", "2", "train.py"]
    arguments, *_ = _validate_launch_command(launch_command_parser().parse_args(asked))
    env = prepare_multi_gpu_env(arguments)
    os.environ |= {name: env[name] for name in env if name.startswith("FSDP_") or name == "ACCELERATE_USE_FSDP"}


class GivenRollouts(GRPOTrainer):
    """TRL's trainer with given rollouts instead of sampled ones. Its settings decide how many prompts they have."""

    first_rollout = 1

    def __init__(self, **arguments: Any) -> None:
        if arguments["args"].use_cpu and "ACCELERATE_USE_FSDP" in os.environ:  # accelerate has no FSDP2 on the CPU
            PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU  # with this it uses FSDP2 anyway
        super().__init__(**arguments)

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, torch.Tensor]:
        share = len(inputs)
        num_prompts = share * self.accelerator.num_processes // G
        whole = given_rollout(self.first_rollout + self.state.global_step, num_prompts)
        whole[BUFFER_REWARD] = rewards_of(whole)  # as of a buffer, which has drawn these rows
        rows = slice(self.accelerator.process_index * share, (self.accelerator.process_index + 1) * share)
        rank_inputs = {
            key: (value[rows] if value.ndim else value).to(self.accelerator.device) for key, value in whole.items()
        }
        width = int(rank_inputs["completion_mask"].sum(dim=1).max())  # each process pads to its own longest sequence
        rank_inputs |= {key: rank_inputs[key][:, :width] for key in ("completion_ids", "completion_mask")}
        return rank_inputs


class ReplayTrainer(GivenRollouts, DrGRPOTrainer):
    """The same with this package's trainer."""


class Recorder(Probe):
    """Keeps this rank's entries of the gradient, the Adam state before each step, and the mean over folds.

    It runs last: if another probe's backward had triggered the hooks, this mean would show it.
    """

    name = "recorder"
    needs = Need.FOLD_GRADIENTS

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[dict[str, torch.Tensor]] = []
        self.listens = False  # whether a SIGTERM handler is installed

    def measure(self, ctx: Any, state: Any) -> Reading:
        step = ctx.step
        self.listens = signal.getsignal(signal.SIGTERM) != signal.SIG_DFL
        by_fold = step.gradients.layout.by_name(step.gradients.by_fold.means())
        kinds = {
            "gradient": step.gradients.mean,
            "own": {name: vectors.mean(dim=0) for name, vectors in by_fold.items()},
            "exp_avg": {name: state.exp_avg for name, state in step.optimizer.states.items()},
            "exp_avg_sq": {name: state.exp_avg_sq for name, state in step.optimizer.states.items()},
        }
        self.steps.append({f"{kind}/{name}": t.clone() for kind, named in kinds.items() for name, t in named.items()})
        return Reading(measured={"recorder/clipping": Estimate(step.optimizer.max_grad_norm)})


@contextlib.contextmanager
def logged_collectives() -> Iterator[list[int]]:
    """Yield a list that collects the number of elements of every collective called from Python meanwhile."""
    sizes: list[int] = []
    originals = {name: getattr(dist, name) for name in COLLECTIVES}

    def logged(original: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            parts = [part for a in (*args, *kwargs.values()) for part in (a if isinstance(a, (list, tuple)) else [a])]
            sizes.append(sum(part.numel() for part in parts if isinstance(part, torch.Tensor)))
            return original(*args, **kwargs)

        return call

    for name, original in originals.items():
        setattr(dist, name, logged(original))
    yield sizes
    for name, original in originals.items():
        setattr(dist, name, original)


def probes_of(run: str) -> list[Probe]:
    """Return the probes of a run: those for which its launch takes a different code path.

    Interventions and token classes run in the engine: parallel/test_sharding.py covers them under FSDP2, and ZeRO-2
    covers ZeRO-1. A resumed run has none: a checkpoint keeps their states like those of other probes. For the truth
    the whole model samples, unless its weights are sharded.
    """
    if run.endswith(("bare", "remedied", "bounded")):
        return []
    if run.endswith("lora"):
        return [Recorder()]
    probes: list[Probe] = [SimpleEntropyProbe(per_sequence=True), MeasuredStepProbe()]
    if not run.endswith("bf16"):
        probes += [GradientNoiseScaleProbe(), EffectiveSampleSizeProbe()]
        if run.startswith(("plain_2", "zero3", "fsdp2")) or "_gpu" in run:  # DDP, and sharded weights
            probes.append(GroundTruthProbe(every=STEPS, sequences=16))  # at the first step
    if "_gpu" in run or not (run.startswith(("fsdp2", "zero1")) or run.endswith(("resumed", "continued"))):
        probes += [
            InterventionsProbe(["bonus:0.5", "w_reinforce:0.5", "lr:0.5", "top_entropy"], every=1),
            TokenClassesProbe(every=1),
        ]
    return [*probes, Recorder()]


def train_all(rank: int, folder: Path, runs: list[str], port: int) -> None:
    """Train runs of the same kind and number of processes, as process `rank` of each."""
    environment, trainers = dict(os.environ), []
    for run in runs:
        unset_hf_deepspeed_config()  # else the next model's weights would be sharded while they are loaded
        trainers.append(train(rank, folder, run, port))
        if dist.is_initialized():
            dist.barrier()
        os.environ.clear()
        os.environ.update(environment)
    os._exit(0)  # no teardown: freeing DDP's gloo group holds the GIL and waits for a thread that may need the GIL


def train(rank: int, folder: Path, run: str, port: int) -> DrGRPOTrainer:
    """Train as process `rank` of a run, save what it recorded, and return the trainer, which must not be freed."""
    kind, processes = run.split("_")[:2]
    world, on_gpus = int(processes), "_gpu" in run
    if world > 1 or kind == "fsdp2":
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": processes,
                       "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}  # fmt: skip
    if on_gpus and world == 1:
        os.environ["CUDA_VISIBLE_DEVICES"] = "0"  # otherwise transformers would train on all GPUs
    if kind == "fsdp2":
        ask_for_fsdp2()
    if kind.startswith("zero"):
        import deepspeed

        os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"  # as accelerate launch does; without it this would be DDP
        # Otherwise DeepSpeed would compile its shared-memory all-reduce, a minute of g++ behind a lock file. Use gloo.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    probes = probes_of(run)
    settings = {
        "use_cpu": not on_gpus,
        "bf16": "_bf16" in run,
        "deepspeed": deepspeed_settings(kind) if kind.startswith("zero") else None,
        "per_device_train_batch_size": MICROBATCH,
        "gradient_accumulation_steps": PROMPTS * G // (MICROBATCH * world),
        "num_generations": G,
        "max_completion_length": L_MAX,
        "max_steps": 1 if run.endswith("bounded") else STEPS,  # remedied runs too: they are compared with plain_1
        "adam_epsilon": 1e-5,  # without it Adam's first step is a sign, and rounding decides the sign of a zero
        "max_grad_norm": 0.05,  # every step is clipped
        "lr_scheduler_type": "linear",
        **({"target_kl_share": 2e-3, "learning_rate": 1e-2} if run.endswith("bounded") else {}),
        "save_strategy": "no"
        if run.endswith(("bare", "resumed", "continued", "bf16", "remedied", "bounded"))
        else "steps",
        "save_steps": 1,
    }
    GivenRollouts.first_rollout = ZERO_STEP
    trainer = trainer_maker(folder / run)(
        GivenRollouts if run in TWO_LINES else ReplayTrainer,
        peft_config=LORA if run.endswith("lora") else None,
        probes=probes,
        interventions=REMEDIES if run.endswith("remedied") else (),
        records=Records(folder / run / "logs"),
        **settings,
    )
    other = "plain_2" if run == "plain_1_continued" else run.removesuffix("_resumed")
    before = folder / other / "state" / "checkpoint-1"
    attachment = attach(trainer, folder / run, probes) if run in TWO_LINES else contextlib.nullcontext()
    with logged_collectives() as sizes, attachment:
        trainer.train(resume_from_checkpoint=None if other == run else str(before))
    assert trainer.accelerator.num_processes == world
    assert (trainer.is_deepspeed_enabled, trainer.is_fsdp_enabled) == (kind.startswith("zero"), kind == "fsdp2")
    if kind == "zero3":
        trainer.model_wrapped.empty_partition_cache()  # DeepSpeed prefetched weights for a backward; scoring has none
        assert all(p.numel() == 0 for p in trainer.model.parameters())  # they are sharded again
    if kind == "fsdp2":
        assert all(isinstance(p, DTensor) for p in trainer.model.parameters())
    uneven = run in ("zero3_2", "fsdp2_2")  # one process samples 33 sequences, the other 32, at most 32 at once
    fresh = 0
    if uneven:
        policy = TrainerPolicy(trainer)
        policy.lockstep_ranks = all_ranks()
        trainer.generation_config.max_new_tokens = 4
        fresh = policy.sample(65, seed=0).num_sequences
    with whole_weights(trainer):
        weights = {name: whole(p).detach().clone() for name, p in trainer.model.named_parameters()}
    recorder = next((probe for probe in probes if isinstance(probe, Recorder)), Recorder())
    torch.save(
        {
            "steps": recorder.steps,
            "listens": recorder.listens,
            "parameters": weights,
            "collectives": sizes,
            "fresh": fresh,
        },
        folder / run / f"{rank}.pt",
    )
    return trainer


def whole_weights(trainer: DrGRPOTrainer) -> Any:
    """Return a context in which ZeRO-3's weights are gathered."""
    if trainer.is_deepspeed_enabled:
        import deepspeed

        return deepspeed.zero.GatheredParameters(list(trainer.model.parameters()))
    return contextlib.nullcontext()


def whole(value: Any) -> torch.Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


if __name__ == "__main__":
    destination = Path(sys.argv[1])
    with contextlib.suppress(ImportError):  # if it is installed, accelerate would import it in every process
        importlib.import_module("deepspeed")
    gc.freeze()  # so that no fork's garbage collector looks through the objects made so far
    runs: dict[tuple[str, str, bool], list[str]] = {}
    for name in sys.argv[2:]:
        (destination / name).mkdir(parents=True)
        kind, processes = name.split("_")[:2]
        runs.setdefault((kind, processes, "_gpu" in name), []).append(name)
    for (_, processes, on_gpus), names in runs.items():
        torch.multiprocessing.start_processes(
            train_all,
            args=(destination, names, get_free_port()),
            nprocs=int(processes),
            start_method="spawn" if on_gpus else "fork",  # an import may have initialized CUDA
        )
