"""One branch of `rl-training try`: the commands that a user would type, one after another, in processes of their own.

    python -m rl_training.job.trial_branches -m wave=FILE number=0,1,2 hydra/launcher=joblib

Hydra's multirun places the branches; whether one has succeeded, the files in its folder say.
"""

from __future__ import annotations

import fcntl
import json
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import hydra
from omegaconf import DictConfig

from rl_training.job.shipped import CONF


def run_branch(cfg: DictConfig) -> None:
    """Runs the commands of a branch until one fails; waits for an earlier process that still works on this branch."""
    branch = json.loads(Path(cfg.wave).read_text(encoding="utf-8"))[cfg.number]
    folder = Path(branch["folder"])
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(f"{folder}.lock", "w", encoding="utf-8") as lock, open(f"{folder}.log", "ab") as log:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for words in branch["commands"]:
            log.write(f"$ rl-training {shlex.join(words)}\n".encode())
            log.flush()
            program = [*(branch["launch"] or [sys.executable, "-m"]), "rl_training", *words]
            environment = {**os.environ, **_device(cfg.number if not branch["launch"] else None)}
            if subprocess.call(program, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment):
                return


def _device(number: int | None) -> dict[str, str]:
    """Returns what leaves a branch one of several GPUs."""
    if number is None:
        return {}
    import torch  # not above: not every launcher's process needs it

    count = torch.cuda.device_count()
    devices = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(count)))).split(",")
    return {} if count < 2 else {"CUDA_VISIBLE_DEVICES": devices[number % count]}


def end_with(parent: int) -> None:
    """Asks this group of processes to end once the parent is gone: SIGTERM, on which a training writes a checkpoint."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os.killpg(0, signal.SIGTERM)


if __name__ == "__main__":
    threading.Thread(target=end_with, args=(os.getppid(),), daemon=True).start()
    hydra.main(version_base="1.3", config_path=str(CONF), config_name="branches")(run_branch)()
