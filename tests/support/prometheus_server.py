"""Debian's Prometheus on a free port of loopback, and its programs."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from paceline.sizing.machine import free_port


def program(name: str) -> str:
    """The path of `prometheus` or `promtool`; skips the test without it."""
    path = shutil.which(name)
    if path is None:
        pytest.skip(f"needs {name}: apt install prometheus")
    return path


@dataclass(frozen=True)
class PrometheusServer:
    """A running server."""

    port: int

    def ask(self, path: str, **parameters: str) -> Any:
        """The data of an answer of its HTTP API."""
        query = urllib.parse.urlencode(parameters)
        url = f"http://127.0.0.1:{self.port}/api/v1/{path}?{query}"
        with urllib.request.urlopen(url, timeout=60) as page:
            return json.load(page)["data"]

    def values(self, expression: str) -> list[tuple[dict[str, str], float]]:
        """The series that an expression has now, with their values."""
        answer = self.ask("query", query=expression)
        return [(series["metric"], float(series["value"][1])) for series in answer["result"]]

    def names(self) -> set[str]:
        """Every metric that was ever scraped."""
        return {name for name in self.ask("label/__name__/values") if name.startswith("paceline_")}

    def wait_for(self, condition: Callable[[], bool], what: str, *, timeout_s: float = 300) -> None:
        """Waits until something is true."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, f"not within {timeout_s} s: {what}"
            time.sleep(0.2)


@contextlib.contextmanager
def prometheus_server(config: Path, data: Path) -> Iterator[PrometheusServer]:
    """Runs the server with a configuration file."""
    port = free_port()
    command = [program("prometheus"), f"--config.file={config}", f"--storage.tsdb.path={data}"]
    command += [f"--web.listen-address=127.0.0.1:{port}", "--log.level=warn"]
    with (data.parent / "prometheus.log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        server, deadline = PrometheusServer(port), time.monotonic() + 120
        while True:
            with contextlib.suppress(OSError):
                server.ask("status/buildinfo")
                break
            assert process.poll() is None, (data.parent / "prometheus.log").read_text()
            assert time.monotonic() < deadline, "Prometheus does not answer"
            time.sleep(0.1)
        yield server
    finally:
        process.terminate()
        process.wait(60)
