"""A trainer restored at a checkpoint: what its next step does to entropy, predicted and measured.

Read in this order:

    restored.py      the trainer as the step after the checkpoint would find it; checkpoint_files.py reads the files
    buffers.py       E, whose entropy is measured, and U, which the step learns from
    update.py        the step that the optimizer would make with U, whole and without each fold
    first_order.py   what that does to the entropy of E, to first order
    truth.py         what it really does, measured on E
    probe.py         these five as one analysis; sweep.py varies its settings
    results.py       what it leaves; analysis.py analyzes and writes
    kernel/          which sequence of U moves which of E
    own_trainer.py   the same of the user's own trainer; settings.py has the settings, phases.py shows progress
"""
