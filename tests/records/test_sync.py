"""Claims on downloading runs, held against a folder, a real SFTP server and a real S3 interface.

SFTP is asyncssh's server, with a key of its own and a client that has to know it; S3 is moto's server. Both listen on
this machine only, and end with the tests.
"""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import asyncssh
import boto3
import pytest
from fsspec.implementations.local import LocalFileSystem
from moto.server import ThreadedMotoServer

from rl_training.records.sync import SourceFile, has_ended, main, shown, sync, target_of

RUN = {
    "run_a/config.yaml": b"seed: 0\n",
    "run_a/logs/metrics.jsonl": b'{"step": 1}\n',
    "run_a/logs/tensorboard/events": b"\0\1\2",
    "run_a/report/report.html": b"<p>",
    "run_a/evaluations/sums/step_4/metrics.json": b"{}",
}
CHECKPOINTS = {
    "run_a/training_state/checkpoint-4/model.safetensors": b"4" * 100,
    "run_a/training_state/checkpoint-4/trainer_state.json": b"{}",
    "run_a/training_state/checkpoint-20/model.safetensors": b"20" * 100,
    "run_a/training_state/checkpoint-20/trainer_state.json": b"{}",
}
NOT_WANTED = {
    "run_a/training_state/checkpoint-24/model.safetensors": b"half",  # no trainer_state.json: still being written
    "run_a/training_state/README.md": b"x",
    "run_a/logs/metrics.jsonl.tmp": b"x",
    "run_a/evaluations/sums/.step_8.partial/metrics.json": b"x",
    "elsewhere/logs/app.log": b"x",
    "secrets.txt": b"x",
}


class FaultySFTP(asyncssh.SFTPServer):
    """An SFTP server of a folder that can be slow, and that can lose its connection in the middle of a read."""

    root: bytes = b""
    reads_until_loss = -1
    pause = 0.0

    def __init__(self, chan: asyncssh.SSHServerChannel[bytes]) -> None:
        super().__init__(chan, chroot=self.root)

    async def read(self, file_obj: object, offset: int, size: int) -> bytes:  # type: ignore[override]
        await asyncio.sleep(self.pause)
        if FaultySFTP.reads_until_loss == 0:
            FaultySFTP.reads_until_loss = -1
            self.channel.get_connection().abort()
        FaultySFTP.reads_until_loss -= FaultySFTP.reads_until_loss > 0
        return super().read(file_obj, offset, size)  # type: ignore[arg-type, return-value]


@pytest.fixture(scope="module")
def sftp(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path, Path]]:
    """(address, folder that is served, home of a user who has a key and knows the server's)."""
    folder, home = tmp_path_factory.mktemp("served"), tmp_path_factory.mktemp("home")
    FaultySFTP.root = os.fsencode(folder)
    host_key, user_key = (asyncssh.generate_private_key("ssh-ed25519") for _ in range(2))
    (home / ".ssh").mkdir()
    user_key.write_private_key(home / ".ssh" / "id_ed25519")
    (home / ".ssh" / "id_ed25519").chmod(0o600)
    allowed = asyncssh.import_authorized_keys(user_key.export_public_key().decode())
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    async def listen() -> asyncssh.SSHAcceptor:
        return await asyncssh.listen(
            "127.0.0.1", 0, server_host_keys=[host_key], authorized_client_keys=allowed, sftp_factory=FaultySFTP
        )

    server = asyncio.run_coroutine_threadsafe(listen(), loop).result(30)
    public = host_key.export_public_key().decode().split()
    (home / ".ssh" / "known_hosts").write_text(f"[127.0.0.1]:{server.get_port()} {public[0]} {public[1]}\n")
    yield f"sftp://someone@127.0.0.1:{server.get_port()}", folder, home
    loop.call_soon_threadsafe(server.close)
    loop.call_soon_threadsafe(loop.stop)
    thread.join(10)


