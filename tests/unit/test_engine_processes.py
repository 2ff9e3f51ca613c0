"""An engine's processes among the children of a process, of which some are forked by another one."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

SCRIPT = textwrap.dedent(
    """
    import multiprocessing, time
    import psutil
    from paceline.rollout.engines.processes import EngineProcesses, end_all_children

    if __name__ == "__main__":
        own = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
        own.start()
        engine = EngineProcesses()
        core = multiprocessing.get_context("forkserver").Process(target=time.sleep, args=(60,))
        core.start()
        other = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
        other.start()
        tracker = {c.pid for c in psutil.Process().children() if "resource_tracker" in " ".join(c.cmdline())}
        engine.settle()
        print({child.pid for child in engine.children()} - tracker == {core.pid, other.pid})
        end_all_children()
        left = {c.pid for c in psutil.Process().children(recursive=True) if c.status() != "zombie"}
        print(left - tracker)
    """
)


STOPPED = textwrap.dedent(
    """
    import multiprocessing, os, signal, time
    import psutil
    from multiprocessing import forkserver
    from paceline.rollout.engines.processes import EngineProcesses, end_all_children

    def be_core(pids):
        worker = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
        worker.start()
        pids.send(worker.pid)
        time.sleep(60)

    def send(pid, number, status):
        os.kill(pid, number)
        while (psutil.Process(pid).status() == psutil.STATUS_STOPPED) is not status:
            pass

    if __name__ == "__main__":
        engine, (ours, theirs) = EngineProcesses(), multiprocessing.Pipe()
        core = multiprocessing.get_context("forkserver").Process(target=be_core, args=(theirs,))
        core.start()
        worker = ours.recv()
        engine.settle()
        own = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
        own.start()
        send(own.pid, signal.SIGSTOP, True)  # a tool's, say: no part of the engine
        now = 1000.0
        for pid in (core.pid, worker, forkserver._forkserver._forkserver_pid):
            looks = []
            # The second look comes late: this process may have been stopped, too.
            for wait in (1.0, 500.0, 1.5, 1.0, 1.0):
                send(pid, signal.SIGSTOP, True)
                looks.append(engine.stopped(now := now + wait))
            said = (looks[-1] or "").split(" ", 1)
            print(looks[:-1], said[:1] == [str(pid)], said[1:] == ["(the fork server)"])
            send(pid, signal.SIGCONT, False)
            print(engine.stopped(now := now + 1.0))
        end_all_children()
    """
)


STARTING = textwrap.dedent(
    """
    import asyncio, multiprocessing, os, signal, time
    import psutil
    from paceline.core.errors import FailedStartError
    from paceline.rollout.engines import processes
    from paceline.rollout.engines.vllm.start import startup

    def start_core():
        core = multiprocessing.get_context("forkserver").Process(target=time.sleep, args=(600,))
        core.start()
        os.kill(core.pid, signal.SIGSTOP)
        print(core.pid)
        core.join()
        raise RuntimeError("the engine core is gone")

    async def main():
        startup._LOOK_S, processes._STOPPED_S = 0.05, 0.3
        engine = processes.EngineProcesses()
        building = startup.in_daemon(lambda: start_core())
        try:
            await startup.built(building, engine)
        except FailedStartError as error:
            print(str(error).split(" (")[0])
        print(building.done(), [p for p in engine.children() if p.status() != "zombie" and "tracker" not in
                                " ".join(p.cmdline()) and "forkserver" not in " ".join(p.cmdline())])
        building = startup.in_daemon(lambda: None)
        await startup.built(building, engine)
        building = startup.in_daemon(lambda: 1 / 0)
        try:
            await startup.built(building, engine)
        except ZeroDivisionError:
            print("its own error")

    if __name__ == "__main__":
        asyncio.run(main())
        processes.end_all_children()
    """
)


def test_a_process_that_is_stopped_while_the_engine_starts_ends_the_start(tmp_path: object) -> None:
    """Its thread would wait for vLLM's own deadline of minutes."""
    pytest.importorskip("torch")
    script = f"{tmp_path}/script.py"
    with open(script, "w", encoding="utf-8") as file:
        file.write(STARTING)
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=300, check=False)
    pid, *lines = done.stdout.splitlines() or [""]
    assert lines == [f"process {pid}", "True []", "its own error"], done.stderr
    assert "never retrieved" not in done.stderr


def test_a_process_that_stays_stopped_is_named(tmp_path: object) -> None:
    """Engine core, worker and fork server, after five seconds in which somebody could have continued it."""
    script = f"{tmp_path}/script.py"
    with open(script, "w", encoding="utf-8") as file:
        file.write(STOPPED)
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120, check=False)
    none_yet = "[None, None, None, None]"
    assert done.stdout.splitlines() == [
        f"{none_yet} True False",
        "None",
        f"{none_yet} True False",
        "None",
        f"{none_yet} True True",
        "None",
    ], done.stderr


def test_what_a_fork_server_started_counts_and_everything_ends(tmp_path: object) -> None:
    script = f"{tmp_path}/script.py"
    with open(script, "w", encoding="utf-8") as file:
        file.write(SCRIPT)
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.splitlines() == ["True", "set()"], done.stderr
