"""Services that are forked from a process which has imported what they share."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import psutil
import pytest

from paceline.launch.planning.plan import ProcessSpec, Role
from paceline.launch.processes import fork_server, forking

LAUNCHER = textwrap.dedent(
    """
    import asyncio, json, os, signal, sys
    from pathlib import Path
    from paceline.launch.processes import fork_server

    def main():
        # Before all that an ordinary launcher imports.
        fork_server.SHARED = ("colorsys", "torch", "huggingface_hub.constants")
        fork_server.is_cpu_build = lambda: CPU_BUILD
        fork_server.begin()
        from paceline.launch.planning import plan
        from paceline.launch.processes import forking, process_tree
        from paceline.service.process import adopt_orphans

        forking.IMPORTS = {"service": ("chunk",), "threaded": ("threads",)}
        adopt_orphans()

        async def run():
            tree = process_tree.ProcessTree(Path("logs"), env={"TMPDIR": "/tmp", "FROM": "the tree"})
            server = next(iter(tree._before), None)
            command = (sys.executable, "-m", "service", "--word")
            spec = plan.ProcessSpec(
                name="one",
                role=plan.Role.REWARD,
                command=command,
                env={"OMP_NUM_THREADS": "3", "HF_HUB_OFFLINE": "1"},
            )
            Path("logs").mkdir()
            Path("logs/one.log").write_text("an earlier line\\n")
            first = await tree.start(spec, {"SECRET": "s"})
            await asyncio.wait_for(first.exited, 60)
            print(json.dumps(first.exited.result()))
            lasting = await tree.start(plan.ProcessSpec(
                name="two", role=plan.Role.REWARD, command=(*command, "stay"), env={}
            ), {})
            while "ready" not in lasting.log_path.read_text():
                await asyncio.sleep(0.01)
            other = plan.ProcessSpec(
                name="other", role=plan.Role.REWARD, command=(sys.executable + "3", *command[1:]), env={}
            )
            if tree._forking:
                assert await tree._forking.start(other, Path("logs/other.log"), {}) is None
            threaded = await tree.start(plan.ProcessSpec(
                name="threaded", role=plan.Role.REWARD, command=(sys.executable, "-m", "threaded"), env={}
            ), {})
            await asyncio.wait_for(threaded.exited, 60)
            tree.end_forking()
            print(json.dumps([server is not None and os.path.exists(f"/proc/{server}"), lasting.running]))
            program = await tree.start(plan.ProcessSpec(
                name="three", role=plan.Role.REWARD, command=command, env={}
            ), {})
            await asyncio.wait_for(program.exited, 60)
            if DIES:
                print(lasting.pid, flush=True)
                os.kill(os.getpid(), signal.SIGKILL)
            child = int(lasting.log_path.read_text().split()[-1])
            assert os.path.exists(f"/proc/{child}")
            await tree.stop(budget_s=20)
            lasting.kill_family()
            assert not os.path.exists(f"/proc/{child}")
            print(json.dumps([lasting.exited.result(), lasting.outcome()]))

        asyncio.run(asyncio.wait_for(run(), 120))

    main()
    """
)
SERVICE = textwrap.dedent(
    """
    import json, os, signal, sys, time
    from paceline.service.process import die_with_parent

    die_with_parent()
    print(json.dumps({
        "argv": sys.argv[1:],
        "name": __name__,
        "spec": __spec__.name,
        "imported": sorted({"colorsys", "chunk"} & sys.modules.keys()),
        "launcher": os.getppid(),
        "leads": os.getsid(0) == os.getpid(),
        "env": [os.environ.get(name) for name in ("FROM", "SECRET", "OMP_NUM_THREADS", "SPT_NOENV")],
        "interrupt": signal.getsignal(signal.SIGINT) is signal.default_int_handler,
        "threads": getattr(sys.modules.get("torch"), "threads", None),
        "offline": getattr(sys.modules.get("huggingface_hub.constants"), "HF_HUB_OFFLINE", None),
    }))
    print("an error", file=sys.stderr)
    if "stay" in sys.argv:
        parent, child = os.getpid(), os.fork()
        if child == 0:
            os.setpgid(0, 0)
            while os.getppid() == parent:
                time.sleep(0.1)
            time.sleep(20)
            os._exit(0)
        print("ready", child)
        time.sleep(60)
    raise SystemExit(7)
    """
)


def launch(folder: Path, *, cpu_build: bool = True, dies: bool = False) -> tuple[int, list[str]]:
    (folder / "launcher.py").write_text(f"CPU_BUILD, DIES = {cpu_build}, {dies}\n{LAUNCHER}")
    (folder / "service.py").write_text(SERVICE)
    (folder / "threaded.py").write_text(SERVICE)
    (folder / "threads.py").write_text("import threading\nthreading.Timer(60, print).start()\n")
    (folder / "torch.py").write_text(
        "def set_num_threads(number):\n    global threads\n    threads = number\n"
    )
    (folder / "huggingface_hub").mkdir()
    (folder / "huggingface_hub" / "constants.py").write_text("HF_HUB_OFFLINE = False\n")
    environ = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    command = [sys.executable, "-W", "ignore", "-c", "import launcher"]
    done = subprocess.run(
        command, cwd=folder, env=environ, timeout=180, text=True, stdout=subprocess.PIPE, check=False
    )
    return done.returncode, done.stdout.splitlines()


def said(folder: Path, name: str) -> dict[str, Any]:
    lines = (folder / "logs" / f"{name}.log").read_text().splitlines()
    line, error = lines[1:3] if lines[0] == "an earlier line" else lines[:2]
    assert error == "an error"
    answer: dict[str, Any] = json.loads(line)
    return answer


def test_a_fork_is_what_a_program_would_be_with_what_the_server_has_imported(tmp_path: Path) -> None:
    code, lines = launch(tmp_path)
    assert code == 0
    assert [json.loads(line) for line in lines] == [7, [False, True], [-15, "killed by SIGTERM"]]
    forked, program = said(tmp_path, "one"), said(tmp_path, "three")
    assert forked.pop("imported") == ["chunk", "colorsys"]
    assert program.pop("imported") == []
    assert forked.pop("env") == ["the tree", "s", "3", None]
    assert program.pop("env") == ["the tree", None, None, None]
    assert (forked.pop("threads"), program.pop("threads")) == (3, None)
    assert (forked.pop("offline"), program.pop("offline")) == (True, None)
    assert forked == program
    assert forked["argv"] == ["--word"]
    assert forked["leads"]
    assert (tmp_path / "logs" / "one.log").read_text().startswith("an earlier line")


def test_nothing_is_forked_beside_a_thread(tmp_path: Path) -> None:
    launch(tmp_path)
    assert said(tmp_path, "two")["imported"] == ["chunk", "colorsys"]
    assert said(tmp_path, "threaded")["imported"] == []


async def test_a_late_answer_is_not_taken_for_that_to_another_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, its = socket.socketpair()
    with ours, its:
        monkeypatch.setattr(fork_server, "end", lambda: None)
        monkeypatch.setattr(forking, "_START_S", 0.05)
        server = forking.Forking(fork_server.Begun(0, ours))
        command = (sys.executable, "-m", "paceline.reward")
        spec = ProcessSpec(name="reward", role=Role.REWARD, command=command)
        assert await server.start(spec, tmp_path / "reward.log", {}) is None
        its.sendall(b'{"pid": 4711}\n')
        assert await server.start(spec, tmp_path / "reward.log", {}) is None


def test_without_a_server_every_service_is_a_program(tmp_path: Path) -> None:
    code, lines = launch(tmp_path, cpu_build=False)
    assert code == 0
    assert [json.loads(line) for line in lines] == [7, [False, True], [-15, "killed by SIGTERM"]]
    assert said(tmp_path, "one")["imported"] == []


def test_forks_end_with_a_launcher_that_is_killed(tmp_path: Path) -> None:
    code, lines = launch(tmp_path, dies=True)
    assert code == -9
    pid = int(lines[-1])
    if psutil.pid_exists(pid):
        psutil.wait_procs([psutil.Process(pid)], timeout=20)
    assert not psutil.pid_exists(pid)
