"""launch/train.slurm unchanged, under a Slurm with two nodes on this machine; skipped if Slurm is not installed.

Debian: apt-get install slurmctld slurmd slurm-client. Tests of how the script uses Slurm's variables do not need it.
"""

from __future__ import annotations

import getpass
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml
from configs import QUICK

from rl_training.records.jsonl import read_metrics

ROOT = Path(__file__).parents[2]
PROGRAMS = ("slurmctld", "slurmd", "sbatch")
NO_SLURM = not all(shutil.which(name, path=os.environ["PATH"] + ":/usr/sbin") for name in PROGRAMS)
SMALL = [*QUICK, "probe=none"]
CONFIGURATION = Path(__file__).with_name("slurm.conf").read_text(encoding="utf-8")


class Cluster:
    """A Slurm with its configuration, state and logs in one folder, and a checkout to submit from."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.checkout = folder, folder / "checkout"
        first = 27100 + os.getpid() % 1000 * 3
        configuration = CONFIGURATION.format(user=getpass.getuser(), folder=folder, ports=range(first, first + 3))
        (folder / "state").mkdir()
        (folder / "slurm.conf").write_text(configuration)
        (folder / "gres.conf").write_text("AutoDetect=off\nName=gpu File=/dev/null\n")
        self.checkout.mkdir()
        for name in ("train.py", "conf", "launch", "rl_training"):
            (self.checkout / name).symlink_to(ROOT / name)
        (self.checkout / ".venv").symlink_to(sys.prefix)
        self.environment = {key: value for key, value in os.environ.items() if not key.startswith("SLURM_")}
        self.environment |= {"SLURM_CONF": str(folder / "slurm.conf"), "LAUNCH": "launch/cpu_ddp.yaml"}
        self.environment |= {"PATH": f"{os.environ['PATH']}:/usr/sbin", "PYTHONPATH": str(ROOT)}
        self.environment.pop("OMP_NUM_THREADS", None)
        daemons = [["slurmctld", "-D", "-c"], ["slurmd", "-D", "-N", "127.0.0.1"], ["slurmd", "-D", "-N", "127.0.0.2"]]
        log = open(folder / "daemons.log", "w")  # noqa: SIM115, theirs as long as they live
        self.daemons = [subprocess.Popen(d, env=self.environment, stdout=log, stderr=log) for d in daemons]

    def ask(self, *command: str) -> str:
        ended = subprocess.run(command, cwd=self.checkout, env=self.environment, capture_output=True, text=True)
        assert ended.returncode == 0, (command, ended.stderr)
        return ended.stdout

    def submit(self, *options: str, settings: list[str]) -> str:
        """Submit launch/train.slurm unchanged, and return the job's number."""
        return self.ask("sbatch", "--parsable", *options, "launch/train.slurm", *SMALL, *settings).strip()

    def states(self, job: str) -> set[str]:
        words = self.ask("scontrol", "--oneliner", "show", "job", job).split()
        return {word.removeprefix("JobState=") for word in words if word.startswith("JobState=")}

    def said(self, job: str) -> str:
        """Return the output of a job or job array."""
        return "".join(path.read_text() for path in sorted(self.checkout.glob(f"slurm-{job}[._]*")))

    def is_idle(self) -> bool:
        return self.ask("sinfo", "--noheader", "--states=idle", "--format=%D").strip() == "2"

    def wait(self, job: str, until: Callable[[], bool], seconds: float = 400) -> None:
        deadline = time.monotonic() + seconds
        while not until():
            assert time.monotonic() < deadline, f"{job} is {self.states(job)}: {self.said(job)}"
            time.sleep(0.2)

    def run_of(self, job: str) -> Path:
        (run,) = self.checkout.glob(f"runs/run_*_job_{job}")
        return run

    def end(self) -> None:
        for daemon in reversed(self.daemons):
            daemon.terminate()
        for daemon in self.daemons:
            daemon.wait(timeout=60)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    if NO_SLURM:
        pytest.skip("needs slurmctld, slurmd and sbatch")
    cluster = Cluster(tmp_path_factory.mktemp("slurm"))
    try:
        cluster.wait("", cluster.is_idle, seconds=30)
        yield cluster
    finally:
        subprocess.run(["scancel", f"--user={getpass.getuser()}"], env=cluster.environment, check=False)
        cluster.end()


