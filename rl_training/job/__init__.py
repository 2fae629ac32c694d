"""The commands train, analyze and evaluate.

Read in this order:

    commands.py      each command on a page: its configuration, the objects that it makes, its run
    configuration/   what was typed, conf/ and the settings of a stored run become one checked configuration
    objects/         what a configuration describes is made: trainer, model, task, probes, dashboards
    run/             what is made runs: a training, an analysis of checkpoints, an evaluation
    errors.py        how a command ends

Imports go from the bottom of configuration/ up: errors < configuration < objects < run < commands.
"""
