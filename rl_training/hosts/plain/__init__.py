"""A loop in plain PyTorch, whose author calls the probes: the shortest host.

measured_loop.py     `measured_loop`, which documents the calls, checks the loop and describes it to the engine
calls.py             the calls themselves, each checked and passed to the engine's driver
progress.py          which call may come next
checkpoint.py        the state that the loop saves in its own checkpoints
refusals.py          errors for what cannot be measured, and for calls that contradict the loop

A whole loop is among the examples of the repository, plain_loop.
"""
