"""The entropy gradient, and what a step does to entropy, length and reward."""
