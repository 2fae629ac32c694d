"""The policy: scores of sequences, fresh samples, and how both are calculated.

rollout.py, scores.py                  the sequences, and their log-probabilities and entropies: read these first
policy.py                              the policy as probes see it
scorer.py                              scores of any causal model: inputs.py feeds it, linear_head.py saves memory
forward.py                             calls with the model's `forward` replaced
token_distributions.py                 next-token distributions, and their KL divergence after a step
finite.py                              refuses weights that are not finite
precision.py, rng.py                   precision and random streams of measurements, restored afterwards
dropout.py                             whether the forward pass draws random numbers
buffers.py                             buffers that forward passes change, restored afterwards; what batch norm means
rotary.py                              models whose scores depend on the longest row of a batch
"""
