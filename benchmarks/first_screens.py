"""Pictures of the first screen of reports, of runs in which something is wrong: docs/figures/report_NAME.png.

    OMP_NUM_THREADS=1 python benchmarks/stories.py --out FOLDER                          trains runs
    OMP_NUM_THREADS=1 python benchmarks/planted_faults.py --out FOLDER --only train      trains others
    python benchmarks/first_screens.py FOLDER                                            needs Chromium

`--browser` names its program. The pictures are twice as wide as they are shown.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import tempfile
from pathlib import Path

import rl_training.job.silence  # noqa: F401

from PIL import Image

from rl_training.records.report import write_report

FIGURES = Path(__file__).parents[1] / "docs" / "figures"
RUNS = {  # by name of the picture: folder of the run, height of the first screen in pixels
    "report_too_large_a_step": ("rate_3e_3", 700),
    "report_lost": ("rate_1e_3_long_chains", 205),
    "report_hacked": ("loophole", 620),
    "report_bonus": ("entropy_bonus_3", 720),
    "report_sampler": ("fault_top_p_.7/seed_0", 365),
    "report_batch": ("fault_two_prompts_a_step/seed_0", 450),
}
WIDTH, SCALE, COLOURS = 900, 2, 64
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--hide-scrollbars", "--virtual-time-budget=30000",
    f"--force-device-scale-factor={SCALE}",
)  # fmt: skip


def photograph(page: Path, picture: Path, height: int, browser: str) -> None:
    """Write the top of a page as a PNG with few colours."""
    with tempfile.TemporaryDirectory() as profile:
        size = f"--window-size={WIDTH},{height}"
        command = [browser, *FLAGS, size, f"--user-data-dir={profile}", f"--screenshot={picture}", page.as_uri()]
        subprocess.run(command, check=True, capture_output=True)
    with Image.open(picture) as image:
        image.convert("RGB").quantize(COLOURS).save(picture, optimize=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where the trainings are")
    parser.add_argument("--out", type=Path, default=FIGURES)
    parser.add_argument("--browser", default="chromium")
    parser.add_argument("--only", nargs="+", choices=RUNS, default=list(RUNS))
    chosen = parser.parse_args()
    for name in chosen.only:
        run, height = RUNS[name]
        with tempfile.TemporaryDirectory() as temporary:  # the records stay as they are
            copy = shutil.copytree(
                chosen.folder / run, Path(temporary) / run.split("/")[0], ignore=shutil.ignore_patterns("state")
            )
            photograph(write_report(copy), chosen.out / f"{name}.png", height, chosen.browser)


if __name__ == "__main__":
    main()
