"""Words and numbers on which the engine and the records agree: who measured a number, and what bounds a step."""

# The names under `probe` in probes.jsonl. Any other name is that of a probe of a user's own.
BUILT_IN_NAMES = (
    "simple", "interventions", "measured", "token_classes", "ground_truth", "gns", "sampler", "ess", "covariance",
)  # fmt: skip
# Parts of the engine that measure. All time that no single probe causes is the engine's, whichever probes there are.
ENGINE, KL_BOUND = "engine", "kl_bound"

# The values of `target_kl_share`: a step's KL as a share of entropy, to which engine/kl_bound.py sets it.
AUTO = "auto"
AUTO_SHARE = 1e-2  # ended level with the best fixed rate on ten settings: benchmarks/step_size_plan.txt, third part
MAX_SHARE = 0.1  # a step of 1 to 2 times the entropy took held-out reward from .68 to .23 within six steps
