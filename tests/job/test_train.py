"""The user's command lines, as typed: they end well, or name the mistake and leave what was written."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import forks
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from rl_training.records.jsonl import read_estimates, read_metrics

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
SILENCE = "rl_training.job.silence"
BENCHMARKS = sorted((ROOT / "benchmarks").glob("*.py"))
PROGRAMS = [path.relative_to(ROOT) for path in BENCHMARKS if "__main__" in path.read_text(encoding="utf-8")]
SMALL = [
    "trainer.max_steps=2",
    "trainer.num_generations=4",
    "batch.sequences_per_step=32",
    "batch.microbatch_size=4",
    "logger=none",
]


def train(*overrides: str) -> subprocess.CompletedProcess[str]:
    return forks.run("train.py", *overrides)


def test_the_main_job_trains_measures_and_reports(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    launched = forks.run(
        str(BIN / "accelerate"), "launch", "--config_file", "launch/cpu.yaml",
        "train.py", "probe=simple", *SMALL, "logger=tensorboard", f"run_dir={folder}",
    )  # fmt: skip
    assert launched.returncode == 0, launched.stderr
    assert [row["step"] for row in read_metrics(folder / "logs")] == [1, 2]
    forward = [row for row in read_estimates(folder / "logs") if row["name"] == "delta_h/forward"]
    assert [row["step"] for row in forward] == [1, 2]
    assert all(row["stderr"] > 0 and row["world_size"] == 1 for row in forward)
    assert "<img" in (folder / "report" / "report.html").read_text(encoding="utf-8")
    assert "predicted" in launched.stdout
    assert "δH=" in launched.stderr  # the progress bar
    for noise in ("Failed to load CPU", "Setting accelerator", "Loading weights", "Writing model", "FutureWarning"):
        assert noise not in launched.stdout + launched.stderr
    assert list((folder / "logs" / "tensorboard").glob("events*"))


def test_two_processes_measure_as_one_run(tmp_path: Path) -> None:
    forks.run_on_ranks(("train.py", *SMALL, f"run_dir={tmp_path / 'run'}"), 2)
    rows = read_estimates(tmp_path / "run" / "logs")
    assert {row["world_size"] for row in rows} == {2}
    forward = [row for row in rows if row["name"] == "delta_h/forward"]
    first, second = (row["num_samples"] for row in forward)
    assert first == 8  # four microbatches on each of two ranks
    assert 8 <= second <= 15  # two steps' variances are averaged: of 7 degrees of freedom each
    assert all(row["stderr"] > 0 for row in forward)


def test_help_says_what_can_be_chosen() -> None:
    shown = train("--help")
    assert shown.returncode == 0
    groups = ("adapter: lora, none", "buffer: filtered, plain", "data: arithmetic, gsm8k")
    for word in (*groups, "trainer.max_steps=", "resume=latest", "run_dir="):
        assert word in shown.stdout


@pytest.mark.parametrize("program", PROGRAMS, ids=str)
def test_every_benchmark_has_help_and_imports_the_silence_before_libraries(program: Path) -> None:
    shown = forks.run(str(program), "--help")
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout.startswith("usage:")
    assert shown.stderr == ""
    body = ast.parse((ROOT / program).read_text(encoding="utf-8")).body
    imported = [node.names[0].name if isinstance(node, ast.Import) else node.module
                for node in body if isinstance(node, ast.Import | ast.ImportFrom)]  # fmt: skip
    assert next(name for name in imported if name.split(".")[0] not in sys.stdlib_module_names) == SILENCE


def test_gsm8k_rows_train_a_small_random_model(tmp_path: Path) -> None:
    rows = [
        {"question": f"A box holds {n} pens. How many do {n + 1} boxes hold?", "answer": f"so\n#### {n * n + n}"}
        for n in range(2, 42)
    ]
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    save_random_model(tmp_path / "model", [row["question"] + row["answer"] for row in rows])
    ended = train(
        "model=hub", f"model.name={tmp_path / 'model'}", "data=gsm8k", f"data.path={data}", *SMALL,
        "trainer.max_completion_length=12", "adapter=lora", f"run_dir={tmp_path / 'run'}",
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    lines = read_metrics(tmp_path / "run" / "logs")
    assert [line["step"] for line in lines] == [1, 2]
    assert lines[0]["rewards/gsm8k_reward/mean"] == 0  # twelve random tokens never answer: nothing is learnt,
    assert lines[0]["delta_h/forward"] == 0  # so nothing moves and entropy stays
    assert lines[0]["entropy/sequence"] > 12


def save_random_model(folder: Path, texts: list[str]) -> None:
    """A random Llama of 40k parameters with a byte-level BPE tokenizer trained on the texts."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    bpe.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=400, special_tokens=["<eos>"], initial_alphabet=alphabet)
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<eos>", pad_token="<eos>")
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def test_what_it_writes_needs_no_hub(tmp_path: Path) -> None:
    assert os.environ["HF_HUB_OFFLINE"] == "1"
    assert train(*SMALL, "trainer.max_steps=1", "probe=none", f"run_dir={tmp_path / 'run'}").returncode == 0
    assert not (tmp_path / "run" / "logs" / "probes.jsonl").exists()
