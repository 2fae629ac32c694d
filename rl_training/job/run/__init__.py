"""Runs the objects: trainings and analyses of checkpoints.

training.py          build, train, report and end a training run
folder.py            find and lock the run folder, and find the checkpoint to continue from
stopping.py          end a training at the end of a step after a signal
progress.py          progress bar of a training
waiting.py           name the process that the other processes wait for
analysis.py          analyze checkpoints
"""
