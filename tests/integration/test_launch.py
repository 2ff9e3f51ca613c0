"""The launcher with small programs in place of the services: its reports, and no process left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import psutil
import pytest

from paceline.cli.launch import run_dir as run_dirs
from paceline.service import process_ends

pytestmark = pytest.mark.timeout(900)

SUPPORT = Path(__file__).parents[1] / "support"
HANG_S = 60.0
"""Within this time everything happens that happens at all."""
BUDGET_S = 60
"""What the services get to end, where a test shows that they do not."""

# A launcher in a process of its own: it adopts orphans and ends all its descendants.
DRIVER = """
import asyncio, json, sys
from pathlib import Path
from paceline.cli.launch import run_dir as run_dirs
from paceline.cli.launch.launcher import Planner, launch
from paceline.cli.launch.plan import ProcessSpec, Role
from paceline.cli.live.view import PlainView
from paceline.config.load import parse
from paceline.config.run import RunConfig

job = json.loads(sys.argv[1])
tree = {"data": {"train_files": ["x.parquet"]}, "model": {"path": "m"},
        "reward": {"functions": [{"name": "exact_match"}], "models": job.get("models", [])},
        "trainer": {"total_steps": 2, "run_dir": job["run_dir"]}, "broker": {"url": "memory://"},
        "service": {"startup_timeout_s": 100, "shutdown_timeout_s": job.get("budget_s", 4),
                    "max_restarts": job.get("max_restarts", 2), "suspect_after_s": 1,
                    "dead_after_s": job.get("dead_after_s", 30)}}
prepared = run_dirs.prepare(parse(RunConfig, tree))
config, run_dir = prepared.config, prepared.run_dir

def controller(config, run_dir, address_file):
    fake = [sys.executable, job["fake"], "--address-file", str(address_file), "--run-dir", str(run_dir)]
    fake += ["--port", str(config.service.controller_port)]
    env = {"FAKE_SCRIPT": job["script"], "FAKE_MEMBERS": job["states"], "FAKE_CALLS": job["calls"]}
    command = tuple(job.get("controller") or fake)
    return ProcessSpec(name="controller", role=Role.CONTROLLER, command=command, env=env)

def members(config, machine, *, controller_address, master_port):
    roles = {name: Role("reward-model" if "model" in name else name.split("-")[0]) for name in job["members"]}
    return [ProcessSpec(name=name, role=roles[name], command=(sys.executable, "-c", text),
                        member_id="learner-0" if roles[name] is Role.LEARNER else name,
                        env={"MASTER_PORT": str(master_port), "REWARD_PORT": str(config.service.reward_port)})
            for name, text in job["members"].items()]

