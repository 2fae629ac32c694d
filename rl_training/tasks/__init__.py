"""Tasks. Each is a module with one function that returns a `rl_training.tasks.task.Task`; there is no registry.

arithmetic, three_words, gsm8k, reasoning_gym                  the tasks
models, tiny, smollm2                                          load models for these tasks
"""
