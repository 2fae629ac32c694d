"""Do all command lines end well? Over 200 of them, right and wrong ones.

    OMP_NUM_THREADS=1 python benchmarks/command_lines.py [--only WORD] [--seconds 60]

runs each in a process of its own and prints how it ended, with its last line. A line ends badly when its last words are
a traceback, when it says nothing and fails, when it ends with 0 and has trained nothing, when it lasts longer than
--seconds, or when it leaves a process behind; one of TRIES also when it does not say what is expected of it. Exit code
1 if any does. A command runs in a fork of this process, which has imported everything already.
"""

from __future__ import annotations

import argparse
import os
import shlex
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

import rl_training.job.analysis
import rl_training.job.build
import rl_training.job.evaluate  # noqa: F401, for the forks
from rl_training.__main__ import main as rl_training_main
from rl_training.records.jsonl import METRICS_FILE, read_metrics

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


# Functions of the user's own, in own.py of the working folder.
OWN = """
import sys
import numpy as np
import torch
from rl_training.engine.loss_weights import LossWeights
from rl_training.tasks.arithmetic import arithmetic
from rl_training.tasks.task import Task

def plain(loss, strength): return loss.weights
def random(loss, strength): return LossWeights(loss.weights.logps * torch.rand(1), None)
def nothing(loss, strength): return None
def text(loss, strength): return "psr"
def array(loss, strength): return np.ones(3)
def leaves(loss, strength): sys.exit(0)
def raises(loss, strength): raise KeyError("x")
def nan(loss, strength): return LossWeights(loss.weights.logps * float("nan"), None)

def rows(*prompts):
    from datasets import Dataset
    task = arithmetic(num_train=16)
    data = [{"prompt": prompts[i % len(prompts)], "answer": "1"} for i in range(16)]
    return Task(Dataset.from_list(data), task.eval_dataset, task.reward)

def none_prompt(): return rows("1+1=", None)
def empty_prompt(): return rows("1+1=", "")
def numbers(): return rows(1, 2)
def a_list(): return [{"prompt": "1+1="}]
def a_none(): return None
def no_prompt():
    from datasets import Dataset
    task = arithmetic(num_train=16)
    return Task(Dataset.from_list([{"question": "1+1="}] * 16), task.eval_dataset, task.reward)
def long_prompt(): return rows("1+" * 400 + "1=")
"""
# By command line, what it has to say at its end, "" where all is well. $RUN is a run, $LORA one with
# an adapter, $NEW a folder that is not there.
MEASURED = "train $SMALL run_dir=$NEW probe=interventions batch.sequences_per_step=32 probes.interventions.which="
TRIES = {
    # one's own functions, in training and measured
    **{f"train $SMALL run_dir=$NEW intervention=own.py:{name}": f"intervention {name}" for name in (
        "nothing", "text", "array", "leaves", "raises", "nan")},
    **{f"{MEASURED}[own.py:{name}]": f"intervention {name}" for name in (
        "nothing", "text", "array", "leaves", "raises")},
    "train $SMALL run_dir=$NEW intervention=own.py:plain": "plain is the name of another",
    "train $SMALL run_dir=$NEW intervention=own:raises": "intervention raises",
    f"{MEASURED}[own:no_such]": "own has no function",
    # lists and strengths
    f"{MEASURED}[5]": "5 is no name", f"{MEASURED}[[bonus]]": "is no name", f"{MEASURED}{{bonus:0.1}}": "for a list",
    f"{MEASURED}[{{bonus:0.1}}]": "is no name", f"{MEASURED}bonus": "must be a list",
    "train $SMALL run_dir=$NEW trainer.max_steps=3 intervention=bonus:1e30": "bonus:1e30",
    f"{MEASURED}[bonus:nan]": "the strength must",
    "train $SMALL run_dir=$NEW intervention=[psr,nsr]": "contradict each other",
    "train $SMALL run_dir=$NEW intervention=[lr:0.5,lr:0.5]": "twice",
    "train $SMALL run_dir=$NEW intervention=5": "intervention", "train $SMALL run_dir=$NEW probe={a:1}": "give a name",
    "train $SMALL run_dir=$NEW probe=[simple,null]": "give a name",
    "train $SMALL run_dir=$NEW probe=[[simple]]": "give a name",
    # branches
    "train branch=$RUN/training_state/checkpoint-1 run_dir=$NEW": "",
    "train branch=$RUN additional_steps=1 run_dir=$NEW": "",
    "train branch=$RUN/training_state/checkpoint-1 run_dir=$NEW probes.simple.every=2 batch.microbatch_size=8": "",
    "train branch=$RUN/training_state/checkpoint-1 run_dir=$NEW seed=7": "",
    "train branch=$RUN/training_state/checkpoint-1 run_dir=$NEW batch.sequences_per_step=32 logger=tensorboard": "",
    "train branch=$RUN/training_state/checkpoint-1 run_dir=$NEW probes.gns.every=2": "there is no such setting",
    "train branch=$RUN/training_state/checkpoint-1 run_dir=$RUN/training_state/checkpoint-1": "lies among the",
    "train branch=$RUN/training_state/checkpoint-1 run_dir=$NEW adapter=lora adapter.r=4": "a branch keeps",
    "train branch=$LORA/training_state/checkpoint-1 run_dir=$NEW adapter.r=4": "adapter.r=4 (was 16)",
    "train branch=latest": "give RUN", "train branch=": "give RUN", "train branch=/nowhere": "there is no such folder",
    # analyses
    "analyze checkpoint=$RUN learning_rate=-1e-4": "must be above 0",
    "analyze checkpoint=$RUN learning_rate=nan": "must be finite",
    "analyze checkpoint=$RUN learning_rate=0": "must be above 0",
    "analyze checkpoint=$RUN interventions=all": "a branch measures them",
    "analyze checkpoint=$RUN evaluation.prompts=8 update.prompts=4 trainer.temperature=0.7 data=arithmetic": "",
    "analyze checkpoint=$RUN batch.microbatch_sise=4": "did you mean batch.microbatch_size",
    # tasks of one's own
    **{f"train $SMALL run_dir=$NEW data._target_=own.{name}": "prompt" for name in (
        "none_prompt", "empty_prompt", "numbers", "no_prompt", "long_prompt")},
    "train $SMALL run_dir=$NEW data._target_=own.a_list": "data",
    "train $SMALL run_dir=$NEW data._target_=own.a_none": "data",
    "train $SMALL run_dir=$NEW data._target_=my_file.task": "my_file",
    # records
    "report $RUN": "", "sync $RUN $RUN/copy": "copy", "sync $RUN $NEW --watch nan": "watch",
}  # fmt: skip


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
    return [*TRIES, *OTHERS, *paths, *(f"{key}={value}" for key, value in product(SETTINGS, NUMBERS))]


