"""What the launcher starts again, and what it does not; with small programs in place of the services."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import psutil
import pytest

from paceline.service import process_ends
from paceline.service.process import STARTED_AS
from support.launched_run import DEAF, HANG_S, LEAVES, MARK, SSH, STOPPED, WELL, Run

pytestmark = pytest.mark.timeout(900)


def test_a_killed_service_is_started_again_without_its_children(tmp_path: Path) -> None:
    """Its child is in a session of its own, as an engine's process is."""
    child = MARK.format(folder=str(tmp_path / "pids")) + DEAF
    run = Run(tmp_path, "wait", {"rollout-0": LEAVES.format(child=child), "reward": WELL})
    run.wait_for_pids(3)
    run.wait_for_state("running")
    before, first = run.alive(), run.pids["rollout-0"]
    mark = psutil.Process(first).environ()[STARTED_AS]
    os.kill(first, signal.SIGKILL)
    note = run.read_until("starting rollout-0 again")
    assert "rollout-0 ended unexpectedly (killed by SIGKILL)" in note
    # The controller hears of it at once, and of which start; so it does not take the next one for dead.
    run.wait_for_calls(1)
    (told,) = run.calls.read_text().splitlines()
    assert re.fullmatch(r"end rollout-0 rollout-0-[0-9a-f]{16}: killed by SIGKILL", told)
    assert told.split()[2].rstrip(":") == mark
    (end,) = process_ends.read(run.run_dir)
    assert (end.name, end.outcome, end.restarts) == ("rollout-0", "killed by SIGKILL", True)
    assert f".log] {end.where}; starting rollout-0" in note
    assert note.endswith("starting rollout-0 again (1 of at most 2 times within 300 s)\n")
    run.wait_for_pids(5)
    assert len(run.alive() & before) == 1, "only the reward service is the same"
    run.wait_for_another_pid("rollout-0", first)
    assert psutil.pid_exists(run.pids["rollout-0"])
    assert run.stop() == STOPPED


@pytest.mark.redis
def test_a_killed_blob_store_comes_back_empty_and_a_run_goes_on_without_one(tmp_path: Path) -> None:
    run = Run(tmp_path, "wait", {"rollout-0": WELL}, broker=None, stores=1, max_restarts=1)
    run.wait_for_state("running")
    first = run.pids["blob-store-0"]
    settings = {name: (run.run_dir / name / "redis.conf").read_text() for name in ("redis", "blob-store-0")}
    assert "appendonly yes" in settings["redis"]
    assert "appendonly no" in settings["blob-store-0"]
    limits = [re.findall(r"maxmemory (\d+)", text)[0] for text in settings.values()]
    assert limits[0] == limits[1]
    assert 2 * int(limits[0]) <= psutil.virtual_memory().total / 4 + 2**20
    os.kill(first, signal.SIGKILL)
    assert "the run's blob store 0 ended unexpectedly (killed by SIGKILL)" in run.read_until(
        "starting it again"
    )
    run.wait_for_another_pid("blob-store-0", first)
    os.kill(run.pids["blob-store-0"], signal.SIGKILL)
    assert "was started again 1 time" in run.read_until("the run goes on without it")
    assert [end.name for end in process_ends.read(run.run_dir)] == ["blob-store-0"] * 2
    assert run.stop() == STOPPED


@pytest.mark.parametrize("what_ends", ["process", "connection"])
def test_the_end_of_a_process_on_another_host_is_reported_with_its_start(
    tmp_path: Path, what_ends: str
) -> None:
    """The mark is in the process beyond the shell; the end of the shell is all that is seen on this host."""
    run = Run(tmp_path, "wait", {"rollout-0": WELL, "reward": WELL}, shells={"rollout-0": SSH})
    run.wait_for_pids(2)
    run.wait_for_state("running")
    run.tell_states("rollout-0 serving\nreward serving\n")
    run.tell_states("rollout-0 serving\nreward serving \n")
    shell = psutil.Process(run.pids["rollout-0"])
    (process,) = shell.children()
    mark = process.environ()[STARTED_AS]
    (process if what_ends == "process" else shell).kill()
    run.wait_for_calls(1)
    assert run.calls.read_text() == f"end rollout-0 {mark}: killed by SIGKILL\n"
    run.read_until("starting rollout-0 again")
    run.wait_for_pids(3)
    run.wait_for_another_pid("rollout-0", shell.pid)
    (again,) = psutil.Process(run.pids["rollout-0"]).children()
    assert again.environ()[STARTED_AS] != mark
    assert run.stop() == STOPPED


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
    assert message.endswith("it was started again 2 times within 300 s already")
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
    run.read_until("reward is ready")
    os.kill(run.pids["reward"], signal.SIGUSR1)
    assert "reward ended unexpectedly (exit code 1)" in run.read_until("starting reward again")
    assert run.stop() == STOPPED


