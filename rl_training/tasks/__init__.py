"""Tasks: each a module with one function that returns a `rl_training.tasks.task.Task`; nothing is registered.

arithmetic, three_words, gsm8k, reasoning_gym                       the tasks
stated_number, expressions, units, guarded_worker, gym_score        how answers are read and scored, text never as code
models, tiny, smollm2                                               the models that are trained on them
"""
