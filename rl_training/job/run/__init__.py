"""Runs the objects: trainings, analyses and evaluations.

training.py          build, train, report and end a training run
folder.py            find and lock the run folder, and find the checkpoint to continue from
stopping.py          end a training at the end of a step after a signal
progress.py          progress bar of a training
waiting.py           name the process that the other processes wait for
analysis.py          analyze checkpoints; offline_probe.py does it from Python
evaluation.py        evaluate checkpoints, each by evaluation_worker.py; evaluation_results.py measures and writes
own_evaluation.py    evaluate checkpoints with the objects of a user's script
"""
