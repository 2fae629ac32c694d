"""rl-training dashboard: save a W&B workspace with one section per question that a run answers.

    rl-training dashboard --project rl-training              saves it, and prints its address
    rl-training dashboard --project rl-training --dry-run    prints what it would save; no account needed
    rl-training dashboard --project mine --attached          for runs of `attach`, whose trainer logs to W&B itself

dashboard.yaml defines sections and panels. A panel stays empty if the run does not log its metrics to W&B;
logger.metrics=all logs all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from rl_training.errors import UserError, require_extra
from rl_training.options import ArgumentParser

OF_TRAINER = "reward"  # section of the metrics that the trainer itself logs; it also logs one of another section:
TIME_OF_TRAINER = "step_time"


def sections() -> dict[str, dict[str, dict[str, Any]]]:
    """Return the content of dashboard.yaml: by section and title, each panel with its metrics, pattern and unit."""
    return yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))


def build_workspace(entity: str, project: str, name: str, attached: bool = False) -> Any:
    """Return the Workspace (wandb_workspaces) that dashboard.yaml describes, not saved yet.

    Args:
        attached: Whether the trainer itself logs to W&B. Its own metrics, the step too, then have the prefix train/.

    Raises:
        ImportError: If wandb_workspaces is not installed.
    """
    with require_extra():
        import wandb_workspaces.reports.v2 as reports
        import wandb_workspaces.workspaces as workspaces

    workspace_sections = []
    for section, panels in sections().items():
        plots: list[Any] = [
            reports.LinePlot(
                title=title,
                x="train/global_step" if attached else "step",
                y=[
                    f"train/{metric}" if attached and (section == OF_TRAINER or metric == TIME_OF_TRAINER) else metric
                    for metric in panel.get("metrics", [])
                ],
                metric_regex=panel.get("pattern"),
                title_y=panel.get("unit"),
            )
            for title, panel in panels.items()
        ]
        workspace_sections.append(workspaces.Section(name=section, panels=plots, is_open=True))
    return workspaces.Workspace(entity=entity, project=project, name=name, sections=workspace_sections)


def main(arguments: Sequence[str] | None = None) -> None:
    """Save or print the workspace that the command line asks for.

    Raises:
        UserError: If this machine has no W&B account, or a library is missing.
    """
    parser = ArgumentParser(
        prog="rl-training dashboard",
        description=f"Save a W&B workspace for the runs of logger=wandb, with the sections: {', '.join(sections())}.",
        epilog="Needs the extra dashboard (pip install 'rl-training[dashboard]') and, unless --dry-run, an account "
        "(wandb login). Runs that were kept offline appear in it after wandb sync.",
    )
    parser.add_argument("--project", default="rl-training", help="W&B project of the runs (default: %(default)s)")
    parser.add_argument("--entity", help="user or team that the project belongs to (default: that of the account)")
    parser.add_argument("--name", default="Entropy, and why", help="name of the saved view (default: %(default)s)")
    parser.add_argument("--attached", action="store_true", help="for runs of attach, whose trainer logs to W&B itself")
    parser.add_argument("--dry-run", action="store_true", help="print the view as JSON instead of saving it")
    args = parser.parse_args(arguments)
    if args.dry_run:
        workspace = build_workspace(args.entity or "your-entity", args.project, args.name, args.attached)
        print(workspace._to_model().model_dump_json(by_alias=True, exclude_none=True, indent=2))
    else:
        with require_extra():
            import wandb
        if not wandb.login(prompt=False):
            raise UserError("this machine has no W&B account: wandb login, or see the view with --dry-run")
        entity = args.entity or str(wandb.Api().default_entity)
        build_workspace(entity, args.project, args.name, args.attached).save()
