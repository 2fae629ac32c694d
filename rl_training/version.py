"""The version and the address of the project, readable without importing anything else."""

VERSION = "0.1.0"
REPOSITORY = "https://github.com/rl-training/rl-training"
