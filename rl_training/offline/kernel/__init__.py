"""Which sequence of U moves which sequence of E: the kernel of a checkpoint's next step.

Read in this order:

    at_checkpoint.py        what an analysis asks for, and what it leaves
    calculate.py            the kernel, in blocks under a memory budget, and its files
    blocks.py               the products of many long rows;  sequence_gradients.py: these rows
    structure.py            what a finished kernel shows
    report.py, command.py   the page, and `rl-training kernel`
"""
