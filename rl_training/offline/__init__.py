"""Checkpoint analysis: how the next step from a checkpoint changes entropy, predicted and measured.

Read in this order:

    restored.py      restores the trainer as the next step would find it; checkpoint_files.py reads the files
    buffers.py       samples E, whose entropy is measured, and U, which the step learns from
    update.py        computes the optimizer's step on U, whole and without each fold
    first_order.py   predicts how that step changes the entropy of E, to first order
    truth.py         measures how it really changes
    analysis.py      runs these five as one analysis; sweep.py varies its settings
    results.py       writes result.json, log and table; analyze_and_write.py does all of this for one checkpoint
    kernel/          shows which sequence of U moves which sequence of E
    own_trainer.py   analyzes the user's own trainer; settings.py has the settings, phases.py shows progress
"""
