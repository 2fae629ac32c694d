"""The entropy gradient, and what a step does to entropy, length and reward.

weights.py                                the entropy gradient as weights on log-probabilities and entropies
prediction.py                             forward, backward and reuse of a step, and what makes each of them nan
fold_gradients.py, products.py            which it is made of; fold_sums.py: all that is reported, as sums over folds
previous_update.py, averaged_errors.py    what is kept from step to step; trapezoid.py: the sum over steps
length_and_reward.py, attribution.py      the same for length and reward; by cause, layer and kind
changed_steps.py, paired_effects.py       what another loss, learning rate or clipping would do
fresh_sample.py, importance.py, per_decision.py, previous_policy.py     what a step has done, measured
advantage_covariance.py                   a predictor from the literature
"""
