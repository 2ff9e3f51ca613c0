"""The launcher with small programs in place of the services: its reports, and no process left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from paceline.runs import run_dir as run_dirs
from support.launched_run import DEAF, DRIVER, HANG_S, NOTES, STOPPED, WELL, Run

pytestmark = pytest.mark.timeout(900)


def test_everything_ends_in_order(tmp_path: Path) -> None:
    order = tmp_path / "order"
    names = ("rollout-0", "learner-0", "reward")
    run = Run(tmp_path, "wait", {name: NOTES.format(name=name, order=str(order)) for name in names})
    run.wait_for_pids(3, suffix=".ready", folder=tmp_path)
    run.wait_for_state("running")
    assert run.stop() == STOPPED
    assert order.read_text().split() == [*names]
    calls = run.run_dir / "controller.calls"
    assert calls.stat().st_mtime_ns > order.stat().st_mtime_ns, "the controller is the last"


@pytest.mark.parametrize(("free", "says_so"), [(4096, True), (1 << 30, False)])
def test_a_run_that_ends_on_a_full_disk_says_so(tmp_path: Path, free: int, says_so: bool) -> None:
    """Whatever failed first: its log lies on the same disk."""
    run = Run(tmp_path, "fail", {"rollout-0": WELL}, free=free)
    full = (
        f" (the disk of {run.run_dir} is full (4096 bytes are free): make room there, and the same command "
        "goes on with the run)"
    )
    ok, code, message = run.finish()
    assert (ok, code) == (False, 1)
    assert message == "COLLECT: the barrier is stuck" + full * says_so
    assert run.note.message == message


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
    assert run.stop() == STOPPED
    (folder,) = {Path(told.read_text()) for told in tmp_path.glob("*.told")}
    assert folder.name.startswith("paceline-")
    assert len(str(folder)) < 107 - len(str(uuid.uuid4()))
    assert not folder.exists()


def test_success(tmp_path: Path) -> None:
    run = Run(tmp_path, "steps", {"rollout-0": WELL, "learner-0": WELL, "reward": WELL})
    assert run.finish() == (True, 0, "2 steps done")
    assert [line for line in run.output.splitlines() if line.startswith("step") and "reward" in line] == [
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


@pytest.mark.redis
@pytest.mark.parametrize(("script", "stays"), [("steps", False), ("wait", False), ("fail", True)])
def test_the_data_of_the_runs_redis_server_goes_unless_the_run_failed(
    tmp_path: Path, script: str, stays: bool
) -> None:
    """Of a long run it is gigabytes, and nothing reads it again: a run that goes on begins its step anew."""
    run = Run(tmp_path, script, {"rollout-0": WELL}, broker=None)
    redis = run.run_dir / "redis"
    if script == "wait":
        run.wait_for_state("running")
        assert list(redis.glob("appendonly*"))
        run.process.send_signal(signal.SIGINT)
    ok, _, message = run.finish()
    assert ok == (script == "steps"), message
    assert bool(list(redis.glob("appendonly*"))) == stays
    assert (redis / "redis.log").is_file()


@pytest.mark.redis
def test_the_controller_is_told_of_the_runs_blob_stores(tmp_path: Path) -> None:
    told = tmp_path / "told"
    text = f"import os, sys; open({str(told)!r}, 'w').write(os.environ['PACELINE_BLOB_STORES']); sys.exit(2)"
    run = Run(tmp_path, "", {}, controller=[sys.executable, "-c", text], broker=None, stores=2)
    assert not run.finish()[0]
    stores = told.read_text().split()
    assert len(set(stores)) == 2
    for number, url in enumerate(stores):
        log = (run.run_dir / f"blob-store-{number}" / "redis.log").read_text()
        assert url.startswith("redis://:")
        assert f":{url.rpartition(':')[2].partition('/')[0]}" not in url.partition("@")[0]
        assert "Ready to accept connections" in log
        assert not list((run.run_dir / f"blob-store-{number}").glob("appendonly*"))


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
    *ends, stop = (run.run_dir / "controller.calls").read_text().splitlines()
    assert stop == f"stop {message}"
    # The end of the rank is told while the launcher looks for the cause; the run's own end may come first.
    assert [end.split()[:2] for end in ends] in ([], [["end", "learner-0"]])
    assert all(end.endswith(": exit code 1: ValueError: loss is not finite") for end in ends)


def test_a_run_goes_on_when_one_of_two_rollout_servers_cannot_be_mended(tmp_path: Path) -> None:
    run = Run(tmp_path, "wait", {"rollout-0": "raise SystemExit(3)", "rollout-1": WELL, "reward": WELL})
    note = run.read_until("goes on with the other rollout servers")
    assert "rollout-0 ended unexpectedly (exit code 3)" in note
    assert run.stop() == STOPPED


def test_a_run_ends_when_its_last_rollout_server_dies(tmp_path: Path) -> None:
    run = Run(tmp_path, "wait", {"rollout-0": "raise SystemExit(3)", "reward": WELL})
    ok, code, message = run.finish()
    assert (ok, code) == (False, 1)
    assert message.startswith("rollout-0 ended unexpectedly (exit code 3)")


def test_a_run_directory_in_use_is_refused(tmp_path: Path) -> None:
    """Also while it starts, before its controller answers."""
    run = Run(tmp_path, "wait", {"rollout-0": WELL}, controller=[sys.executable, "-c", WELL])
    run.wait_for_state("starting")
    second = subprocess.run(
        [sys.executable, "-c", DRIVER, json.dumps(run.job)],
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )
    assert "belongs to a run that is still running" in second.stderr
    assert os.stat(run.run_dir / "run.json").st_mode & 0o777 == 0o600
    assert run.stop() == STOPPED
