"""The training loops that probes can be attached to."""
