"""Interventions: possible changes of the training loss or of the optimizer, each as one function of a step.

reweighting.py     the interventions on the loss, one function each with its source: read it first
loss.py            what they are given
named.py           all interventions by name, with their strengths and what they need
custom.py          a user's own
"""
