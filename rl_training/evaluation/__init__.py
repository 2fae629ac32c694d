"""Evaluation of checkpoints: a policy responds to a task's evaluation prompts, and metrics summarize the responses."""