planner = Planner(controller=controller, members=members)
outcome = asyncio.run(launch(config, run_dir, PlainView(2), planner=planner))
print("OUTCOME", json.dumps([outcome.ok, outcome.exit_code, outcome.message]), flush=True)
"""

MARK = "import os, pathlib; pathlib.Path({folder!r}, f'{{os.getpid()}}.pid').touch();"
WELL = "import signal, sys; signal.signal(signal.SIGTERM, lambda *_: sys.exit(0)); signal.pause()"
NOTES = (
    "import signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: (time.sleep(0.05), "
    "print({name!r}, file=open({order!r}, 'a')), sys.exit(0))); "
    "open({order!r} + {name!r} + '.ready', 'w'); signal.pause()"
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
            "fake": str(SUPPORT / "fake_controller.py"),
            "script": script,
            "members": programs,
            **job,
        }
        self.process = subprocess.Popen(
            [sys.executable, "-c", DRIVER, json.dumps(self.job)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def wait_for_pids(self, count: int, *, suffix: str = ".pid", folder: Path | None = None) -> None:
        """Waits until `count` fake services are up."""
        deadline = time.monotonic() + HANG_S
        while len(list((folder or self.pids_dir).glob(f"*{suffix}"))) < count:
            assert time.monotonic() < deadline, self.process.communicate(timeout=1)
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

    def wait_for_another_pid(self, name: str, pid: int) -> None:
        """Waits until run.json names another process: it is written after that one began."""
        deadline = time.monotonic() + HANG_S
        while self.pids[name] == pid:
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
        """Waits until the fake controller has been asked so often to end the run."""
        deadline = time.monotonic() + HANG_S
        while not self.calls.exists() or len(self.calls.read_text().splitlines()) < count:
            assert time.monotonic() < deadline
            time.sleep(0.02)

    def read_until(self, words: str) -> str:
        """The first line that contains these words."""
        assert self.process.stdout is not None
        return next(line for line in self.process.stdout if words in line)

    def finish(self) -> tuple[bool, int, str]:
        """Returns the outcome; checks that no process is left."""
        self.output, _ = self.process.communicate(timeout=HANG_S)
        left = [int(path.stem) for path in self.pids_dir.iterdir() if psutil.pid_exists(int(path.stem))]
        assert left == [], f"still alive: {left}\n{self.output}"
        line = next((line for line in self.output.splitlines() if line.startswith("OUTCOME")), None)
        assert line is not None, self.output
        ok, code, message = json.loads(line.removeprefix("OUTCOME "))
        return ok, code, message


def test_everything_ends_in_order(tmp_path: Path) -> None:
    order = tmp_path / "order"
    names = ("rollout-0", "learner-0", "reward")
    run = Run(tmp_path, "wait", {name: NOTES.format(name=name, order=str(order)) for name in names})
    run.wait_for_pids(3, suffix=".ready", folder=tmp_path)
    run.wait_for_state("running")
    run.process.send_signal(signal.SIGTERM)
    run.finish()
    assert order.read_text().split() == [*names]
    calls = run.run_dir / "controller.calls"
    assert calls.stat().st_mtime_ns > order.stat().st_mtime_ns, "the controller is the last"


def test_members_start_beside_the_controller_and_end_with_it(tmp_path: Path) -> None:
    """A controller that refuses the run ends them at once, and the message is its own."""
    told = tmp_path / "told"
    refuses = (
        "import pathlib, sys, time\n"
        f"while not pathlib.Path({str(told)!r}).exists(): time.sleep(0.02)\n"
        "print('paceline controller: the data is wrong', file=sys.stderr); sys.exit(2)"
    )
    tells = f"import pathlib; pathlib.Path({str(told)!r}).touch(); " + WELL
    run = Run(tmp_path, "", {"rollout-0": tells}, controller=[sys.executable, "-c", refuses])
    ok, code, message = run.finish()
    assert not ok
    assert code == 2
    assert "the data is wrong" in message


def test_services_share_a_temporary_folder_that_goes_with_the_run(tmp_path: Path) -> None:
    """Killed engines leave sockets in it, whose paths may have 107 characters."""
    leaves = (
        "import os, pathlib, tempfile; folder = pathlib.Path(tempfile.gettempdir()); "
        "(folder / str(os.getpid())).touch(); "
        f"pathlib.Path({str(tmp_path)!r}, f'{{os.getpid()}}.told').write_text(str(folder)); "
    )
    run = Run(tmp_path, "wait", {"rollout-0": leaves + WELL, "learner-0": leaves + WELL})
    run.wait_for_pids(2, suffix=".told", folder=tmp_path)
    run.process.send_signal(signal.SIGTERM)
    run.finish()
    (folder,) = {Path(told.read_text()) for told in tmp_path.glob("*.told")}
    assert folder.name.startswith("paceline-")
    assert len(str(folder)) < 107 - len(str(uuid.uuid4()))
    assert not folder.exists()


def test_success(tmp_path: Path) -> None:
    run = Run(tmp_path, "steps", {"rollout-0": WELL, "learner-0": WELL, "reward": WELL})
    assert run.finish() == (True, 0, "2 steps done")
    assert [line for line in run.output.splitlines() if line.startswith("step")] == [
        "step 1/2  reward 0.500",
        "step 2/2  reward 1.000",
    ]
    note = run_dirs.read_note(run.run_dir)
    assert note is not None
    assert (note.state, note.token, note.message) == ("ended", "", "2 steps done")
    assert (tmp_path / "latest").resolve() == run.run_dir


def test_a_failure_of_the_controller_is_the_runs_outcome(tmp_path: Path) -> None:
    run = Run(tmp_path, "fail", {"rollout-0": WELL, "learner-0": WELL, "reward": WELL})
    assert run.finish() == (False, 1, "COLLECT: the barrier is stuck")


def test_a_controller_that_dies_at_start_is_quoted(tmp_path: Path) -> None:
    line = "2026-01-01T00:00:00.000Z ERROR controller paceline.x: fatal: port 7000 is taken"
    text = f"import sys; print({line!r}, file=sys.stderr); sys.exit(1)"
    run = Run(tmp_path, "steps", {}, controller=[sys.executable, "-c", text])
    ok, code, message = run.finish()
    assert (ok, code) == (False, 1)
    assert message.startswith("controller ended while starting (exit code 1): port 7000 is taken")


def test_a_learner_that_dies_ends_the_run_with_its_error(tmp_path: Path) -> None:
    dies = "import sys, time; time.sleep(0.3); raise ValueError('loss is not finite')"
    run = Run(tmp_path, "wait", {"rollout-0": WELL, "learner-0": dies, "learner-1": DEAF, "reward": WELL})
    ok, code, message = run.finish()
    assert (ok, code) == (False, 1)
    assert message.startswith(
        "learner-0 ended unexpectedly (exit code 1): ValueError: loss is not finite [log:"
    )
    calls = (run.run_dir / "controller.calls").read_text()
    assert calls == f"stop {message}"


def test_a_run_goes_on_when_one_of_two_rollout_servers_cannot_be_mended(tmp_path: Path) -> None:
    run = Run(tmp_path, "wait", {"rollout-0": "raise SystemExit(3)", "rollout-1": WELL, "reward": WELL})
    note = run.read_until("goes on with the other rollout servers")
    assert "rollout-0 ended unexpectedly (exit code 3)" in note
    run.process.send_signal(signal.SIGTERM)
    assert run.finish() == (False, 128 + signal.SIGTERM, "stopped by SIGTERM")


def test_a_run_ends_when_its_last_rollout_server_dies(tmp_path: Path) -> None:
    run = Run(tmp_path, "wait", {"rollout-0": "raise SystemExit(3)", "reward": WELL})
    ok, code, message = run.finish()
    assert (ok, code) == (False, 1)
    assert message.startswith("rollout-0 ended unexpectedly (exit code 3)")


def test_a_killed_service_is_started_again_without_its_children(tmp_path: Path) -> None:
    """Its child is in a session of its own, as an engine's process is."""
    child = MARK.format(folder=str(tmp_path / "pids")) + DEAF
    run = Run(tmp_path, "wait", {"rollout-0": LEAVES.format(child=child), "reward": WELL})
    run.wait_for_pids(3)
    run.wait_for_state("running")
    before, first = run.alive(), run.pids["rollout-0"]
    os.kill(first, signal.SIGKILL)
    note = run.read_until("starting rollout-0 again")
    assert "rollout-0 ended unexpectedly (killed by SIGKILL)" in note
    (end,) = process_ends.read(run.run_dir)
    assert (end.name, end.outcome, end.restarts) == ("rollout-0", "killed by SIGKILL", True)
    assert f".log] {end.where}; starting rollout-0" in note
    assert note.endswith("starting rollout-0 again (1 of at most 2 within 300 s)\n")
    run.wait_for_pids(5)
    assert len(run.alive() & before) == 1, "only the reward service is the same"
    run.wait_for_another_pid("rollout-0", first)
    assert psutil.pid_exists(run.pids["rollout-0"])
    run.process.send_signal(signal.SIGTERM)
    run.finish()


