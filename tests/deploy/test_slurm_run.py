"""The Slurm file as a job of three nodes: namespaces with stand-ins for srun, scontrol and the name server.

The nodes share the working folder, as Slurm's do. The job is told to end, queued again, and goes on.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from support.hosts import Network, need_namespaces, network
from support.redis_servers import need_redis_with_tls
from support.source import ROOT
from support.training_run import TRANSPORT, Row, assert_same_metrics, only, read_jsonl, tiny_config

pytestmark = [
    pytest.mark.namespaces,
    pytest.mark.e2e,
    pytest.mark.vllm,
    pytest.mark.torch,
    pytest.mark.redis,
    pytest.mark.timeout(1800),
]

SBATCH = ROOT / "deploy/slurm/paceline.sbatch"
NODES = ("a", "b", "c")
# srun keeps environment and working folder. As on Debian, the first node knows its own name as 127.0.1.1.
PROGRAMS = {
    "srun": """
for word; do
  case "$word" in --nodelist=*) node=${word#*=} ;; --*) ;; *) break ;; esac
  shift
done
echo "srun on $node" >> CALLS
exec ip netns exec "PREFIX$node" env PACELINE_NODE_ID="$node" "$@"
""",
    "scontrol": """
case "$1" in show) printf '%s\\n' a b c ;; *) echo "scontrol $*" >> CALLS ;; esac
""",
    "getent": """
case "$2" in a) echo 127.0.1.1 STREAM ;; b) echo 10.77.0.2 STREAM ;; *) echo 10.77.0.3 STREAM ;; esac
""",
}


@pytest.fixture(scope="session", autouse=True)
def programs() -> None:
    """Skips before the undisturbed run is made."""
    need_namespaces()
    need_redis_with_tls()


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Network]:
    with network(tmp_path / "hosts", NODES) as made:
        yield made


class Job:
    """A job in the queue; `folder` is its working folder, on every node."""

    def __init__(self, nodes: Network, folder: Path) -> None:
        self._nodes, self._folder = nodes, folder
        self.calls = folder / "calls"
        (folder / "bin").mkdir(parents=True)
        prefix = nodes["a"].namespace.removesuffix("a")
        for name, text in PROGRAMS.items():
            path = folder / "bin" / name
            path.write_text(
                f"#!/bin/sh\n{text}\n".replace("CALLS", str(self.calls)).replace("PREFIX", prefix)
            )
            path.chmod(0o755)

    def start(self) -> subprocess.Popen[bytes]:
        """Runs the batch script on the first node, as Slurm does: no signal is ignored."""
        script = 'cd "$0" && PATH="$0/bin:$PATH" exec "$@"'
        command = ["sh", "-c", script, str(self._folder), "env", "--default-signal=INT,TERM", "bash"]
        env = {
            "CONFIG": "run.yaml",
            "LEARNER_NODES": "2",
            "PYTHON": sys.executable,
            "SLURM_JOB_ID": "42",
            "SLURM_JOB_NODELIST": "[a-c]",
            "SLURM_CPUS_ON_NODE": "1",
        }
        words = [str(SBATCH), f"trainer.run_dir={self._folder / 'run'}"]
        return self._nodes["a"].start("job", [*command, *words], env)

    @property
    def events(self) -> list[Row]:
        return read_jsonl(self._folder / "run/events.jsonl")

    def wait_for_phase(self, job: subprocess.Popen[bytes], phase: str, step: int) -> None:
        deadline = time.monotonic() + 500.0
        while not any((e["to"], e["step"]) == (phase, step) for e in only(self.events, "phase")):
            assert time.monotonic() < deadline, self.log()
            assert job.poll() is None, self.log()
            time.sleep(0.05)

    def log(self) -> str:
        """What Slurm would append to the job's file."""
        return (self._nodes["a"].folder.parent / "job.log").read_text(errors="replace")[-5000:]

    def left(self) -> list[str]:
        """Command lines of what still runs on a node."""
        lines = []
        for pid in (pid for host in self._nodes.hosts.values() for pid in host.pids()):
            with contextlib.suppress(psutil.NoSuchProcess):  # the script's `sleep`, which has just ended
                lines.append(" ".join(psutil.Process(pid).cmdline()))
        return lines


def test_a_slurm_job_is_told_to_end_queued_again_and_goes_on(
    nodes: Network, small_inputs: Path, small_run: dict[str, Any], undisturbed: list[Row], tmp_path: Path
) -> None:
    """A learner rank on a and on b, rollout on c; SIGTERM to the batch script alone in the second step."""
    folder = tmp_path / "work"
    job = Job(nodes, folder)
    trainer = small_run["trainer"] | {"save_freq": 0}
    (folder / "run.yaml").write_text(
        yaml.safe_dump(tiny_config(small_inputs, **small_run | {"trainer": trainer}))
    )

    began = time.monotonic()
    first = job.start()
    job.wait_for_phase(first, "collect", 2)
    running = job.left()
    assert any("paceline.rollout" in line for line in running)
    first.send_signal(signal.SIGTERM)
    # As after the Ctrl-C that the script passes on.
    assert first.wait(300) == 128 + signal.SIGINT, job.log()
    assert job.left() == []
    calls = job.calls.read_text().splitlines()
    assert calls[-1] == "scontrol requeue 42"
    assert {"srun on a", "srun on b", "srun on c"} == set(calls[:-1])
    done = only(job.events, "step")[-1]["step"]
    assert only(job.events, "checkpoint")[-1]["step"] == done >= 2
    print(f"queued again after step {done}, {time.monotonic() - began:.0f} s after its start")

    second = job.start()
    assert second.wait(500) == 0, job.log()
    assert job.left() == []
    assert job.calls.read_text().count("requeue") == 1, "a run that has ended is not queued again"
    assert not only(job.events, "rewind"), "no step was done twice"
    assert_same_metrics(read_jsonl(folder / "run/metrics.jsonl"), undisturbed, without=TRANSPORT)
    verify = [sys.executable, "-m", "paceline.cli.main", "verify", str(folder / "run")]
    checked = subprocess.run(verify, capture_output=True, text=True, timeout=300, check=False)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    print(f"ended {time.monotonic() - began:.0f} s after its first start\n{checked.stdout}")
