"""The sections of benchmarks/gpu.py, which runs each in a process of its own: GPU memory, and a hang, end with it.

    python benchmarks/gpu_sections.py SECTION --page gpu.md --seconds 60 [--small]

Each section yields lines of Markdown, which are appended to the page at once. Models have random weights: LoRA is on
one of Qwen2.5-1.5B's shape, and all weights are trained of one of Qwen2.5-0.5B's. Responses are given, not sampled, so
a step has no generation. Ratios compare adjacent steps with and without probes. Memory formula: (K + 3) × 4 bytes per
trained parameter, with K folds, for `simple`, (K/4 + 2) × 4 bytes from 2^25 parameters on; 3 × 4 bytes for `measured`.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import rl_training.job.silence  # noqa: F401

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when CUDA starts; the tests compare bit for bit
os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "PLAIN_TESTS": "1"}  # no shortcuts of tests

import pytest
import torch
from gpu import append
from overhead import StepTimer, bound_ratios, interleaved, make_probes
from transformers import TrainerCallback
from workload import Workload, make_trainer

from rl_training import DrGRPOTrainer, Probe
from rl_training.offline.kernel.blocks import row_products
from rl_training.parallel.vectors import LARGE
from rl_training.probes import SimpleEntropyProbe
from rl_training.records.provenance import provenance

ROOT = Path(__file__).parents[1]
GPU = torch.cuda.is_available()
FIRST = 3  # first step with probes: Adam has its states by then. It also checks the padding and allocates what is kept
WARM_UP = 4  # steps before the first one reported; the peak memory of the last of them is the baseline
SHARE_LEFT = 0.3  # a training is not started with less of the section's time left


@dataclass(frozen=True)
class Scale:
    """The sizes used in each section."""

    shape: str
    full_shape: str  # of the model whose weights are all trained
    ranks: tuple[int, ...]
    tokens: tuple[int, ...]
    prompts: int
    responses: int
    prompt_tokens: int
    pairs: int  # of adjacent steps, one with probes and one without
    precision: tuple[int, int]  # steps, microbatches
    product: tuple[int, int, int]  # held rows, streamed rows, columns

    def workload(self, rank: int, tokens: int, checkpointing: bool, kl_share: float = 0.0) -> Workload:
        return Workload(
            self.shape if rank else self.full_shape, rank, self.prompts, self.responses, self.prompt_tokens, tokens,
            folds=self.prompts, checkpointing=checkpointing, bf16=GPU, given=True, target_kl_share=kl_share,
        )  # fmt: skip


FULL = Scale("qwen2_5_1_5b", "qwen2_5_0_5b", (16, 64), (512, 256, 1024), 8, 8, 64, 2, (8, 16), (64, 16, 18_464_768))
SMALL = Scale("small", "small", (2,), (6,), 4, 2, 4, 1, (2, 2), (8, 4, 100_000))


class Meter(StepTimer):
    """Seconds of each step without generation, and the peak of allocated bytes after generation (nan without CUDA)."""

    def __init__(self, trainer: DrGRPOTrainer) -> None:
        super().__init__(trainer)
        self.peaks: list[float] = []

    def _timed_generation(self, inputs: Any) -> Any:
        output = super()._timed_generation(inputs)
        if GPU:
            torch.cuda.reset_peak_memory_stats()
        return output

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        super().on_step_end(*args, **kwargs)
        self.peaks.append(float(torch.cuda.max_memory_allocated()) if GPU else float("nan"))


class SyncCounter(TrainerCallback):
    """Counts, for each step, how often each line of Python made the host wait for the GPU."""

    def __init__(self) -> None:
        self.steps: list[Counter[str]] = []

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        self._watch = warnings.catch_warnings(record=True)
        self._caught = self._watch.__enter__()
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        torch.cuda.set_sync_debug_mode("default")
        self._watch.__exit__(None, None, None)
        waits = (w for w in self._caught or () if "synchroniz" in str(w.message))
        self.steps.append(Counter(f"{'/'.join(Path(w.filename).parts[-3:])}:{w.lineno}" for w in waits))


def every_second(probes: list[Probe]) -> list[Probe]:
    """Make the probes measure every second step from FIRST on, and return them."""
    for probe in probes:
        probe.measures_at = lambda step: step >= FIRST and (step - FIRST) % 2 == 0  # type: ignore[method-assign]
    return probes


def trained(workload: Workload, probes: list[Probe], steps: int) -> tuple[DrGRPOTrainer, Meter]:
    gc.collect()  # frees the previous trainer, whose parts refer to one another
    trainer = make_trainer(workload, probes, max_steps=steps)
    meter = Meter(trainer)
    trainer.train()
    return trainer, meter


@dataclass(frozen=True)
class Deadline:
    """When a section is stopped, and the page on which it writes rows that it cannot yield."""

    page: Path
    seconds: float
    start: float

    def is_near(self) -> bool:
        """Return whether too little time is left for another training."""
        return time.monotonic() - self.start > (1 - SHARE_LEFT) * self.seconds


# --- the sections: each yields lines of Markdown ------------------------------------------------------------------


def machine(scale: Scale, deadline: Deadline) -> Iterator[str]:
    if GPU:
        about = torch.cuda.get_device_properties(0)
        yield f"{about.name}, {about.total_memory / 1e9:.0f} GB, CUDA {torch.version.cuda}\n"
    else:
        yield f"CPU, {torch.get_num_threads()} threads. There is no GPU: the figures only show that the command runs\n"
    origin = provenance()
    yield "\n".join(f"- {key}: {origin[key]}" for key in ("commit", "started", "python", "libraries"))


def tests(scale: Scale, deadline: Deadline) -> Iterator[str]:
    class Outcomes:
        """Writes each test's outcome when it ends."""

        def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
            if report.when == "call" or report.outcome != "passed":
                append(deadline.page, f"| {report.nodeid.split('::')[-1]} | {report.outcome} | {report.duration:.1f} |")
            if report.failed:
                failures.append(f"### {report.nodeid}\n\n```\n{report.longreprtext}\n```")

    failures: list[str] = []
    yield "| test | outcome | seconds |\n|---|---|---|"
    arguments = ["-q", "-pno:cacheprovider", "-k", "not [cpu", str(ROOT / "tests" / "engine" / "test_cuda.py")]
    code = pytest.main(arguments, plugins=[Outcomes()])
    yield from ("", *failures)
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        raise AssertionError(f"pytest ended with {code!r}")


