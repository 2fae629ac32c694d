"""An untrusted run is shown, or refused in one line that names the file: no traceback, no control character.

Every field of every file takes every odd value. If the reader refuses it, its error names the file. Everything that is
accepted goes into one run, for which a report and a comparison are written.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import yaml
from logged_runs import log_run
from recorded_runs import record_run

from rl_training.errors import UserError
from rl_training.job.errors import run_command
from rl_training.records import report_command
from rl_training.records.analyses import NUMBERS, read_analysis
from rl_training.records.compare.page import write_comparison
from rl_training.records.evaluated import consolidate, read_step, write_step
from rl_training.records.files.printable import printable
from rl_training.records.files.spreadsheet import as_csv
from rl_training.records.jsonl import SETTINGS_FILE, iterate_rollouts, read_estimates, read_evaluations, read_metrics
from rl_training.records.report import write_report
from rl_training.records.writer import Records
from rl_training.statistics.estimate import Estimate

CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e\ud800-\udfff]")
IN_JSON = re.compile(r"(?<!\\)(?:\\\\)*\\u(?:00[01]|202e|d8)")  # what a script in the page would decode it to
DEEP = "[" * 5000 + "]" * 5000
MISSING = "MISSING"
# As JSON: huge numbers, other types, half a character, cursor movements, a change of the writing direction.
ODD = [
    MISSING, "1" + "0" * 22, "-1" + "0" * 22, "1" + "0" * 400, "1e308", "-1e308", "5e-324", "1e999", "-1e999", "NaN",
    '"1e400"', "-1", "1.5", "true", "null", '"a"', '""', '"=1+1"', r'"\ud800"', r'"\u001b[2J\u0007"', r'"\u202e"', "[]",
    "{}", "[1, [2]]", '{"a": {"b": [1]}}', DEEP, '{"a": ' * 400 + "1" + "}" * 400,
]  # fmt: skip
ODD_NAMES = ["\x1b[2J", "\ud800", "=1+1", "{{ 7 * 7 }}", "a/b/c", "reason", "source", "pass_at_x", "eval_pass_at_x",
             "delta_h/layer/\x1b", "delta_h/layer/" + "1" * 400, "tokens/x/y/mean_delta_h", "probe_cost/x",
             "intervention/:/mean_delta_h", "intervention/\x1b/mean_delta_h", "measured_steps",
             "value", "file", "variable", "index"]  # fmt: skip
LINES: dict[str, dict[str, Any]] = {
    "metrics.jsonl": {"step": 6, "reward": 0.5, "entropy": 0.5},
    "evaluations.jsonl": {"step": 6, "eval_reward": 0.5, "eval_reward_se": 0.1},
    "probes.jsonl": {
        "step": 6, "about_step": 6, "world_size": 1, "probe": "simple", "name": "delta_h/forward", "value": -1.0,
        "stderr": 0.1, "num_samples": 8, "reason": "",
    },
    "rollouts.jsonl.gz": {
        "step": 1, "prompt": "p", "response": "r", "prompt_index": 7, "reward": 1.0, "advantage": 0.0, "length": 3,
        "logp": -1.0, "importance_ratio": 1.0,
    },
}  # fmt: skip
READERS = {
    "metrics.jsonl": read_metrics, "probes.jsonl": read_estimates, "evaluations.jsonl": read_evaluations,
    "rollouts.jsonl.gz": lambda folder: list(iterate_rollouts(folder)),
}  # fmt: skip
CONFIGS = [
    "[]", "1", "a: [", "seed: {a: 1}", "seed: 2020-01-01", "a: 2001-99-99", "provenance: 5", "provenance: [1]",
    "probes: 5",
    "probes: {interventions: 5}", "probes: {interventions: {decay: a, every: b, which: 5}}", "intervention: 5",
    "trainer: [1]", "? [1, 2]\n: 3", 'a: "\\e[2J"', '"\\e[2J": 1', 'a: "\\ud800"', "a: " + DEEP, "null: null", "1: 2",
    "branch: 5", "branch: x", "branch: /a/b", "branch: [1]", "branch: RUN/training_state/checkpoint-2",
]  # fmt: skip


def odd_lines(name: str) -> Iterator[str]:
    """Yield lines for this file, each with one odd value and at a different step."""
    facts = LINES[name]
    changes = [(key, odd) for key in (*facts, "extra") for odd in ODD]
    changes += [(key, "1") for key in ODD_NAMES]
    changes += [("name", json.dumps(odd)) for odd in ODD_NAMES] if "name" in facts else []
    for number, (key, odd) in enumerate(changes):
        row = {**facts, "step": 6 + number} | {key: "@"}
        if odd == MISSING:
            row.pop(key)
        yield json.dumps(row).replace('"@"', odd)
    yield from ("", "x", "[]", "1", "null", DEEP, '{"\x1b": 1}')


def run_of(folder: Path) -> Path:
    """Write a run with contents in each of its files, and return its folder."""
    run = record_run(folder, range(1, 6))
    records = Records(run / "logs")
    for step in range(1, 6):
        names = ["intervention/psr/mean_delta_h", "intervention/psr/mean_price", "intervention/plain_mean_delta_h",
                 "tokens/entropy/low/mean_delta_h", "tokens/entropy/low/share_of_tokens", "gns/noise_scale_prompts",
                 "gns/batch_ratio", "delta_h/layer/0", "covariance/token", "ess/advantage"]  # fmt: skip
        detail = {"measured_steps": step}
        records.write_estimates(step, 1, "others", {name: Estimate(0.5, 0.1, 8, detail=detail) for name in names})
        write_step(
            run / "evaluations" / "e", step, {}, {"reward": Estimate(0.5, 0.1, 8), "pass_at_1": Estimate(1.0)}, []
        )
    records.write_rollouts(1, [LINES["rollouts.jsonl.gz"]])
    records.write_evaluation(5, {"eval_reward": 0.5})
    config = {"seed": 0, "run_dir": str(run), "trainer": {"max_steps": 5}, "provenance": {"host": "here"}}
    (run / "config.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    return run


def bare_run(folder: Path) -> Path:
    """Write a run without probes, which is quick to show, and return its folder."""
    records = Records(folder / "logs")
    for step in (1, 2):
        records.write_metrics(step, {"reward": 0.5})
    (folder / "config.yaml").write_text("seed: 0", encoding="utf-8")
    return folder


def bare_runs(folder: Path, count: int) -> list[Path]:
    """Write `count` bare runs, none of whose names is a prefix of another's."""
    return [bare_run(folder / f"run_{number:02}") for number in range(count)]


