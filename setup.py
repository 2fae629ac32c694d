"""What setup.cfg cannot say: folders outside the package that the wheel holds, and a README with links for PyPI."""

import re
from pathlib import Path

from setuptools import find_packages, setup

SHIPPED = ("conf", "launch", "probe_configs")
REPOSITORY = "https://github.com/rl-training/rl-training"


def with_absolute_links(text: str) -> str:
    """Return Markdown whose relative links lead to the repository's files, pictures to their content."""

    def absolute(match: re.Match[str]) -> str:
        kind = "raw" if match["path"].endswith(".png") else "blob"
        return f"{match['before']}{REPOSITORY}/{kind}/main/{match['path']}"

    return re.sub(
        r"(?P<before>\]\(|^\[[^]]+\]: )(?!https?:|mailto:|#)(?P<path>[^\s)]+)", absolute, text, flags=re.MULTILINE
    )


setup(
    packages=[*find_packages(include=["rl_training*"]), *(f"rl_training.{name}" for name in SHIPPED)],
    package_dir={f"rl_training.{name}": name for name in SHIPPED},
    long_description=with_absolute_links(Path(__file__).with_name("README.md").read_text(encoding="utf-8")),
    long_description_content_type="text/markdown",
)
