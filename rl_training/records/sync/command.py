"""rl-training sync SOURCE DESTINATION."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tqdm import tqdm

from rl_training.records.sync.copying import OURS, Connection, Outcome, sync_once
from rl_training.records.sync.listing import METRICS, SourceFile, has_ended, shown

EPILOG = """\
SOURCE is a folder, or anything that fsspec knows:
  sftp://USER@HOST/absolute/path    pip install 'rl-training[sync-ssh]'; keys, agent, config and known_hosts of ssh
  s3://BUCKET/path                  pip install 'rl-training[sync-s3]'; profile and environment of the AWS tools
  gs://…  hf://…                    pip install gcsfs, huggingface_hub

The files of SOURCE are copied to DESTINATION under the same names. Only what changed is copied; a file arrives whole
or not at all; nothing is ever deleted there. After a failure the same command goes on.
"""


def main(arguments: Sequence[str] | None = None) -> None:
    """Downloads runs as the command line asks; exits with 2 for a mistake, 1 when the source could not be reached."""
    parser = argparse.ArgumentParser(
        prog="rl-training sync",
        description="Copy runs from another machine or a store to a folder here: logs, reports, evaluations and "
        "configuration, on request checkpoints.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("source", metavar="SOURCE", help="a run, or a folder of runs")
    parser.add_argument("destination", metavar="DESTINATION", type=Path, help="a folder here; made if it is not there")
    parser.add_argument("--checkpoints", choices=["none", "latest", "all"], default="none", help="default: none")
    parser.add_argument("--checksum", action="store_true", help="compare contents, not size and time; fetches all")
    parser.add_argument("--watch", metavar="SECONDS", type=float, help="repeat until the runs have ended")
    parser.add_argument("--retries", metavar="N", type=int, default=5, help="after a broken connection (default: 5)")
    chosen = parser.parse_args(arguments)
    if "://" in str(chosen.destination) or ":/" in str(chosen.destination):
        parser.error(f"DESTINATION is a folder on this machine, not {chosen.destination}")
    if chosen.retries < 0 or (chosen.watch is not None and chosen.watch <= 0):
        parser.error("--watch takes seconds above 0, --retries a number that is not below 0")
    if chosen.destination.exists() and not chosen.destination.is_dir():
        parser.error(f"DESTINATION is a folder, and {chosen.destination} is a file: name another, or remove it")
    connection = Connection(chosen.source, chosen.retries, pause=1.0, tell=_tell)
    try:
        if chosen.watch is None:
            _one_pass(connection, chosen)
        else:
            _watch(connection, chosen)
    except ConnectionError as error:
        parser.exit(1, f"{parser.prog}: error: {error}\n")
    except (OSError, ValueError) as error:
        way_out = OURS.get(error.errno or 0, "") if isinstance(error, OSError) else ""
        parser.exit(2, f"{parser.prog}: error: {error}{way_out}\n")
    except KeyboardInterrupt:
        parser.exit(130, "stopped: what has arrived is kept\n")


def _one_pass(connection: Connection, chosen: argparse.Namespace) -> Outcome:
    outcome = sync_once(connection, chosen.destination, chosen.checkpoints, chosen.checksum, _bar)
    if not outcome.files:
        raise ValueError(f"{shown(chosen.source)} holds no run: give the folder that has {METRICS}, or one above it")
    vanished = f", {outcome.vanished} deleted there meanwhile" if outcome.vanished else ""
    size = tqdm.format_sizeof(outcome.copied_bytes, "B", 1000)
    copied = f"{outcome.copied} file{'s' * (outcome.copied != 1)} copied"
    print(f"{copied} ({size}), {outcome.unchanged} unchanged{vanished}: {chosen.destination}")
    return outcome


def _watch(connection: Connection, chosen: argparse.Namespace) -> None:
    """Makes passes until a run has ended: two in a row that copied nothing, and a report newer than the last step."""
    quiet = 0
    while quiet < 2:
        try:
            outcome = _one_pass(connection, chosen)
        except ConnectionError as error:
            _tell(str(error))
            quiet = 0
        else:
            quiet = quiet + 1 if not outcome.copied and has_ended(outcome.listed) else 0
        if quiet < 2:
            time.sleep(chosen.watch)
    print("the runs have ended")


def _bar(files: Sequence[SourceFile]) -> Sequence[SourceFile]:
    return tqdm(files, unit="file", leave=False, file=sys.stderr) if files else files  # type: ignore[return-value]


def _tell(message: str) -> None:
    tqdm.write(message, file=sys.stderr)
