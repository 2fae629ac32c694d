"""Probes in verl, whose workers import this: actor_rollout_ref.model.external_lib=rl_training.hosts.verl.

python -m rl_training.hosts.verl ...        # in the place of python -m verl.trainer.main_ppo, with its own settings
"""

from importlib.metadata import version

from rl_training.errors import UserError
from rl_training.extras import require_extra

with require_extra():
    import verl  # noqa: F401  before what comes with it, so that the extra is named

    if not version("verl").startswith("0.9."):  # before modules are imported that only this version has
        raise UserError(
            f"probes are written against verl 0.9, and this is {version('verl')}: pip install 'verl>=0.9,<0.10'"
        )
    from rl_training.hosts.verl.engine import register

register()
