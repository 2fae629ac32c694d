"""Tasks. Each is a module with one function that returns a `rl_training.tasks.task.Task`; there is no registry.

task.py                                                        what a task is: read it first
answers.py                                                     reads the answer in a response
arithmetic.py, three_words.py, gsm8k.py, reasoning_gym.py      the tasks
"""
