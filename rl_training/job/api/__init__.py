"""What scripts import from `rl_training` to do what the commands do.

own_evaluation.py    evaluate: checkpoints of a script's own trainer, as `rl-training evaluate` does it
offline_probe.py     OfflineEntropyProbe: `rl-training analyze` with a configuration file of its own format
"""