def run(words: list[str], log: Path) -> None:
    """Runs a command in this process, which is a fork and leads a group of processes."""
    os.setsid()
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.chdir(log.parent)  # a relative path leads nowhere else
    os.environ["HF_HUB_OFFLINE"] = "1"
    sys.argv = ["rl-training", *words]
    rl_training_main()


def words_of(line: str, folder: Path, runs: Path) -> list[str]:
    """Returns the words of a command: a line of TRIES, or the settings of a small run."""
    if line in TRIES:
        places = {"$RUN": runs / "run", "$LORA": runs / "lora", "$NEW": folder / "run", "$SMALL": " ".join(SMALL)}
        for name, place in places.items():
            line = line.replace(name, str(place))
        return shlex.split(line)
    words = line.split(" ") if "run_dir=" not in line else [line]  # a path may hold spaces
    if line.startswith("data=gsm8k data.path="):
        words = ["data=gsm8k", line.removeprefix("data=gsm8k ")]
    return ["train", *SMALL, f"run_dir={folder / 'run'}", *words]


def end_of(line: str, folder: Path, runs: Path, seconds: float) -> Ending:
    """Runs a command line and returns how it ended."""
    log = folder / "log"
    (folder / "own.py").write_text(OWN, encoding="utf-8")
    process = ForkProcess(target=run, args=(words_of(line, folder, runs), log))
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
    return Ending(line, code, took, last, what_is_bad(line, code, last, left, folder / "run", said))


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
    if code and not last.startswith(("error: ", "train: error", "usage:", "ended by", "rl-training")):
        return "its last words are no error"
    if code == 1 or ("--debug" not in line and any(text.startswith("Traceback") for text in said)):
        return "unexpected"
    if line in TRIES:
        expected = TRIES[line]
        if not expected:
            return "" if code == 0 else "is right, and refused"
        return "silently wrong" if code == 0 else "" if expected in last else f"does not say {expected!r}"
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
    bad, codes, runs = 0, {}, Path(tempfile.mkdtemp())
    for name, adapter in (("run", "none"), ("lora", "lora")):
        words = ["train", *SMALL, f"run_dir={runs / name}", f"adapter={adapter}", "trainer.max_steps=2"]
        process = ForkProcess(target=run, args=([*words, "trainer.save_steps=1"], runs / "log"))
        process.start()
        process.join()
        assert process.exitcode == 0, (runs / "log").read_text()
    for line in lines:
        folder = Path(tempfile.mkdtemp())
        ending = end_of(line, folder, runs, args.seconds)
        shutil.rmtree(folder, ignore_errors=True)
        bad += bool(ending.bad)
        codes[ending.code] = codes.get(ending.code, 0) + 1
        mark = f"BAD, {ending.bad}" if ending.bad else "ok"
        print(f"{mark:12} {ending.code} {ending.seconds:5.1f} s  {line}\n             {ending.last[:200]}", flush=True)
    shutil.rmtree(runs)
    print(f"{len(lines)} command lines, by exit code {codes}; {bad} ended badly")
    sys.exit(bool(bad))


if __name__ == "__main__":
    main()
