"""From a checked configuration to the objects that it describes.

make.py             one node of the configuration becomes an object; nothing else calls Hydra's instantiate
trainer.py          the trainer, with model, task, adapter, buffer, probes and interventions
trainer_checks.py   what only a built trainer shows
dashboards.py       W&B, TensorBoard and trackio
"""
