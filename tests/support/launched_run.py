"""A launcher in a process of its own, with small programs in place of the services."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

from paceline.runs import run_dir as run_dirs
from support.forked import Forked

HANG_S = 400.0
"""Within this time everything happens that happens at all."""
STOPPED = (False, 128 + signal.SIGTERM, "stopped by SIGTERM")
"""The outcome of a run that `Run.stop` ended."""
BUDGET_S = 400
"""What the services get to end, where a test shows that they do not."""

# A launcher in a process of its own: it adopts orphans and ends all its descendants.
DRIVER = """
import asyncio, json, os, shutil, sys
from pathlib import Path
from types import SimpleNamespace
from paceline.runs import run_dir as run_dirs
from paceline.launch.launcher import ProcessPlanner, launch
from paceline.launch.planning.plan import ProcessSpec, Role
from paceline.launch.processes import fork_server, forking
from paceline.show.live.view import PlainView
from paceline.config.load import parse
from paceline.config.run import RunConfig

FAKE = "support.fake_controller"
job = json.loads(sys.argv[1])
if "free" in job:
    shutil.disk_usage = lambda folder: SimpleNamespace(free=job["free"])
tree = {"data": {"train_files": ["x.parquet"]}, "model": {"path": "m"},
        "reward": {"functions": [{"name": "exact_match"}], "models": job.get("models", [])},
        "trainer": {"total_steps": 2, "run_dir": job["run_dir"]},
        "broker": {"url": job.get("broker", "redis://127.0.0.1:1/0"), "blob_stores": job.get("stores", 0)},
        "service": {"startup_timeout_s": 400, "shutdown_timeout_s": job["budget_s"],
                    "max_restarts": job.get("max_restarts", 2), "suspect_after_s": 1,
                    "dead_after_s": job.get("dead_after_s", 30)}}
prepared = run_dirs.prepare(parse(RunConfig, tree))
config, run_dir = prepared.config, prepared.run_dir

def controller(config, run_dir, address_file):
    fake = [sys.executable, "-m", FAKE, "--address-file", str(address_file), "--run-dir", str(run_dir)]
    fake += ["--port", str(config.service.controller_port)]
    env = {"FAKE_SCRIPT": job["script"], "FAKE_MEMBERS": job["states"], "FAKE_CALLS": job["calls"],
           "PYTHONPATH": os.pathsep.join(sys.path)}
    command = tuple(job.get("controller") or fake)
    return ProcessSpec(name="controller", role=Role.CONTROLLER, command=command, env=env)

def members(config, machine, *, controller_address, master_port):
    roles = {name: Role("reward-model" if "model" in name else name.split("-")[0]) for name in job["members"]}
    return [ProcessSpec(name=name, role=roles[name], command=(sys.executable, "-c", text),
                        member_id="learner-0" if roles[name] is Role.LEARNER else name,
                        shell=tuple(job.get("shells", {}).get(name, ())),
                        env={"MASTER_PORT": str(master_port), "REWARD_PORT": str(config.service.reward_port)})
            for name, text in job["members"].items()]

planner = ProcessPlanner(controller=controller, members=members)
# This process has their imports: the first controller and the check of the rewards are its forks.
forking.IMPORTS = {**forking.IMPORTS, FAKE: ()}
with fork_server.running():
    outcome = asyncio.run(launch(config, run_dir, PlainView(2), planner=planner))
