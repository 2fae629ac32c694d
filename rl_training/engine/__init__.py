"""One optimizer step, measured, in any training loop: nothing here knows a trainer."""
