"""`paceline ui`: what it serves, to whom, and the news of a run that is under way."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import http.client
import json
import os
import re
import socket
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from paceline.cli.certificates import Authority
from paceline.cli.commands.results import ui
from paceline.cli.main import main
from paceline.core.errors import ConfigError, EnvironmentLackError
from paceline.rpc.v1 import controller_pb2 as pb
from paceline.runs import run_dir as run_dirs
from paceline.service.identity.credentials import INSECURE, TLS_DIR
from paceline.show.ui.machine import MachineUsage
from paceline.show.ui.runs import ServedRuns
from paceline.show.ui.serve import Listen, open_server
from paceline.show.ui.server import PageApp
from support.fake_controller import FakeController, serve
from support.synthetic_run import write_run

TOKEN = "s3cret"


@dataclass
class Reply:
    status: int
    headers: dict[str, str]
    body: str


async def ask(port: int, path: str, method: str = "GET") -> Reply:
    def send() -> Reply:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
        connection.request(method, path)
        answer = connection.getresponse()
        reply = Reply(answer.status, dict(answer.getheaders()), answer.read().decode())
        connection.close()
        return reply

    return await asyncio.to_thread(send)


async def data(port: int, path: str) -> Any:
    reply = await ask(port, f"/{TOKEN}/data/{path}")
    assert (reply.status, reply.headers["Content-Type"]) == (200, "application/json; charset=utf-8")
    return json.loads(reply.body)


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    for name in ("first", "second"):
        write_run(tmp_path / "runs" / name, num_steps=5)
    (tmp_path / "runs" / "latest").symlink_to("second")
    return tmp_path / "runs"


def listen(host: str = "127.0.0.1", *, port: int = 0) -> Listen:
    return Listen(host=host, port=port, prefix="--")


def app(folder: Path) -> PageApp:
    return PageApp(ServedRuns(folder, asyncio.get_running_loop()), TOKEN)


@pytest.fixture
async def port(runs: Path) -> AsyncIterator[int]:
    server = open_server(app(runs), listen())
    yield server.server_port
    server.close()


async def test_it_serves_a_folders_runs(port: int, runs: Path) -> None:
    page = await ask(port, f"/{TOKEN}/")
    assert (page.status, page.headers["Content-Type"]) == (200, "text/html; charset=utf-8")
    assert [run["name"] for run in await data(port, "runs")] == ["first", "second"]
    write_run(runs / "third", num_steps=3)
    assert [run["step"] for run in await data(port, "runs")] == [5, 5, 3], "one that began later"
    assert (await data(port, "first/samples")) == ["step_000001", "step_000005", "val_000005"]
    rows = await data(port, "first/samples/step_000005")
    assert (len(rows), rows[7]["row"]) == (64, 7)
    assert (await data(port, "first/samples/step_000005/7"))["engine"] == [-0.1, -0.2, -3.0, -0.1]
    assert [span["who"] for span in await data(port, "first/timeline/2")][-1] == "learner-0"
    assert "hunter2" not in await data(port, "first/config")
    assert (await data(port, "first/journal"))["verdicts"]["admitted"] == 512
    assert await data(port, "first/now") == {}


async def test_only_new_lines_are_sent_until_the_run_begins_anew(port: int, runs: Path) -> None:
    first = await data(port, "first/metrics/0/0")
    assert (first["num_lines"], first["is_new"], first["steps"]) == (6, True, [0, 1, 2, 3, 4, 5])
    with (runs / "first" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "critic/score/mean": 0.5}\n')
    more = await data(port, f"first/metrics/{first['generation']}/6")
    assert (more["is_new"], more["steps"], more["columns"]) == (False, [6], {"critic/score/mean": [0.5]})
    (runs / "first" / "metrics.jsonl").write_text('{"step": 0, "val/reward/mean": 0.1}\n')
    anew = await data(port, f"first/metrics/{first['generation']}/7")
    assert (anew["is_new"], anew["steps"]) == (True, [0])


async def test_the_only_run_can_be_served_alone(runs: Path) -> None:
    server = open_server(app(runs / "first"), listen())
    assert [run["name"] for run in await data(server.server_port, "runs")] == ["first"]
    server.close()


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/", 404),
        ("/first/", 404),
        ("/s3cre/first/", 404),
        ("/s3cre/data/runs", 404),
        (f"/{TOKEN}/data/latest/journal", 404),
        (f"/{TOKEN}/data/first/events.jsonl", 404),
        (f"/{TOKEN}/data/first/run.json", 404),
        (f"/{TOKEN}/data/first/samples/step_000005/640", 404),
        (f"/{TOKEN}/data/first/samples/step_000005/-1", 404),
        (f"/{TOKEN}/data/..%2Ffirst/config", 404),
        (f"/{TOKEN}/data/%2e%2e/config", 404),
    ],
)
async def test_nothing_else_is_served(port: int, path: str, status: int) -> None:
    reply = await ask(port, path)
    assert (reply.status, reply.headers["Content-Type"]) == (status, "text/plain; charset=utf-8")


async def test_samples_outside_the_runs_folder_are_not_read(port: int, runs: Path) -> None:
    (runs / "first" / "trajectories" / "step_000005.parquet").rename(runs / "secret.parquet")
    (runs / "first" / "trajectories" / "other.parquet").symlink_to(runs / "secret.parquet")
    for name in ("step_000005", "..", "other"):
        assert await data(port, f"first/samples/{name}") == []
    assert (await ask(port, f"/{TOKEN}/data/first/samples/..%2F..%2Fsecret")).status == 404


async def test_it_only_reads_and_listens_on_loopback(port: int) -> None:
    for method in ("POST", "PUT", "DELETE"):
        assert (await ask(port, f"/{TOKEN}/", method)).status == 405
    with pytest.raises(EnvironmentLackError, match="give another --port"):
        open_server(app(Path()), listen(port=port))
    with socket.socket() as other, pytest.raises(OSError):
        other.connect(("127.0.0.2", port))


async def test_beyond_loopback_it_wants_tls(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(TLS_DIR, raising=False)
    with pytest.raises(
        ConfigError, match="refusing to serve runs and their secret address on 0.0.0.0 in plain text"
    ):
        open_server(app(runs), listen("0.0.0.0"))
    monkeypatch.setenv(INSECURE, "1")
    server = open_server(app(runs), listen("0.0.0.0"))
    assert server.is_plain
    server.close()
    monkeypatch.delenv(INSECURE)
    Authority.create(tmp_path, days=1)
    Authority.load(tmp_path).issue(tmp_path / "host", "host", role="controller", days=1)
    monkeypatch.setenv(TLS_DIR, str(tmp_path / "host"))
    server = open_server(app(runs), listen("0.0.0.0"))
    context = ssl.create_default_context(cafile=str(tmp_path / "ca.pem"))
    context.check_hostname = False

    def read(path: str) -> int:
        connection = http.client.HTTPSConnection(
            "127.0.0.1", server.server_port, timeout=120, context=context
        )
        connection.request("GET", path)
        status = connection.getresponse().status
        connection.close()
        return status

    assert await asyncio.to_thread(read, f"/{TOKEN}/data/runs") == 200, "a browser has no certificate"
    assert await asyncio.to_thread(read, "/data/runs") == 404
    server.close()


async def test_only_the_pages_own_script_may_run(port: int) -> None:
    page = await ask(port, f"/{TOKEN}/")
    (script,) = re.findall(r"<script>(.*?)</script>", page.body, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = page.headers["Content-Security-Policy"]
    assert policy.startswith("default-src 'none'")
    assert f"script-src 'sha256-{digest}';" in policy
    assert re.findall(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(", page.body) == []


async def test_what_a_run_that_is_under_way_is_doing(port: int, runs: Path) -> None:
    controller = FakeController()
    controller.members = [pb.MemberStatus(member_id="rollout-<0>", state="serving", in_flight=3)]
    server = await serve(controller, token="t")
    note = run_dirs.new_note(runs / "first", "t")
    note.controller, note.state, note.pids = server.address, "running", {"rollout-0": os.getpid()}
    run_dirs.write_note(runs / "first", note)
    now = await data(port, "first/now")
    await server.stop(0)
    assert (now["state"], now["line"]) == ("training", "step 3/9: collect, 0 s")
    assert now["members"] == [{"name": "rollout-<0>", "state": "serving", "in_flight": 3}]
    (process,) = now["processes"]
    assert process["name"] == "rollout-0"
    assert process["bytes"] > 1 << 20
    assert [run["state"] for run in await data(port, "runs")] == ["running", ""]


def test_what_a_launcher_has_started_counts_with_its_own_name() -> None:
    hold = "import time; data = bytearray(60 << 20); print(1, flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", hold], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        pids = {"launcher": os.getpid(), "rollout-0": child.pid}
        both = {entry["name"]: entry["bytes"] for entry in MachineUsage().processes(pids)}
        alone = {
            entry["name"]: entry["bytes"] for entry in MachineUsage().processes({"launcher": os.getpid()})
        }
        child.kill()
    assert both["rollout-0"] > 60 << 20
    assert alone["launcher"] - both["launcher"] > 50 << 20
    assert MachineUsage().processes({"gone": child.pid}) == []


def test_the_command_says_where(
    runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def at_once(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.chdir(runs.parent)
    monkeypatch.setattr(ui.asyncio.BaseEventLoop, "create_future", at_once)
    assert main(["ui", "--port", "0"]) == 130
    said = capsys.readouterr().out
    assert re.search(r"http://127\.0\.0\.1:\d+/[\w-]{20,}/\n", said)
    assert "ssh -L" in said
    assert main(["ui", "nowhere"]) == 2
