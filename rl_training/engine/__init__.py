"""One optimizer step in any training loop: recorded, measured, and checked against what happened.

driver.py                           the six calls in which a loop reports each step: read it first
measurer.py, kl_bound.py            what takes part in a step: probes measure it, a set KL bounds it
open_step.py, fold_recorder.py      collect the step's sequences and gradients; build_step.py turns them into StepData
step_reasons.py                     which reasons a step gets, and when each becomes known
probe.py, context.py                what a probe is and returns, and what it is given
requirements.py                     what all probes together need; announcement.py: what is said of it at the start
probe_states.py                     the probes' states, kept once a step is verified
loop_spec.py                        what the driver knows about a loop
fold_placement.py                   the folds of a step; fold_advice.py: what to type for more of them
step_checks.py                      what is checked at several steps: padding_check.py, terms_check.py, reward_check.py
loss_info.py                        what a loop tells about its loss, and what the loss's graph shows
gradient_check.py                   whether the step's gradient is that of its microbatches
copied_groups.py                    whether groups of responses are copies of others
gradient_witness.py                 whether the optimizer gets the measured gradient
predictions.py, verifier.py         what the step is predicted to do, and whether it followed the optimizer's formula
kl_search.py                        the length of a step of a set KL
step_result.py, costs.py            what a step leaves for hosts; its seconds by name, and bytes
"""
