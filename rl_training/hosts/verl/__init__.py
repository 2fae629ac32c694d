"""Probes in verl, whose workers import this: actor_rollout_ref.model.external_lib=rl_training.hosts.verl.

python -m rl_training.hosts.verl ...        # in the place of python -m verl.trainer.main_ppo, with its own settings
"""

from rl_training.extras import of_an_extra

with of_an_extra():
    import verl  # noqa: F401  before what comes with it, so that the extra is named

    from rl_training.hosts.verl.versions import refuse_another_version

    refuse_another_version()  # before modules are imported that only this version has
    from rl_training.hosts.verl.engine import register

register()
