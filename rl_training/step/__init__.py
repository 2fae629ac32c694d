"""One optimizer step as probes see it, and what can be computed from that view."""
