"""One optimizer step in any training loop: recorded, measured, and held against what happened."""
