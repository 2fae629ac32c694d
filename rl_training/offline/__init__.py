"""A trainer restored at a checkpoint: what its next step does to entropy, predicted and measured."""
