"""From the composed configuration to the objects of a run, with its checks and its errors in plain words."""
