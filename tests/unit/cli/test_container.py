"""The process of a container: one process or one per rank, and the exit code that the engine is to see."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from paceline.cli.main import main
from paceline.core.errors import ConfigError
from paceline.launch import container
from paceline.launch.container import container_code, own_gpus, ranks
from paceline.service import packages

LEARNER, CONTROLLER = "paceline.learner", "paceline.controller"


@pytest.mark.parametrize(
    ("module", "codes", "engine_restarts", "code"),
    [
        (LEARNER, [0], True, 0),
        (LEARNER, [1], True, 1),
        # A rank that lost rank 0 to its error knows less than rank 0.
        (LEARNER, [1, 3], True, 0),
        (LEARNER, [1, 3], False, 3),
        (LEARNER, [2], True, 0),
        (LEARNER, [2], False, 2),
        (LEARNER, [-signal.SIGKILL, 1], True, 137),
        (LEARNER, [-signal.SIGKILL, 1], False, 137),
        (CONTROLLER, [-signal.SIGSEGV], True, 139),
        # It has told its members that the run is over.
        (CONTROLLER, [1], True, 0),
        (CONTROLLER, [1], False, 1),
        # SIGTERM ended it in order, before the run was over: the next start goes on with it.
        (CONTROLLER, [143], True, 143),
        (LEARNER, [143, 0], True, 143),
        (LEARNER, [143, 1], False, 143),
    ],
)
def test_only_what_a_start_can_mend_ends_a_container_with_an_error(
    module: str, codes: list[int], engine_restarts: bool, code: int
) -> None:
    assert container_code(module, codes, engine_restarts=engine_restarts) == code


def test_ranks_of_one_host_and_of_several() -> None:
    assert ranks({}) == [{}]
    first, second = ranks({"PET_NPROC_PER_NODE": "2"})
    assert int(first.pop("MASTER_PORT")) == int(second.pop("MASTER_PORT")) > 0
    common = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    assert (first, second) == (
        {"RANK": "0", "LOCAL_RANK": "0", **common},
        {"RANK": "1", "LOCAL_RANK": "1", **common},
    )
    several = {"PET_NPROC_PER_NODE": "2", "PET_NNODES": "3", "PET_NODE_RANK": "1"}
    with pytest.raises(ConfigError, match="PET_NNODES=3 needs PET_MASTER_ADDR"):
        ranks(several)
    places = ranks({**several, "PET_MASTER_ADDR": "10.0.0.1"})
    assert [(place["RANK"], place["LOCAL_RANK"], place["WORLD_SIZE"]) for place in places] == [
        ("2", "0", "6"),
        ("3", "1", "6"),
    ]
    assert {(place["MASTER_ADDR"], place["MASTER_PORT"]) for place in places} == {("10.0.0.1", "29500")}
    with pytest.raises(ConfigError, match="PET_NPROC_PER_NODE='two' must be a number"):
        ranks({"PET_NPROC_PER_NODE": "two"})


def test_a_server_takes_its_share_of_the_list_of_gpus(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def share(number: str, size: str = "", gpus: str = "2, 3,GPU-5f,5,6") -> str | None:
        """What CUDA_VISIBLE_DEVICES becomes for the server of this number."""
        listed = {"CUDA_VISIBLE_DEVICES": gpus, "PACELINE_GPUS_PER_SERVER": size}
        own = own_gpus({**listed, "PACELINE_GPU_SHARE": number})
        return None if own is None else own["CUDA_VISIBLE_DEVICES"]

    assert own_gpus({"CUDA_VISIBLE_DEVICES": "0,1"}) == {}
    assert [share(number) for number in "01245"] == ["2", "3", "GPU-5f", "6", None]
    assert [share(number, "2") for number in "012"] == ["2,3", "GPU-5f,5", None]
    assert share("0", gpus="") is None
    for number, size in (("one", "1"), ("0", "0"), ("0", "-1")):
        with pytest.raises(ConfigError, match="PACELINE_GPU"):
            share(number, size)

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    monkeypatch.setenv("PACELINE_GPU_SHARE", "2")
    assert container.main(["paceline.nowhere"]) == 0
    assert capsys.readouterr().err == "paceline.nowhere has nothing to do: no GPU is left for it in '4,5'\n"
    monkeypatch.setenv("PACELINE_GPU_SHARE", "1")
    seen: list[str] = []

    async def run(command: Sequence[str], places: Sequence[Mapping[str, str]]) -> list[int]:
        seen.extend(place["CUDA_VISIBLE_DEVICES"] for place in places)
        return [0] * len(places)

    monkeypatch.setattr(container, "_run", run)
    monkeypatch.setenv("PET_NPROC_PER_NODE", "2")
    assert container.main(["paceline.nowhere"]) == 0
    assert seen == ["5", "5"]


JOB = """
import os, pathlib, signal, sys, time
folder, rank = pathlib.Path(sys.argv[1]), os.environ["RANK"]
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
(folder / f"pid{rank}.new").write_text(str(os.getpid()))
(folder / f"pid{rank}.new").rename(folder / f"pid{rank}")
other = folder / f"pid{1 - int(rank)}"
while not other.exists():
    time.sleep(0.02)
