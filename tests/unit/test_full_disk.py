"""What writes on a full disk (here: to /dev/full) gives one sentence with the folder, and no traceback."""

from __future__ import annotations

import errno
import io
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.controller.journal import Journal
from paceline.controller.run.records.metrics import MetricsFile
from paceline.core.clock import SystemClock
from paceline.core.errors import EXIT_GIVEN, EnvironmentLackError, exit_code
from paceline.runs import run_dir as run_dirs
from paceline.service import process_ends
from paceline.service.disk import full_disk, writing
from paceline.service.observability.logs import LineHandler
from paceline.service.process_ends import ProcessEnd


@pytest.fixture(autouse=True)
def free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=4096))


def full_at(path: Path) -> None:
    """Whatever is written to this file finds no room."""
    path.symlink_to("/dev/full")


def write_end(folder: Path) -> None:
    full_at(folder / process_ends.FILE)
    process_ends.append(folder, ProcessEnd(time=1.0, name="redis", outcome="x", step=1, restarts=True))


def write_metrics(folder: Path) -> None:
    full_at(folder / "metrics.jsonl")
    MetricsFile(folder / "metrics.jsonl").append(1, {"reward": 0.5})


def write_note(folder: Path) -> None:
    full_at(folder / f".{run_dirs.NOTE}.{os.getpid()}")
    run_dirs.write_note(folder, run_dirs.new_note(folder, "secret"))


@pytest.mark.parametrize("write", [write_end, write_metrics, write_note])
def test_who_writes_names_folder_and_free_bytes(write: Callable[[Path], None], tmp_path: Path) -> None:
    with pytest.raises(EnvironmentLackError) as caught:
        write(tmp_path)
    assert str(caught.value) == full_disk(tmp_path)
    assert str(caught.value) == (
        f"the disk of {tmp_path} is full (4096 bytes are free): make room there, and the same command "
        "goes on with the run"
    )
    assert exit_code(caught.value) == EXIT_GIVEN, "no restart makes room"


def test_a_journal_ends_its_controller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = Journal(tmp_path / "events.jsonl", SystemClock())

    def no_room(file: int, data: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch, pytest.raises(EnvironmentLackError, match=r"is full \(4096"):
        patch.setattr(os, "write", no_room)
        journal.record("epoch", number=1)
    journal.close()


def test_another_fault_of_a_disk_is_not_called_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PermissionError), writing(tmp_path):
        raise PermissionError(errno.EACCES, "no")
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=1 << 20))
    assert full_disk(tmp_path) == ""


class FullFile(io.StringIO):
    """What a log file on a full disk does."""

    def flush(self) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")


def test_a_record_that_finds_no_room_is_lost_without_a_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    logger, full = logging.Logger("full"), LineHandler("launcher", FullFile())
    logger.addHandler(full)
    logger.warning("nobody reads this")
    assert capsys.readouterr().err == ""
    logger.warning("%d", "a fault of the program")
    assert "--- Logging error ---" in capsys.readouterr().err
