"""Gradients of a step by fold: caught on the leaves, exchanged between ranks, added up.

folds.py            which prompts form a fold, and means that leave one fold out
loss_weights.py     a loss as weights on log-probabilities and entropies, from which its gradient can be recomputed
fold_reduction.py   the gradients of a backward, summed by fold: catching.py catches them, exchange.py sends them
"""