if rank == sys.argv[2]:
    sys.exit(int(sys.argv[3]))
while True:  # until the other one is gone
    time.sleep(0.05)
    try:
        os.kill(int(other.read_text()), 0)
        state = pathlib.Path(f"/proc/{other.read_text()}/stat").read_text().split()[2]
    except OSError:
        state = "gone"
    if state in ("Z", "gone"):
        sys.exit(1)
"""


def start(folder: Path, *words: str) -> subprocess.Popen[str]:
    (folder / "job.py").write_text(JOB)
    env = {**os.environ, "PET_NPROC_PER_NODE": "2", "PACELINE_ENGINE_RESTARTS": "1"}
    env["PYTHONPATH"] = f"{folder}{os.pathsep}{env.get('PYTHONPATH', '')}"
    command = [sys.executable, "-m", "paceline.launch.container", "job", str(folder), *words]
    return subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True)


def pids(folder: Path) -> list[int]:
    """Of both ranks, once they run."""
    deadline = time.monotonic() + 120
    files = [folder / f"pid{rank}" for rank in range(2)]
    while not all(file.exists() for file in files):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return [int(file.read_text()) for file in files]


def test_a_rank_that_ends_for_good_ends_the_others_and_is_not_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with start(tmp_path, "1", "3") as process:
        first, _ = pids(tmp_path)
        _, said = process.communicate(timeout=120)
    assert process.returncode == 0
    assert said == "job ended with exit code 3: a restart would not fix it\n"
    with pytest.raises(ProcessLookupError):
        os.kill(first, 0)


def test_a_stop_reaches_rank_0_and_ends_all(tmp_path: Path) -> None:
    with start(tmp_path, "none", "0") as process:
        first, second = pids(tmp_path)
        os.kill(second, signal.SIGSTOP)
        process.terminate()
        process.communicate(timeout=120)
    assert process.returncode == 0
    for pid in (first, second):
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_a_killed_rank_is_a_reason_to_start_again(tmp_path: Path) -> None:
    with start(tmp_path, "none", "0") as process:
        os.kill(pids(tmp_path)[1], signal.SIGKILL)
        process.communicate(timeout=120)
    assert process.returncode == 128 + signal.SIGKILL


def test_a_container_says_its_version_and_starts_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PACELINE_VERSION", "0.1.0 (abc)")
    assert container.main(["paceline.nowhere", "--port", "7000", "--version"]) == 0
    assert capsys.readouterr().out == "paceline.nowhere of paceline 0.1.0 (abc)\n"
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert (ended.value.code, capsys.readouterr().out) == (0, "paceline 0.1.0 (abc)\n")
    monkeypatch.setenv("PACELINE_VERSION", "")
    assert packages.own_version() == packages.version("paceline")
