"""One optimizer step in any training loop: recorded, measured, and held against what happened.

driver.py                           what a loop tells of each step, in six calls: read it first
recorder.py, fold_recorder.py       the step while it fills; build_step.py makes its data of it
probe.py, context.py                what a probe is and returns, and what it is given; requirements.py: what all ask for
probe_states.py                     their states, kept once a step is verified
loop_spec.py, fold_placement.py     what a loop is, and which folds its steps have
gradient_check.py, loss_check.py    whether the gradient is the one that folds and loss give
predictions.py, verifier.py         what the step is predicted to do, and whether it was the optimizer's formula
kl_bound.py, bounded_driver.py      steps of a set KL
timing.py, user_code.py             seconds, and errors of the user's functions
"""
