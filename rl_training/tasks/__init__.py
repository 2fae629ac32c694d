"""Tasks: each a module with one function that returns a `rl_training.tasks.task.Task`; nothing is registered."""
