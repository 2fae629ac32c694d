"""Where a training writes: nowhere, records alone, or the folder of a run.

destination.py       what an attachment calls when training begins and ends; nowhere, and records alone
attached_run.py      the folder of a run that `attach` writes: its choice, config.yaml, and the report at its end
run_folder.py        a folder with its lock, records and report, for `attach` and for commands
unwritten_lines.py   counts lines that cannot be written, as on a full disk
end_request.py       notes a signal that asks the process to end
"""
