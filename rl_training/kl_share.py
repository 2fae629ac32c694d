"""The values of `target_kl_share`: a step's KL as a share of entropy, to which engine/kl_bound.py sets it."""

AUTO = "auto"
AUTO_SHARE = 1e-2  # ended level with the best fixed rate on ten settings: benchmarks/step_size_plan.txt, third part
MAX_SHARE = 0.1  # a step of 1 to 2 times the entropy took held-out reward from .68 to .23 within six steps
