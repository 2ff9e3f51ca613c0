"""Services and ranks on several hosts: network namespaces with their own addresses, and no shared folder."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.byte_tokenizer import save_tokenizer
from support.hosts import OWN, Host, Network, network

pytestmark = [pytest.mark.namespaces, pytest.mark.timeout(400)]

TESTS = Path(__file__).parents[1]
RANKS_PORT, WEIGHTS_PORT, CONTROLLER_PORT = 7001, 7002, 7003
ENV = {
    "PYTHONPATH": f"{TESTS}:{os.environ.get('PYTHONPATH', '')}",
    "PACELINE_TOKEN": "the token of this run",
    "PACELINE_INSECURE": "1",
    "OMP_NUM_THREADS": "1",
}


@pytest.fixture
def three(tmp_path: Path) -> Iterator[Network]:
    with network(tmp_path / "hosts", ["a", "b", "c"]) as made:
        yield made


def output_of(host: Host, name: str) -> str:
    return (host.folder.parent / f"{name}.log").read_text(errors="replace")


@pytest.mark.torch
@pytest.mark.parametrize("family", [4, 6])
def test_learner_ranks_on_two_hosts_send_weights_to_a_third(three: Network, family: int) -> None:
    """Every rank listens on its host's own address alone."""
    first = three["a"]
    master = first.address if family == 4 else first.address6
    ranks: list[tuple[Host, subprocess.Popen[bytes]]] = []
    for number, host in enumerate(three.hosts.values()):
        place = {"RANK": number, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
        place |= {"MASTER_ADDR": master, "MASTER_PORT": RANKS_PORT}
        command = [sys.executable, "-m", "support.host_rank", str(number), "eth0", master, str(WEIGHTS_PORT)]
        env = ENV | ({key: str(value) for key, value in place.items()} if number < 2 else {})
        ranks.append((host, host.start(f"rank-{number}", command, env)))
    said = []
    for number, (host, process) in enumerate(ranks):
        assert process.wait(300) == 0, output_of(host, f"rank-{number}")[-3000:]
        said.append(json.loads(output_of(host, f"rank-{number}").splitlines()[-1]))
    assert [rank["node"] for rank in said] == ["a", "b", "c"]
    assert [rank.get("sum") for rank in said] == [11.0, 11.0, None]
    assert said[2]["arrived"] is True
    for (host, _), rank in zip(ranks, said, strict=True):
        assert rank["listens"], host.name
        assert set(rank["listens"]) <= {host.address, host.address6}


@pytest.mark.parametrize("family", [4, 6])
def test_a_member_on_another_host_outlives_a_cut(three: Network, family: int) -> None:
    """A reward service with nothing but its environment; a cut of 20 s, and the controller has it back."""
    first, second = three["a"], three["b"]
    address = first.address if family == 4 else first.address6
    where = f"{address}:{CONTROLLER_PORT}" if family == 4 else f"[{address}]:{CONTROLLER_PORT}"
    save_tokenizer(second.folder / "model")
    first.start("controller", [sys.executable, "-m", "support.host_controller", where], ENV)
    variables = {
        "PACELINE_CONTROLLER": where,
        "PACELINE_HOST": "0.0.0.0" if family == 4 else "::",
        "PACELINE_MEMBER_ID": "reward-b",
    }
    member = second.start("reward", [sys.executable, "-m", "paceline.reward"], ENV | variables)
    own = second.address if family == 4 else f"[{second.address6}]"

    def heartbeats(*, more_than: int) -> int:
        """Waits for so many; the fake controller writes a line for each call."""
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            assert member.poll() is None, output_of(second, "reward")[-3000:]
            count = output_of(first, "controller").count("heartbeat")
            if count > more_than:
                return count
            time.sleep(0.2)
        raise AssertionError(output_of(first, "controller")[-2000:] + output_of(second, "reward")[-2000:])

    heartbeats(more_than=3)
    # It listens on every interface, and says where this controller reaches it.
    registered = re.findall(r"register (\S+) (\S+)", output_of(first, "controller"))
    assert [(name, told.rpartition(":")[0]) for name, told in registered] == [("reward-b", own)]
    three.cut("b", 20.0)
    heartbeats(more_than=output_of(first, "controller").count("heartbeat") + 3)
    assert "the controller is back after" in output_of(second, "reward")
    # The folder that the member read is its host's own.
    assert not (OWN / "model").exists()
