"""What a run leaves, and how it is looked at: records, checkpoints, dashboards, the report."""
