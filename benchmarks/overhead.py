"""What probes cost, as Markdown tables: time per step, peak memory, bytes over the network.

    OMP_NUM_THREADS=1 python benchmarks/overhead.py                          # the default task
    OMP_NUM_THREADS=1 python benchmarks/overhead.py --shape hidden512 --rank 16 --prompts 16
    OMP_NUM_THREADS=1 python benchmarks/overhead.py --shape hidden512 --rank 16 --prompts 16 --grow
    python benchmarks/overhead.py --shape qwen2_5_1_5b --rank 16 --completion-tokens 512 --bf16 --checkpointing

Time: within one run the probes measure every second step. Each pair of adjacent steps, with and without probes, gives
two ratios: of the whole step, and of its forward, backward and optimizer without generation. The table has medians and
quartiles. Times are processor time on the CPU, which other jobs disturb less; on a GPU, between synchronisations.

Memory: the peak of a step with probes minus the peak of the same step without, after generation, in units of one fp32
vector over the trainable parameters. Network: bytes that a process passes to collectives in a measured step, in two
processes on the CPU, with as many layers but narrow ones: it does not depend on the width. DDP's gradient is excluded.

`--target-kl-share 2e-3` prints the cost of bounding each step instead: a step's time divided by the same step's time
minus that of the bound. Bounding only every second step would be a different run.

`--grow` prints how the time of `simple` grows with the trainable parameters, the tokens and the folds instead.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import os
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import rl_training.job.silence  # noqa: F401

import torch
import torch.distributed as dist
import torch.multiprocessing
from accelerate.utils.other import get_free_port
from torch.profiler import ProfilerActivity, profile, record_function
from transformers import TrainerCallback
from workload import SHAPES, Workload, make_trainer, model_config

from rl_training import DrGRPOTrainer, Probe
from rl_training.probes import (
    EffectiveSampleSizeProbe,
    GradientNoiseScaleProbe,
    InterventionsProbe,
    MeasuredStepProbe,
    SimpleEntropyProbe,
    TokenClassesProbe,
)

PROBES: dict[str, Callable[..., Probe]] = {
    "simple": SimpleEntropyProbe,
    "measured": MeasuredStepProbe,
    "gns": GradientNoiseScaleProbe,
    "ess": EffectiveSampleSizeProbe,
    "interventions": InterventionsProbe,
    "four_families": functools.partial(InterventionsProbe, ["bonus", "psr", "nsr", "lr", "clip_cov", "top_entropy"]),
    "token_classes": TokenClassesProbe,
}
SETS = ("simple", "gns+ess", "simple+gns+ess")
COLLECTIVES = ("all_reduce", "all_gather", "all_gather_into_tensor", "all_to_all_single", "broadcast")


def make_probes(names: str, **options: Any) -> list[Probe]:
    return [PROBES[name](**options) for name in names.split("+")]


def now() -> float:
    """Return a clock in seconds: processor time, or wall time after synchronizing with the GPU."""
    if not torch.cuda.is_available():
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


def seconds_of(work: Callable[[], object]) -> float:
    start = now()
    work()
    return now() - start


def interleaved(plain: Callable[[], object], other: Callable[[], object], pairs: int = 7) -> tuple[float, float]:
    """Time both alternately. Return the medians of plain's seconds and of the ratio plain / other over the pairs."""
    plain(), other()
    timed = [(seconds_of(plain), seconds_of(other)) for _ in range(pairs)]
    return statistics.median(a for a, _ in timed), statistics.median(a / b for a, b in timed)


class StepTimer(TrainerCallback):
    """Seconds of each optimizer step, whole and without generation."""

    def __init__(self, trainer: DrGRPOTrainer) -> None:
        self.whole: list[float] = []
        self.training: list[float] = []
        self._generate = trainer._generate_and_score_completions
        trainer._generate_and_score_completions = self._timed_generation
        trainer.add_callback(self)  # last, so that it also times what probes do at the end of a step

    def _timed_generation(self, inputs: Any) -> Any:
        start = now()
        output = self._generate(inputs)
        self._generation += now() - start
        return output

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        self._start, self._generation = now(), 0.0

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.whole.append(now() - self._start)
        self.training.append(self.whole[-1] - self._generation)


