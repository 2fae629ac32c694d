"""The sequence kernel: how strongly each sequence of U moves each sequence of E in a checkpoint's next step.

Read in this order:

    at_checkpoint.py        computes the kernel of an analysis and writes its sequences
    calculate.py            computes a kernel in blocks under a memory budget, and writes its files
    blocks.py               multiplies many long rows; sequence_gradients.py computes these rows, checks.py checks them
    structure.py            summarizes a finished kernel, by sketches.py and clusters.py
    report.py, command.py   the page, and `rl-training kernel`
"""
