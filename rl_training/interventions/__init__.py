"""Interventions: what could be changed in the training loss or in the optimizer, each as one function of a step."""
