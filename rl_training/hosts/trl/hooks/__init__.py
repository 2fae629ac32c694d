"""The hooks around a trainer's methods: what stands before their `yield` runs before the method, the rest after it.

TRL has no callback between forward pass and backward, so a few methods of the trainer INSTANCE are wrapped.

rollout.py        what is generated
loss.py           each microbatch; scoring_calls.py finds the scores behind its loss
training_step.py  the backward, and the optimizer's step
unseen_loss.py    a loss that the hook of loss.py does not see
checkpoint.py     what checkpoints get, and what a training resumes

`Guard.around` runs them, so that none of their errors ends a training.
"""