def test_a_service_that_is_killed_too_often_ends_the_run(tmp_path: Path) -> None:
    dies = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    run = Run(tmp_path, "wait", {"rollout-0": WELL, "learner-0": WELL, "reward": dies})
    began = time.time()
    ok, code, message = run.finish()
    assert (ok, code) == (False, 1)
    ends = list(process_ends.read(run.run_dir))
    assert [(e.name, e.outcome, e.restarts) for e in ends] == [
        ("reward", "killed by SIGKILL", restarts) for restarts in (True, True, False)
    ]
    assert began < ends[0].time < ends[1].time < ends[2].time < time.time()
    assert message.startswith("reward ended unexpectedly (killed by SIGKILL) [log:")
    assert message.endswith("it was started again 2 within 300 s already")
    assert run.output.count("note: reward ended unexpectedly") == 2


def test_a_service_that_failed_after_it_was_ready_is_started_again(tmp_path: Path) -> None:
    fails = (
        "import signal, sys; signal.signal(signal.SIGUSR1, lambda *_: sys.exit(1)); "
        f"open({str(tmp_path / 'reward.ready')!r}, 'w');"
    )
    run = Run(tmp_path, "wait", {"rollout-0": WELL, "reward": fails + WELL})
    run.wait_for_pids(1, suffix=".ready", folder=tmp_path)
    run.wait_for_state("running")
    run.tell_states("reward serving\n")
    os.kill(run.pids["reward"], signal.SIGUSR1)
    assert "reward ended unexpectedly (exit code 1)" in run.read_until("starting reward again")
    run.process.send_signal(signal.SIGTERM)
    run.finish()


