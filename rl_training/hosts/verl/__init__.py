"""Probes in verl: the same settings, one word of the command changed, and bitwise the same training.

    python -m rl_training.hosts.verl ...        # instead of python -m verl.trainer.main_ppo

A training has three kinds of process, and a step passes through them in this order:

    the command      __main__.py composes verl's settings with a choice of probes; refusals.py refuses what cannot be
                     measured, before Ray starts; trainer.with_probes puts the trainer and the engine below into them
    Ray's runner     trainer.py: verl's synchronous trainer. It keeps the responses to a prompt together, by
                     whole_prompts.py, and sends message.py with each rollout: what workers cannot see of the training,
                     training_settings.py, and of the rollout
    the workers      engine.py: verl's FSDP2 engine, which calls measurement.py at the moments of a step: that calls the
                     engine's driver, as any loop does. loop_spec.py describes verl's loop to it, batch.py reads
                     microbatches

probes.py makes the probes: in the command to refuse them, in the workers to measure. members.py lists what is relied on
in verl; read it first when verl changes. verl's own command can do the same by the plugin rl_training.verl_plugin. That
lies elsewhere, because verl imports it while verl is still being imported, and this package imports verl.

Workers import this package by actor_rollout_ref.model.external_lib=rl_training.hosts.verl, which registers the engine.
"""

from importlib.metadata import version

from rl_training.errors import UserError, require_extra

with require_extra():
    import verl  # noqa: F401  imported before its dependencies, so that a missing extra is named

    if not version("verl").startswith("0.9."):  # checked before importing modules that only this version has
        raise UserError(
            f"probes are written against verl 0.9, and this is {version('verl')}: pip install 'verl>=0.9,<0.10'"
        )
    from rl_training.hosts.verl.engine import register

register()
