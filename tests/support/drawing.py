"""One vl-convert for all pages that a test process and its forks draw, because starting it takes half a second."""

from __future__ import annotations

import functools
import json
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable

# It ends when the process that started it ends, because that process holds the other end of its stdin.
SERVER = """
import contextlib, functools, io, json, os, socket, sys, threading

@functools.lru_cache(maxsize=64)
def said(program, argument, text):
    sys.argv, sys.stdin = ["-c", argument], io.StringIO(text)
    with contextlib.redirect_stdout(io.StringIO()) as output:
        exec(program, {})
    return output.getvalue()

threading.Thread(target=lambda: (os.read(0, 1), os._exit(0))).start()
calls = socket.socket(fileno=int(sys.argv[1]))
while True:
    call = calls.accept()[0].makefile("rw")
    with contextlib.suppress(Exception), call:
        call.write(said(*json.load(call)))
"""


def start_drawing() -> Callable[[str, str, str], str]:
    """Start the process, and return a function that asks it to run a program.

    Returns:
        A function of a program, its argument and its stdin. It returns the program's output, or "" if it fails.
    """
    calls, folder = socket.socket(socket.AF_UNIX), tempfile.TemporaryDirectory(prefix="drawing-")
    calls.bind(f"{folder.name}/calls")
    calls.listen()
    server = [sys.executable, "-P", "-c", SERVER, str(calls.fileno())]
    process = subprocess.Popen(server, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL, pass_fds=[calls.fileno()])
    return functools.partial(_ask, folder, process)


def _ask(folder: tempfile.TemporaryDirectory[str], _: subprocess.Popen[bytes], *call: str) -> str:
    with socket.socket(socket.AF_UNIX) as connection, connection.makefile("rw", encoding="utf-8") as file:
        connection.connect(f"{folder.name}/calls")
        json.dump(call, file)
        file.flush()
        connection.shutdown(socket.SHUT_WR)
        return file.read()
