"""Pictures of first screens, docs/figures/report_NAME.png: of reports, of a comparison and of a dashboard.

    OMP_NUM_THREADS=1 python benchmarks/stories.py --out FOLDER                          trains runs
    OMP_NUM_THREADS=1 python benchmarks/planted_faults.py --out FOLDER --only train      trains others
    rl-training train -m trainer.learning_rate=3e-4,1e-3 run_dir=FOLDER/lr               a sweep
    rl-training train run_dir=FOLDER/my_run resume=auto trainer.save_steps=5 &           is killed after step 13
    until grep -q '"step": 13' FOLDER/my_run/logs/metrics.jsonl; do sleep 1; done; kill -KILL $!
    rl-training train run_dir=FOLDER/my_run resume=auto trainer.save_steps=5             goes on from step 10
    python benchmarks/first_screens.py FOLDER                                            needs Chromium

`--browser` names its program. The pictures are twice as wide as they are shown.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import rl_training.job.silence  # noqa: F401

from PIL import Image

from rl_training.records.compare.page import write_comparison
from rl_training.records.report import write_report

FIGURES = Path(__file__).parents[1] / "docs" / "figures"
RUNS = {  # by name of the picture: folder of the run, width and height of the first screen in pixels
    "report_too_large_a_step": ("rate_3e_3", 900, 700),
    "report_lost": ("rate_1e_3_long_chains", 900, 220),
    "report_hacked": ("loophole", 900, 620),
    "report_bonus": ("entropy_bonus_3", 900, 720),
    "report_sampler": ("fault_top_p_.8_of_an_engine/seed_0", 900, 430),
    "report_batch": ("fault_two_prompts_a_step/seed_0", 900, 450),
    "report_compared": ("lr", 900, 775),
    "report_healthy": ("my_run", 900, 540),
    "report_dashboard": ("my_run", 1060, 500),
}
TAGS = "entropy/token%7Ccumulative_predicted"  # a regular expression
PORT = 6097
SCALE, COLOURS = 2, 64
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--hide-scrollbars",
    "--run-all-compositor-stages-before-draw", f"--force-device-scale-factor={SCALE}",
)  # fmt: skip


# How long to wait: a report draws its charts when it is idle, which it never is on a clock that jumps, and TensorBoard
# goes on asking for data, so that another clock would never end.
WAIT, WAIT_FOR_DASHBOARD = "--timeout=15000", "--virtual-time-budget=30000"


def photograph(page: str, picture: Path, size: tuple[int, int], browser: str) -> None:
    """Write the top of a page as a PNG with few colours."""
    with tempfile.TemporaryDirectory() as profile:
        window = f"--window-size={size[0]},{size[1]}"
        wait = WAIT_FOR_DASHBOARD if page.startswith("http") else WAIT
        command = [browser, *FLAGS, wait, window, f"--user-data-dir={profile}", f"--screenshot={picture}", page]
        subprocess.run(command, check=True, capture_output=True)
    with Image.open(picture) as image:
        image.convert("RGB").quantize(COLOURS).save(picture, optimize=True)


@contextmanager
def first_screen(name: str, folder: Path) -> Iterator[str]:
    """Yield the address of a run's report, of the comparison of a folder's runs, or of a run's TensorBoard."""
    run = RUNS[name][0]
    with tempfile.TemporaryDirectory() as temporary:  # the records stay as they are
        copy = Path(temporary) / run.split("/")[0]
        shutil.copytree(folder / run, copy, ignore=shutil.ignore_patterns("*state"))
        if name == "report_compared":
            yield write_comparison([copy], copy / "comparison.html")[0].as_uri()
        elif name == "report_dashboard":
            with tensorboard(copy) as address:
                yield f"{address}/#scalars&_smoothingWeight=0&tagFilter={TAGS}"
        else:
            yield write_report(copy).as_uri()


@contextmanager
def tensorboard(folder: Path) -> Iterator[str]:
    """Serve a folder with TensorBoard, and yield the address once it answers."""
    address = f"http://localhost:{PORT}"
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", folder.name, "--port", str(PORT)]
    with subprocess.Popen(command, cwd=folder.parent, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        try:
            for _ in range(60):
                time.sleep(1)
                try:
                    urllib.request.urlopen(f"{address}/data/runs")
                    break
                except OSError:
                    continue
            yield address
        finally:
            server.terminate()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where the trainings are")
    parser.add_argument("--out", type=Path, default=FIGURES)
    parser.add_argument("--browser", default="chromium")
    parser.add_argument("--only", nargs="+", choices=RUNS, default=list(RUNS))
    chosen = parser.parse_args()
    for name in chosen.only:
        with first_screen(name, chosen.folder) as address:
            photograph(address, chosen.out / f"{name}.png", RUNS[name][1:], chosen.browser)


if __name__ == "__main__":
    main()
