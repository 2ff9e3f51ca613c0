"""What a service listens on and what it tells others, for IPv4, IPv6 and the names of interfaces."""

from __future__ import annotations

import socket

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from paceline.core.errors import ConfigError, EnvironmentLackError
from paceline.service import addresses
from paceline.service.grpc.channels import connect
from paceline.service.grpc.server import start_server


class Entry:
    """What psutil says of an address."""

    def __init__(self, family: int, address: str) -> None:
        self.family, self.address = family, address


@pytest.mark.parametrize(
    ("host", "joined"),
    [
        ("10.0.0.1", "10.0.0.1:5"),
        ("node7", "node7:5"),
        ("fd00::2", "[fd00::2]:5"),
        ("[fd00::2]", "[fd00::2]:5"),
    ],
)
def test_host_and_port_are_joined_and_split_again(host: str, joined: str) -> None:
    assert addresses.join(host, 5) == joined
    assert addresses.split(joined) == (host.strip("[]"), 5)


@pytest.mark.parametrize("address", ["", "host", "host:", ":5", "fd00::2:5", "host:port"])
def test_what_is_no_host_and_port_is_refused(address: str) -> None:
    with pytest.raises(ConfigError, match="HOST:PORT"):
        addresses.split(address)


def test_an_interface_stands_for_its_address(monkeypatch: pytest.MonkeyPatch) -> None:
    interfaces = {
        "eth0": [Entry(socket.AF_INET6, "fe80::1%eth0"), Entry(socket.AF_INET, "10.0.0.1")],
        "ib0": [Entry(socket.AF_INET6, "fe80::2%ib0"), Entry(socket.AF_INET6, "fd00::2")],
        "down0": [Entry(socket.AF_PACKET, "00:00")],
    }
    monkeypatch.setattr("psutil.net_if_addrs", lambda: interfaces)
    names = ("eth0", "ib0", "[fd00::9]", "10.0.0.7", "node7")
    assert [addresses.to_bind(name) for name in names] == [
        "10.0.0.1",
        "fd00::2",
        "fd00::9",
        "10.0.0.7",
        "node7",
    ]
    with pytest.raises(EnvironmentLackError, match="down0 has no address.*eth0, ib0"):
        addresses.to_bind("down0")


def test_what_others_are_told() -> None:
    here = socket.gethostname()
    assert addresses.to_advertise("10.0.0.1", "") == "10.0.0.1"
    assert addresses.to_advertise("10.0.0.1", "gateway") == "gateway"
    assert addresses.to_advertise("0.0.0.0", "") == here
    assert addresses.to_advertise("0.0.0.0", "", towards="127.0.0.1:1") == "127.0.0.1"
    assert addresses.to_advertise("::", "", towards="[::1]:1") == "::1"
    assert addresses.to_advertise("::", "", towards="no-such-name.invalid:1") == here


@pytest.mark.parametrize("host", ["127.0.0.1", "lo", "::1", "[::1]"])
async def test_a_server_answers_at_the_address_that_it_tells(host: str) -> None:
    server = await start_server(lambda servicer, server: None, None, host=host)
    assert addresses.split(server.address)[0] == ("::1" if ":" in host else "127.0.0.1")
    async with connect(server.address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=30)
    assert answer.status == health_pb2.HealthCheckResponse.SERVING
    with pytest.raises(EnvironmentLackError, match=r"port \d+ on .* is taken"):
        await start_server(lambda servicer, server: None, None, host=host, port=server.port)
    await server.stop(0)


async def test_an_interface_beyond_loopback_needs_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.service.grpc.server.to_bind", lambda host: "192.0.2.1")
    with pytest.raises(ConfigError, match=r"refusing to listen on 192\.0\.2\.1"):
        await start_server(lambda servicer, server: None, None, host="eth7")


def test_the_interface_of_the_chosen_address_carries_gloo_and_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    interfaces = {
        "lo": [Entry(socket.AF_INET, "127.0.0.1")],
        "ib0": [Entry(socket.AF_INET, "10.0.0.1"), Entry(socket.AF_INET6, "fd00::2")],
    }
    monkeypatch.setattr("psutil.net_if_addrs", lambda: interfaces)

    def chosen(host: str, **given: str) -> dict[str, str]:
        environ = dict(given)
        addresses.choose_for_gloo(host, environ)
        addresses.choose_for_nccl(host, environ)
        return environ

    ipv4 = {"NCCL_SOCKET_IFNAME": "=ib0", "NCCL_SOCKET_FAMILY": "AF_INET", "GLOO_SOCKET_IFNAME": "ib0"}
    assert chosen("10.0.0.1") == chosen("ib0") == ipv4
    assert chosen("fd00::2") == ipv4 | {"NCCL_SOCKET_FAMILY": "AF_INET6"}
    assert chosen("ib0", NCCL_SOCKET_IFNAME="eth1")["NCCL_SOCKET_IFNAME"] == "eth1"
    # Without a choice NCCL finds its way itself; gloo stays inside the machine.
    assert chosen("127.0.0.1") == {"GLOO_SOCKET_IFNAME": "lo"}
    assert chosen("0.0.0.0") == chosen("10.9.9.9") == {}
