"""Who measured a number: the names under `probe` in probes.jsonl. Any other name is that of a probe of a user's own."""

BUILT_IN_NAMES = (
    "simple", "interventions", "measured", "token_classes", "ground_truth", "gns", "sampler", "ess", "covariance",
)  # fmt: skip
# Parts of the engine that measure. All time that no single probe causes is the engine's, whichever probes there are.
ENGINE, KL_BOUND = "engine", "kl_bound"
