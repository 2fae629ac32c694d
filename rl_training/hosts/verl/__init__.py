"""Probes in verl. Its workers import this: actor_rollout_ref.model.external_lib=rl_training.hosts.verl.

python -m rl_training.hosts.verl ...        # instead of python -m verl.trainer.main_ppo, with the same settings

trainer.py keeps the responses to a prompt together; engine.py reports each step of its workers to the probes, and
batch.py converts their microbatches.
"""

from importlib.metadata import version

from rl_training.errors import UserError
from rl_training.extras import require_extra

with require_extra():
    import verl  # noqa: F401  imported before its dependencies, so that a missing extra is named

    if not version("verl").startswith("0.9."):  # checked before importing modules that only this version has
        raise UserError(
            f"probes are written against verl 0.9, and this is {version('verl')}: pip install 'verl>=0.9,<0.10'"
        )
    from rl_training.hosts.verl.engine import register

register()
