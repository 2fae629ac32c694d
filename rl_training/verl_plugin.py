"""The plugin that verl loads from this package's entry point (setup.cfg): verl's own command can then run probes.

    python -m verl.trainer.main_ppo trainer.v1.trainer_mode=sync_with_probes +probe=simple ...

verl loads it in each of its processes while verl itself is being imported, and hides errors. So nothing is imported
here: what it adds is added once verl has imported Hydra and its trainers.
"""

from __future__ import annotations

import logging
import types

from rl_training.hosts.after_import import after_import


def add_probe_group(_: types.ModuleType) -> None:
    """Let verl's command choose probes from conf/probe."""
    from rl_training.job.configuration.probe_group import add_probe_group

    add_probe_group()


def add_trainer(_: types.ModuleType) -> None:
    """Register the trainer that keeps prompts whole. Other trainings go on without it if it cannot be."""
    try:
        import rl_training.hosts.verl.trainer  # noqa: F401
    except Exception as error:
        logging.getLogger(__name__).warning(f"trainer_mode=sync_with_probes is not available: {error}")


after_import("hydra.main", add_probe_group)
after_import("verl.trainer.ppo.v1", add_trainer)
