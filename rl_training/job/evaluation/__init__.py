"""Evaluates checkpoints: of a run, for the command; of a script's own trainer, for job/api.

spec.py              what is evaluated, and with which options
spelling.py          how the user types an option: on the command line, in Python
request.py           reads from a command's settings what to evaluate; checkpoints.py finds the checkpoints
run_checkpoints.py   evaluates them one after another; worker.py generates the responses of one in a process of its own
evaluation.py        what both callers do with the responses of a checkpoint: measure, write, announce
result_folder.py     the folder of the results, which is locked meanwhile
announcements.py     the dashboards, the run's report and the table in the terminal
progress.py          the progress bar
"""