def offload(scale: Scale, deadline: Deadline) -> Iterator[str]:
    workload = scale.workload(scale.ranks[0], scale.tokens[0], checkpointing=True)
    yield "| rows in | seconds of a measured step | peak, GB |\n|---|---|---|"
    for offloaded in (False, True):
        _, meter = trained(workload, every_second([SimpleEntropyProbe(offload=offloaded)]), WARM_UP + 1)
        where = "host memory" if offloaded else "GPU memory" if GPU else "memory"
        yield f"| {where} | {meter.training[-1]:.2f} | {meter.peaks[-1] / 1e9:.2f} |"


def waits(scale: Scale, deadline: Deadline) -> Iterator[str]:
    if not GPU:
        yield "Counted on a GPU only."
        return
    workload = scale.workload(scale.ranks[0], scale.tokens[0], checkpointing=False)
    trainer = make_trainer(workload, every_second(make_probes("simple+gns+ess")), max_steps=WARM_UP + 2)
    counter = SyncCounter()
    trainer.add_callback(counter)  # last, so that it sees the end of a step after the probes have measured
    trainer.train()
    measured_step, bare = counter.steps[-2:]
    yield f"{bare.total()} in a step without probes, {measured_step.total()} with all three:"
    yield "\n| place | without | with |\n|---|---|---|"
    for place, count in measured_step.most_common(20):
        yield f"| {place} | {bare[place]} | {count} |"


def precisions(scale: Scale, deadline: Deadline) -> Iterator[str]:
    # Not above: this changes the package for the whole process.
    from precision import METRICS, PRECISIONS, RATIOS, Tape, compare, run_precision

    tape = Tape()
    exact, *others = [run_precision("tiny", precision, tape, *scale.precision) for precision in PRECISIONS]
    yield f"{scale.precision[0]} steps of the default task with LoRA of rank 16.\n"
    yield "| precision | metric | rms difference / rms value | median difference / standard error | largest |"
    yield "|---|---|---|---|---|"
    for precision, lines in zip(list(PRECISIONS)[1:], others, strict=True):
        figures = compare(exact, lines)
        for name in METRICS:
            relative, _, median, most = figures[name]
            yield f"| {precision} | `{name}` | {relative:.4f} | {median:.3f} | {most:.3f} |"
        for name in RATIOS:
            low, high = figures[name]
            yield f"| {precision} | `{name}` | ratio {low:.4f} … {high:.4f} | | |"


