"""What a policy says of sequences: scores, fresh samples, and how both are calculated.

rollout.py, scores.py                  the sequences, and their log-probabilities and entropies: read these first
policy.py                              the policy as probes see it
scorer.py                              scores of any causal model: inputs.py feeds it, linear_head.py spares its logits
precision.py, rng.py                   what a measurement must not change
padding_check.py, rotary.py            models whose scores depend on the batch that a response is scored in
"""
