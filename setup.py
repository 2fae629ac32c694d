"""Put conf/, launch/ and probe_configs/, which lie outside the package, inside the wheel. setup.cfg cannot say this."""

from setuptools import find_packages, setup

SHIPPED = ("conf", "launch", "probe_configs")

setup(
    packages=[*find_packages(include=["rl_training*"]), *(f"rl_training.{name}" for name in SHIPPED)],
    package_dir={f"rl_training.{name}": name for name in SHIPPED},
)