def test_a_reward_model_that_hangs_is_started_again_with_token_and_address(tmp_path: Path) -> None:
    """It is no member, so nobody says when it is ready: it is not killed for that, nor given up at once."""
    seen, child = tmp_path / "seen", tmp_path / "child"
    text = (
        "import os, re, subprocess, sys, time\n"
        "from paceline.reward.models.deadline import or_end\n"
        "names = 'PACELINE_REWARD_TOKEN', 'REWARD_PORT'\n"
        f"print(*(os.environ.get(name) for name in names), file=open({str(seen)!r}, 'a'))\n"
        f"if len(open({str(seen)!r}).readlines()) == 1:\n"
        "    started = subprocess.Popen(['sleep', '1000'], start_new_session=True)\n"
        f"    open({str(child)!r}, 'w').write(str(started.pid))\n"
        "    with or_end(0.5):\n"
        "        re.match('(a+)+$', 'a' * 60 + 'b')\n"
    )
    models = [{"name": "rm", "path": "x"}]
    run = Run(tmp_path, "wait", {"reward": WELL, "reward-model-rm-0": text + WELL}, models=models)
    assert "reward-model-rm-0 ended unexpectedly (exit code 1)" in run.read_until("starting reward-model")
    run.wait_for_pids(3)
    run.wait_for_state("running")
    run.tell_states("reward serving\n")
    run.tell_states("reward serving \n")
    assert psutil.pid_exists(run.pids["reward-model-rm-0"])
    run.process.send_signal(signal.SIGTERM)
    run.finish()
    (token, port), again = (line.split() for line in seen.read_text().splitlines())
    assert again == [token, port], "the same for its successor"
    assert not psutil.pid_exists(int(child.read_text())), "what it had started"
    log = (run.run_dir / "logs" / "reward-model-rm-0.log").read_text()
    assert "Timeout (0:00:00.500000)!" in log, "where it hung"
    assert len(token) > 20
    assert 0 < int(port) < 65536