# Slurm's variables on the first node, depending on the sbatch options.
@pytest.mark.parametrize(
    ("given", "processes"),
    [
        pytest.param({"SLURM_GPUS_PER_NODE": "8", "SLURM_GPUS_ON_NODE": "8"}, "16", id="--gpus-per-node=8"),
        pytest.param({"SLURM_GPUS_PER_NODE": "a100:8", "SLURM_GPUS_ON_NODE": "8"}, "16", id="--gpus-per-node=a100:8"),
        pytest.param({"SLURM_GPUS_ON_NODE": "4"}, "8", id="--gres=gpu:4"),
        pytest.param({}, None, id="neither"),
    ],
)
def test_there_is_a_process_for_each_gpu_of_each_node(tmp_path: Path, given: dict[str, str], processes: str) -> None:
    for name in ("train.py", "launch/ddp.yaml"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    ended = submitted(tmp_path, given, environment_folder=".venv/bin")
    if processes is None:
        assert "this job has no GPUs: ask for them with --gpus-per-node=8 or --gres=gpu:8" in ended.stderr
    else:
        assert ended.returncode == 0, ended.stderr
        assert f"--num_machines 2 --machine_rank 0 --num_processes {processes} " in ended.stdout
        assert ended.stdout.split()[-3] == "train.py"  # then run_dir and resume


def test_outside_a_checkout_the_job_runs_the_module_of_the_active_environment(tmp_path: Path) -> None:
    eight = {"SLURM_GPUS_PER_NODE": "8"}
    ended = submitted(tmp_path, eight, environment_folder="bin")
    assert ended.stderr == f"error: there is no {tmp_path}/launch/ddp.yaml: rl-training launch-file ddp puts it there\n"
    (tmp_path / "launch").mkdir()
    (tmp_path / "launch" / "ddp.yaml").touch()
    ended = submitted(tmp_path, eight, environment_folder="bin")
    assert ended.stdout.split()[-5:-2] == ["-m", "rl_training", "train"]


def submitted(tmp_path: Path, given: dict[str, str], environment_folder: str) -> subprocess.CompletedProcess[str]:
    """Run the script as on the first node, with stand-ins for Slurm's programs and accelerate."""
    programs = {
        "bin/scontrol": "echo node1; echo node2",
        "bin/srun": 'while [[ $1 == --* ]]; do shift; done; exec "$@"',
        f"{environment_folder}/accelerate": 'echo "$@"',
    }
    for name, commands in programs.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"#!/bin/bash\n{commands}\n", encoding="utf-8")
        (tmp_path / name).chmod(0o755)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    environment |= {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "MAIN_ADDRESS": "localhost"}
    environment |= {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node[1-2]", "SLURM_CPUS_ON_NODE": "64"}
    environment |= {"SLURM_PROCID": "0", **given}
    script = ["bash", str(ROOT / "launch" / "train.slurm")]
    return subprocess.run(script, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)


def test_a_first_node_without_an_address_is_reported_at_once(cluster: Cluster) -> None:
    job = cluster.submit("--export=ALL,MAIN_ADDRESS=nowhere.invalid", settings=[])
    cluster.wait(job, lambda: cluster.states(job) == {"FAILED"}, seconds=60)
    assert "has no address for the first node, nowhere.invalid" in cluster.said(job)


def test_a_vllm_server_that_dies_ends_the_job(cluster: Cluster) -> None:
    """The server cannot start because its model does not exist. Training would wait for it for a quarter of an hour."""
    job = cluster.submit("--export=ALL,VLLM_MODEL=/nowhere", settings=[])
    cluster.wait(job, lambda: cluster.states(job) == {"FAILED"}, seconds=200)
    assert "error: the vLLM server on 127.0.0.2 has ended, so the training ends" in cluster.said(job)


def test_a_job_that_gets_a_signal_requeues_itself_and_resumes(cluster: Cluster) -> None:
    """On two nodes, the script gets SIGTERM, as shortly before a time limit. Its folder and output stay the same."""
    job = cluster.submit("--gpus-per-node=1", settings=["trainer.max_steps=30"])
    cluster.wait(job, lambda: any(cluster.checkout.glob("runs/*/logs/metrics.jsonl")))
    cluster.ask("scancel", "--signal=TERM", "--batch", job)
    cluster.wait(job, lambda: cluster.states(job) == {"PENDING"})
    first = re.search(r"ended by SIGTERM after step (\d+) of 30", cluster.said(job))
    assert first is not None, cluster.said(job)
    cluster.wait(job, cluster.is_idle)
    time.sleep(2)  # nodes would mistake a job that restarts within the same second for the ended one
    cluster.ask("scontrol", "update", f"JobId={job}", "StartTime=now")  # otherwise it starts two minutes later
    cluster.wait(job, lambda: cluster.states(job) == {"COMPLETED"})
    assert first.group() in cluster.said(job)
    assert f"continuing runs/{cluster.run_of(job).name} from step {first.group(1)}" in cluster.said(job)
    assert [row["step"] for row in read_metrics(cluster.run_of(job) / "logs")] == list(range(1, 31))
    config = yaml.safe_load((cluster.run_of(job) / "config.yaml").read_text())
    assert "resume=auto" in config["provenance"]["command"]


def test_array_tasks_have_their_own_folders_and_their_ids_as_seeds(cluster: Cluster) -> None:
    job = cluster.submit("--array=3-4", "--nodes=1", "--gres=gpu:1", settings=["trainer.max_steps=1"])
    cluster.wait(job, lambda: cluster.states(job) == {"COMPLETED"})
    for task in (3, 4):
        config = yaml.safe_load((cluster.run_of(f"{job}_{task}") / "config.yaml").read_text())
        assert config["seed"] == config["trainer"]["seed"] == task
        assert len(read_metrics(cluster.run_of(f"{job}_{task}") / "logs")) == 1


def test_array_tasks_with_one_folder_are_refused(cluster: Cluster) -> None:
    job = cluster.submit("--array=0", "--nodes=1", settings=["run_dir=runs/one"])
    cluster.wait(job, lambda: cluster.states(job) == {"FAILED"}, seconds=60)
    assert "leave out run_dir, or put ${oc.env:SLURM_ARRAY_TASK_ID} into it" in cluster.said(job)
