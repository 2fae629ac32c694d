"""One optimizer step as data: its sequences, its gradients, and what cannot be measured.

data.py, batch.py        the data; quantities.py: numbers computed from it
reasons.py               every reason why a number is missing, with its code
needs.py                 what a probe can ask the engine to keep
passes.py                computes with the data; score_check.py: whether its scores equal training's
"""
