"""Services that are forked from a process which has imported what they share."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import psutil

LAUNCHER = textwrap.dedent(
    """
    import asyncio, json, os, signal, sys
    from pathlib import Path
    from paceline.cli.launch import fork_server

    def main():
        # Before all that an ordinary launcher imports.
        fork_server.SHARED = ("colorsys",)
        fork_server.is_cpu_build = lambda: CPU_BUILD
        fork_server.begin()
        from paceline.cli.launch import forking, plan, process_tree
        from paceline.service.process import adopt_orphans

        forking.IMPORTS = {"service": ("chunk",)}
        adopt_orphans()

        async def run():
            tree = process_tree.ProcessTree(Path("logs"), env={"TMPDIR": "/tmp", "FROM": "the tree"})
            server = next(iter(tree._before), None)
            command = (sys.executable, "-m", "service", "--word")
            spec = plan.ProcessSpec(
                name="one", role=plan.Role.REWARD, command=command, env={"OMP_NUM_THREADS": "1"}
            )
            first = await tree.start(spec, {"SECRET": "s"})
            await asyncio.wait_for(first.exited, 60)
            print(json.dumps(first.exited.result()))
            lasting = await tree.start(plan.ProcessSpec(
                name="two", role=plan.Role.REWARD, command=(*command, "stay"), env={}
            ), {})
            while "ready" not in lasting.log_path.read_text():
                await asyncio.sleep(0.01)
            tree.end_forking()
            print(json.dumps([server is not None and os.path.exists(f"/proc/{server}"), lasting.running]))
            program = await tree.start(plan.ProcessSpec(
                name="three", role=plan.Role.REWARD, command=command, env={}
            ), {})
            await asyncio.wait_for(program.exited, 60)
            if DIES:
                print(lasting.pid, flush=True)
                os.kill(os.getpid(), signal.SIGKILL)
            await tree.stop(budget_s=20)
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
    }))
    print("an error", file=sys.stderr)
    if "stay" in sys.argv:
        print("ready")
        time.sleep(60)
    raise SystemExit(7)
    """
)


def launch(folder: Path, *, cpu_build: bool = True, dies: bool = False) -> tuple[int, list[str]]:
    (folder / "launcher.py").write_text(f"CPU_BUILD, DIES = {cpu_build}, {dies}\n{LAUNCHER}")
    (folder / "service.py").write_text(SERVICE)
    environ = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    command = [sys.executable, "-W", "ignore", "-c", "import launcher"]
    done = subprocess.run(
        command, cwd=folder, env=environ, timeout=180, text=True, stdout=subprocess.PIPE, check=False
    )
    return done.returncode, done.stdout.splitlines()


def said(folder: Path, name: str) -> dict[str, Any]:
    line, error = (folder / "logs" / f"{name}.log").read_text().splitlines()[:2]
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
    assert forked.pop("env") == ["the tree", "s", "1", None]
    assert program.pop("env") == ["the tree", None, None, None]
    assert forked == program
    assert forked["argv"] == ["--word"]
    assert forked["leads"]


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
