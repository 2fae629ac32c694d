"""The records of a run as pandas tables.

python examples/tables.py runs/lora
"""

import sys

from rl_training.records import metrics, probes

if __name__ == "__main__":
    run = sys.argv[1]
    steps = metrics(run)  # a row for each step, a column for each metric
    print(steps[["reward", "entropy/token", "delta_h/forward", "delta_h/forward_se"]].round(4))

    estimates = probes(run)  # a row for each estimate, with its error, interval and reason
    predicted = estimates.query("name == 'delta_h/forward' and value == value")
    print(predicted[["step", "value", "half_width"]].round(4).to_string(index=False))

    missing = estimates.query("value != value")  # nan: not measured at this step
    print(missing.groupby("reason")["name"].agg(["first", "size"]))
