"""`rl-training report RUN --json` says what the page's first lines say, in the fields that run_folder.md documents."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from logged_runs import log_run, noisy

from rl_training.errors import UserError
from rl_training.records.report import print_summary
from rl_training.records.report.as_json import VERSION
from rl_training.records.report_command import main

ROOT = Path(__file__).parents[3]
REWARD = noisy(lambda step: 0.8 if step < 25 else 0.2, 0.03, 1)
RISING = noisy(lambda step: 0.3 + 0.01 * step, 0.03, 1)
ENTROPY = noisy(lambda step: 0.5, 0.01, 2)


def printed(folder: Path, capsys: pytest.CaptureFixture[str]) -> dict:
    main([str(folder), "--json"])
    return json.loads(capsys.readouterr().out)


def fields(value: dict, before: str = "") -> set[str]:
    """Return the names of all fields, as `verdict.kind` and `stands_out[].since`."""
    names = set()
    for name, inner in value.items():
        names.add(f"{before}{name}")
        if isinstance(inner, dict):
            names |= fields(inner, f"{before}{name}.")
        elif isinstance(inner, list) and inner and isinstance(inner[0], dict):
            names |= fields(inner[0], f"{before}{name}[].")
    return names


def test_json_has_the_terminals_verdict_and_the_setting_in_its_advice(tmp_path: Path, capsys) -> None:
    run = log_run(tmp_path / "run", 50, entropy=ENTROPY, reward=REWARD)
    said = printed(run, capsys)
    print_summary(run)
    terminal = " ".join(capsys.readouterr().out.split())
    assert (said["version"], said["verdict"]["kind"], said["steps"]["last"]) == (1, "fallen", 50)
    assert 24 <= said["verdict"]["since"] <= 27
    for sentence in (said["verdict"]["headline"], said["verdict"]["evidence"], said["advice"]):
        assert " ".join(sentence.split()) in terminal
    [setting] = said["settings"]
    assert setting in said["advice"]
    assert "target_kl_share" in setting
    assert not (run / "report").exists()


def test_json_has_evidence_without_what_joins_it_to_the_headline(tmp_path: Path, capsys) -> None:
    """Whatever that is: ", " for a steady entropy, ": " for a run too short, a space for a fall."""
    joints = {}
    for steps, reward, start in (
        (40, RISING, "at 101% of its start: reward"), (4, RISING, "4 steps are logged"), (50, REWARD, "since step 2"),
    ):  # fmt: skip
        run = log_run(tmp_path / str(steps), steps, entropy=ENTROPY, reward=reward)
        said = printed(run, capsys)["verdict"]
        assert said["evidence"].startswith(start)
        print_summary(run)
        text = " ".join(capsys.readouterr().out.split())
        joints[said["kind"]] = text.partition(said["headline"])[2].partition(said["evidence"][:10])[0]
    assert joints == {"steady": ", ", "unknown": ": ", "fallen": " "}


def test_json_has_what_stands_out_with_the_step_and_the_settings(tmp_path: Path, capsys) -> None:
    run = log_run(
        tmp_path / "run", entropy=ENTROPY, reward=0.5, completions__clipped_ratio=0.9, completions__mean_length=60.0
    )
    said = printed(run, capsys)
    assert said["stands_out"]
    for line in said["stands_out"]:
        assert 1 <= line["since"] <= 40
        assert all(setting in line["advice"] for setting in line["settings"])


def test_a_line_that_is_the_verdict_gives_the_kind_and_the_step_of_the_headline(tmp_path: Path, capsys) -> None:
    run = log_run(tmp_path / "run", reward=0.0, reward_std=0.0, frac_reward_zero_std=1.0)
    said = printed(run, capsys)["verdict"]
    assert (said["kind"], said["since"]) == ("equal", 1)
    assert said["headline"] == "Nothing has been learned from rewards"


def test_every_field_is_documented_and_no_other(tmp_path: Path, capsys) -> None:
    run = log_run(tmp_path / "run", entropy=ENTROPY, reward=REWARD, completions__clipped_ratio=0.9)
    page = (ROOT / "docs" / "reference" / "run_folder.md").read_text(encoding="utf-8")
    section = page.partition("## The first lines as JSON")[2].partition("\n## ")[0]
    documented = set(re.findall(r"`([a-z_.\[\]]+)`", "".join(re.findall(r"^\| (.*?) \|", section, re.MULTILINE))))
    assert fields(printed(run, capsys)) == documented
    assert f"version {VERSION}" in section


def test_json_of_several_runs_is_refused_in_one_line(tmp_path: Path) -> None:
    runs = [str(log_run(tmp_path / name, 3, entropy=ENTROPY, reward=REWARD)) for name in ("a", "b")]
    with pytest.raises(UserError, match=r"^--json "):
        main([*runs, "--json"])
