"""Services and ranks on several hosts: network namespaces with their own addresses, and no shared folder."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from support.byte_tokenizer import save_tokenizer
from support.hosts import OWN, Host, Network, network

pytestmark = [pytest.mark.namespaces, pytest.mark.timeout(900)]

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


def start_ranks(net: Network, family: int) -> list[tuple[Host, str]]:
    """Two learner ranks and a rollout rank, each on a host of its own; returns their hosts and logs."""
    first, ranks = net["a"], []
    master = first.address if family == 4 else first.address6
    for number, host in enumerate(net.hosts.values()):
        place = {"RANK": number, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
        place |= {"MASTER_ADDR": master, "MASTER_PORT": RANKS_PORT}
        command = [sys.executable, "-m", "support.host_rank", str(number), "eth0", master, str(WEIGHTS_PORT)]
        env = ENV | ({key: str(value) for key, value in place.items()} if number < 2 else {})
        host.start(f"rank-{family}-{number}", command, env)
        ranks.append((host, f"rank-{family}-{number}"))
    return ranks


@pytest.mark.torch
def test_learner_ranks_on_two_hosts_send_weights_to_a_third(three: Network) -> None:
    """Over IPv4 and IPv6; every rank listens on its host's own addresses alone."""
    for ranks in [start_ranks(three, family) for family in (4, 6)]:
        said = []
        for host, name in ranks:
            assert host.processes[name].wait(300) == 0, output_of(host, name)[-3000:]
            said.append(json.loads(output_of(host, name).splitlines()[-1]))
        assert [rank["node"] for rank in said] == ["a", "b", "c"]
        assert [rank.get("sum") for rank in said] == [11.0, 11.0, None]
        assert said[2]["arrived"] is True
        for (host, _), rank in zip(ranks, said, strict=True):
            assert rank["listens"], host.name
            assert set(rank["listens"]) <= {host.address, host.address6}


@dataclass(frozen=True, kw_only=True)
class Pair:
    """A controller on the first host, and a reward service with nothing but its environment on another."""

    first: Host
    second: Host
    family: int
    member: subprocess.Popen[bytes]

    @classmethod
    def start(cls, first: Host, second: Host, family: int) -> Pair:
        """Over IPv4 or IPv6."""
        save_tokenizer(second.folder / "model")
        address = first.address if family == 4 else f"[{first.address6}]"
        where = f"{address}:{CONTROLLER_PORT}"
        first.start(f"controller-{family}", [sys.executable, "-m", "support.host_controller", where], ENV)
        variables = {
            "PACELINE_CONTROLLER": where,
            "PACELINE_HOST": "0.0.0.0" if family == 4 else "::",
            "PACELINE_MEMBER_ID": "reward",
        }
        member = second.start(f"reward-{family}", [sys.executable, "-m", "paceline.reward"], ENV | variables)
        return cls(first=first, second=second, family=family, member=member)

    @property
    def controller_said(self) -> str:
        return output_of(self.first, f"controller-{self.family}")

    @property
    def member_said(self) -> str:
        return output_of(self.second, f"reward-{self.family}")

    def await_heartbeats(self, number: int) -> None:
        """Waits for so many more; the fake controller writes a line for each call."""
        wanted, deadline = self.controller_said.count("heartbeat") + number, time.monotonic() + 120
        while self.controller_said.count("heartbeat") < wanted:
            assert self.member.poll() is None, self.member_said[-3000:]
            assert time.monotonic() < deadline, self.controller_said[-2000:] + self.member_said[-2000:]
            time.sleep(0.2)


def test_members_on_other_hosts_outlive_a_cut(three: Network) -> None:
    """A cut of 20 s, and the controllers have them back."""
    pairs = [Pair.start(three["a"], three[name], family) for name, family in (("b", 4), ("c", 6))]
    for pair in pairs:
        pair.await_heartbeats(4)
        # It listens on every interface, and says where this controller reaches it.
        registered = re.findall(r"register (\S+) (\S+)", pair.controller_said)
        own = pair.second.address if pair.family == 4 else f"[{pair.second.address6}]"
        assert [(name, told.rpartition(":")[0]) for name, told in registered] == [("reward", own)]
    three.cut("b", "c", seconds=20.0)
    for pair in pairs:
        pair.await_heartbeats(4)
        assert "the controller is back after" in pair.member_said
    # The folder that the members read is their hosts' own.
    assert not (OWN / "model").exists()
