"""One optimizer step as data: its sequences, its gradients, and what cannot be measured at it.

data.py, batch.py        the data; quantities.py: the numbers that are made of it
limits.py                every reason why a number is missing, with its code
needs.py                 what a probe can ask to be kept
runtime.py               what calculates with the data; score_check.py: whether that scores as training did
"""
