"""The saved W&B workspace: what it would hold, without an account; its errors say what to do."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

from rl_training.records import workspace as dashboard
from rl_training.records.workspace import SECTIONS, main


def panels_of(spec: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    sections = spec["spec"]["section"]["panelBankConfig"]["sections"]
    return {section["name"]: [panel["config"] for panel in section["panels"]] for section in sections}


def test_a_dry_run_prints_every_section_and_panel_over_the_optimizer_step(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--dry-run", "--project", "mine", "--entity", "me"])
    spec = json.loads(capsys.readouterr().out)
    assert (spec["entity"], spec["project"]) == ("me", "mine")
    shown = panels_of(spec)
    assert list(shown) == list(SECTIONS)
    for name, panels in SECTIONS.items():
        assert [config["chartTitle"] for config in shown[name]] == [panel.title for panel in panels]
        assert [config.get("metrics", []) for config in shown[name]] == [list(panel.metrics) for panel in panels]
        assert all(config["xAxis"] == "step" for config in shown[name])


def test_without_the_package_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "wandb_workspaces.reports.v2", None)  # as if it were not installed
    with pytest.raises(SystemExit) as ended:
        main(["--dry-run"])
    assert ended.value.code == 2
    assert "pip install wandb-workspaces" in capsys.readouterr().err


def test_without_an_account_it_says_how_to_get_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Any
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))  # no .netrc
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    with pytest.raises(SystemExit) as ended:
        dashboard.main([])
    assert ended.value.code == 2
    assert "wandb login" in capsys.readouterr().err
