"""The file of a step's trajectories."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from paceline.controller.run.trajectories import TrajectoryFile
from paceline.core.trajectory import ScoredHeader
from tests.support.headers import scored
from tests.support.sequencer_run import prompts


async def texts(headers: Sequence[ScoredHeader]) -> list[str]:
    return ["text"] * len(headers)


async def test_a_writer_is_not_closed_while_a_thread_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """pyarrow ends the process with SIGSEGV otherwise: a step whose learner is lost is written again."""
    began, goes_on, calls = threading.Event(), threading.Event(), []

    class Writer(pyarrow.parquet.ParquetWriter):  # type: ignore[misc]
        def write_table(self, table: pyarrow.Table, *args: Any, **options: Any) -> None:
            began.set()
            goes_on.wait(10)
            super().write_table(table, *args, **options)
            calls.append("written")

        def close(self) -> None:
            calls.append("closed")
            super().close()

    monkeypatch.setattr(pyarrow.parquet, "ParquetWriter", Writer)
    file = TrajectoryFile(tmp_path / "step_000001.parquet", step=1, prompts=prompts(1).prompts)
    writing = asyncio.create_task(file.write([scored(0)], texts))
    assert await asyncio.to_thread(began.wait, 10)
    writing.cancel()
    asyncio.get_running_loop().call_later(0.2, goes_on.set)
    with pytest.raises(asyncio.CancelledError):
        await writing
    assert calls[:2] == ["written", "closed"]
    assert not (tmp_path / "step_000001.parquet").exists()
