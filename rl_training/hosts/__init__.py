"""The training loops that probes can be attached to.

plain/               a loop in plain PyTorch: the shortest host, so read it first
trl/, verl/          TRL's trainer and verl's training worker
estimate_writer.py   ends a step for all hosts, and writes what it leaves: estimates, sequences (sequence_rows.py), and
                     the line of a loop that logs nothing itself (step_averages.py)
step_warnings.py     what it warns of: estimates are missing or share a name, or advantages are zero (equal_rewards.py)
recorded_settings.py lists the settings
interrupt_note.py    says below the traceback of Ctrl-C where records without a report are
folder_claim.py      claims the folder of the records of a plain loop or of verl
first_rank.py        what one process decides for all, such as that folder
policy.py            the policy of a plain loop or of verl: it samples and decodes with their functions
devices.py           refuses devices on which nothing can be measured
probes.py            the probes of a loop, as its user gives them
after_import.py      calls a function once a library is imported
"""