def test_all_ranks_of_a_learner_start_again_with_a_new_port(tmp_path: Path) -> None:
    port = "import os; print(os.environ['MASTER_PORT'], file=open('{folder}/%d.port' % os.getpid(), 'w'), "
    rank = port.format(folder=tmp_path) + "flush=True)\n" + DEAF
    run = Run(tmp_path, "wait", {"rollout-0": WELL, "learner-0": rank, "learner-1": rank, "reward": WELL})

    def ports() -> list[str]:
        """Those of the ranks that are named now, once all have written theirs down."""
        files = [tmp_path / f"{run.pids[name]}.port" for name in ("learner-0", "learner-1")]
        deadline = time.monotonic() + HANG_S
        while not all(file.exists() and file.read_text().endswith("\n") for file in files):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        return [file.read_text() for file in files]

    run.wait_for_pids(4)
    run.wait_for_state("running")
    before, (port_0, port_1) = dict(run.pids), ports()
    os.kill(before["learner-1"], signal.SIGKILL)
    assert "learner-1 ended unexpectedly (killed by SIGKILL)" in run.read_until("starting the learner again")
    run.wait_for_pids(6)
    run.wait_for_another_pid("learner-1", before["learner-1"])
    after = run.pids
    same = {name for name in before if before[name] == after[name]}
    assert same == {"launcher", "controller", "rollout-0", "reward"}
    port_2, port_3 = ports()
    assert port_0 == port_1 != port_2 == port_3
    assert not psutil.pid_exists(before["learner-0"])
    run.process.send_signal(signal.SIGTERM)
    run.finish()


def test_a_killed_controller_comes_back_at_its_address(tmp_path: Path) -> None:
    run = Run(tmp_path, "wait", {"rollout-0": WELL, "reward": WELL})
    run.wait_for_pids(2)
    run.wait_for_state("running")
    run.read_until("step 2/2")
    address, before = run.note.controller, run.pids
    os.kill(before["controller"], signal.SIGKILL)
    run.read_until("the controller is back")
    assert (run.run_dir / "controller.address").read_text() == address
    assert run.pids["controller"] != before["controller"]
    assert run.pids["reward"] == before["reward"]
    run.process.send_signal(signal.SIGTERM)
    assert run.finish() == (False, 128 + signal.SIGTERM, "stopped by SIGTERM")
    assert [line for line in run.output.splitlines() if line.startswith("step 1/2")] == []


def test_a_stopped_member_that_the_controller_declared_dead_is_killed(tmp_path: Path) -> None:
    run = Run(tmp_path, "wait", {"rollout-0": WELL, "reward": WELL}, dead_after_s=5)
    run.wait_for_pids(2)
    run.wait_for_state("running")
    run.tell_states("reward serving\nrollout-0 serving\n")
    stopped = run.pids["reward"]
    os.kill(stopped, signal.SIGSTOP)
    run.tell_states("reward dead\nrollout-0 serving\n")
    assert "reward runs, but has not been heard of for" in run.read_until("killing it")
    run.read_until("starting reward again")
    run.wait_for_pids(3)
    assert not psutil.pid_exists(stopped)
    run.process.send_signal(signal.SIGTERM)
    run.finish()


def test_a_server_that_leaves_without_an_error_is_not_started_again(tmp_path: Path) -> None:
    run = Run(tmp_path, "wait", {"rollout-0": "pass", "rollout-1": WELL, "reward": WELL})
    run.read_until("rollout-0 has left; it is not started again")
    run.wait_for_pids(3)
    run.process.send_signal(signal.SIGTERM)
    assert run.finish() == (False, 128 + signal.SIGTERM, "stopped by SIGTERM")
    assert len(list(run.pids_dir.iterdir())) == 3, "each of the three was started once"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_services_that_ignore_it_and_their_children(
    tmp_path: Path, number: signal.Signals
) -> None:
    child = MARK.format(folder=str(tmp_path / "pids")) + DEAF
    members = {"rollout-0": LEAVES.format(child=child), "learner-0": DEAF, "reward": WELL}
    run = Run(tmp_path, "wait", members, budget_s=2)
    run.wait_for_pids(4)
    run.wait_for_state("running")
    run.process.send_signal(number)
    assert run.finish() == (False, 128 + number, f"stopped by {number.name}")
    assert "stopping in order" in run.output
    assert (run.run_dir / "controller.calls").read_text() == f"stop stopped by {number.name}"


