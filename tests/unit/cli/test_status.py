"""`paceline status`, answered by a fake controller."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from paceline.cli.launch import run_dir as run_dirs
from paceline.cli.main import main
from paceline.core.errors import EnvironmentLackError
from support.cli_configs import config
from support.fake_controller import FakeController, serve


async def test_status_asks_the_controller_of_the_note(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server = await serve(FakeController(), token="secret")
    prepared = run_dirs.prepare(config(trainer={"total_steps": 2, "run_dir": "runs/mine"}))
    resolved, folder = prepared.config, prepared.run_dir
    note = run_dirs.new_note(folder, "secret")
    note.controller, note.state = server.address, "running"
    run_dirs.write_note(folder, note)
    for words in (["status"], ["status", "mine"], ["status", "runs/mine"]):
        assert await asyncio.to_thread(main, words) == 0
        assert "step 3/9: collect" in capsys.readouterr().out
    with pytest.raises(EnvironmentLackError, match="belongs to a run that is under way"):
        run_dirs.prepare(resolved)
    run_dirs.end_note(folder, note, "2 steps done")
    assert await asyncio.to_thread(main, ["status"]) == 1
    assert "not running (2 steps done)" in capsys.readouterr().out
    assert await asyncio.to_thread(main, ["status", "other"]) == 2
    assert "no run other" in capsys.readouterr().err
    await server.stop(0)
