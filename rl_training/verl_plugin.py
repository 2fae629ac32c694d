"""The plugin that verl loads from this package's entry point (setup.cfg): verl's own command can then run probes.

    python -m verl.trainer.main_ppo trainer.v1.trainer_mode=sync_with_probes +probe=simple ...

verl loads it in each of its processes while verl itself is still being imported, and hides its errors. So it imports
nothing of verl: it waits until verl has imported Hydra and its trainers.
"""

from __future__ import annotations

import logging
import types

from rl_training.hosts.after_import import after_import


def _let_command_choose_probes(_: types.ModuleType) -> None:
    from rl_training.job.configuration.probe_group import add_probe_group

    add_probe_group()


def _register_trainer(_: types.ModuleType) -> None:
    """Register the trainer that keeps prompts whole. An error is only logged, since other trainings do not need it."""
    try:
        import rl_training.hosts.verl.trainer  # noqa: F401
    except Exception as error:
        logging.getLogger(__name__).warning(f"trainer_mode=sync_with_probes is not available: {error}")


after_import("hydra.main", _let_command_choose_probes)
after_import("verl.trainer.ppo.v1", _register_trainer)
