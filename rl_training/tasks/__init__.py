"""Tasks: each is a dataset together with the reward that judges answers to it.

A task is a module with one function that returns a `rl_training.tasks.task.Task`: a training and a held-out
dataset, disjoint, and the reward. Every row has a `prompt` (plain text) and the columns that the reward
reads. The reward takes what TRL hands to a reward function, `reward(completions, **columns) -> list[float]`,
one number per completion; TRL logs it as `rewards/<name of the function>/mean`.

A new task is one new module here; nothing needs to be registered.
"""
