"""Members started by hand, by the commands that `paceline train --open` prints: they join, work and leave."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from support.training_run import MARK, PACELINE, TrainingRun


@contextmanager
def _member(line: str, mark: str, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Runs a printed command as a shell would."""
    with log.open("wb") as out:
        process = subprocess.Popen(
            ["/bin/sh", "-c", f"exec env {line}"],
            env=os.environ | {MARK: mark},
            stdout=out,
            stderr=out,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()


def join_and_leave(run: TrainingRun, folder: Path) -> None:
    """A rollout server and a reward service join an open run, and leave it.

    Args:
        run: started with --open, with one rollout server.
        folder: for the logs.
    """
    run.wait_for_phase("collect", 1)
    lines = re.findall(r"^.*PACELINE_TOKEN_FILE=.*$", run.output, flags=re.MULTILINE)
    assert [re.search(r"paceline\.(\w+)", line)[1] for line in lines] == ["rollout", "reward"]  # type: ignore[index]
    with (
        _member(lines[0], run.mark, folder / "rollout.log") as rollout,
        _member(lines[1], run.mark, folder / "reward.log") as reward,
    ):
        run.wait_for(lambda e: e["event"] == "trajectory" and e.get("server") == "rollout-1", timeout_s=250)
        run.wait_for_member("reward-1")
        drain = [str(PACELINE), "rollout", "drain", "rollout-1", str(run.run_dir), "--timeout", "250"]
        subprocess.run(drain, check=True, timeout=300, capture_output=True)
        assert rollout.wait(120) == 0
        reward.terminate()
        assert reward.wait(120) == 0
        assert run.process.poll() is None, "the run goes on without them"
    run.wait_for_output("reward-1 has left")