# Ready, it waits for a signal, says an error with its process id, and fails.
FAILS = (
    "import os, pathlib, signal, sys\n"
    "restarted = any(name.endswith('.ready') for name in os.listdir({folder!r}))\n"
    "def fail(*_): print('RuntimeError:', {error}, os.getpid(), flush=True); sys.exit(1)\n"
    "signal.signal(signal.SIGUSR1, fail); signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))\n"
    "pathlib.Path({folder!r}, f'{{os.getpid()}}.ready').touch()\n"
    "while True: signal.pause()"
)


@pytest.mark.parametrize(
    ("script", "name"), [("idle", "rollout-0"), ("idle", "reward"), ("collect", "learner-0")]
)
def test_what_fails_twice_the_same_way_before_it_has_worked_is_not_started_again(
    tmp_path: Path, script: str, name: str
) -> None:
    """An engine that lacks the model's head size is ready, and fails with its first token."""
    fails = FAILS.format(error="'no heads of 16'", folder=str(tmp_path))
    run = Run(tmp_path, script, {"rollout-0": WELL, "reward": WELL, "learner-0": WELL, name: fails})
    run.wait_for_pids(3)
    run.wait_for_state("running")
    fail_twice(run, name, tmp_path)
    ok, code, message = run.finish()
    assert (ok, code) == (False, 1)
    assert message.startswith(f"{name} ended unexpectedly (exit code 1): RuntimeError: no heads of 16 ")
    assert message.endswith("twice before it had done any work, so it is not started again")
    ends = list(process_ends.read(run.run_dir))
    assert [(end.name, end.restarts) for end in ends] == [(name, True), (name, False)]


@pytest.mark.parametrize(
    ("script", "error"),
    [("collect", "'no heads'"), ("wait", "'no heads'"), ("idle", "'no heads' if restarted else 'no layers'")],
)
def test_what_has_worked_or_fails_in_another_way_is_started_again(
    tmp_path: Path, script: str, error: str
) -> None:
    """An answered prompt and a finished step say that the engine can do its work."""
    fails = FAILS.format(error=error, folder=str(tmp_path))
    run = Run(tmp_path, script, {"rollout-0": fails, "reward": WELL})
    run.wait_for_pids(2)
    run.wait_for_state("running")
    if script == "wait":
        run.read_until("step 2/2")
    fail_twice(run, "rollout-0", tmp_path)
    run.read_until("starting rollout-0 again (2 of at most 2")
    assert run.stop() == STOPPED


def test_a_reward_model_is_started_again_whatever_it_says(tmp_path: Path) -> None:
    """Nobody says whether one has worked; each of two answers may have taken too long for it."""
    fails, name = FAILS.format(error="'too long'", folder=str(tmp_path)), "reward-model-rm-0"
    run = Run(tmp_path, "idle", {"reward": WELL, name: fails}, models=[{"name": "rm", "path": "x"}])
    run.wait_for_state("running")
    for number in (1, 2):
        run.wait_for_pids(number, suffix=".ready", folder=tmp_path)
        pid = run.pids[name]
        os.kill(pid, signal.SIGUSR1)
        run.read_until(f"starting {name} again ({number} of at most 2")
        run.wait_for_another_pid(name, pid)
    assert run.stop() == STOPPED


def fail_twice(run: Run, name: str, folder: Path) -> None:
    """Has a service of FAILS fail once it is ready, and its successor, too."""
    run.wait_for_pids(1, suffix=".ready", folder=folder)
    run.tell_states(f"{name} serving\n")
    run.read_until(f"{name} is ready")
    first = run.pids[name]
    os.kill(first, signal.SIGUSR1)
    run.read_until(f"starting {name} again (1 of at most 2")
    run.wait_for_pids(2, suffix=".ready", folder=folder)
    run.wait_for_another_pid(name, first)
    os.kill(run.pids[name], signal.SIGUSR1)


