"""`paceline status`, `paceline stop` and `paceline rollout drain`, answered by a fake controller."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from paceline.cli.main import main
from paceline.core.errors import EnvironmentLackError
from paceline.rpc.v1 import controller_pb2 as pb
from paceline.runs import run_dir as run_dirs
from support.cli_configs import config
from support.fake_controller import FakeController, notice_event, serve, step_event


async def test_status_asks_the_controller_of_the_note(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server = await serve(FakeController(), token="secret")
    prepared = run_dirs.prepare(config(trainer={"total_steps": 2, "run_dir": "runs/mine"}))
    resolved, folder = prepared.config, prepared.run_dir
    note = run_dirs.new_note(folder, "secret")
    note.controller, note.state = server.address, "running"
    run_dirs.write_note(folder, note)
    run_dirs.link_latest(folder)
    for words in (["status"], ["status", "mine"], ["status", "runs/mine"]):
        assert await asyncio.to_thread(main, words) == 0
        assert "step 3/9: collect" in capsys.readouterr().out
    with pytest.raises(EnvironmentLackError, match="belongs to a run that is still running"):
        run_dirs.prepare(resolved)
    run_dirs.end_note(folder, note, "2 steps done")
    assert await asyncio.to_thread(main, ["status"]) == 1
    assert "not running (2 steps done)" in capsys.readouterr().out
    assert await asyncio.to_thread(main, ["status", "other"]) == 2
    assert "no run other" in capsys.readouterr().err
    await server.stop(0)


@pytest.mark.parametrize(("ok", "code"), [(True, 0), (False, 1)])
async def test_status_follows_a_run_to_its_end(
    ok: bool, code: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PACELINE_TOKEN", raising=False)
    fake = FakeController()
    server = await serve(fake)
    end = pb.WatchEvent(end=pb.EndEvent(ok=ok, message="that is the end"))
    fake.script = [step_event(1, **{"val/reward/mean": 0.25}), end]
    words = ["status", "--follow", "--controller", server.address]
    assert await asyncio.to_thread(main, words) == code
    said = capsys.readouterr()
    assert said.out.startswith("step 1/9  ")
    assert (said.out if ok else said.err).endswith("that is the end\n")
    await server.stop(0)


async def test_drain_waits_until_the_server_has_left(
    project: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PACELINE_TOKEN", raising=False)
    fake = FakeController()
    server = await serve(fake)
    fake.members = [pb.MemberStatus(member_id="rollout-1", state="serving", in_flight=12)]
    words = ["rollout", "drain", "rollout-1", "--controller", server.address]
    assert await asyncio.to_thread(main, [*words, "--timeout", "0.1"]) == 1
    said = capsys.readouterr()
    assert said.out == "rollout-1 takes no more prompts; 12 samples are in progress\n"
    assert "DRAIN: no answer from rollout-1 within 0.1 s" in said.err

    draining = asyncio.create_task(asyncio.to_thread(main, words))
    await asyncio.sleep(0.3)
    assert not draining.done()
    fake.members = [pb.MemberStatus(member_id="rollout-1", state="left")]
    assert await draining == 0
    assert fake.calls == ["drain rollout-1", "drain rollout-1"]
    assert capsys.readouterr().out.splitlines()[-1] == "rollout-1 has left"
    await server.stop(0)


@pytest.mark.parametrize(
    ("words", "well", "code", "call"),
    [
        ([], True, 0, "stop after the step: paceline stop"),
        ([], False, 1, "stop after the step: paceline stop"),
        (["--now"], False, 0, "stop paceline stop"),
    ],
)
async def test_stop_waits_for_the_end_of_the_run(
    words: list[str],
    well: bool,
    code: int,
    call: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A run that is ended at once is never in order; that is what was asked for."""
    monkeypatch.delenv("PACELINE_TOKEN", raising=False)
    fake = FakeController()
    server = await serve(fake)
    fake.stops_well, fake.script = well, [notice_event("step 3: waiting for a rollout server")]
    given = ["stop", "--controller", server.address, *words]
    assert await asyncio.to_thread(main, given) == code
    said = capsys.readouterr()
    assert fake.calls == [call]
    assert "step 3: waiting for a rollout server" in said.out
    assert ("ends after step 3, with a checkpoint" in said.out) == (not words)
    assert (said.err if code else said.out).endswith("stopped: paceline stop\n")
    await server.stop(0)


async def test_stop_says_that_the_run_goes_on_or_cannot_be_reached(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PACELINE_TOKEN", raising=False)
    fake = FakeController()
    server = await serve(fake)
    fake.deaf = True
    words = ["stop", "--controller", server.address]
    assert await asyncio.to_thread(main, [*words, "--timeout", "0.1"]) == 1
    assert "STOP: no answer from the controller" in capsys.readouterr().err
    fake.end_after_stop = False
    assert await asyncio.to_thread(main, words) == 1
    assert "was lost before it said how the run ended" in capsys.readouterr().err
    await server.stop(0)
    assert await asyncio.to_thread(main, words) == 1
