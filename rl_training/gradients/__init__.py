"""Gradients of a step by fold: caught on the leaves, exchanged between processes, added up."""
