"""Numbers from samples: estimates with errors, by the jackknife, over runs and over steps.

estimate.py, unavailable.py            a number with its error, or the reason why it is missing: read these first
jackknife.py                           errors of functions of sums over independent units
running_variance.py, running_pairs.py  averages over steps
welch.py, line.py                      errors over runs, and of a line through the steps of one
calibration.py                         predictions against the truth
noise_scale.py, kish.py                how much of a batch is noise, and how many sequences count
"""
