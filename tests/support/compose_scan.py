"""What a running compose project gives away: rights of its processes, secrets, ports on other networks."""

from __future__ import annotations

import ipaddress
import json
import re
import socket
import subprocess
from dataclasses import dataclass
from typing import Any, Final

from support.compose_stack import DOCKER, FOLDER, IMAGES

# Prints those of the places in its arguments where somebody answers.
_SCAN: Final = """
import asyncio, sys

async def answers(place):
    host, _, port = place.rpartition(":")
    try:
        _, writer = await asyncio.wait_for(asyncio.open_connection(host, int(port)), 3)
    except OSError:
        return False
    writer.close()
    return True

async def main():
    each = await asyncio.gather(*map(answers, sys.argv[1:]))
    print(*[place for place, answered in zip(sys.argv[1:], each) if answered])

asyncio.run(main())
"""


@dataclass(frozen=True, kw_only=True)
class Container:
    """A running container, as the engine and its own kernel files describe it."""

    service: str
    description: str
    status: dict[str, str]
    writes_root: bool
    addresses: list[str]
    listens: set[int]
    """Ports on other addresses than loopback."""
    published: list[tuple[str, int]]

    @property
    def places(self) -> set[str]:
        return {f"{address}:{port}" for address in self.addresses for port in self.listens}


def containers(ids: list[str]) -> list[Container]:
    """Looks at running containers."""
    return [_look(json.loads(_run([DOCKER, "inspect", each]))[0]) for each in ids]


def secrets() -> list[str]:
    """The token and the password of the project."""
    return [(FOLDER / "secrets" / name).read_text().strip() for name in ("token", "redis_password")]


def answering(places: set[str], network: str) -> set[str]:
    """The places that a container on a network can connect to."""
    words = [DOCKER, "run", "--rm", "--network", network, "--entrypoint", "python", IMAGES[0], "-c", _SCAN]
    return set(_run([*words, *sorted(places)]).split())


def gateway(network: str) -> str:
    """This machine's address on a network."""
    (described,) = json.loads(_run([DOCKER, "network", "inspect", network]))
    (ways,) = described["IPAM"]["Config"]
    # Docker 20.10 does not say it of a bridge that the engine's start made: then it is the first address.
    return str(ways.get("Gateway") or ipaddress.ip_network(ways["Subnet"])[1])


def answers_here(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=60).close()
    except OSError:
        return False
    return True


def _look(described: dict[str, Any]) -> Container:
    def of_kernel(command: str) -> str:
        return _run([DOCKER, "exec", described["Id"], "sh", "-c", command])

    status = dict(re.findall(r"^(\w+):\s*(\S+)", of_kernel("cat /proc/1/status"), flags=re.M))
    networks = described["NetworkSettings"]["Networks"].values()
    ports = described["NetworkSettings"]["Ports"] or {}
    return Container(
        service=described["Config"]["Labels"]["com.docker.compose.service"],
        description=json.dumps(described) + of_kernel("tr '\\0' ' ' < /proc/1/cmdline"),
        status=status,
        writes_root=of_kernel("touch /opt/x 2> /dev/null && echo yes || true") != "",
        addresses=[network["IPAddress"] for network in networks],
        listens=_listening(of_kernel("cat /proc/net/tcp /proc/net/tcp6")),
        published=[(way["HostIp"], int(way["HostPort"])) for ways in ports.values() for way in ways or ()],
    )


def _listening(table: str) -> set[int]:
    """Ports of a kernel's table in state LISTEN (0A) whose address is not on loopback."""
    listeners = re.findall(r"^ *\d+: (\w+):(\w{4}) \w+:\w{4} 0A ", table, flags=re.M)
    # The last byte of an IPv4 address comes first; of IPv6, each group of four does so.
    return {
        int(port, 16)
        for address, port in listeners
        if not address.endswith("7F") and address != "0" * 24 + "01000000"
    }


def _run(words: list[str]) -> str:
    done = subprocess.run(words, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, f"{words}\n{done.stderr[-2000:]}"
    return done.stdout
