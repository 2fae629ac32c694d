"""The Jinja environment of the pages (templates/*.html) and of the charts' texts (templates/charts.yaml)."""

from __future__ import annotations

from jinja2 import Environment, PackageLoader, StrictUndefined

from rl_training.records.pages.writing import format_estimate, short
from rl_training.statistics.welch import is_significant

ENVIRONMENT = Environment(
    loader=PackageLoader(__package__), undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
)
ENVIRONMENT.filters |= {"format_estimate": format_estimate, "short": short}
ENVIRONMENT.tests["significant"] = is_significant
