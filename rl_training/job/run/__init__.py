"""What the objects do, from a run's first line on the terminal to its last.

training.py          a training: built, trained, reported, ended
folder.py            the folder that it writes to, locked; the checkpoint that it goes on from
stopping.py          signals, answered at the end of a step
progress.py          the bar of its steps
waiting.py           which of several processes the others wait for
analysis.py          analyses of checkpoints; offline_probe.py starts one from Python
evaluation.py        evaluations of checkpoints, planned by evaluation_plan.py; which, by evaluated_checkpoints.py
own_evaluation.py    evaluations with the objects of a user's script
"""
