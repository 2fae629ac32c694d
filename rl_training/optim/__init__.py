"""The optimizer's step as a formula: from states and a gradient to the change of the parameters.

formula.py         the contract that adamw.py (AdamW and Adam), sgd.py and lion.py keep; supported.py is their table
state.py           what the loop's optimizer is before its step
updates.py         the step, in pieces; leave_one_out.py: without each fold; rounding.py: what bf16 keeps of it
"""
