"""Numbers from samples: estimates with their errors, by jackknife, over prompts, over steps."""
