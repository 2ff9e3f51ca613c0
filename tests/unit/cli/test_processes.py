"""What is said of a process that ended."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

from paceline.launch.planning.plan import ProcessSpec, Role
from paceline.launch.processes import spawn

KILLS_ITSELF = "import os, signal; print('at work', flush=True); os.kill(os.getpid(), signal.SIGKILL)"
FAILS = "raise SystemExit(9)"


@pytest.mark.parametrize(
    ("code", "kills_since", "reason"),
    [
        (KILLS_ITSELF, 1, ": the kernel has killed processes for lack of memory since its start"),
        (KILLS_ITSELF, 0, ""),
        (FAILS, 1, ""),
    ],
)
async def test_a_kill_is_put_down_to_memory_where_the_kernel_killed_for_it(
    code: str, kills_since: int, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counter = tmp_path / "vmstat"
    monkeypatch.setattr(spawn, "VMSTAT", counter)
    counter.write_text("nr_free_pages 7\noom_kill 3\n")
    spec = ProcessSpec(name="learner-0", role=Role.LEARNER, command=(sys.executable, "-c", code))
    process = await spawn.start(spec, tmp_path / "log", {})
    counter.write_text(f"oom_kill {3 + kills_since}\n")
    await asyncio.wait_for(process.exited, 120)
    outcome = "killed by SIGKILL" if code == KILLS_ITSELF else "exit code 9"
    assert process.describe_end("ended") == f"learner-0 ended ({outcome}){reason} [log: {tmp_path / 'log'}]"
