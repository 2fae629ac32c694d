"""Evaluation of checkpoints: the responses, the files it writes, and what happens to damaged or killed ones."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gzip
import json
import math
import multiprocessing
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from configs import REFUSED, prepared_evaluation, refusal
from endings import kill_itself, leave, run_out_of_memory
from full_disk import files_of_at_most
from safetensors.torch import load_file, save_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tqdm import tqdm

from rl_training.errors import UserError, one_line
from rl_training.evaluation import examples, policy
from rl_training.evaluation.metrics import custom_metrics, group_by_row, response_metrics
from rl_training.evaluation.responses import Batch, Response, choose_rows, generate_responses, reward_responses
from rl_training.evaluation.workers import run_in_process
from rl_training.job.commands import evaluate
from rl_training.job.configuration.prepare import PreparedEvaluation
from rl_training.job.evaluation import run_checkpoints
from rl_training.job.evaluation.announcements import print_table
from rl_training.job.evaluation.evaluation import Evaluation
from rl_training.job.evaluation.request import read_request
from rl_training.job.evaluation.result_folder import fingerprint
from rl_training.job.evaluation.run_checkpoints import evaluate_run_checkpoints
from rl_training.job.evaluation.worker import CheckpointResponses
from rl_training.job.objects.checkpoint_policy import load_policy, require_weights
from rl_training.models.load import load_tiny
from rl_training.records import evaluated
from rl_training.statistics.estimate import Estimate
from rl_training.tasks.arithmetic import arithmetic
from rl_training.tasks.three_words import three_words

QUICK = ["evaluation.fraction=0.02", "evaluation.responses_per_prompt=4"]


def evaluation_of(*overrides: str) -> Evaluation:
    return read_request(prepared_evaluation(*overrides)).evaluation


def sampled_at(checkpoint: Path, places: list[list[tuple[int, int]]], temperature: float = 1.0) -> list[Response]:
    """Return responses that are sampled in batches of these rows and numbers."""
    loaded = load_policy(checkpoint, load_tiny, with_reference=True, temperature=temperature, max_completion_length=36)
    batches = [Batch(tuple(part), is_greedy=False) for part in places]
    return [response for part, _ in generate_responses(loaded, arithmetic(), batches, 0) for response in part]


@pytest.mark.parametrize(
    ("config", "of_run", "why"),
    [('{"base_model_name_or_path": null}', None, "does not name its base model: give model=hub model.name=PATH"),
     ("{", None, "does not name its base model"), ("{", load_tiny, "its adapter cannot be loaded: ")],
)  # fmt: skip
def test_an_adapter_with_an_incomplete_configuration_is_reported_as_that(
    tmp_path: Path, config: str, of_run: Any, why: str
) -> None:
    (tmp_path / "adapter_config.json").write_text(config, encoding="utf-8")
    (tmp_path / "adapter_model.safetensors").touch()
    with pytest.raises(ValueError, match=why):
        load_policy(tmp_path, of_run, with_reference=False, temperature=1.0, max_completion_length=1)


# --- the command ------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("forked")
def test_a_damaged_checkpoint_is_reported_and_retried_on_the_next_call_while_others_are_kept(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)  # every command does this for its folder
    metrics = "def characters(responses, **others):\n    return {'mean': sum(map(len, responses)) / len(responses)}\n"
    raising = "def raising(row, **others):\n    raise KeyError('nothing')\n"
    (tmp_path / "my_metrics.py").write_text(metrics + raising, encoding="utf-8")
    asked = [f"run={run}", *QUICK, "metric=entropy_by_position", "+metrics.mine._target_=my_metrics.characters"]
    assert evaluate_run_checkpoints(prepared_evaluation(*asked))
    shown = capsys.readouterr().out
    assert "step 2 failed: its model cannot be loaded" in shown
    table = run / "evaluations" / "arithmetic" / evaluated.TABLE_FILE
    first = table.read_text(encoding="utf-8")
    rows = {row.metric: row for row in evaluated.read_table(table.parent).itertuples()}
    assert {row.step for row in rows.values()} == {1}
    assert {"pass_at_1", "pass_at_4", "kl/sequence", "entropy_by_position/from_001", "mine/mean"} <= set(rows)
    assert rows["pass_at_1"].value == rows["reward"].value
    assert rows["kl/token"].value > 0
    assert rows["reward"].num_prompts == 10

    before = (table.parent / "step_1" / evaluated.STEP_METRICS_FILE).stat().st_mtime_ns
    weights = run / "training_state" / "checkpoint-2" / "model.safetensors"
    weights.write_bytes((run / "whole").read_bytes())
    assert not evaluate_run_checkpoints(prepared_evaluation(*asked))
    assert (table.parent / "step_1" / evaluated.STEP_METRICS_FILE).stat().st_mtime_ns == before, (
        "what was finished is skipped"
    )
    assert table.read_text(encoding="utf-8").startswith(first)
    assert set(evaluated.read_table(table.parent)["step"]) == {1, 2}

    lines = (table.parent / "step_1" / "responses.jsonl").read_text(encoding="utf-8").splitlines()
    assert len(lines) == 10 * (4 + 1)
    assert {"prompt", "response", "reward", "length", "mean_logp", "mean_entropy"} <= set(json.loads(lines[0]))
    events = EventAccumulator(str(run / "logs" / "tensorboard"))
    events.Reload()
    steps = {event.step for event in events.Scalars("evaluation/reward")}  # a set, because files are read by name,
    assert steps == {1, 2}  # and a process's tenth writer precedes its ninth if both start within the same second

    anew = [
        *asked[:3],
        "evaluation.name=anew",
        f"checkpoints=[{run}/training_state/checkpoint-1]",
        "+metrics.bad._target_=my_metrics.raising",
        "evaluation.batch_size=7",
        "evaluation.gzip=true",
    ]
    assert evaluate_run_checkpoints(prepared_evaluation(*anew))
    assert "metric bad raised at row" in capsys.readouterr().out
    again = [*evaluated.read_table(run / "evaluations" / "anew").itertuples()]
    assert {row.metric for row in again} == {name for name in rows if "by_position" not in name and "mine" not in name}
    for row in again:  # with another batch size: the same numbers up to rounding, and the same responses
        assert row.value == pytest.approx(rows[row.metric].value, rel=1e-5, nan_ok=True)
    with gzip.open(run / "evaluations" / "anew" / "step_1" / "responses.jsonl.gz", "rt", encoding="utf-8") as file:
        assert [json.loads(line)["response"] for line in file] == [json.loads(line)["response"] for line in lines]


@pytest.mark.usefixtures("forked")
def test_an_evaluation_killed_halfway_is_reported_and_done_on_the_next_call(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Also: while one evaluation of a run is active, another one reports this and exits."""
    prepared = prepared_evaluation(
        f"checkpoints=[{run}/training_state/checkpoint-1]", *QUICK, f"output={tmp_path}", "evaluation.batch_size=10"
    )
    second: list[str] = []

    def kill_at_the_first_batch(bar: tqdm, num_responses: int) -> None:
        with pytest.raises(ValueError, match=f"process {os.getpid()} ") as refused:
            evaluate_run_checkpoints(prepared)
        second.append(str(refused.value))
        for process in multiprocessing.active_children():
            process.kill()

    with monkeypatch.context() as patched:
        patched.setattr(tqdm, "update", kill_at_the_first_batch)
        assert evaluate_run_checkpoints(prepared)
    assert second
    assert "step 1 failed: its process was killed by SIGKILL" in capsys.readouterr().out
    folder = tmp_path / "evaluations" / "arithmetic"
    assert [path.name for path in folder.iterdir()] == ["settings.json"]
    assert not evaluate_run_checkpoints(prepared)
    assert set(evaluated.read_table(folder)["step"]) == {1}


