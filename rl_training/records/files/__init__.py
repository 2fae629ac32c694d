"""Safe access to single files: a run may be killed while it writes, share its folder, or come from somebody else.

atomic_write.py     written completely or not at all     lock.py           one process at a time
links.py            nothing outside of the run           pickles.py        tensors, and no code
stored_yaml.py      plain YAML of limited size           unpack.py         gzip, within limits
masking.py          no tokens or passwords               printable.py      no terminal control characters
append.py           lines that stay whole        damaged.py        an error that names the file
limited.py          files of limited size        spreadsheet.py    no formulas
secret_names.py, secret_forms.py    how tokens and passwords are recognized
"""
