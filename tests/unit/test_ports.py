"""Ports and networks that a person has chosen for connections without a setting of their own."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.checks.host_check import check_hosts
from paceline.config.load import parse
from paceline.core.errors import ConfigError, EnvironmentLackError
from paceline.core.members import MemberKind
from paceline.core.ports import read_ports
from paceline.launch.launcher import _with_ports
from paceline.launch.planning import hosts as several
from paceline.launch.planning import plan
from paceline.launch.planning.hosts import Hosts
from paceline.service import ports
from paceline.service.grpc.server import start_server
from paceline.service.member.bootstrap import MemberOptions
from paceline.sizing import machine as machines
from paceline.sizing.machine import Machine, free_port
from support.cli_configs import config


@pytest.fixture
def three(monkeypatch: pytest.MonkeyPatch) -> Iterator[range]:
    """Three free ports in a row, chosen by a person; the first two are taken."""
    with ExitStack() as stack:
        while True:
            first = free_port()
            monkeypatch.setattr(machines, "_GIVEN", {first})  # earlier tests may have got the next ones
            try:
                for port in (first, first + 1):
                    stack.enter_context(socket.create_server(("127.0.0.1", port)))
                socket.create_server(("127.0.0.1", first + 2)).close()
                break
            except OSError:
                stack.close()
        chosen = range(first, first + 3)
        monkeypatch.setenv(ports.PORTS, f"{chosen[0]}-{chosen[-1]}")
        yield chosen


def test_what_is_no_range_of_ports_is_refused() -> None:
    assert read_ports("20000-20001") == range(20000, 20002)
    for words in ("20000", "20001-20000", "80-90", "65000-65536", "a-b"):
        with pytest.raises(ConfigError, match="must be FIRST-LAST with ports from 1024 to 65535"):
            read_ports(words)
    with pytest.raises(ConfigError, match=r"service\.ports.*must be FIRST-LAST"):
        config(service={"ports": "2000"})


async def test_a_server_takes_a_port_of_the_range(three: range) -> None:
    async def serve() -> Any:
        return await start_server(lambda servicer, server: None, object(), host="127.0.0.1")

    server = await serve()
    try:
        assert server.port == three[-1]
        with pytest.raises(
            EnvironmentLackError, match=rf"of the ports {three[0]}-{three[-1]} .* none is free"
        ):
            await serve()
    finally:
        await server.stop()


def test_the_weight_groups_store_takes_a_port_of_the_range(three: range) -> None:
    pytest.importorskip("torch")
    from paceline.weights.transport.rendezvous import open_store

    store = open_store("127.0.0.1", 5.0)
    assert store.port == three[-1]
    with pytest.raises(OSError, match="in use"):
        open_store("127.0.0.1", 5.0)
    # A port that is asked for is that one.
    with pytest.raises(OSError, match="in use"):
        open_store("127.0.0.1", 5.0, port=three[0])


def test_processes_and_the_controller_get_ports_of_the_range(three: range) -> None:
    told = config(service={"ports": f"{three[0]}-{three[-1]}"})
    machine = Machine(num_cores=1, gpus=())
    specs = plan.members(told, machine, controller_address="h:1", master_port=29)
    assert {spec.env[ports.PORTS] for spec in specs} == {told.service.ports}
    plain = plan.members(config(), machine, controller_address="h:1", master_port=29)
    assert not any(ports.PORTS in spec.env for spec in plain)
    assert _with_ports(told).service.controller_port == three[-1]
    # The next run of this process gets another one, or is told that there is none.
    with pytest.raises(EnvironmentLackError, match=r"no port of service.ports=\d+-\d+ is free"):
        _with_ports(told)


def test_a_rank_says_where_nccl_and_gloo_would_listen_outside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    kernel = tmp_path / "ip_local_port_range"
    monkeypatch.setattr(ports, "_KERNEL", kernel)
    kernel.write_text("32768\t60999\n")
    ports.warn_of_kernel("192.0.2.1")
    assert not caplog.messages
    monkeypatch.setenv(ports.PORTS, "20000-20999")
    ports.warn_of_kernel("127.0.0.1")
    assert not caplog.messages
    ports.warn_of_kernel("192.0.2.1")
    assert 'sysctl -w net.ipv4.ip_local_port_range="20000 20999"' in caplog.messages[0]
    for inside in ("20000 20999", "20100 20200"):
        kernel.write_text(inside)
        ports.warn_of_kernel("192.0.2.1")
    assert len(caplog.messages) == 1


HOSTS = {
    "config": "run.yaml",
    "address": "127.0.0.1",
    "shell": ["/bin/sh", "-c"],
    "hosts": [
        {"name": "a", "address": "127.0.0.1", "data_address": "127.0.0.2", "folder": "/", "learner": 2},
        {"name": "b", "address": "127.0.0.1", "folder": "/", "rollout": 1, "reward": 1},
    ],
}


def test_hosts_with_a_second_network_have_data_on_it() -> None:
    hosts = parse(Hosts, HOSTS)
    run = several.with_hosts(config(learner={"device": "cpu"}), hosts)
    machine = Machine(num_cores=1, gpus=())
    planned = several.members(hosts, run, machine, controller_address="127.0.0.1:7000", master_port=1)
    data = {spec.name: spec.env.get("PACELINE_DATA_HOST") for spec in planned}
    assert data == {"learner-0": "127.0.0.2", "learner-1": "127.0.0.2", "rollout-0": None, "reward-0": None}
    assert {s.env["MASTER_ADDR"] for s in planned if "MASTER_ADDR" in s.env} == {"127.0.0.2"}
    assert all(spec.command[spec.command.index("--host") + 1] == "127.0.0.1" for spec in planned)


def test_hosts_whose_kernel_gives_other_ports_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults = []
    answer = {"missing": [], "version": None, "folder": "", "unread": [], "meanings": {}}
    monkeypatch.setattr(
        "paceline.checks.host_check.ask_python", lambda *words, **env: answer | {"kernel": [32768, 60999]}
    )
    check_hosts(parse(Hosts, HOSTS))
    for host in ("a", "b"):
        with pytest.raises(EnvironmentLackError) as refused:
            check_hosts(parse(Hosts, HOSTS), ports="20000-20999")
        faults.append(f"{host}: NCCL and gloo take their ports from the kernel" in str(refused.value))
    assert faults == [True, True]
    check_hosts(parse(Hosts, HOSTS), ports="32768-60999")


def options(**words: str) -> MemberOptions:
    arguments = [word for key, value in words.items() for word in (f"--{key.replace('_', '-')}", value)]
    given = ["--controller", "h:1", *arguments]
    return MemberOptions.parse(given, prog="learner", kind=MemberKind.LEARNER, description="")


def test_a_learner_offers_its_store_on_the_network_of_data(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    from paceline.learner.app import LearnerApp

    fields = ("config", "broker_url", "blob_stores", "checkpoints")
    fields += ("checkpoint_root", "checkpoint_marker", "run_dir")
    registration: Any = SimpleNamespace(**dict.fromkeys(fields, ""))

    def store(**words: str) -> tuple[str, str]:
        link = SimpleNamespace(address="192.0.2.9:7000")
        session: Any = SimpleNamespace(options=options(**words), link=link, poke=None)
        environment: Any = None
        assignment = LearnerApp(session, environment)._assignment(registration)
        return assignment.host, assignment.advertise

    assert store(host="192.0.2.1") == ("192.0.2.1", "192.0.2.9")
    assert store(host="192.0.2.1", data_host="198.51.100.1") == ("198.51.100.1", "198.51.100.1")
    monkeypatch.setenv("PACELINE_DATA_HOST", "lo")
    assert store(host="192.0.2.1") == ("127.0.0.1", "127.0.0.1")


async def test_a_learner_connects_its_ranks_over_the_network_of_data() -> None:
    pytest.importorskip("torch")
    from paceline.learner.app import LearnerApp

    class Over(Exception):
        pass

    used = []

    class Environment:
        def use_interface(self, host: str) -> None:
            used.append(host)
            raise Over

    environment: Any = Environment()
    for words, host in (({}, "192.0.2.1"), ({"data_host": "eth1"}, "eth1")):
        session: Any = SimpleNamespace(options=options(host="192.0.2.1", **words), poke=None)
        with pytest.raises(Over):
            await LearnerApp(session, environment).run()
        assert used.pop() == host
