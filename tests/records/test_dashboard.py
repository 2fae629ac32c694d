"""The saved W&B workspace: its contents, checked without an account, and errors that say what to do."""

from __future__ import annotations

import itertools
import json
import re
import sys
from pathlib import Path

import pytest
from transformers.integrations.integration_utils import rewrite_logs

from rl_training.errors import UserError
from rl_training.records import dashboard
from rl_training.records.dashboard import main


def table_of_the_page() -> dict[str, list[str]]:
    """Return what docs/how_to/watch_a_run.md says to look at: {section: names as written there}."""
    lines = (Path(__file__).parents[2] / "docs" / "how_to" / "watch_a_run.md").read_text(encoding="utf-8").splitlines()
    start = lines.index("| section | look at | question |") + 2
    rows = [line.split("|") for line in itertools.takewhile(bool, lines[start:])]
    return {row[1].strip(): re.findall(r"`([^`]+)`", row[2]) for row in rows}


def test_a_dry_run_prints_the_dashboard_sections_over_the_optimizer_step(capsys) -> None:
    main(["--dry-run", "--project", "mine", "--entity", "me"])
    spec = json.loads(capsys.readouterr().out)
    assert (spec["entity"], spec["project"]) == ("me", "mine")
    sections = spec["spec"]["section"]["panelBankConfig"]["sections"]
    table = table_of_the_page()
    assert [section["name"] for section in sections] == list(table)
    for section in sections:
        panels = [panel["config"] for panel in section["panels"]]
        assert all(config["xAxis"] == "step" for config in panels)
        drawn = [metric for config in panels for metric in config.get("metrics", [])]
        patterns = [config["metricRegex"] for config in panels if config.get("useMetricRegex")]
        for name in table[section["name"]]:
            if name.startswith(("delta_h/layer/", "intervention/", "tokens/")):
                name_in_run = name.replace("…", "0").replace("NAME", "bonus:0.02").replace("KIND", "text")
                assert any(re.search(pattern, name_in_run) for pattern in patterns), name
            elif "…" in name:  # stands for several names with this ending or beginning
                assert any(metric.startswith(name[:-1]) or metric.endswith(name[1:]) for metric in drawn), name
            elif "=" not in name:
                assert {name, f"delta_h/{name}"} & set(drawn), name


def test_an_attached_trainers_metrics_have_the_names_that_transformers_gives_them(capsys) -> None:
    main(["--dry-run", "--attached"])
    first, reward, *others = json.loads(capsys.readouterr().out)["spec"]["section"]["panelBankConfig"]["sections"]
    drawn = [
        metric for section in others for panel in section["panels"] for metric in panel["config"].get("metrics", [])
    ]
    assert {*rewrite_logs({"step_time": 0.0})} <= {*drawn}
    assert reward["panels"][0]["config"]["metrics"] == [*rewrite_logs({"reward": 0.0})]
    change = first["panels"][0]["config"]
    assert change["metrics"] == ["delta_h/cumulative_measured", "delta_h/cumulative_predicted"]
    assert change["xAxis"] == "train/global_step"


def test_a_missing_dashboard_package_is_refused_with_what_to_install(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb_workspaces.reports.v2", None)  # as if it were not installed
    with pytest.raises(ImportError, match=r"pip install 'rl-training\[dashboard\]'"):
        main(["--dry-run"])


def test_a_missing_account_is_refused_with_how_to_log_in(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))  # no .netrc
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    with pytest.raises(UserError, match="wandb login"):
        dashboard.main([])
