"""Gradients of a step by fold: caught on the leaves, exchanged between processes, added up.

folds.py            which prompts are a fold, and means without one
loss_weights.py     a loss as weights on log-probabilities and entropies, from which its gradient is made anew
fold_reduction.py   the gradients of a backward, summed by fold: catching.py catches them, exchange.py sends them
"""