@pytest.fixture
def swept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that runs `rl-training evaluate -m` with these words, and a job in place of evaluations."""

    def command(job: Any, *words: str) -> None:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv("HYDRA_FULL_ERROR", "1")  # what the command changes is undone
        monkeypatch.setattr(sys, "path", [*sys.path])
        monkeypatch.setattr(sys, "argv", ["evaluate", "-m", *words])
        monkeypatch.setattr(run_checkpoints, "evaluate_run_checkpoints", job)
        evaluate()

    return command


@pytest.mark.parametrize(("failed", "code"), [("", 0), ("0.5", 1)])
def test_every_job_of_a_sweep_is_evaluated_before_the_command_exits(swept: Any, failed: str, code: int) -> None:
    evaluated_at: list[float] = []

    def recorded(prepared: PreparedEvaluation) -> list[str]:
        evaluated_at.append(prepared.values["evaluation"]["temperature"])
        return ["step 1 failed"] if str(evaluated_at[-1]) == failed else []

    with pytest.raises(SystemExit) if code else contextlib.nullcontext() as ended:
        swept(recorded, "run=r", "evaluation.temperature=0.5,0.7")
    assert evaluated_at == [0.5, 0.7]
    assert ended is None or ended.value.code == code
    assert list(Path.cwd().iterdir()) == [], "Hydra's record of a sweep is not left in the working folder"


@pytest.mark.parametrize(
    ("words", "names"),
    [
        (["evaluation.temperature=0.5,0.7"], ["arithmetic,temperature=0.5", "arithmetic,temperature=0.7"]),
        (["evaluation.name=warm", "evaluation.seed=1,2"], ["warm,seed=1", "warm,seed=2"]),
        (["evaluation.name=a,b"], ["a", "b"]),
        (["evaluation.name=t${evaluation.seed}", "evaluation.seed=1,2"], ["t1", "t2"]),
        (["output=x,y"], ["arithmetic", "arithmetic"]),
        (["data=arithmetic,three_words"], ["arithmetic", "three_words"]),
        (["data=arithmetic,three_words", "evaluation.name=b"], ["b,data=arithmetic", "b,data=three_words"]),
        (["+data.num_eval=8,9"], ["arithmetic,num_eval=8", "arithmetic,num_eval=9"]),
    ],
)
def test_jobs_of_a_sweep_that_evaluate_differently_have_different_names(
    run: Path, swept: Any, words: list[str], names: list[str]
) -> None:
    evaluations: list[Evaluation] = []

    def recorded(prepared: PreparedEvaluation) -> list[str]:
        evaluations.append(read_request(prepared).evaluation)
        return []

    swept(recorded, f"run={run}", *words)
    assert [evaluation.folder.path.name for evaluation in evaluations] == names
    if "output=x,y" not in words:
        assert len({evaluation.announcements.prefix for evaluation in evaluations}) == 2


@pytest.mark.parametrize(("overrides", "message"), REFUSED["evaluation"].items())
def test_bad_input_is_refused_before_anything_is_written(run: Path, overrides: str, message: str | list[str]) -> None:
    before = sorted(run.rglob("*"))
    with pytest.raises(ValueError, match=refusal(message)):
        evaluate_run_checkpoints(prepared_evaluation(*overrides.replace("$RUN", str(run)).split()))
    assert sorted(run.rglob("*")) == before


def test_a_run_without_checkpoints_says_so(run: Path, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_bytes((run / "config.yaml").read_bytes())
    with pytest.raises(ValueError, match=rf"^run={tmp_path} .*trainer\.save_steps"):
        evaluation_of(f"run={tmp_path}")


def test_a_runs_temperature_that_is_no_number_is_refused_once_before_any_checkpoint(run: Path, tmp_path: Path) -> None:
    (tmp_path / "training_state" / "checkpoint-1").mkdir(parents=True)
    config = (run / "config.yaml").read_text()
    (tmp_path / "config.yaml").write_text(re.sub(r"\btemperature: .*", "temperature: hot", config))
    with pytest.raises(ValueError, match=r"^trainer\.temperature='hot' .*: give evaluation\.temperature$"):
        evaluation_of(f"run={tmp_path}")
    assert evaluation_of(f"run={tmp_path}", "evaluation.temperature=0.5").spec.options.temperature == 0.5


def test_another_setting_under_the_same_name_is_refused(run: Path, tmp_path: Path) -> None:
    asked = [f"run={run}", f"output={tmp_path}", *QUICK]
    evaluation = evaluation_of(*asked)
    evaluation.folder.start()
    evaluated.write_step(evaluation.folder.path, 1, {}, {}, [])
    with pytest.raises(ValueError, match=r"temperature=0.5 \(was 1.0\).*evaluation.name=NAME"):
        evaluation_of(*asked, "evaluation.temperature=0.5").folder.start()
    evaluation_of(*asked, "evaluation.batch_size=1").folder.start()


def test_an_evaluation_without_any_result_does_not_block_the_corrected_command(run, tmp_path) -> None:
    asked = [f"run={run}", f"output={tmp_path}", *QUICK]
    evaluation_of(*asked, "evaluation.temperature=9").folder.start()  # every checkpoint then fails
    evaluation = evaluation_of(*asked)
    evaluation.folder.start()
    assert (
        json.loads((evaluation.folder.path / evaluated.EVALUATION_SETTINGS_FILE).read_text(encoding="utf-8"))[
            "temperature"
        ]
        == 1.0
    )


@pytest.mark.parametrize("retrained", ["trainer_state.json", "model.safetensors", "pytorch_model.bin"])
def test_a_retrained_checkpoint_is_evaluated_again(run: Path, tmp_path: Path, retrained: str) -> None:
    """Its weights have the same names and sizes as before, but its trainer's log differs; without one, the weights."""
    checkpoint = tmp_path / "training_state" / "checkpoint-1"
    shutil.copytree(run / "training_state" / "checkpoint-1", checkpoint)
    (tmp_path / "config.yaml").write_bytes((run / "config.yaml").read_bytes())
    if retrained != "trainer_state.json":
        (checkpoint / "trainer_state.json").unlink()
        (checkpoint / "model.safetensors").replace(checkpoint / retrained)
    evaluation = evaluation_of(f"run={tmp_path}")
    evaluated.write_step(evaluation.folder.path, 1, {"fingerprint": fingerprint(checkpoint), "errors": []}, {}, [])
    assert evaluation.folder.pending() == {}
    before = (checkpoint / retrained).read_bytes()
    (checkpoint / retrained).write_bytes(before[:-2] + bytes([before[-2] ^ 1]) + before[-1:])
    assert evaluation.folder.pending() == {1: checkpoint}
    evaluation.folder.write(1, CheckpointResponses([], {}), {}, [])
    assert evaluation.folder.pending() == {}


