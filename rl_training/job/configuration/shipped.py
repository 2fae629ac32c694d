"""The folders that come with the package (conf/, launch/ and probe_configs/), and two commands that copy from them.

In a checkout they are at the top level; in a wheel they are inside the package (setup.py).
"""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path

from rl_training.errors import UserError
from rl_training.options import ArgumentParser

PACKAGE = Path(__file__).parents[2]


def _shipped(name: str) -> Path:
    inside = PACKAGE / name
    return inside if inside.is_dir() else PACKAGE.parent / name


CONF, LAUNCH, PROBE_CONFIGS = map(_shipped, ("conf", "launch", "probe_configs"))


def conf_folders() -> list[Path]:
    """Return the folders that settings are read from, highest precedence first: --config-dir, conf/."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config-dir", "-cd", type=Path)
    given = parser.parse_known_args(sys.argv[1:])[0].config_dir
    return [given.absolute(), CONF] if given else [CONF]


def show_conf() -> None:
    """Print the folder of the configuration files, or copy them with --copy."""
    parser = ArgumentParser(
        prog="rl-training config",
        description="Print the folder of the configuration files that train, analyze and evaluate read; or copy them.",
        epilog="Use a copy with --config-dir DIR. It need not be complete: files missing there come from the package. "
        "rl-training train --cfg job prints the composed settings.",
    )
    parser.add_argument("--copy", metavar="DIR", type=Path, help="copy them to this folder, which must be new")
    chosen = parser.parse_args()
    if chosen.copy is None:
        print(CONF)
        return
    if chosen.copy.exists():
        raise UserError(f"{chosen.copy} is there already: name a new folder")
    shutil.copytree(CONF, chosen.copy, ignore=shutil.ignore_patterns("__pycache__"))
    print(f"{chosen.copy}: edit what you like, then rl-training train --config-dir {chosen.copy}")


def copy_launch_file() -> None:
    """Copy a launch file or a script to ./launch, unless it exists there, and print its path."""
    scripts = ["train.slurm", "sync.sh"]
    names = [*sorted(path.stem for path in LAUNCH.glob("*.yaml")), *scripts]
    parser = ArgumentParser(
        prog="rl-training launch-file",
        description="Copy a configuration of accelerate launch, or a script, to ./launch, and print its path. A file "
        "that exists there is kept.",
        epilog="accelerate launch --config_file $(rl-training launch-file ddp) --num_processes 8 -m rl_training train",
    )
    parser.add_argument("name", metavar="NAME", choices=names, help=", ".join(names))
    name = parser.parse_args().name
    copies = [name] if name in scripts else [f"{name}.yaml", f"{name}.json"]  # .json: DeepSpeed's settings, if any
    for copy in copies:
        if (LAUNCH / copy).is_file() and not (Path("launch") / copy).exists():
            Path("launch").mkdir(exist_ok=True)
            shutil.copyfile(LAUNCH / copy, Path("launch") / copy)
    print(Path("launch") / copies[0])