def said_by(*arguments: str) -> tuple[int, str]:
    """Run rl-training report, and return its exit code and output."""
    printed = io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["rl-training report", *arguments])
        for stream in ("stdout", "stderr"):
            patch.setattr(sys, stream, printed)
        try:
            run_command(report_command.main)
        except SystemExit as ended:
            return int(ended.code or 0), printed.getvalue()
    return 0, printed.getvalue()


def refused(runs: list[Path], page: Path, *options: str) -> list[Path]:
    """Return the runs that an error line names, or an empty list if the page is written."""
    code, said = said_by(*map(str, runs), *options)
    assert not CONTROL.search(said), said
    if code:
        assert code == 2, said
        line = said.splitlines()[-1]  # below a run whose page cannot be written, which is told all the same
        assert line.startswith("error: ")
        named = [run for run in runs if re.search(rf"{re.escape(str(run))}(?!\w)", line)]
        assert named, line
        return named
    text = page.read_text(encoding="utf-8")
    assert not CONTROL.search(text)
    assert not [script for script in re.findall(r'json">(.*?)</script>', text, re.S) if IN_JSON.search(script)]
    return []


def assert_shown_or_refused(runs: list[Path], other: Path) -> None:
    """Assert that each run's report and a comparison are written, or end in one line that names a file of a run.

    A refused run is removed from the comparison, until it is written or only the intact `other` is left.
    """
    page = other.parent / "comparison.html"
    compared = [run for run in runs if not refused([run], run / "report" / "report.html")] + [other]
    for run in set(runs) - set(compared):
        refused([run, other], page, "--out", str(page))
    while len(compared) > 1 and (named := refused(compared, page, "--out", str(page))):
        assert all(refused([run, other], page, "--out", str(page)) == [run] for run in named)  # no other run is blamed
        compared = [run for run in compared if run not in named]


