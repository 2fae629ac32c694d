"""python -m rl_training.report RUN …: the command report; the work is in records/report and records/compare."""

from rl_training.__main__ import command

if __name__ == "__main__":
    command("report")
