"""Checkpoints evaluated: a policy answers the rows of a task's evaluation split, and what that says of it."""