def ratios(workload: Workload, probes: str, steps: int) -> tuple[list[float], list[float], float]:
    """Return with / without ratios of adjacent steps for training and for whole steps, and generation's time share."""
    trainer = make_trainer(workload, make_probes(probes, every=2), max_steps=steps)
    timer = StepTimer(trainer)
    trainer.train()
    warm_up = 2
    pairs = [
        [on / off for on, off in zip(seconds[warm_up::2], seconds[warm_up + 1 :: 2], strict=False)]
        for seconds in (timer.training, timer.whole)
    ]
    without = slice(warm_up + 1, None, 2)
    return pairs[0], pairs[1], 1.0 - sum(timer.training[without]) / sum(timer.whole[without])


def bound_ratios(workload: Workload, steps: int) -> list[list[float]]:
    """Return each step's time with the bound divided by its time without, for training and for the whole step."""
    trainer = make_trainer(workload, [], max_steps=steps)
    timer, spent = StepTimer(trainer), []

    def timed(method: Callable[..., Any], *args: Any) -> None:
        spent.append(seconds_of(lambda: method(*args)))

    driver = trainer.attachment.driver
    for name in ("gradients_ready", "stepped"):  # each runs once in a step, and here does nothing but the bound
        setattr(driver, name, functools.partial(timed, getattr(driver, name)))
    trainer.train()
    pairs = [first + second for first, second in zip(spent[::2], spent[1::2], strict=True)]
    whole_and_part = [zip(seconds, pairs, strict=True) for seconds in (timer.training, timer.whole)]
    return [[total / (total - part) for total, part in parts] for parts in whole_and_part]


class PeakMeter(TrainerCallback):
    """Measures the peak of allocated bytes in the last step of a training, after its generation."""

    def __init__(self, trainer: DrGRPOTrainer) -> None:
        self.peak = 0
        self._generate = trainer._generate_and_score_completions
        trainer._generate_and_score_completions = self._apart
        trainer.add_callback(self)
        self._profile = profile(activities=[ProfilerActivity.CPU], profile_memory=True)

    def _apart(self, inputs: Any) -> Any:
        with record_function("generation"):
            output = self._generate(inputs)
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        return output

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        if not torch.cuda.is_available():
            self._profile.start()

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        if torch.cuda.is_available():
            self.peak = torch.cuda.max_memory_allocated()
            return
        self._profile.stop()
        assert self._profile.profiler is not None
        events = self._profile.profiler.kineto_results.events()
        generated = max(event.end_ns() for event in events if event.name() == "generation")
        level = 0
        for event in sorted(events, key=lambda event: event.start_ns()):
            if event.name() == "[memory]":
                level += event.nbytes()
                if event.start_ns() > generated:
                    self.peak = max(self.peak, level)


def extra_memory(workload: Workload, probes: str) -> float:
    """Return the peak with the probes minus that without, in fp32 vectors over the trainable parameters."""
    peaks = []
    for names in (make_probes(probes, every=1), []):
        trainer = make_trainer(workload, names, max_steps=2)
        meter = PeakMeter(trainer)
        trainer.train()
        peaks.append(meter.peak)
        vector = 4 * sum(p.numel() for p in trainer.model.parameters() if p.requires_grad)
        del trainer, meter
    return (peaks[0] - peaks[1]) / vector


@contextlib.contextmanager
def counted(sent: list[int]) -> Iterator[None]:
    """Append the bytes of every collective called from Python to `sent`. DDP's own collective is not counted."""
    with contextlib.ExitStack() as stack:
        for name in COLLECTIVES:
            original = getattr(dist, name)

            def count(*args: Any, original: Callable[..., Any] = original, **kwargs: Any) -> Any:
                tensor = next(a for a in reversed(args) if isinstance(a, torch.Tensor))
                sent.append(tensor.numel() * tensor.element_size())
                return original(*args, **kwargs)

            stack.enter_context(mock.patch.object(dist, name, count))
        yield


