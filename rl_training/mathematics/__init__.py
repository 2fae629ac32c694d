"""Formulas: torch and scipy only. No trainer, no model, no file."""
