"""Evaluates checkpoints: a policy answers the rows of a task's evaluation split, and metrics summarize the answers."""