def test_a_second_signal_does_not_wait(tmp_path: Path) -> None:
    run = Run(tmp_path, "wait", {"rollout-0": DEAF, "learner-0": DEAF, "reward": DEAF}, budget_s=BUDGET_S)
    run.wait_for_pids(3)
    run.process.send_signal(signal.SIGINT)
    run.read_until("send it again to stop at once")
    sent = time.monotonic()
    run.process.send_signal(signal.SIGINT)
    run.finish()
    assert time.monotonic() - sent < BUDGET_S / 2


def begun(tmp_path: Path, script: str, service: str) -> Run:
    """A run that is in its first step."""
    run = Run(
        tmp_path, script, {"rollout-0": service, "learner-0": service, "reward": service}, budget_s=BUDGET_S
    )
    run.wait_for_pids(3)
    run.wait_for_state("running")
    run.read_until("step 1/2: dispatch")  # a sign of life, after five seconds
    return run


def test_ctrl_c_lets_the_step_in_progress_end(tmp_path: Path) -> None:
    run = begun(tmp_path, "train", WELL)
    run.process.send_signal(signal.SIGINT)
    run.process.send_signal(signal.SIGINT)  # as a program around it may pass it on
    assert run.finish() == (False, 130, "stopped: SIGINT")
    assert "SIGINT: the run ends after this step, with a checkpoint; again stops it at once" in run.output
    assert (run.run_dir / "controller.calls").read_text() == "stop after the step: SIGINT"


def test_a_second_ctrl_c_ends_everything_at_once(tmp_path: Path) -> None:
    run = begun(tmp_path, "train on", DEAF)
    run.process.send_signal(signal.SIGINT)
    run.read_until("again stops it at once")
    time.sleep(0.6)
    assert run.process.poll() is None
    sent = time.monotonic()
    run.process.send_signal(signal.SIGINT)
    assert run.finish() == (False, 130, "stopped by SIGINT")
    assert time.monotonic() - sent < BUDGET_S / 2


def test_another_signal_does_not_wait_for_the_step(tmp_path: Path) -> None:
    run = begun(tmp_path, "train on", WELL)
    run.process.send_signal(signal.SIGINT)
    # It is asked again: a controller that was started again has forgotten it.
    run.wait_for_calls(2)
    run.process.send_signal(signal.SIGTERM)
    assert run.finish() == (False, 143, "stopped by SIGTERM")
    asked, *again, stopped = (run.run_dir / "controller.calls").read_text().split("\n")
    assert again
    assert {asked, *again} == {"stop after the step: SIGINT"}
    assert stopped == "stop stopped by SIGTERM"


def test_services_die_with_a_killed_launcher(tmp_path: Path) -> None:
    service = (
        "from paceline.service.process import die_with_parent; die_with_parent(); "
        f"open({str(tmp_path)!r} + '/%d.ready' % os.getpid(), 'w');"
    )
    members = dict.fromkeys(("rollout-0", "learner-0", "reward"), service + WELL)
    run = Run(tmp_path, "wait", members)
    run.wait_for_pids(3, suffix=".ready", folder=tmp_path)
    pids = [int(path.stem) for path in run.pids_dir.iterdir()]
    run.process.kill()
    run.process.communicate()
    deadline = time.monotonic() + HANG_S
    while any(psutil.pid_exists(pid) and _alive(pid) for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_run_directory_in_use_is_refused(tmp_path: Path) -> None:
    """From the first moment: it is still starting here."""
    run = Run(tmp_path, "wait", {"rollout-0": WELL}, controller=[sys.executable, "-c", WELL])
    run.wait_for_state("starting")
    second = subprocess.run(
        [sys.executable, "-c", DRIVER, json.dumps(run.job)],
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )
    assert "belongs to a run that is under way" in second.stderr
    assert os.stat(run.run_dir / "run.json").st_mode & 0o777 == 0o600
    run.process.send_signal(signal.SIGTERM)
    run.finish()


def _alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
