"""What lies in the folder of a run, by name; the files in `logs` have theirs beside what reads and writes them."""

CONFIG_FILE = "config.yaml"  # every setting, and where the run comes from
LOGS_FOLDER = "logs"  # metrics.jsonl, probes.jsonl and what dashboards keep on the disk
TRAINING_STATE = "training_state"  # the checkpoint-N folders
