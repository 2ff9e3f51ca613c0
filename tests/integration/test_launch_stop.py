"""How a launched run ends on signals, with small programs in place of the services."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import psutil
import pytest

from paceline.service.member.runtime import STOP_GRACE
from support.launched_run import BUDGET_S, DEAF, HANG_S, LEAVES, MARK, SLOW, STOPPED, WELL, Run

pytestmark = pytest.mark.timeout(900)


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


def begun(tmp_path: Path, script: str, service: str, rollout: str = "") -> Run:
    """A run that is in its first step."""
    members = {"rollout-0": rollout or service, "learner-0": service, "reward": service}
    run = Run(tmp_path, script, members, budget_s=BUDGET_S)
    run.wait_for_pids(3)
    run.wait_for_state("running")
    run.read_until("step 1/2: dispatch")  # a sign of life, after five seconds
    return run


def test_ctrl_c_lets_the_step_in_progress_end(tmp_path: Path) -> None:
    ended = tmp_path / "ended"
    run = begun(tmp_path, "train", WELL, SLOW.format(ended=str(ended)))
    run.process.send_signal(signal.SIGINT)
    run.process.send_signal(signal.SIGINT)  # as a program around it may pass it on
    assert run.finish() == (False, 130, "stopped: SIGINT")
    assert "SIGINT: the run ends after this step, with a checkpoint; again stops it at once" in run.output
    assert (run.run_dir / "controller.calls").read_text() == "stop after the step: SIGINT"
    assert ended.exists(), "an engine's server was killed while it ended"


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
    assert run.stop() == STOPPED
    asked, *again, stopped = (run.run_dir / "controller.calls").read_text().split("\n")
    assert again
    assert {asked, *again} == {"stop after the step: SIGINT"}
    assert stopped == "stop stopped by SIGTERM"


def test_services_die_with_a_killed_launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They get SIGTERM, after which they do not wait for a step that nobody can finish."""
    monkeypatch.setenv(STOP_GRACE, "600")
    service = (
        "from paceline.service.process import die_with_parent; die_with_parent(); "
        f"name = {str(tmp_path)!r} + '/%d' % os.getpid();"
        f"open(name, 'w').write(os.environ[{STOP_GRACE!r}]); os.rename(name, name + '.ready');"
    )
    members = dict.fromkeys(("rollout-0", "learner-0", "reward"), service + WELL)
    run = Run(tmp_path, "wait", members)
    run.wait_for_pids(3, suffix=".ready", folder=tmp_path)
    assert {path.read_text() for path in tmp_path.glob("*.ready")} == {"0"}
    pids = [int(path.stem) for path in run.pids_dir.iterdir()]
    run.process.kill()
    run.process.communicate()
    deadline = time.monotonic() + HANG_S
    while any(psutil.pid_exists(pid) and _alive(pid) for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