print("OUTCOME", json.dumps([outcome.ok, outcome.exit_code, outcome.message]), flush=True)
"""

# As ssh: nothing of this environment gets to the other side but the way to Python and its packages.
SSH = (
    "env", "-i", f"PATH={os.environ['PATH']}", f"PYTHONPATH={os.environ.get('PYTHONPATH', '')}",
    sys.executable, "-m", "paceline.launch.remote",
)  # fmt: skip
MARK = "import os, pathlib; pathlib.Path({folder!r}, f'{{os.getpid()}}.pid').touch();"
WELL = "import signal, sys; signal.signal(signal.SIGTERM, lambda *_: sys.exit(0)); signal.pause()"
NOTES = (
    "import signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: (time.sleep(0.05), "
    "print({name!r}, file=open({order!r}, 'a')), sys.exit(0))); "
    "open({order!r} + {name!r} + '.ready', 'w'); signal.pause()"
)
# It takes longer to end than services get after a failure.
SLOW = (
    "import pathlib, signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: (time.sleep(9), "
    "pathlib.Path({ended!r}).touch(), sys.exit(0))); signal.pause()"
)
DEAF = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN)\nwhile True: time.sleep(1)"
# A child in its own session, like an engine's: not in its parent's group, and alive after its parent's end.
LEAVES = (
    "import subprocess, sys, signal; "
    "child = subprocess.Popen([sys.executable, '-c', {child!r}], start_new_session=True);"
    "signal.signal(signal.SIGTERM, lambda *_: sys.exit(0)); signal.pause()"
)


class Run:
    """A launcher process with fake services that write down their process ids."""

    def __init__(self, folder: Path, script: str, members: dict[str, str], **job: object) -> None:
        self.pids_dir = folder / "pids"
        self.pids_dir.mkdir()
        self.run_dir = folder / "run"
        mark = MARK.format(folder=str(self.pids_dir))
        programs = {name: mark + text for name, text in members.items()}
        self.states = folder / "states"
        self.states.touch()
        self.calls = folder / "calls"
        self.job = {
            "calls": str(self.calls),
            "states": str(self.states),
            "run_dir": str(self.run_dir),
            "script": script,
            "members": programs,
            # All of it goes by where a service ignores its signal; others need what the machine takes.
            "budget_s": 4 if any("SIG_IGN" in text for text in members.values()) else 60,
            **job,
        }
        command = ["-c", DRIVER, json.dumps(self.job)]
        self.process = Forked(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)

    def wait_for_pids(self, count: int, *, suffix: str = ".pid", folder: Path | None = None) -> None:
        """Waits until `count` fake services are up."""
        deadline = time.monotonic() + HANG_S
        while len(list((folder or self.pids_dir).glob(f"*{suffix}"))) < count:
            assert time.monotonic() < deadline, self.process.communicate(timeout=60)
            assert self.process.poll() is None, self.process.communicate()
            time.sleep(0.02)

    @property
    def note(self) -> run_dirs.RunNote:
        """run.json."""
        note = run_dirs.read_note(self.run_dir)
        assert note is not None
        return note

    @property
    def pids(self) -> dict[str, int]:
        """The process ids in run.json."""
        return self.note.pids

    def alive(self) -> set[int]:
        """The fake services that are up."""
        return {int(path.stem) for path in self.pids_dir.iterdir() if psutil.pid_exists(int(path.stem))}

    def wait_for_another_pid(self, name: str, pid: int = 0) -> None:
        """Waits until run.json names another process, and one that is up: it is written after it began."""
        deadline = time.monotonic() + HANG_S
        while (named := self.pids[name]) == pid or not psutil.pid_exists(named):
            assert time.monotonic() < deadline
            time.sleep(0.02)

    def wait_for_state(self, state: str) -> None:
        """Waits until run.json says so."""
        deadline = time.monotonic() + HANG_S
        while (note := run_dirs.read_note(self.run_dir)) is None or note.state != state:
            assert time.monotonic() < deadline
            time.sleep(0.02)

    def tell_states(self, lines: str) -> None:
        """Makes the fake controller report these members, and waits until the launcher has asked for them."""
        self.states.write_text(lines)
        told, deadline = self.states.with_suffix(".told"), time.monotonic() + HANG_S
        while not told.exists() or told.read_text() != lines:
            assert time.monotonic() < deadline
            time.sleep(0.02)

    def wait_for_calls(self, count: int) -> None:
        """Waits until the fake controller has got so many calls of those that it writes down."""
        deadline = time.monotonic() + HANG_S
        while not self.calls.exists() or len(self.calls.read_text().splitlines()) < count:
            assert time.monotonic() < deadline
            time.sleep(0.02)

    def read_until(self, words: str) -> str:
        """The first line that contains these words."""
        assert self.process.stdout is not None
        return next(line for line in self.process.stdout if words in line)

    def stop(self) -> tuple[bool, int, str]:
        """Ends the launcher by a signal; returns the outcome, and checks that no process is left."""
        self.process.send_signal(signal.SIGTERM)
        return self.finish()

    def finish(self) -> tuple[bool, int, str]:
        """Returns the outcome; checks that no process is left."""
        self.output, _ = self.process.communicate(timeout=HANG_S)
        left = [int(path.stem) for path in self.pids_dir.iterdir() if psutil.pid_exists(int(path.stem))]
        assert left == [], f"still alive: {left}\n{self.output}"
        line = next((line for line in self.output.splitlines() if line.startswith("OUTCOME")), None)
        assert line is not None, self.output
        ok, code, message = json.loads(line.removeprefix("OUTCOME "))
        return ok, code, message