def products(scale: Scale, deadline: Deadline) -> Iterator[str]:
    held_rows, streamed_rows, columns = scale.product
    device = torch.device("cuda" if GPU else "cpu")
    generator = torch.Generator(device).manual_seed(0)
    held, streamed = (torch.randn(n, columns, generator=generator, device=device) for n in (held_rows, streamed_rows))
    exact = sum(a.double() @ b.double().T for a, b in zip(held.split(2**16, 1), streamed.split(2**16, 1), strict=True))
    assert isinstance(exact, torch.Tensor)
    yield f"{held_rows} × {columns:,} × {streamed_rows}.\n"
    yield "| held rows in | GFLOP/s | share of one plain fp32 product | error, Frobenius |\n|---|---|---|---|"
    for dtype in (torch.float32, torch.bfloat16):
        rows = held.to(dtype)
        plain, share = interleaved(lambda: held @ streamed.T, lambda rows=rows: row_products(rows, streamed))
        rate = share * 2 * held_rows * streamed_rows * columns / plain / 1e9
        error = float((row_products(rows, streamed) - exact).norm() / exact.norm())
        yield f"| {str(dtype).removeprefix('torch.')} | {rate:.0f} | {share:.2f} | {error:.1g} |"


def costs(scale: Scale, deadline: Deadline) -> Iterator[str]:
    rank, tokens = scale.ranks[0], scale.tokens[0]
    first = [(rank, tokens, False, names) for names in ("simple", "measured", "gns+ess")]
    others = [(r, t, c, "simple") for t in scale.tokens for r in scale.ranks for c in (False, True)]
    yield from _cost_rows(scale, deadline, [*first, *others[1:]])


def all_weights(scale: Scale, deadline: Deadline) -> Iterator[str]:
    yield from _cost_rows(scale, deadline, [(0, scale.tokens[0], True, names) for names in ("simple", "measured")])


def _cost_rows(scale: Scale, deadline: Deadline, plan: list[tuple[int, int, bool, str]]) -> Iterator[str]:
    """Yield a row for each rank (0: all weights), number of tokens, checkpointing or not, and names of probes."""
    yield f"{scale.prompts} folds of a prompt with {scale.prompt_tokens} tokens and {scale.responses} responses.\n"
    yield "| rank | tokens | checkpointing | probes | seconds without | with / without | more memory, GB | formula |"
    yield "|---|---|---|---|---|---|---|---|"
    for number, (rank, tokens, checkpointing, names) in enumerate(plan):
        if number and deadline.is_near():
            yield f"\nLeft out for lack of time: {len(plan) - number} of {len(plan)} rows."
            return
        workload = scale.workload(rank, tokens, checkpointing)
        trainer, meter = trained(workload, every_second(make_probes(names)), WARM_UP + 2 * scale.pairs)
        if trainer.attachment.driver.costs.num_bytes is None:
            raise RuntimeError(f"no probe of {names} has measured a step")
        seconds, peaks = meter.training[WARM_UP:], meter.peaks
        ratio = statistics.median(a / b for a, b in zip(seconds[::2], seconds[1::2], strict=True))
        num_trained = sum(p.numel() for p in trainer.model.parameters() if p.requires_grad)
        kept = scale.prompts / 4 + 2 if num_trained >= LARGE else scale.prompts + 3
        vectors = {"simple": kept, "measured": 3}.get(names, 1)
        more, formula = (peaks[WARM_UP] - peaks[WARM_UP - 1]) / 1e9, vectors * 4 * num_trained / 1e9
        yield (
            f"| {rank or 'all weights'} | {tokens} | {'yes' if checkpointing else 'no'} | `{names}` | "
            f"{statistics.median(seconds[1::2]):.2f} | {ratio:.3f} | {more:.2f} | {formula:.2f} |"
        )
        del trainer, meter


def bounded(scale: Scale, deadline: Deadline) -> Iterator[str]:
    yield "| rank | tokens | with / without the bound: median, quartiles |\n|---|---|---|"
    workload = scale.workload(scale.ranks[0], scale.tokens[0], checkpointing=True, kl_share=2e-3)
    ratios, _ = bound_ratios(workload, WARM_UP + 4)
    low, median, high = statistics.quantiles(ratios[WARM_UP:], n=4)
    yield f"| {scale.ranks[0]} | {scale.tokens[0]} | {median:.3f} ({low:.3f} – {high:.3f}) |"


SECTIONS: dict[str, Callable[[Scale, Deadline], Iterator[str]]] = {
    section.__name__: section
    for section in (machine, tests, waits, costs, all_weights, bounded, offload, precisions, products)
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", choices=SECTIONS, nargs="+", metavar="SECTION", help=", ".join(SECTIONS))
    parser.add_argument("--page", type=Path, required=True)
    parser.add_argument("--seconds", type=float, required=True, help="after this time the section will be stopped")
    parser.add_argument("--small", action="store_true")
    options = parser.parse_args()
    if not GPU and not options.small:
        parser.error("there is no GPU here: --small runs the same on the CPU")
    for section in options.sections:
        deadline = Deadline(options.page, options.seconds, time.monotonic())
        for line in SECTIONS[section](SMALL if options.small else FULL, deadline):
            append(options.page, line)


if __name__ == "__main__":
    main()
