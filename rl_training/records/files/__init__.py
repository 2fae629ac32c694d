"""Files of a run, written and read safely: the run may be killed while it writes, shared, or somebody else's.

atomic_write.py     whole or not at all              lock.py           by one process at a time
links.py            nothing outside of the run       pickles.py        tensors, and no code
stored_yaml.py      plain, within limits             unpack.py         packed, within limits
masking.py          without tokens and passwords     printable.py      moves no cursor
spreadsheet.py      is no formula
"""
