"""python -m rl_training.report RUN_DIR: the command, under its public name; the work is in records/report/."""

from rl_training.records.report.command import main

if __name__ == "__main__":
    main()
