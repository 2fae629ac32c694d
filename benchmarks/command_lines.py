"""Do all command lines of train.py end well? Over 150 of them, right and wrong ones.

    OMP_NUM_THREADS=1 python benchmarks/command_lines.py [--only WORD] [--seconds 60]

runs each in a process of its own and prints how it ended, with its last line. A line ends badly when its last words are
a traceback, when it says nothing and fails, when it ends with 0 and has trained nothing, when it lasts longer than
--seconds, or when it leaves a process behind. Exit code 1 if any does. A run is train.py in a fork of this process,
which has imported everything already.
"""

from __future__ import annotations

import argparse
import os
import runpy
import shutil
import signal
import sys
import tempfile
import time
from dataclasses import dataclass
from itertools import product
from multiprocessing.context import ForkProcess
from pathlib import Path

import rl_training.job.silence

import rl_training.job.build  # noqa: F401, for the forks
from rl_training.records.jsonl import METRICS_FILE, read_metrics

ROOT = Path(__file__).parents[1]
SMALL = [
    "trainer.max_steps=1",
    "trainer.num_generations=4",
    "batch.sequences_per_step=16",
    "batch.microbatch_size=4",
    "trainer.max_completion_length=8",
    "logger=none",
    "trainer.disable_tqdm=true",
]
NUMBERS = ["0", "-2", "1.5", "1e10", "nan", "abc", "null", ""]
SETTINGS = [
    "seed",
    "trainer.max_steps",
    "trainer.learning_rate",
    "trainer.num_generations",
    "trainer.temperature",
    "batch.sequences_per_step",
    "batch.microbatch_size",
    "probes.simple.every",
    "probes.simple.num_folds",
]
PATHS = [
    "",
    "null",
    "~/x y",
    "/proc/x",
    "/dev/null",
    "a=b",
    "ä",
    "[x]",
    "a,b",
    "(",
    '"',
    "${seed}",
    "${nothing}",
    "5",
    ".",
]
OTHERS = [
    "sed=1", "trainer=foo", "probe=simpel", "probe=simple,gns", "probe=[simple,gns", "probe=[]", "probe=", "foo",
    "=", "+", "-x", "--hlep", "--help", "--cfg job", "--cfg foo", "--multirun seed=1,2", "--version", "--info",
    "--debug seed=-1", "+x=1", "~seed", "~trainer", "~probes", "~batch", "trainer.foo=1", "trainer.max_stepz=3",
    "model=hub", "model=hub model.name=/nowhere", "model=hub model.name=.", "model.name=x", "model.dtype=float99",
    "+model.dtype=bfloat16", "adapter=lora", "adapter=lora adapter.r=0", "adapter=lora adapter.r=-3",
    "adapter=qlora", "data=gsm8k data.path=/nowhere", "data=gsm8k data.path=README.md", "data=gsm8k data.path=.",
    "+data.num_train=2", "+data.num_train=0", "+data.num_train=-1", "data=foo", "buffer=filtered",
    "buffer=filtered buffer.floor=2", "buffer=filtered buffer.max_attempts=0",
    "buffer=filtered buffer.half_life=0", "resume=latest", "resume=/nowhere", "resume=.", "resume=",
    "resume=null", "resume=5", "logger=foo", "logger=none trainer.report_to=[foo]",
    "trainer.lr_scheduler_type=foo", "trainer.optim=foo", "trainer.optim=sgd", "trainer.save_strategy=foo",
    "trainer.save_steps=0", "trainer.save_steps=-1", "trainer.logging_steps=0", "trainer.logging_steps=7",
    "trainer.logging_strategy=no", "trainer.eval_strategy=steps", "trainer.eval_strategy=foo",
    "trainer.num_iterations=0", "trainer.num_iterations=2", "trainer.loss_type=grpo", "trainer.beta=0.1",
    "trainer.top_p=0.9", "trainer.top_k=5", "trainer.bf16=maybe", "trainer.fp16=true",
    "trainer.gradient_checkpointing=true", "trainer.deepspeed=x.json", "trainer.max_grad_norm=null",
    "trainer.max_grad_norm=-1", "trainer.max_grad_norm=0", "trainer.adam_beta1=2", "trainer.weight_decay=-1",
    "trainer.warmup_steps=-5", "trainer.max_completion_length=0", "trainer.seed=3", "trainer.output_dir=/tmp/x",
    "trainer.gradient_accumulation_steps=2", "trainer.per_device_train_batch_size=3",
    "trainer.per_device_eval_batch_size=3 trainer.eval_strategy=steps", "trainer.hub_token=x",
    "trainer.use_vllm=true", "trainer.steps_per_generation=8", "trainer.generation_batch_size=8",
    "trainer.max_steps=-1 trainer.num_train_epochs=0", "trainer.dataloader_num_workers=-1",
    "trainer.mask_truncated_completions=true", "trainer.torch_compile=foo", "trainer.run_name=[1]",
    "probe=gns probes.gns.decay=2", "probe=gns probes.gns.decay=abc", "probe=none", "probe=ess",
    "probe=gns probes.gns.split_prompts=99", "probes.gns.every=5", "probes.simple.evry=5", "probes.simple=null",
    "probes=null", "probes.simple.error_decay=2", "probes.simple.responses_per_prompt=9",
    "probe=ground_truth", "probe=ground_truth probes.ground_truth.sequences=1e8",
    "probe=ground_truth probes.ground_truth.sequences=100000000", "probe=[simple,responses]",
    "probes.simple._target_=foo.Bar", "probes.simple._target_=os.getcwd", "experiment=foo",
    "experiment=qwen_gsm8k", "hydra.run.dir=/tmp/x", "batch=null", "trainer=null", "model=null",
]  # fmt: skip


