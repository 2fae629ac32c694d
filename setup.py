"""What setup.cfg cannot say: where files come from that a wheel has elsewhere, and a README whose links hold anywhere.

conf/, launch/ and probe_configs/ lie at the top of the repository, and in a wheel inside the package.
"""

import re
from pathlib import Path

from setuptools import find_packages, setup

SHIPPED = ("conf", "launch", "probe_configs")
HOME = "https://github.com/rl-training/rl-training/blob/main/"
IMAGES = "https://raw.githubusercontent.com/rl-training/rl-training/main/"
RELATIVE = re.compile(r"(!?)(\[[^\]]*\]\()(?!https?://|#)")


def description() -> str:
    """Returns README.md with absolute links: an index shows it without the files beside it."""
    readme = Path(__file__).with_name("README.md").read_text(encoding="utf-8")
    return RELATIVE.sub(lambda link: link[1] + link[2] + (IMAGES if link[1] else HOME), readme)


setup(
    packages=[*find_packages(include=["rl_training*"]), *(f"rl_training.{name}" for name in SHIPPED)],
    package_dir={f"rl_training.{name}": name for name in SHIPPED},
    long_description=description(),
)
