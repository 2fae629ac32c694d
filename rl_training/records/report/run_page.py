"""What the page of one run shows, part by part, in the order of templates/run.html, which only prints it."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rl_training.records.pages.charts import Chart, Section
from rl_training.records.report.interventions.branches import branch_commands
from rl_training.records.report.interventions.section import interventions_of_run
from rl_training.records.report.opening import Opening, opening
from rl_training.records.report.sections import ledger, tokens
from rl_training.records.report.sections.appendix import (
    Cost,
    EvaluationTable,
    Gap,
    evaluation_tables,
    gaps,
    probe_costs,
    samples_over_time,
)
from rl_training.records.report.sections.checkpoint_analyses import analyses_of
from rl_training.records.report.sections.figures import draw_figures
from rl_training.records.report.sections.own_probes import own_metrics
from rl_training.records.report.sections.sampler import sampler_and_trainer
from rl_training.records.report.summary import summarize
from rl_training.records.report.summary.row import Row
from rl_training.records.report.summary.step_numbers import step_numbers
from rl_training.records.table.series import Run

CHARTS_ON_TOP = ("reward", "token_entropy")  # on the first screen
BATCH_CHARTS = ("noise_scale", "ess")  # after the interventions


@dataclass(frozen=True)
class Account:
    """Where the entropy went."""

    waterfall: Chart
    table: list[list[str]]
    caption: str


@dataclass(frozen=True)
class TokenTables:
    """Which tokens change entropy. The first row of a table is headings."""

    title: str
    anchor: str
    classes: list[list[str]]
    steps_of_classes: int  # measured steps that they average
    top: list[list[str]]  # [] if not recorded
    steps_of_top: int


@dataclass(frozen=True)
class RunPage:
    """The values of templates/run.html. A part that a run does not have is None or empty."""

    name: str
    opening: Opening
    charts_on_top: list[Chart]
    rows: list[Row]  # of the summary
    compare: str  # command
    account: Account | None
    step_numbers: list[list[str]]
    charts: list[Chart]
    interventions: Section | None
    batch_charts: list[Chart]
    sampler: list[str]  # sentences
    tokens: TokenTables | None
    own_metrics: list[list[str]]
    evaluations: list[EvaluationTable]
    analyses: list[Section]
    samples: Sequence[Any]  # rows of rollouts.jsonl.gz
    has_estimates: bool
    gaps: list[Gap]
    costs: list[Cost]
    provenance: dict[str, Any]
    config: str | None  # text of config.yaml

    @classmethod
    def of(cls, run: Run) -> RunPage:
        charts = draw_figures(run)
        return cls(
            name=run.name,
            opening=opening(run),
            charts_on_top=[chart for chart in charts if chart.name in CHARTS_ON_TOP],
            rows=summarize(run),
            compare=comparison_command(run),
            account=_account(run),
            step_numbers=step_numbers(run),
            charts=[chart for chart in charts if chart.name not in (*CHARTS_ON_TOP, *BATCH_CHARTS)],
            interventions=interventions_of_run(run, branch_commands(run)),
            batch_charts=[chart for chart in charts if chart.name in BATCH_CHARTS],
            sampler=sampler_and_trainer(run),
            tokens=_token_tables(run),
            own_metrics=own_metrics(run),
            evaluations=evaluation_tables(run),
            analyses=analyses_of(run),
            samples=samples_over_time(run),
            has_estimates=bool(run.names()),
            gaps=gaps(run),
            costs=probe_costs(run),
            provenance=run.provenance,
            config=run.config,
        )

    @property
    def all_charts(self) -> list[Chart]:
        """The charts of all parts, which can be written as pictures."""
        waterfall = [self.account.waterfall] if self.account else []
        sections = [section for section in (self.interventions, *self.analyses) if section]
        of_sections = [chart for section in sections for chart in section.charts]
        return [*self.charts_on_top, *self.charts, *self.batch_charts, *waterfall, *of_sections]


def comparison_command(run: Run) -> str:
    """Return the command that compares this run with others."""
    return f"rl-training report {shlex.quote(str(run.folder))} OTHER_RUN …"


def _account(run: Run) -> Account | None:
    account = ledger.ledger_of(run)
    if account is None:
        return None
    return Account(ledger.waterfall(account), ledger.table(account), ledger.caption(account))


def _token_tables(run: Run) -> TokenTables | None:
    classes, steps_of_classes = tokens.token_classes(run)
    top, steps_of_top = tokens.top_tokens(run)
    if not classes:
        return None
    return TokenTables(tokens.TITLE, tokens.ANCHOR, classes, steps_of_classes, top, steps_of_top)
