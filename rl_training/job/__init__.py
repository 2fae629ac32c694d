"""The commands train, analyze and evaluate.

Read in this order:

    commands.py      each command: compose the configuration, make the objects, run them
    configuration/   turns the command line, conf/ and a stored run's settings into one checked configuration
    objects/         makes what a configuration describes: trainer, model, task, probes, dashboards
    evaluation/      evaluates checkpoints
    run/             runs these objects: a training, an analysis of checkpoints
    api/             what `rl_training` exports to scripts: evaluate, OfflineEntropyProbe
    fetch_smollm2.py, make_tiny.py   two commands by themselves, which write a model
    errors.py        exit codes, and the one-line errors that users see; silence.py hides messages of libraries

Each layer imports only from those to its left: errors < configuration < objects < evaluation < run < api <
commands.
"""
