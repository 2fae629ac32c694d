"""The group `probe` of Hydra's settings, for a command of another package."""

from __future__ import annotations

from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.plugins import Plugins
from hydra.plugins.search_path_plugin import SearchPathPlugin

from rl_training.job.configuration.shipped import CONF


class ProbeGroup(SearchPathPlugin):
    """Lets Hydra find conf/probe, with lower priority than the other package's groups and the user's."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        provider = "rl_training"
        if all(element.provider != provider for element in search_path.get_path()):
            search_path.append(provider=provider, path=f"file://{CONF}")


def add_probe_group() -> None:
    """Add the group to the commands of this process."""
    Plugins.instance().register(ProbeGroup)
