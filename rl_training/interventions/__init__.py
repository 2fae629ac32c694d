"""Interventions: possible changes of the training loss or of the optimizer, each as one function of a step."""
