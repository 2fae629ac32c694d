"""Makes the objects that a checked configuration describes.

make.py                makes the object of one node of the configuration; nothing else here calls Hydra's instantiate
trainer.py             makes the trainer, with model, task, adapter, buffer, probes and interventions
trainer_checks.py      checks that need TRL, the launcher or the built trainer
checkpoint_policy.py   loads the policy of a checkpoint, to evaluate it
dashboards.py          W&B, TensorBoard and trackio
"""
