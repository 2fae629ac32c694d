"""What setup.cfg cannot say: conf/, launch/ and probe_configs/ lie outside of the package, and in a wheel inside."""

from setuptools import find_packages, setup

SHIPPED = ("conf", "launch", "probe_configs")

setup(
    packages=[*find_packages(include=["rl_training*"]), *(f"rl_training.{name}" for name in SHIPPED)],
    package_dir={f"rl_training.{name}": name for name in SHIPPED},
)
