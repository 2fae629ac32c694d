"""The entropy gradient, and how a step changes entropy, length and reward.

Predicted to first order:

weights.py                the entropy gradient as weights on log-probabilities and entropies
prediction.py             forward, backward and reuse of a step, and what makes each of them nan
fold_gradients.py         the entropy gradient X of each fold
products.py               products of X with updates
fold_sums.py              everything that is reported, as a function of sums over folds
length_and_reward.py      the same predictions for length and reward
attribution.py            splits by cause, layer, kind of module and group of layers
token_effects.py          what each single token of the step's gradient does
previous_update.py        δθ of the previous step, and error bars averaged over steps
changed_steps.py          what another loss, learning rate or clipping would do; paired_effects.py: with errors
advantage_covariance.py   a predictor from the literature

Measured:

fresh_sample.py           the effect of a step on responses that it was not trained on
importance.py             the change of entropy by weights of whole sequences
per_decision.py           the change of entropy by weights of prefixes, which has less noise
"""
