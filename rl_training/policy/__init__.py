"""What a policy says of sequences: scores, fresh samples, and how both are calculated."""