def test_a_start_that_failed_for_a_reason_that_may_pass_is_tried_again(tmp_path: Path) -> None:
    """Exit code 4, as of an engine beside which the GPU's memory changed; 1 would end the run."""
    fails = (
        f"import sys; folder = pathlib.Path({str(tmp_path)!r}); (folder / f'{{os.getpid()}}.start').touch(); "
        "len([*folder.glob('*.start')]) > 2 or sys.exit(4);"
    )
    run = Run(tmp_path, "wait", {"rollout-0": fails + WELL, "reward": WELL})
    note = run.read_until("starting rollout-0 again (2 of at most 2")
    assert "rollout-0 ended unexpectedly (exit code 4)" in note
    run.wait_for_pids(3, suffix=".start", folder=tmp_path)
    run.wait_for_pids(4)
    run.wait_for_state("running")
    run.wait_for_another_pid("rollout-0")
    assert run.stop() == STOPPED
    starts = [*tmp_path.glob("*.start")]
    assert len(starts) == 3
    for start in starts:
        start.unlink()
    (tmp_path / "second").mkdir()
    run = Run(tmp_path / "second", "wait", {"rollout-0": fails.replace("exit(4)", "exit(1)") + WELL})
    ok, code, message = run.finish()
    assert (ok, code) == (False, 1)
    assert message.startswith("rollout-0 ended unexpectedly (exit code 1)")
    assert len([*tmp_path.glob("*.start")]) == 1


def test_a_reward_model_that_hangs_is_started_again_with_token_and_address(tmp_path: Path) -> None:
    """It is no member, so nobody says when it is ready: it is not killed for that, nor given up at once."""
    seen, child = tmp_path / "seen", tmp_path / "child"
    text = (
        "import os, re, subprocess, sys, time\n"
        "from paceline.reward.models.deadline import or_end\n"
        "names = 'PACELINE_REWARD_TOKEN', 'REWARD_PORT'\n"
        f"print(*(os.environ.get(name) for name in names), file=open({str(seen)!r}, 'a'))\n"
        f"pathlib.Path({str(tmp_path)!r}, f'{{os.getpid()}}.ready').touch()\n"
        f"if len(open({str(seen)!r}).readlines()) == 1:\n"
        "    started = subprocess.Popen(['sleep', '1000'], start_new_session=True)\n"
        f"    open({str(child)!r}, 'w').write(str(started.pid))\n"
        "    with or_end(0.5):\n"
        "        re.match('(a+)+$', 'a' * 60 + 'b')\n"
    )
    models = [{"name": "rm", "path": "x"}]
    run = Run(tmp_path, "wait", {"reward": WELL, "reward-model-rm-0": text + WELL}, models=models)
    assert "reward-model-rm-0 ended unexpectedly (exit code 1)" in run.read_until("starting reward-model")
    run.wait_for_pids(2, suffix=".ready", folder=tmp_path)
    run.wait_for_pids(3)
    run.wait_for_state("running")
    run.tell_states("reward serving\n")
    run.tell_states("reward serving \n")
    assert psutil.pid_exists(run.pids["reward-model-rm-0"])
    assert run.stop() == STOPPED
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
    marks = [psutil.Process(before[name]).environ()[STARTED_AS] for name in ("learner-0", "learner-1")]
    os.kill(before["learner-1"], signal.SIGKILL)
    assert "learner-1 ended unexpectedly (killed by SIGKILL)" in run.read_until("starting the learner again")
    # The controller hears of the one member that the ranks are, and which of them was the first to end.
    run.wait_for_calls(1)
    assert run.calls.read_text() == f"end learner-0 {' '.join(marks)}: learner-1 killed by SIGKILL\n"
    run.wait_for_pids(6)
    run.wait_for_another_pid("learner-1", before["learner-1"])
    after = run.pids
    same = {name for name in before if before[name] == after[name]}
    assert same == {"launcher", "controller", "rollout-0", "reward"}
    port_2, port_3 = ports()
    assert port_0 == port_1 != port_2 == port_3
    assert not psutil.pid_exists(before["learner-0"])
    assert run.stop() == STOPPED


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
    assert run.stop() == STOPPED
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
    assert run.stop() == STOPPED


def test_a_server_that_leaves_without_an_error_is_not_started_again(tmp_path: Path) -> None:
    run = Run(tmp_path, "wait", {"rollout-0": "pass", "rollout-1": WELL, "reward": WELL})
    run.read_until("rollout-0 has left; it is not started again")
    run.wait_for_pids(3)
    assert run.stop() == STOPPED
    assert len(list(run.pids_dir.iterdir())) == 3, "each of the three was started once"
