"""One optimizer step as data: its sequences, its gradients, and what cannot be measured at it."""
