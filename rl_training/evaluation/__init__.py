"""Evaluation of checkpoints: a policy responds to a task's evaluation prompts, and metrics summarize the responses.

responses.py                       prompts to scored responses: read it first
options.py                         how checkpoints are evaluated
policy.py                          a checkpoint's policy, and the first model as its reference
metrics.py                         the metrics: pass_at_k.py, next_token.py (KL), examples.py to copy for your own
prompt_means.py                    means over prompts with their errors
workers.py                         a process of its own for each evaluation
"""
