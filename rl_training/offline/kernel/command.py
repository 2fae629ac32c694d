"""rl-training kernel FOLDER …: show finished kernels, and how they change over training.

FOLDER is RUN/offline/NAME/checkpoint-N/kernel:

    rl-training kernel FOLDER                             print its numbers, and write its tables and page again
    rl-training kernel FOLDER FOLDER … --out EVOLUTION    also write evolution.csv, and evolution.html with charts;
                                                          --pictures svg writes each chart as a file too
"""

from __future__ import annotations

import argparse
from pathlib import Path

from rl_training.options import ArgumentParser
from rl_training.records.files.links import refuse_links_out


def main() -> None:
    parser = ArgumentParser(
        prog="rl-training kernel", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folders", nargs="+", type=Path, help="folders with kernel.safetensors")
    parser.add_argument("--out", type=Path, help="where to write the evolution over several folders")
    parser.add_argument("--pictures", choices=["png", "svg"], default="", help="draw its charts as files too")
    args = parser.parse_args()
    run(args.folders, args.out, args.pictures)


def run(folders: list[Path], out: Path | None, pictures: str = "") -> None:
    """Print a column of numbers for each kernel, write each kernel's report, and the evolution if `out` is given."""
    # Imported here, so that --help does not wait for slow imports.
    import pandas as pd

    from rl_training.offline.kernel.report import write_evolution, write_report
    from rl_training.offline.kernel.structure import Structure, headline

    for folder in folders if out is None else [*folders, out]:
        refuse_links_out(folder.resolve(), ".")
    structures = [Structure.read(folder) for folder in folders]
    columns = [{"step": int(s.kernel.metadata.get("step", 0)), **headline(s)} for s in structures]
    for folder in folders:
        print(write_report(folder))
    print(pd.DataFrame(columns).set_index("step").T.to_string(float_format="{:.3g}".format))
    if out is not None:
        write_evolution(structures, columns, out, pictures)
