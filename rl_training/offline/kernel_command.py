"""rl-training kernel FOLDER …: read finished kernels: numbers, what if, change over training.

FOLDER is RUN/offline/NAME/checkpoint-N/kernel:

    rl-training kernel FOLDER                                     numbers; draws tables and page again
    rl-training kernel FOLDER --without wrong --without longest:8
    rl-training kernel FOLDER FOLDER … --out EVOLUTION            evolution.csv and three pictures
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from rl_training.offline.structure import Row


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="rl-training kernel", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folders", nargs="+", type=Path, help="folders with kernel.safetensors")
    parser.add_argument(
        "--without", action="append", default=[], metavar="WHAT",
        help="calculate as if the step had not trained on these sequences: wrong, right, longest:K, lowest:K, "
        "prompt:HASH; may be repeated",
    )  # fmt: skip
    parser.add_argument("--out", type=Path, help="where to write the evolution over several folders")
    args = parser.parse_args()
    run(args.folders, args.without, args.out)


def run(folders: list[Path], without: list[str], out: Path | None) -> None:
    """Prints a column of numbers for each kernel, what if, and writes reports and, for several, the evolution."""
    # Here, because --help waits for no slow import.
    import pandas as pd

    from rl_training.offline.kernel_report import write_evolution, write_report
    from rl_training.offline.kernel_what_if import chooser, what_if
    from rl_training.offline.structure import Structure, headline

    chosen = {text: chooser(text) for text in without}
    structures = [Structure.read(folder) for folder in folders]
    for text, choose in chosen.items():
        _refuse_another_number(text, [choose(structure) for structure in structures])
    columns: list[Row] = []
    for folder, structure in zip(folders, structures, strict=True):
        column: Row = {"step": int(structure.kernel.about.get("step", 0)), **headline(structure)}
        for text, choose in chosen.items():
            column |= {f"without {text}: {key}": value for key, value in what_if(structure, choose(structure)).items()}
        columns.append(column)
        print(write_report(folder))
    print(pd.DataFrame(columns).set_index("step").T.to_string(float_format="{:.3g}".format))
    if out is not None:
        write_evolution(structures, columns, out)


def _refuse_another_number(text: str, without: list[Tensor]) -> None:
    """Raises ValueError where fewer sequences were chosen than asked for, or none in any kernel: a what if of nothing.

    without  of each kernel, (N_U,) bool
    """
    kind, _, value = text.partition(":")
    if kind in ("longest", "lowest"):
        least = min(map(len, without))
        if not 0 < int(value) <= least:
            raise ValueError(f"--without {text}: K must be from 1 to the number of sequences in U, here {least}")
    if not any(chosen.any() for chosen in without):
        where = "sequences.jsonl has each one's prompt_hash and reward"
        raise ValueError(f"--without {text}: no sequence of U matches ({where})")
