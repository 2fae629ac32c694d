"""The entropy gradient, and what it predicts of a step: changes of entropy, length and reward to first order.

weights.py                the entropy gradient as weights on log-probabilities and entropies
data.py                   settings, quantities and the prediction as data, and the order of columns in tables
prediction.py             forward, backward and reuse of a step, and what makes each of them nan
fold_gradients.py         the entropy gradient X of each fold
products.py               products of X with updates
fold_sums.py              everything that is reported, as a function of sums over folds
reward_gradient.py        the gradient of the mean reward, and its products with the updates
attribution.py            splits by cause, layer, kind of module and group of layers
token_effects.py          what each single token of the step's gradient does
previous_update.py        the update of the previous step, and error bars averaged over steps
changed_steps.py          what another loss, learning rate or clipping would do; paired_effects.py: with errors
per_decision.py           the change of entropy between two policies, by importance weights of prefixes

The words, with their symbols:

    entropy gradient    X: ∂H_seq per sequence, E[T] ∂H_tok per token. These two are the denominators
    fold                k of K: whole prompts; it has n_k of the step's N sequences
    update              δθ: what the optimizer's step adds to the weights, a vector. A `StepUpdate` is what makes it
      without a fold    δθ_(−k): what it would add if the batch lacked fold k, clipped by that gradient's own norm
      unclipped         what it would add without gradient clipping
      unrounded         what the formula adds, before weights in half precision are rounded; δθ itself in fp32
      scheduled         what it would add at the schedule's learning rate, before `target_kl_share` sets another
      changed           what it would add after a `Change` of loss, learning rate or clipping; Δ is its difference to δθ
      previous          that of the step before
    by_fold             vectors, one for each fold
    product             X · δθ, the change of entropy that an update makes to first order; tables are `…_products`
    correction          of fold l: how the other folds' products change if the updates lack l as well
    totals              a fold's number of sequences, Σ h and Σ T
    quantity            what is reported: a number per token and one per sequence, or that alone, with errors
    target              of `surrogate_weights`: the entropy, or the length, whose gradient they give
"""
