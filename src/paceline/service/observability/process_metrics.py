"""Measures memory, CPU time, open files and certificates of this process when the metrics are read."""

from __future__ import annotations

import contextlib
import datetime
import os
from collections.abc import Iterator
from pathlib import Path

import psutil

from paceline.service.identity.credentials import CA_FILE, CERTIFICATE_FILE, TLS_DIR
from paceline.service.identity.validity import life_left
from paceline.service.observability import metrics
from paceline.service.observability.metrics import Observation, Observe


def observe_process(observe: Observe) -> None:
    """Offers the metrics of this process."""
    process = psutil.Process()

    def memory() -> Iterator[Observation]:
        yield process.memory_info().rss, {"part": "self"}
        total = 0
        for child in process.children(recursive=True):
            with contextlib.suppress(psutil.Error):  # the child has ended
                total += child.memory_info().rss
        yield total, {"part": "children"}

    def cpu() -> Iterator[Observation]:
        times = process.cpu_times()
        yield times.user + times.system + times.children_user + times.children_system, {}

    def certificates() -> Iterator[Observation]:
        folder = os.environ.get(TLS_DIR, "")
        for name in (CERTIFICATE_FILE, CA_FILE) if folder else ():
            with contextlib.suppress(OSError, ValueError):  # being replaced
                text = Path(folder, name).read_text(encoding="ascii")
                yield life_left(text, datetime.datetime.now(datetime.UTC)), {"file": name}

    observe(metrics.CERTIFICATE_LIFE, certificates)
    observe(metrics.MEMORY, memory)
    observe(metrics.CPU, cpu)
    observe(metrics.OPEN_FILES, lambda: [(process.num_fds(), {})])
    observe(metrics.START_TIME, lambda: [(process.create_time(), {})])
