"""The entropy gradient, and what it predicts of a step: changes of entropy, length and reward to first order.

weights.py                the entropy gradient as weights on log-probabilities and entropies
data.py                   settings, quantities and the prediction as data
prediction.py             forward, backward and reuse of a step, and what makes each of them nan
fold_gradients.py         the entropy gradient X of each fold
products.py               products of X with updates
fold_sums.py              everything that is reported, as a function of sums over folds
reward_gradient.py        the gradient of the mean reward, and its products with the updates
attribution.py            splits by cause, layer, kind of module and group of layers
token_effects.py          what each single token of the step's gradient does
previous_update.py        δθ of the previous step, and error bars averaged over steps
changed_steps.py          what another loss, learning rate or clipping would do; paired_effects.py: with errors
per_decision.py           the change of entropy between two policies, by importance weights of prefixes
"""
