"""`paceline ui`: what it serves, to whom, and the news of a run that is under way."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import re
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from paceline.cli.commands import ui
from paceline.cli.launch import run_dir as run_dirs
from paceline.cli.main import main
from paceline.cli.ui.runs import ServedRuns
from paceline.cli.ui.server import PageServer
from paceline.core.errors import EnvironmentLackError
from paceline.rpc.v1 import controller_pb2 as pb
from support.fake_controller import FakeController, serve
from support.synthetic_run import write_run

TOKEN = "s3cret"


@dataclass
class Reply:
    status: int
    headers: dict[str, str]
    body: str


async def ask(port: int, path: str, method: str = "GET") -> Reply:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"{method} {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
    async with asyncio.timeout(20):
        text = (await reader.read()).decode()
    writer.close()
    head, _, body = text.partition("\r\n\r\n")
    first, *lines = head.splitlines()
    return Reply(int(first.split()[1]), dict(line.split(": ", 1) for line in lines), body)


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    for name in ("first", "second"):
        write_run(tmp_path / "runs" / name, num_steps=5)
    (tmp_path / "runs" / "latest").symlink_to("second")
    return tmp_path / "runs"


@pytest.fixture
async def port(runs: Path) -> AsyncIterator[int]:
    server = await PageServer(ServedRuns(runs), TOKEN).start(0)
    yield server.sockets[0].getsockname()[1]
    server.close()


async def test_it_serves_the_pages_of_a_folders_runs(port: int, runs: Path) -> None:
    index = await ask(port, f"/{TOKEN}/")
    assert re.findall(r'href="([^"]+)"', index.body) == ["first/", "second/"]
    page = await ask(port, f"/{TOKEN}/first/")
    assert (page.status, page.headers["Content-Type"]) == (200, "text/html; charset=utf-8")
    assert "<h1>first</h1>" in page.body
    write_run(runs / "third", num_steps=3)
    assert (await ask(port, f"/{TOKEN}/third/")).status == 200, "a run that began later"


async def test_the_page_of_the_only_run_is_where_the_address_leads(runs: Path) -> None:
    server = await PageServer(ServedRuns(runs / "first"), TOKEN).start(0)
    async with server:
        reply = await ask(server.sockets[0].getsockname()[1], f"/{TOKEN}/")
    assert (reply.status, reply.headers["Location"]) == (302, f"/{TOKEN}/first/")


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/", 404),
        ("/first/", 404),
        ("/s3cre/first/", 404),
        (f"/{TOKEN}/latest/", 404),
        (f"/{TOKEN}/first/events.jsonl", 404),
        (f"/{TOKEN}/first/../../x", 404),
        (f"/{TOKEN}/..%2Ffirst/", 404),
        (f"/{TOKEN}/%2e%2e/", 404),
    ],
)
async def test_nothing_else_is_served(port: int, path: str, status: int) -> None:
    reply = await ask(port, path)
    assert reply.status == status
    assert "<h1>" not in reply.body


async def test_it_only_reads_and_listens_on_loopback(port: int) -> None:
    assert (await ask(port, f"/{TOKEN}/first/", "POST")).status == 405
    with pytest.raises(EnvironmentLackError, match="give another --port"):
        await PageServer(ServedRuns(Path()), TOKEN).start(port)
    with socket.socket() as other, pytest.raises(OSError):
        other.connect(("127.0.0.2", port))


async def test_only_the_pages_own_script_may_run(port: int) -> None:
    page = await ask(port, f"/{TOKEN}/first/")
    (script,) = re.findall(r"<script>(.*?)</script>", page.body, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = page.headers["Content-Security-Policy"]
    assert policy.startswith("default-src 'none'")
    assert f"script-src 'sha256-{digest}';" in policy
    assert (
        re.findall(r"\son\w+=|javascript:", page.body.partition("<main>")[2].partition("<script>")[0]) == []
    )


async def test_the_news_of_a_run_that_is_under_way(port: int, runs: Path) -> None:
    page = (await ask(port, f"/{TOKEN}/first/")).body
    (stamp,) = re.findall(r'data-live="([^"]*)"', page)
    assert json.loads((await ask(port, f"/{TOKEN}/first/now")).body) == {"html": "", "stamp": stamp}
    controller = FakeController()
    controller.members = [pb.MemberStatus(member_id="rollout-<0>", state="serving")]
    server = await serve(controller, token="t")
    note = run_dirs.new_note(runs / "first", "t")
    note.controller, note.state = server.address, "running"
    run_dirs.write_note(runs / "first", note)
    await asyncio.sleep(1.1)  # it is asked at most once a second
    news = json.loads((await ask(port, f"/{TOKEN}/first/now")).body)
    await server.stop(0)
    assert news["html"] == (
        "<b>training</b> step 3/9: collect, 0 s"
        '<div class="members"><span>rollout-&lt;0&gt; serving</span></div>'
    )
    assert news["stamp"] != stamp


def test_the_command_says_where(
    runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def at_once(server: asyncio.Server) -> None:
        raise KeyboardInterrupt

    monkeypatch.chdir(runs.parent)
    monkeypatch.setattr(ui.asyncio.Server, "serve_forever", at_once)
    assert main(["ui", "--port", "0"]) == 130
    said = capsys.readouterr().out
    assert re.search(r"http://127\.0\.0\.1:\d+/[\w-]{20,}/\n", said)
    assert "ssh -L" in said
    assert main(["ui", "nowhere"]) == 2
