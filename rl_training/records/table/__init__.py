"""A run's records as one table, and what is read off it. Pages of one run and of several are made from this.

series.py        the run: its table, settings and provenance
reading.py       reads a run
estimates.py     rows of the table as estimates with their errors
measured.py      what the probe `measured` says of single steps
cumulative.py    cumulative sums of changes of entropy
trends.py        lines through logged numbers, shares and means, each with an interval
rates.py         entropy's change per step now
effects.py       what interventions were measured to change, and at which price
missing.py       why a number is missing, in words
config_file.py   the settings, with secrets masked
"""
