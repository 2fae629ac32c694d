"""The optimizer's step as a formula: from its states and a gradient to the change of the parameters.

formula.py                   the interface; supported.py: the optimizers that implement it
adamw.py, sgd.py, lion.py    an optimizer each
state.py                     the state of the loop's optimizer before its step
updates.py                   the update, in pieces; leave_one_out.py: without each fold
rounding.py                  what bf16 keeps of it
"""