@pytest.mark.parametrize("name", LINES)
def test_a_malformed_line_is_refused_with_its_number_or_shown_safely(tmp_path: Path, name: str) -> None:
    run, other = run_of(tmp_path / "run"), run_of(tmp_path / "other")
    file = run / "logs" / name
    opened: Any = gzip.open if name.endswith(".gz") else open
    with opened(file, "rt") as before:
        good = before.read()
    accepted, refused = [], []
    for line in odd_lines(name):
        with opened(file, "wt", encoding="utf-8") as damaged:
            damaged.write(f"{good}{line}\n")
        try:
            READERS[name](run / "logs")
            accepted.append(line)
        except UserError as error:
            refused.append(str(error))
    assert len(refused) >= 10
    where = f"{file}, line {good.count(chr(10)) + 1}"
    assert all(error.startswith(where) and len(error.splitlines()) == 1 for error in refused)
    assert len(accepted) > 30
    with opened(file, "wt", encoding="utf-8") as all_of_them:
        all_of_them.write("\n".join([good.strip(), *accepted, ""]))
    assert_shown_or_refused([run], other)


def odd_contents(good: dict[str, Any], depth: int) -> Iterator[str]:
    """Yield JSON texts that differ from a good one by one odd value, at most `depth` levels deep."""

    def places(node: Any, above: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
        inner = node.items() if isinstance(node, dict) else enumerate(node[:1]) if isinstance(node, list) else ()
        for key, value in inner:
            yield (*above, key)
            if len(above) + 1 < depth:
                yield from places(value, (*above, key))

    for place in places(good):
        for odd in ODD:
            content = json.loads(json.dumps(good))
            node = content
            for key in place[:-1]:
                node = node[key]
            node[place[-1]] = "@"
            if odd == MISSING:
                node.pop(place[-1])
            yield json.dumps(content).replace('"@"', odd)


def test_a_malformed_evaluation_is_refused_with_its_file_or_shown_safely(tmp_path: Path) -> None:
    run, other = run_of(tmp_path / "run"), run_of(tmp_path / "other")
    folder = run / "evaluations" / "e"
    good = json.loads((folder / "step_1" / "metrics.json").read_text(encoding="utf-8"))
    good["metrics"] = {"reward": {**good["metrics"]["reward"], "interval": [0.1, 0.9]}}
    names = [{"step": 1, "metrics": {odd: good["metrics"]["reward"]}} for odd in ODD_NAMES]
    contents = [*odd_contents(good, depth=4), *ODD[1:], *map(json.dumps, names)]
    step, wrong = 6, []
    for content in contents:
        file = folder / f"step_{step}" / "metrics.json"
        file.parent.mkdir(exist_ok=True)
        file.write_text(content, encoding="utf-8")
        try:
            read_step(folder, step)
            step += 1
        except UserError as error:
            wrong += [str(error)] * (str(file) not in str(error))
    assert not wrong
    file.unlink()
    assert 30 < step < len(contents)
    for name in ("step_²", "step_" + "9" * 30, "step_-1"):
        (folder / name).mkdir()
        (folder / name / "metrics.json").write_text(json.dumps(good), encoding="utf-8")
    (run / "evaluations" / "\x1b[2J").symlink_to("e")
    assert_shown_or_refused([run], other)
    assert not CONTROL.search(consolidate(folder).read_text(encoding="utf-8"))


def test_malformed_settings_are_refused_with_their_file_or_shown_safely(tmp_path: Path) -> None:
    """The last one belongs to a run that branched off from itself."""
    runs = bare_runs(tmp_path, len(CONFIGS))
    for run, config in zip(runs, CONFIGS, strict=True):
        (run / "config.yaml").write_text(config.replace("RUN", str(run)), encoding="utf-8")
    assert_shown_or_refused(runs, bare_run(tmp_path / "other"))


def test_malformed_settings_in_records_are_refused_with_their_file_or_shown_safely(tmp_path: Path) -> None:
    odd = ["x", "[]", DEEP, '{"branch": 5}', r'{"a": "\ud800\u001b[2J"}', '{"a": {"b": [1]}}']
    runs = bare_runs(tmp_path, len(odd))
    for run, settings in zip(runs, odd, strict=True):
        (run / "config.yaml").unlink()
        (run / "logs" / SETTINGS_FILE).write_text(settings, encoding="utf-8")
    assert_shown_or_refused(runs, bare_run(tmp_path / "other"))


RESULT: dict[str, Any] = {
    "checkpoint": "c", "step": 1, "results": {"B_E": 8.0, "N_E": 8.0, "B_U": 4.0, "G": 2.0},
    "tables": {
        "eta": [{"eta": 0.5, "deltaH_true": 0.1}], "updates": [{"update_seed": 2, "deltaH1": 0.1, "deltaH1_se": 0.01}],
        "conditioning": [{"name": "Adam", "delta_h1": 0.1, "delta_h1_same_gain": 0.2}],
    },
    "settings": {"offline": {"update": {"filtered": False, "seed": 1}}, "run": {}},
}  # fmt: skip
RESULT["results"] |= {f"{key}{se}": 0.1 for key in NUMBERS for se in ("", "_se", "_sequence", "_sequence_se")}


def test_a_malformed_analysis_is_refused_with_its_file_or_shown_safely(tmp_path: Path) -> None:
    run, other = run_of(tmp_path / "run"), run_of(tmp_path / "other")
    folder = run / "offline" / "=1+1\x1b"
    accepted, wrong = 0, []
    for content in odd_contents(RESULT, depth=4):
        file = folder / f"checkpoint-{accepted}" / "result.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content, encoding="utf-8")
        try:
            read_analysis(file)
            accepted += 1
        except UserError as error:
            wrong += [str(error)] * (str(file) not in str(error))
    assert not wrong
    file.unlink()
    assert accepted > 30
    assert_shown_or_refused([run], other)


@pytest.mark.parametrize("kind", ["a file", "a folder"])
def test_a_file_where_a_folder_is_expected_is_named_and_vice_versa(tmp_path: Path, kind: str) -> None:
    names = ["logs", "logs/metrics.jsonl", "logs/probes.jsonl", "logs/rollouts.jsonl.gz", "report",
             "report/report.html", "evaluations", "evaluations/e", "offline", "training_state",
             "config.yaml"]  # fmt: skip
    runs = bare_runs(tmp_path, len(names))
    for run, name in zip(runs, names, strict=True):
        path = run / name
        path.parent.mkdir(exist_ok=True)
        if path.is_dir():
            shutil.rmtree(path)
        path.unlink(missing_ok=True)
        path.mkdir(parents=True) if kind == "a folder" else path.write_bytes(b"\xff\x00")
    assert_shown_or_refused(runs, bare_run(tmp_path / "other"))


def test_a_link_that_leads_to_itself_is_ignored_or_refused_by_its_name(tmp_path: Path) -> None:
    names = ["report", "evaluations", "training_state", "logs/rollouts.jsonl.gz"]
    runs = bare_runs(tmp_path, len(names))
    for run, name in zip(runs, names, strict=True):
        (run / name).symlink_to(Path(name).name)
    assert_shown_or_refused(runs, bare_run(tmp_path / "other"))


def test_a_run_whose_rewards_are_all_as_large_as_a_float_is_shown(tmp_path: Path) -> None:
    run = log_run(tmp_path / "run", 30, reward=lambda step: 1e308 if step > 9 else 0.5, entropy=1e308)
    assert write_report(run).is_file()


def test_what_is_in_the_way_of_a_page_is_not_told_to_make_room(tmp_path: Path) -> None:
    """Only a full disk is."""
    run = bare_run(tmp_path / "run")
    (run / "report" / "report.html").mkdir(parents=True)
    with pytest.raises(UserError, match=r"report\.html cannot be written \(Is a directory\): .*move .* away"):
        write_report(run)


def test_a_folder_that_the_system_refuses_to_open_is_named_in_one_line(tmp_path: Path) -> None:
    """As without permission, which a test that runs as root always has."""
    name = "a" * 300
    code, said = said_by(str(tmp_path / name))
    assert (code, len(said.splitlines())) == (2, 1)
    assert name in said
    assert "cannot be opened (File name too long)" in said


def test_a_run_whose_page_cannot_be_written_is_told_all_the_same(tmp_path: Path) -> None:
    run = bare_run(tmp_path / "run")
    (run / "report").write_text("in its place")
    code, said = said_by(str(run))
    assert code == 2
    assert "2 steps are logged, and a verdict needs 8" in " ".join(said.split())
    assert said.splitlines()[-1].startswith("error: ")


def test_csv_tables_hold_no_spreadsheet_formula_and_keep_numbers() -> None:
    texts = ["=1+1", "+1", "-1", "@a", "\t=1", "\r=1", "\n=1", "＝1", "a=1", "\x1b[2J"]
    table = pd.DataFrame({"=name": texts, "number": [-0.5] * len(texts)})
    data = as_csv(table)
    read = pd.read_csv(io.BytesIO(data))
    assert list(read) == ["'=name", "number"]
    assert read["number"].eq(-0.5).all()
    escaped = [text[1:] for text in read["'=name"] if text.startswith("'")]
    assert escaped == ["=1+1", "+1", "-1", "@a", "\t=1", r"\x0d=1", "\n=1", "＝1"]
    assert read["'=name"].tolist()[-2:] == ["a=1", r"\x1b[2J"]


def test_an_evaluation_of_odd_texts_is_read_back_as_written(tmp_path: Path) -> None:
    odd = {"prompt": "\ud800", "response": "=1+1\x1b[2J", "reward": 1.0}
    write_step(tmp_path, 1, {}, {"=reward": Estimate(1.0, 0.1, 8, "\ud800\x1b")}, [odd])
    (line,) = (tmp_path / "step_1" / "responses.jsonl").read_text(encoding="utf-8").splitlines()
    assert json.loads(line) == odd
    content = read_step(tmp_path, 1)
    assert content is not None
    assert content["metrics"]["=reward"]["reason"] == "\\ud800\x1b"
    assert "1,'=reward,1.0," in consolidate(tmp_path).read_text(encoding="utf-8")


def test_unprintable_characters_are_escaped_and_all_others_kept() -> None:
    everything = "".join(map(chr, range(0x3100)))
    shown = printable(everything)
    assert not CONTROL.search(shown)
    assert printable("a\tb\nc é 漢 🏖️ \\x1b") == "a\tb\nc é 漢 🏖️ \\x1b"
    assert printable("\x1b]0;title\x07\r\n\x9b2J\u202e\u2028\ud800") == (
        "\\x1b]0;title\\x07\n\\x9b2J\\u202e\\u2028\\ud800"
    )
    assert len(shown) == len(everything) + 3 * (32 - 2 + 33) + 5 * (2 + 5 + 4)


def test_runs_in_folders_with_odd_names_are_reported_and_compared(tmp_path: Path) -> None:
    """Bytes that are not UTF-8 are escaped, and markup is shown as text."""
    names = [os.fsdecode(b"a\xff"), "b<script>"]
    for name in names:
        (tmp_path / name / "logs").mkdir(parents=True)
        rows = [{"step": step, "reward": 0.5, "reward_std": 0.1, "entropy": 0.3} for step in (1, 2)]
        lines = "".join(f"{json.dumps(row)}\n" for row in rows)
        (tmp_path / name / "logs" / "metrics.jsonl").write_text(lines, encoding="utf-8")
        write_report(tmp_path / name)
    page, _ = write_comparison([str(tmp_path / name) for name in names], tmp_path / "both.html", "")
    text = Path(page).read_text(encoding="utf-8")
    assert "\\udcff" in text
    assert "b&lt;script&gt;" in text