def test_a_checkpoint_retrained_while_it_is_evaluated_is_evaluated_again(run: Path, tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoint-1"
    shutil.copytree(run / "training_state" / "checkpoint-1", checkpoint)
    evaluation = evaluation_of(f"checkpoints=[{checkpoint}]", "data=arithmetic", f"output={tmp_path}")
    assert evaluation.folder.start() == {1: checkpoint}
    (checkpoint / "trainer_state.json").write_text('{"global_step": 1, "log_history": [{"step_time": 0.3}]}')
    evaluation.folder.write(1, CheckpointResponses([], {}), {}, [])
    assert evaluation.folder.pending() == {1: checkpoint}


def test_another_task_than_the_runs_gets_its_own_table_and_must_fit_the_tokenizer(run: Path, tmp_path: Path) -> None:
    rows = [{"question": f"Say {n} €", "answer": f"#### {n}"} for n in range(40)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    evaluation = evaluation_of(f"run={run}", "data=gsm8k", f"data.path={tmp_path / 'rows.jsonl'}")
    assert (evaluation.folder.path.name, evaluation.announcements.prefix) == ("gsm8k", "evaluation/gsm8k/")
    assert evaluation.spec.options.max_completion_length == 512
    evaluation.announcements.add(1, {"reward": Estimate(0.5)})
    evaluation.announcements.close()
    shown = b"".join(file.read_bytes() for file in run.glob("logs/tensorboard/*"))
    assert b"tasks.arithmetic" in shown
    assert b"tasks.gsm8k" not in shown, "the settings in the run's dashboards are its own"
    loaded = load_policy(
        evaluation.spec.checkpoints[1], None, with_reference=False, temperature=1.0, max_completion_length=4
    )
    with pytest.raises(ValueError, match=r"tokenizer .*'A user asks .*data=…"):
        list(generate_responses(loaded, evaluation.spec.task, [Batch(((0, 0),), is_greedy=False)], 0))
    with pytest.raises(UserError, match=r"prompts are messages, and the tokenizer .* no chat template: .*data=…"):
        list(generate_responses(loaded, three_words(8, 8), [Batch(((0, 0),), is_greedy=False)], 0))


def test_a_bare_checkpoint_is_evaluated_on_the_given_task(run: Path, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    asked = [f"checkpoints=[{bare}]", "data=arithmetic", f"output={tmp_path}"]
    evaluation = evaluation_of(*asked)
    assert evaluation.spec.checkpoints == {0: bare}
    options = evaluation.spec.options
    assert (options.max_completion_length, options.temperature, evaluation.announcements.run) == (36, 1.0, None)


@pytest.mark.parametrize("missing", ["model.safetensors", "trainer_state.json"])
def test_a_checkpoint_that_is_unfinished_or_has_no_weights_is_named(run: Path, tmp_path: Path, missing: str) -> None:
    for path in (run / "training_state" / "checkpoint-1").iterdir():
        if path.name != missing:
            (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "optimizer.pt").touch()
    with pytest.raises(ValueError, match=missing):
        require_weights(tmp_path)


def test_a_checkpoint_of_a_training_that_diverged_is_told_so(run: Path, tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoint-1"
    shutil.copytree(run / "training_state" / "checkpoint-1", checkpoint)
    weights = load_file(checkpoint / "model.safetensors")
    weights["model.norm.weight"][0] = math.nan
    save_file(weights, checkpoint / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"^model\.norm\.weight is not finite: training had diverged"):
        sampled_at(checkpoint, [[(0, 0)]])


# --- processes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("work", "reason"),
    [
        (kill_itself, "killed by SIGKILL"),
        (run_out_of_memory, "it ran out of memory: ask for less ("),
        (leave, "exit code 3"),
    ],
)
def test_the_error_says_what_ended_a_process(work: Any, reason: str) -> None:
    received: list[Any] = []
    assert reason in run_in_process(work, received.append, if_out_of_memory="ask for less")
    assert received == (["begun"] if work is kill_itself else [])


def test_a_cpu_whose_memory_runs_out_is_known_by_torchs_error() -> None:
    with pytest.raises(RuntimeError) as raised:
        torch.empty(2**60)
    assert one_line(raised.value, "ask for less").startswith("it ran out of memory: ask for less (")


INTERRUPTED = """
import signal, sys
from rl_training.evaluation.workers import run_in_process
def work(send):
    import slow
    send("worked")
if __name__ == "__main__":
    print(repr(run_in_process(work, print, imports=["slow"])))
    print(signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, set()))
"""


def test_ctrl_c_while_a_process_imports_reaches_the_parent_alone(tmp_path: Path) -> None:
    """A slow module is interrupted during its import, once in the server of forks and once more."""
    (tmp_path / "slow.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n")
    (tmp_path / "script.py").write_text(INTERRUPTED)
    env = {**os.environ, "PYTHONPATH": f"{Path(__file__).parents[2]}:{tmp_path}"}
    command = [sys.executable, str(tmp_path / "script.py")]
    ended = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=60)
    assert (ended.stdout.splitlines(), ended.stderr) == (["worked", "''", "False"], "")


@pytest.mark.parametrize("returned", ["much", None, 0.5])
def test_a_metric_that_returns_no_named_numbers_is_refused_with_what_is_needed(returned: Any) -> None:
    response: Any = SimpleNamespace(text="a", reward=1.0, logps=None, entropies=None)
    with pytest.raises(ValueError, match=r"metric mine .*row 0 .*\{'mine': 0\.5\}"):
        custom_metrics("mine", lambda **_: returned, {0: [response]}, [{"prompt": "p"}])


# --- responses --------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Answering(policy.CheckpointPolicy):
    """A policy with given responses, which it produces with certainty."""

    answers: tuple[list[int], ...]

    def generate(self, prompt_ids: Any, uniforms: Any) -> list[torch.Tensor]:
        return [torch.tensor(ids) for ids in self.answers]

    def score(self, prompt_ids: Any, completion_ids: Any) -> list[policy.TokenScores]:
        return [policy.TokenScores(torch.zeros(len(ids)), torch.zeros(len(ids)), None) for ids in completion_ids]


def test_a_response_ends_at_any_end_token_of_the_model() -> None:
    model, tokenizer = load_tiny()
    prompts = [torch.tensor(tokenizer("1+1-2=?<think>")["input_ids"])] * 8
    uniforms = torch.stack([policy.uniforms_of(0, 0, number, 24) for number in range(8)])
    loaded = policy.CheckpointPolicy(model.eval(), tokenizer, None, 1.0, 24)
    uncut = [answer.tolist() for answer in loaded.generate(prompts, uniforms)]
    end = tokenizer.convert_tokens_to_ids("</think>")
    assert any(end in ids[:-1] for ids in uncut)
    model.generation_config.eos_token_id = [tokenizer.eos_token_id, end]
    cut = [answer.tolist() for answer in loaded.generate(prompts, uniforms)]
    assert cut == [ids[: ids.index(end) + 1] if end in ids else ids for ids in uncut]


def test_truncated_means_without_an_end_token_not_of_maximum_length() -> None:
    model, tokenizer = load_tiny()
    end = tokenizer.eos_token_id
    answering = Answering(model, tokenizer, None, 1.0, 3, answers=([5, 6, end], [5, 6, 7], [5, end]))
    batch = Batch(((0, 0), (1, 0), (2, 0)), is_greedy=True)
    ((answered, seconds),) = generate_responses(answering, arithmetic(), [batch], 0)
    assert seconds.keys() == {"generate", "score", "judge"}
    assert all(r.is_greedy for r in answered)
    assert [(r.length, r.truncated) for r in answered] == [(3, False), (3, True), (2, False)]


def test_a_response_depends_neither_on_its_batch_nor_on_the_other_rows(run: Path) -> None:
    checkpoint = run / "training_state" / "checkpoint-1"
    together = {(r.row, r.number): r for r in sampled_at(checkpoint, [[(n, k) for n in range(8) for k in range(2)]])}
    (alone,) = sampled_at(checkpoint, [[(5, 1)]])
    assert alone.text == together[5, 1].text
    assert alone.logps == pytest.approx(together[5, 1].logps, abs=1e-4)
    assert len({r.text for r in together.values()}) > 8, "responses to one prompt differ"


def test_tokens_are_sampled_with_the_policys_probabilities(run: Path) -> None:
    """χ² test of the first token of 3000 responses to one prompt at temperature 2, against its exact distribution."""
    checkpoint = run / "training_state" / "checkpoint-1"
    loaded = load_policy(checkpoint, None, with_reference=False, temperature=2.0, max_completion_length=1)
    prompt = torch.tensor(loaded.tokenizer(arithmetic().eval_dataset[0]["prompt"])["input_ids"])
    numbers = torch.stack([policy.uniforms_of(0, 0, number, 1) for number in range(3000)])
    drawn = torch.stack(loaded.generate([prompt] * 3000, numbers)).squeeze(1).bincount(minlength=103)
    with torch.no_grad():
        exact = 3000 * (loaded.model(prompt[None]).logits[0, -1].double() / 2).softmax(dim=-1)
    common = exact > 5
    chi2 = float(((drawn - exact)[common].square() / exact[common]).sum())
    assert common.sum() > 5
    assert chi2 < common.sum() + 4 * math.sqrt(2 * common.sum())


def test_greedy_responses_take_the_most_likely_token(run: Path) -> None:
    checkpoint = run / "training_state" / "checkpoint-1"
    loaded = load_policy(checkpoint, None, with_reference=False, temperature=0.5, max_completion_length=36)
    prompts = [torch.tensor(loaded.tokenizer(f"{'1+1-' * n}1=?<think>")["input_ids"]) for n in (1, 4)]
    for prompt, answer in zip(prompts, loaded.generate(prompts, None), strict=True):
        ids = prompt
        while len(ids) < len(prompt) + 36 and ids[-1] not in loaded.eos_token_ids:
            with torch.no_grad():
                ids = torch.cat([ids, loaded.model(ids[None]).logits[0, -1].argmax()[None]])
        assert answer.tolist() == ids[len(prompt) :].tolist()


def test_scores_equal_those_of_a_plain_forward_without_padding(run: Path) -> None:
    checkpoint = run / "training_state" / "checkpoint-1"
    loaded = load_policy(checkpoint, load_tiny, with_reference=True, temperature=0.7, max_completion_length=36)
    prompts = [torch.tensor(loaded.tokenizer(f"{'1+1-' * n}1=?<think>")["input_ids"]) for n in (1, 4)]
    answers = loaded.generate(prompts, torch.full((2, 36), 0.99, dtype=torch.float64))
    first = load_tiny()[0].eval()
    for prompt, answer, score in zip(prompts, answers, loaded.score(prompts, answers), strict=True):
        for k, token in enumerate(answer):
            prefix = torch.cat([prompt, answer[:k]])[None]
            with torch.no_grad():
                p, q = ((m(prefix).logits[0, -1].double() / 0.7).log_softmax(-1) for m in (loaded.model, first))
            assert score.logps[k].item() == pytest.approx(p[token].item(), abs=1e-4)
            assert score.entropies[k].item() == pytest.approx(-(p.exp() * p).sum().item(), abs=1e-4)
            assert score.kl[k].item() == pytest.approx((p.exp() * (p - q)).sum().item(), abs=1e-4)


def test_divergences_do_not_depend_on_the_scoring_batch_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four responses of 4 tokens need 4 · 4 · 103 entries of logits, whatever the prompts' lengths."""
    model, tokenizer = load_tiny()
    first = type(model)(model.config)
    loaded = policy.CheckpointPolicy(model.eval(), tokenizer, first.eval(), 1.0, 4)
    tokens = torch.randint(4, 100, (9, 34), generator=torch.Generator().manual_seed(0))
    prompts, answers = list(tokens[:, :30]), list(tokens[:, 30:])
    together, rows = loaded.score(prompts, answers), list[int]()
    first.model.register_forward_pre_hook(
        lambda _, args, kwargs: rows.append(len(kwargs["input_ids"])), with_kwargs=True
    )
    monkeypatch.setattr(policy, "MAX_LOGITS_ON_CPU", 4 * 4 * len(tokenizer))
    apart = loaded.score(prompts, answers)
    assert rows == [4, 4, 1]
    for a, b in zip(together, apart, strict=True):
        assert a.kl.tolist() == pytest.approx(b.kl.tolist(), abs=1e-5)


def test_the_reference_of_an_adapter_is_its_base_model(run: Path, tmp_path: Path) -> None:
    """The divergence from it is 0 as long as the adapter is LoRA's initial zero."""
    from peft import LoraConfig, get_peft_model

    adapted = get_peft_model(load_tiny()[0], LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear", r=2))
    first = load_tiny()[0].eval()
    for move in (0.0, 0.5):
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.data += move
        adapted.save_pretrained(tmp_path / f"{move}")
        (response,) = sampled_at(tmp_path / f"{move}", [[(0, 0)]])
        prompt = torch.tensor(load_tiny()[1](arithmetic().eval_dataset[0]["prompt"])["input_ids"])[None]
        with torch.no_grad():
            p, q = (m.eval()(prompt).logits[0, -1].double().log_softmax(-1) for m in (adapted, first))
        assert response.kl[0] == pytest.approx((p.exp() * (p - q)).sum().item(), rel=1e-5, abs=1e-5)
        assert (response.kl[0] > 1e-3) == (move > 0)


# --- metrics ----------------------------------------------------------------------------------------------------------


def response(
    row: int, number: int, reward: float, entropies: list[float], answer: str | None, is_greedy: bool = False
) -> Response:
    values, is_cut = np.array(entropies), len(entropies) == 3
    return Response(row, number, f"{answer}", reward, is_cut, answer, -values, values, 2 * values, is_greedy)


def given() -> list[Response]:
    """Return two prompts' responses: two sampled and one greedy for each."""
    return [
        response(0, 0, 1.0, [0.5, 0.1], "3"),
        response(0, 1, 0.0, [0.9, 0.3, 0.6], None),
        response(0, 0, 1.0, [0.2], "3", is_greedy=True),
        response(4, 0, 0.0, [0.4], "7"),
        response(4, 1, 0.0, [0.2, 0.2], "8"),
        response(4, 0, 0.0, [0.2], "7", is_greedy=True),
    ]


def test_the_built_in_metrics_of_two_prompts_equal_those_by_hand() -> None:
    metrics = response_metrics(given(), max_k=2, right_reward=1.0, can_read_answers=True)
    expected = {
        "reward": 0.25, "greedy_accuracy": 0.5, "pass_at_1": 0.25, "pass_at_2": 0.5, "majority": 0.5,
        "entropy/token": 3.2 / 8, "entropy/sequence": 3.2 / 4, "kl/token": 6.4 / 8, "kl/sequence": 6.4 / 4,
        "length": 2.0, "truncated": 0.25, "format": 0.75,
    }  # fmt: skip
    assert {name: e.value for name, e in metrics.items()} == pytest.approx(expected)
    assert {e.num_samples for e in metrics.values()} == {2}
    names = {re.sub(r"_\d+$", "", name) for name in metrics}
    assert names == {*evaluated.BUILT_IN_METRICS}  # how each is shown
    assert metrics["reward"].stderr == pytest.approx(0.25)  # the prompts' means are 0.5 and 0


def test_the_printed_table_has_the_number_of_prompts_and_an_interval_where_all_values_agree(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    right = [response(row, 0, 1.0, [0.5 + 0.1 * (row % 2)], "3") for row in range(4)]
    metrics = response_metrics(right, max_k=1, right_reward=1.0, can_read_answers=True, reward_range=(0.0, 1.0))
    evaluated.write_step(tmp_path, 4, {}, metrics, [])
    evaluated.consolidate(tmp_path)
    print_table(tmp_path, [])
    shown = capsys.readouterr().out
    assert "mean ± half of the 95 % interval, or the interval itself, over 4 prompts" in shown
    assert "1.00 (0.51 … 1.00)" in shown  # for 4 of 4: 4/7.8415 to 1, and nothing is above 1
    assert "0.550 ± 0.092" in shown  # the entropy: 3.18 standard errors, with three degrees of freedom
    frame = pd.read_csv(tmp_path / evaluated.TABLE_FILE).set_index("metric")
    assert (frame.loc["reward", "low"], frame.loc["reward", "high"]) == (pytest.approx(0.5101, abs=1e-4), 1.0)
    assert math.isnan(frame.loc["length", "low"])


def test_a_reward_outside_the_range_of_its_task_is_an_error() -> None:
    task = dataclasses.replace(arithmetic(), reward=lambda completions, **_: [2.0 for _ in completions])
    with pytest.raises(ValueError, match=r"2\.0 .* between 0 and 1"):
        reward_responses(task, [task.eval_dataset[0]], ["6"], [torch.tensor([5])])


def test_too_few_rewards_are_refused_with_their_number() -> None:
    task = dataclasses.replace(arithmetic(), reward=lambda completions, **_: [1.0])
    with pytest.raises(UserError, match="1 rewards for 2 responses"):
        reward_responses(task, [task.eval_dataset[0]] * 2, ["6", "7"], [torch.tensor([5])] * 2)


def test_metrics_that_were_not_requested_are_nan_with_a_reason() -> None:
    sampled = [r for r in given() if not r.is_greedy]
    metrics = response_metrics(sampled, max_k=1, right_reward=1.0, can_read_answers=False)
    answers = dict.fromkeys(("majority", "format"), "no_given_answer")
    for name, code in {"greedy_accuracy": "no_greedy", **answers}.items():
        assert math.isnan(metrics[name].value)
        assert metrics[name].code == code


def test_the_example_metrics_equal_those_by_hand() -> None:
    sampled, _ = group_by_row(given())
    dataset = {0: {"prompt": "a"}, 4: {"prompt": "b"}}
    metrics = custom_metrics("c", examples.entropy_by_correctness, sampled, dataset)
    assert metrics["c/right"].value == pytest.approx(0.3)
    assert metrics["c/wrong"].value == pytest.approx((0.6 + 0.8 / 3) / 2)
    assert metrics["c/wrong_minus_right"].value == pytest.approx(0.3)
    assert metrics["c/wrong_minus_right"].num_samples == 1
    metrics = custom_metrics("p", functools.partial(examples.entropy_by_position, edges=(1, 2)), sampled, dataset)
    assert metrics["p/from_001"].value == pytest.approx((0.7 + 0.3) / 2)
    assert metrics["p/from_002"].value == pytest.approx((0.2 + 0.2) / 2)
    assert (metrics["p/from_003"].value, metrics["p/from_003"].num_samples) == (pytest.approx(0.6), 1)


def test_the_rows_of_a_fraction_are_fixed_by_the_seed_and_at_least_one() -> None:
    assert choose_rows(5, 1.0, seed=0) == (0, 1, 2, 3, 4)
    rows = choose_rows(1000, 0.02, seed=0)
    assert rows == choose_rows(1000, 0.02, seed=0) != choose_rows(1000, 0.02, seed=1)
    assert len(set(rows)) == 20
    assert sorted(rows) == list(rows)
    assert len(choose_rows(10, 0.01, seed=0)) == 1


# --- files ------------------------------------------------------------------------------------------------------------


def test_a_full_disk_drops_a_step_whole_and_keeps_earlier_results(tmp_path: Path) -> None:
    metrics = response_metrics(given(), max_k=1, right_reward=1.0, can_read_answers=True)
    evaluated.write_step(tmp_path, 1, {}, metrics, [{"response": "a"}])
    table = evaluated.consolidate(tmp_path).read_bytes()
    with files_of_at_most(10_000), pytest.raises(UserError, match=str(tmp_path / "step_2")):
        evaluated.write_step(tmp_path, 2, {}, metrics, [{"response": "a" * 20_000}])
    with files_of_at_most(100), pytest.raises(UserError, match=str(tmp_path)):
        evaluated.consolidate(tmp_path)
    assert evaluated.consolidate(tmp_path).read_bytes() == table
    assert {path.parent.name for path in tmp_path.rglob("*.*") if path.is_file()} == {tmp_path.name, "step_1"}


def test_an_infinite_number_stays_infinite_and_is_not_read_as_missing(tmp_path: Path) -> None:
    """A divergence is infinite if the first model gives the policy's response probability 0."""
    metrics = {
        "kl/token": Estimate(math.inf, math.nan, 8, "infinite"),
        "low": Estimate(-math.inf, math.inf, 8),
        "format": Estimate.missing("no answers"),
    }
    evaluated.write_step(tmp_path, 1, {}, metrics, [])
    read = evaluated.read_step(tmp_path, 1)
    assert read is not None
    assert read["metrics"]["kl/token"]["value"] == math.inf
    assert (read["metrics"]["low"]["value"], read["metrics"]["low"]["stderr"]) == (-math.inf, math.inf)
    assert math.isnan(read["metrics"]["format"]["value"])
    evaluated.consolidate(tmp_path)
    assert evaluated.read_table(tmp_path)["value"].tolist()[:2] == [math.inf, -math.inf]