@dataclass
class Ending:
    """How a command line ended; `bad` says why that is wrong, "" if it is not."""

    line: str
    code: int | None
    seconds: float
    last: str
    bad: str


def command_lines() -> list[str]:
    """Returns the command lines, less what makes the runs small: nearly all setting one thing, wrongly or not."""
    paths = [f"{key}={value}" for key, value in product(("run_dir", "data=gsm8k data.path"), PATHS)]
    return [*OTHERS, *paths, *(f"{key}={value}" for key, value in product(SETTINGS, NUMBERS))]


def train(arguments: list[str], log: Path) -> None:
    """Runs train.py in this process, which is a fork and leads a group of processes."""
    os.setsid()
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.chdir(log.parent)  # a relative path leads nowhere else
    os.environ["HF_HUB_OFFLINE"] = "1"
    sys.argv = ["train.py", *arguments]
    runpy.run_path(str(ROOT / "train.py"), run_name="__main__")


def end_of(line: str, folder: Path, seconds: float) -> Ending:
    """Runs a command line and returns how it ended."""
    run_dir, log = folder / "run", folder / "log"
    given = line.split(" ") if "run_dir=" not in line else [line]  # a path may hold spaces
    if line.startswith("data=gsm8k data.path="):
        given = ["data=gsm8k", line.removeprefix("data=gsm8k ")]
    process = ForkProcess(target=train, args=([*SMALL, f"run_dir={run_dir}", *given], log))
    started = time.monotonic()
    process.start()
    assert process.pid is not None
    process.join(seconds)
    took = time.monotonic() - started
    code = process.exitcode
    left = leave_nothing(process.pid)
    process.join()
    said = [text for text in log.read_text(errors="replace").splitlines() if text.strip()] if log.exists() else []
    last = said[-1] if said else ""
    return Ending(line, code, took, last, what_is_bad(line, code, last, left, run_dir, said))


def leave_nothing(group: int) -> bool:
    """Returns whether a process of the group was left, and ends it."""
    try:
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True


def what_is_bad(line: str, code: int | None, last: str, left: bool, run_dir: Path, said: list[str]) -> str:
    """Returns why this is no way to end, or ""."""
    if code is None:
        return "did not end"
    if left:
        return "left a process behind"
    if code and not last.startswith(("error: ", "train.py: error", "usage:", "ended by")):
        return "its last words are no error"
    if code == 1:
        return "unexpected"
    asked = {"--help", "--cfg", "--version", "--info", "-x", "--hlep", "--multirun"} & set(line.split())
    trained = (run_dir / "logs" / METRICS_FILE).exists() and bool(read_metrics(run_dir / "logs"))
    elsewhere = line.startswith("run_dir=") or "logging_" in line
    if not code and not (asked or trained or elsewhere) and not any("Report:" in text for text in said):
        return "trained nothing"
    return ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="only command lines with this word")
    parser.add_argument("--seconds", type=float, default=60, help="how long one may last (default: %(default)s)")
    args = parser.parse_args()
    lines = [line for line in command_lines() if args.only in line]
    bad, codes = 0, {}
    for line in lines:
        folder = Path(tempfile.mkdtemp())
        ending = end_of(line, folder, args.seconds)
        shutil.rmtree(folder, ignore_errors=True)
        bad += bool(ending.bad)
        codes[ending.code] = codes.get(ending.code, 0) + 1
        mark = f"BAD, {ending.bad}" if ending.bad else "ok"
        print(f"{mark:12} {ending.code} {ending.seconds:5.1f} s  {line}\n             {ending.last[:200]}", flush=True)
    print(f"{len(lines)} command lines, by exit code {codes}; {bad} ended badly")
    sys.exit(bool(bad))


if __name__ == "__main__":
    main()