@pytest.fixture(scope="module")
def s3_address() -> Iterator[str]:
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


Put = Callable[[str, bytes], None]


@pytest.fixture(params=["folder", "sftp", "s3"])
def source(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, Put]:
    """(URL of an empty source, what puts a file there)."""
    if request.param == "s3":
        address = request.getfixturevalue("s3_address")
        for name, value in {"ENDPOINT_URL": address, "ACCESS_KEY_ID": "a", "SECRET_ACCESS_KEY": "b"}.items():
            monkeypatch.setenv(f"AWS_{name}", value)
        monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        client = boto3.client("s3")
        bucket = f"runs-{abs(hash(tmp_path))}"
        client.create_bucket(Bucket=bucket)
        return f"s3://{bucket}/mine", lambda name, data: client.put_object(Bucket=bucket, Key=f"mine/{name}", Body=data)
    if request.param == "sftp":
        address, served, home = request.getfixturevalue("sftp")
        monkeypatch.setenv("HOME", str(home))
        folder, url = served / tmp_path.name, f"{address}/{tmp_path.name}"
    else:
        folder = tmp_path / "source"
        url = str(folder)

    def put(name: str, data: bytes) -> None:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)

    return url, put


def brought(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_logs_reports_evaluations_and_configuration_are_copied_and_only_once(source: tuple[str, Put], tmp_path) -> None:
    url, put = source
    for name, data in (RUN | CHECKPOINTS | NOT_WANTED).items():
        put(name, data)
    home = tmp_path / "home"
    first = sync(url, home)
    assert brought(home) == RUN
    assert {file.relative: file.size for file in first.copied.values()} == {
        name: len(data) for name, data in RUN.items()
    }
    again = sync(url, home)
    assert (again.copied, again.unchanged) == ({}, len(RUN))
    put("run_a/logs/metrics.jsonl", b'{"step": 1}\n{"step": 2}\n')
    (home / "notes.txt").write_bytes(b"mine")  # nothing is deleted that the source does not have
    assert [*sync(url, home).copied] == ["run_a/logs/metrics.jsonl"]
    assert brought(home) == RUN | {"run_a/logs/metrics.jsonl": b'{"step": 1}\n{"step": 2}\n', "notes.txt": b"mine"}


@pytest.mark.parametrize(("which", "steps"), [("latest", {"20"}), ("all", {"4", "20"})])
def test_checkpoints_are_copied_on_request_if_they_are_complete(tmp_path: Path, which: str, steps: set[str]) -> None:
    for name, data in (RUN | CHECKPOINTS | NOT_WANTED).items():
        (tmp_path / "there" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "there" / name).write_bytes(data)
    sync(str(tmp_path / "there"), tmp_path / "home", which)  # type: ignore[arg-type]
    expected = {name: data for name, data in CHECKPOINTS.items() if name.split("/")[2].split("-")[1] in steps}
    assert brought(tmp_path / "home") == RUN | expected


@pytest.fixture
def run_there(tmp_path: Path) -> Path:
    """A folder that is a run itself."""
    for name, data in RUN.items():
        path = tmp_path / "there" / name.removeprefix("run_a/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return tmp_path / "there"


def test_a_change_that_size_and_time_hide_is_found_by_checksum(run_there: Path, tmp_path: Path) -> None:
    home, config = tmp_path / "home", run_there / "config.yaml"
    sync(str(run_there), home)
    before = config.stat()
    config.write_bytes(b"seed: 9\n")
    os.utime(config, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert sync(str(run_there), home).copied == {}
    outcome = sync(str(run_there), home, checksum=True)
    assert ([*outcome.copied], outcome.unchanged) == (["config.yaml"], len(RUN) - 1)
    assert (home / "config.yaml").read_bytes() == b"seed: 9\n"


def test_links_at_the_source_are_left_out(run_there: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(b"x")
    (run_there / "logs" / "link").symlink_to(tmp_path / "secret")
    (run_there / "report" / "all").symlink_to(tmp_path)
    sync(str(run_there), tmp_path / "home")
    assert len(brought(tmp_path / "home")) == len(RUN)


@pytest.mark.parametrize("name", ["logs/../../evil", "../evil", "/etc/evil", "logs//evil", "logs/./evil", "logs/\0"])
def test_no_name_leads_out_of_the_destination(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match="would lie outside"):
        target_of(name, tmp_path)


def test_an_evil_key_in_a_store_is_refused_before_anything_is_copied(s3_address: str, tmp_path, monkeypatch) -> None:
    for name, value in {"ENDPOINT_URL": s3_address, "ACCESS_KEY_ID": "a", "SECRET_ACCESS_KEY": "b"}.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    client = boto3.client("s3", region_name="us-east-1")
    client.create_bucket(Bucket="evil")
    for key in ("run/logs/metrics.jsonl", "run/logs/../../../evil"):
        client.put_object(Bucket="evil", Key=key, Body=b"x")
    with pytest.raises(ValueError, match=r"\.\./evil.*nothing was copied"):
        sync("s3://evil/run", tmp_path / "deep" / "home")
    assert not brought(tmp_path)


def test_a_link_in_the_destination_is_not_followed_out_of_it(run_there: Path, tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "outside").mkdir()
    (tmp_path / "home" / "logs").symlink_to(tmp_path / "outside")
    with pytest.raises(ValueError, match="would lie outside"):
        sync(str(run_there), tmp_path / "home")
    assert not brought(tmp_path / "outside")


def test_a_connection_that_breaks_is_tried_again_and_the_rest_is_left_to_the_next_call(
    sftp: tuple[str, Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    address, served, user = sftp
    monkeypatch.setenv("HOME", str(user))
    large = os.urandom(300_000)
    for name, data in (RUN | {"run_a/logs/large": large}).items():
        (served / "breaks" / name).parent.mkdir(parents=True, exist_ok=True)
        (served / "breaks" / name).write_bytes(data)
    monkeypatch.setattr(FaultySFTP, "reads_until_loss", 3)
    sync(f"{address}/breaks", tmp_path / "tried", retries=2, pause=0.01)
    assert capsys.readouterr().err.count("trying again") == 1
    assert brought(tmp_path / "tried") == RUN | {"run_a/logs/large": large}
    monkeypatch.setattr(FaultySFTP, "reads_until_loss", 3)
    with pytest.raises(ConnectionError, match="what has arrived is kept; run the same command again for the rest"):
        sync(f"{address}/breaks", tmp_path / "left")
    arrived = brought(tmp_path / "left")
    assert 0 < len(arrived) <= len(RUN)
    assert all(RUN[name] == data for name, data in arrived.items())  # whole ones, and nothing of the large one
    assert sync(f"{address}/breaks", tmp_path / "left").unchanged == len(arrived)
    assert brought(tmp_path / "left") == RUN | {"run_a/logs/large": large}


@pytest.mark.parametrize("has_times", [True, False])
def test_a_connection_that_breaks_again_and_again_is_tried_as_long_as_files_arrive(
    run_there, tmp_path, monkeypatch, has_times: bool
) -> None:
    """Every second file breaks it: one retry is enough for all of them, and none is not."""
    whole, calls = LocalFileSystem.get_file, 0

    def get_file(self: LocalFileSystem, path: str, target: str) -> None:
        nonlocal calls
        calls += 1
        if calls % 2 == 0:
            raise ConnectionError("lost")
        whole(self, path, target)

    monkeypatch.setattr(LocalFileSystem, "get_file", get_file)
    if not has_times:
        monkeypatch.setattr("rl_training.records.sync.TIMES", ())
    with pytest.raises(ConnectionError, match="failed 1 times"):
        sync(str(run_there), tmp_path / "home")
    outcome = sync(str(run_there), tmp_path / "home", retries=1, pause=0.0)
    assert (len(outcome.copied), outcome.unchanged) == ((len(RUN) - 1, 1) if has_times else (len(RUN), 0))
    assert len(brought(tmp_path / "home")) == len(RUN)


def test_checksums_go_on_behind_a_connection_that_breaks_again_and_again(run_there, tmp_path, monkeypatch) -> None:
    """Every second file breaks it; files that are the same are no more fetched again than those that arrived."""
    sync(str(run_there), tmp_path / "home")
    whole, fetched = LocalFileSystem.get_file, list[str]()

    def get_file(self: LocalFileSystem, path: str, target: str) -> None:
        fetched.append(path)
        if len(fetched) % 2 == 0:
            raise ConnectionError("lost")
        whole(self, path, target)

    monkeypatch.setattr(LocalFileSystem, "get_file", get_file)
    outcome = sync(str(run_there), tmp_path / "home", checksum=True, retries=1, pause=0.0)
    assert (outcome.copied, outcome.unchanged) == ({}, len(RUN))
    assert len(fetched) == 2 * len(RUN) - 1


def test_a_download_that_ends_too_soon_is_tried_again_and_never_left_there(
    run_there, tmp_path, capsys, monkeypatch
) -> None:
    """A server that closes in good order after half of a file: no error of its own says so."""
    whole, halves = LocalFileSystem.get_file, 1

    def get_file(self: LocalFileSystem, path: str, target: str) -> None:
        nonlocal halves
        whole(self, path, target)
        if path.endswith("metrics.jsonl") and halves:
            halves -= 1
            os.truncate(target, 6)

    monkeypatch.setattr(LocalFileSystem, "get_file", get_file)
    sync(str(run_there), tmp_path / "tried", retries=1, pause=0.01)
    assert "ConnectionError: logs/metrics.jsonl ended after 6 of 12 bytes; trying again\n" in capsys.readouterr().err
    assert brought(tmp_path / "tried") == {name.removeprefix("run_a/"): data for name, data in RUN.items()}
    halves = 1
    with pytest.raises(ConnectionError, match="ended after 6 of 12 bytes"):
        sync(str(run_there), tmp_path / "left")
    assert not [name for name in brought(tmp_path / "left") if "metrics.jsonl" in name]


@pytest.mark.parametrize(
    ("missing", "way_out"), [("known_hosts", r"not in ~/\.ssh/known_hosts"), ("id_ed25519", "no key of the ssh agent")]
)
def test_a_strange_machine_and_a_missing_key_are_named_with_the_fix(
    sftp: tuple[str, Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: str, way_out: str
) -> None:
    address, _, user = sftp
    shutil.copytree(user / ".ssh", tmp_path / ".ssh", ignore=lambda *_: [missing])
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(ValueError, match=way_out):
        sync(address, tmp_path / "home", retries=3, pause=0.01)


def test_a_kill_in_the_middle_of_a_file_leaves_none_of_it_and_the_next_call_ends_the_work(
    sftp: tuple[str, Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    address, served, user = sftp
    large = os.urandom(200_000)
    for name, data in {"logs/metrics.jsonl": large}.items():
        (served / "killed" / name).parent.mkdir(parents=True)
        (served / "killed" / name).write_bytes(data)
    monkeypatch.setattr(FaultySFTP, "pause", 3.0)
    command = [sys.executable, "-m", "rl_training", "sync", f"{address}/killed", str(tmp_path / "home")]
    process = subprocess.Popen(command, env={**os.environ, "HOME": str(user)})
    partial = tmp_path / "home" / "logs" / ".metrics.jsonl.partial"
    until = time.monotonic() + 60
    while not partial.exists() and process.poll() is None and time.monotonic() < until:
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert partial.exists()
    assert not (tmp_path / "home" / "logs" / "metrics.jsonl").exists()
    monkeypatch.setattr(FaultySFTP, "pause", 0.0)
    monkeypatch.setenv("HOME", str(user))
    sync(f"{address}/killed", tmp_path / "home")
    assert brought(tmp_path / "home") == {"logs/metrics.jsonl": large}


def test_watch_goes_on_until_the_report_is_newer_than_the_last_step(run_there, tmp_path, capsys) -> None:
    metrics, report = run_there / "logs" / "metrics.jsonl", run_there / "report" / "report.html"
    os.utime(report, (1, 1))

    def train() -> None:
        for step in range(2, 5):
            time.sleep(0.1)
            with open(metrics, "a") as file:
                file.write(f'{{"step": {step}}}\n')
        report.write_bytes(b"<p>ended")

    training = threading.Thread(target=train)
    training.start()
    main([str(run_there), str(tmp_path / "home"), "--watch", "0.05"])
    training.join()
    assert (tmp_path / "home" / "report" / "report.html").read_bytes() == b"<p>ended"
    assert (tmp_path / "home" / "logs" / "metrics.jsonl").read_bytes() == metrics.read_bytes()
    assert capsys.readouterr().out.endswith("the runs have ended\n")


def test_a_run_without_a_report_of_its_last_step_has_not_ended() -> None:
    def listed(report_at: float) -> list[SourceFile]:
        names = {"r/logs/metrics.jsonl": 5.0, "r/report/report.html": report_at, "q/logs/metrics.jsonl": 1.0}
        return [SourceFile(name, name, 1, at) for name, at in (names | {"q/report/report.html": 2.0}).items()]

    assert has_ended(listed(6.0))
    assert not has_ended(listed(4.0))
    assert not has_ended([])


def test_a_full_disk_here_is_named_and_not_tried_again(run_there, tmp_path, capsys, monkeypatch) -> None:
    tried: list[str] = []

    def full(self: LocalFileSystem, source: str, target: str) -> None:
        tried.append(source)
        raise OSError(errno.ENOSPC, "No space left on device", target)

    monkeypatch.setattr(LocalFileSystem, "get_file", full)
    with pytest.raises(SystemExit) as ended:
        main([str(run_there), str(tmp_path / "home")])
    assert ended.value.code == 2
    assert capsys.readouterr().err.endswith(
        "the disk here is full; make room, and run the same command again for the rest\n"
    )
    assert len(tried) == 1


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["nowhere", "here"], 2, "does not exist"),
        (["empty", "here"], 2, "holds no run: give the folder that has logs/metrics.jsonl"),
        (["empty", "s3://bucket"], 2, "DESTINATION is a folder on this machine"),
        (["gopher://host/x", "here"], 2, "gopher"),
        (["s3://", "here"], 2, "s3:// has no path: give BUCKET/path"),
        (["empty", "a_file"], 2, "DESTINATION is a folder, and a_file is a file"),
        (["empty", "here", "--watch", "0"], 2, "--watch takes seconds above 0"),
        (["empty", "here", "--watch", "nan"], 2, "--watch takes seconds above 0"),
        (["empty", "empty/copy"], 2, "DESTINATION lies in SOURCE"),
        (["sftp://me:secret@127.0.0.1:1/x", "here", "--retries", "0"], 1, "me:***@127.0.0.1:1/x failed 1 times"),
    ],
)
def test_mistakes_end_with_one_line_that_names_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
    arguments: list[str], code: int, words: str,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "a_file").touch()
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    error = capsys.readouterr().err
    assert ended.value.code == code
    assert words in error.splitlines()[-1]
    assert "secret" not in error
    assert "Traceback" not in error


def test_no_password_is_shown() -> None:
    assert shown("sftp://me:secret@host/a:b@c") == "sftp://me:***@host/a:b@c"
    assert shown("s3://bucket/a:b@c") == "s3://bucket/a:b@c"
