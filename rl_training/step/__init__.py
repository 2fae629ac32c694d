"""One optimizer step: its sequences, its gradients by fold, and what cannot be measured.

data.py, batch.py        the step as data
folds.py                 which prompts form a fold
loss_weights.py          a loss as weights on log-probabilities and entropies, from which its gradient can be recomputed
reasons.py               what cannot be measured at a step, and reasons that several files give
needs.py                 what a probe can ask the engine to keep
passes.py                computes with the data; score_check.py: whether its scores equal training's
residual.py              whether the policy drew the responses; martingale.py: how far chance goes
fold_reduction.py        the gradients of a backward, summed by fold: catching.py catches them, exchange.py sends them
"""
