"""Tasks. Each is a module with one function that returns a `rl_training.tasks.task.Task`; there is no registry.

task.py                                                        what a task is: read it first
arithmetic.py, three_words.py, gsm8k.py, reasoning_gym.py      the tasks
models.py, tiny.py, smollm2.py                                 load models for these tasks
adapter_patterns.py                                            refuses an adapter's patterns that never end
"""