def _process(rank: int, port: int, workload: Workload, sets: tuple[str, ...], queue: Any) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    os.environ |= {"MASTER_PORT": str(port), "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    torch.set_num_threads(1)
    config = model_config(workload.shape)
    config.hidden_size, config.intermediate_size, config.vocab_size = 16 * config.num_attention_heads, 64, 128
    folds = 4  # microbatches of each of the two processes
    small = dataclasses.replace(workload, prompts=4 * folds, folds=folds, completion_tokens=4, bf16=False)
    totals = []
    for names in ("", *sets):
        sent: list[int] = []
        trainer = make_trainer(small, make_probes(names, every=1) if names else [], max_steps=2, config=config)
        with counted(sent):
            trainer.train()
        totals.append(sum(sent))
    if rank == 0:
        queue.put([(total - totals[0]) / 2 for total in totals[1:]])
    dist.destroy_process_group()


def bytes_sent(workload: Workload, sets: tuple[str, ...]) -> list[float]:
    """Return the bytes per step that each set of probes passes to collectives, in two processes on the CPU."""
    context = torch.multiprocessing.get_context("spawn")
    queue = context.SimpleQueue()
    torch.multiprocessing.spawn(_process, args=(get_free_port(), workload, sets, queue), nprocs=2)
    return queue.get()


def quartiles(values: list[float]) -> str:
    low, median, high = statistics.quantiles(values, n=4)
    return f"{median:.3f} ({low:.3f} – {high:.3f})"


def print_costs(workload: Workload, sets: tuple[str, ...], steps: int) -> None:
    print("| probes | forward + backward + optimizer | whole step | memory, vectors | sent, bytes a step |")
    print("|---|---|---|---|---|")
    traffic = bytes_sent(workload, sets)
    for names, sent in zip(sets, traffic, strict=True):
        training, whole, share = ratios(workload, names, steps)
        memory = extra_memory(workload, names)
        print(f"| `{names}` | {quartiles(training)} | {quartiles(whole)} | {memory:.1f} | {sent:.0f} |", flush=True)
    print(f"\n{len(training)} pairs each; generation takes {share:.0%} of a step without probes.")


def print_bound(workload: Workload, steps: int) -> None:
    training, whole = bound_ratios(workload, steps)
    print("| steps | forward + backward + optimizer | whole step |\n|---|---|---|")
    for name, some in (("1 to 10", slice(10)), (f"11 to {steps}", slice(10, None))):  # the first search for the factor
        print(f"| {name} | {quartiles(training[some])} | {quartiles(whole[some])} |")


def print_growth(workload: Workload, steps: int) -> None:
    """Print how the cost of `simple` grows when one number of the workload is halved and doubled."""
    print("| what | forward + backward + optimizer | whole step |")
    print("|---|---|---|")
    for field in ("rank", "completion_tokens", "folds"):
        middle = getattr(workload, field)
        for value in (middle // 2, middle, middle * 2) if middle else (0,):
            training, whole, _ = ratios(dataclasses.replace(workload, **{field: value}), "simple", steps)
            print(f"| {field} = {value} | {quartiles(training)} | {quartiles(whole)} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="default_task", help=f"default_task, {', '.join(SHAPES)}, a config.json")
    for field in dataclasses.fields(Workload):
        if field.name != "shape":
            flag = "--" + field.name.replace("_", "-")
            kind: dict[str, Any] = {"action": "store_true"} if field.default is False else {"type": type(field.default)}
            parser.add_argument(flag, default=field.default, **kind)
    parser.add_argument("--sets", nargs="+", default=SETS, help="sets of probes, joined by +")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--grow", action="store_true")
    options = vars(parser.parse_args())
    sets, steps, grow = tuple(options.pop("sets")), options.pop("steps"), options.pop("grow")
    workload = Workload(**options)
    if workload.target_kl_share:
        print_bound(workload, steps)
    elif grow:
        print_growth(workload, steps)
    else:
        print_costs(workload, sets, steps)


if __name__ == "__main__":
    main()
