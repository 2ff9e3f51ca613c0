"""Addresses on which services listen, and under which others reach them.

A host is an address (IPv4, or IPv6 with or without brackets), the name of a network interface of this
machine, or a host name. In host:port an IPv6 address stands in brackets.
"""

from __future__ import annotations

import argparse
import ipaddress
import os
import socket
from collections.abc import MutableMapping

import psutil

from paceline.core.errors import ConfigError, EnvironmentLackError

_HOST = "PACELINE_HOST"
_ADVERTISE = "PACELINE_ADVERTISE"
DATA_HOST = "PACELINE_DATA_HOST"
"""The variable of --data-host"""

_WILDCARDS = ("0.0.0.0", "::")


def join(host: str, port: int) -> str:
    """Returns host:port, with an IPv6 address in brackets."""
    plain = host.strip("[]")
    return f"[{plain}]:{port}" if ":" in plain else f"{plain}:{port}"


def split(address: str) -> tuple[str, int]:
    """Returns the host, without brackets, and the port of host:port.

    Raises:
        ConfigError: the address has another form.
    """
    host, _, port = address.rpartition(":")
    plain = host.strip("[]")
    if not plain or not port.isdecimal() or (":" in plain and not host.startswith("[")):
        raise ConfigError(
            f"{address!r} must be HOST:PORT, with an IPv6 address in brackets, such as [fd00::2]:5000"
        )
    return plain, int(port)


def is_loopback(host: str) -> bool:
    """Returns whether only this machine can reach the address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def is_of_this_machine(host: str) -> bool:
    """Returns whether an address or name is one of this machine's, on which a socket can be bound."""
    try:
        endpoints = socket.getaddrinfo(host.strip("[]"), 0, type=socket.SOCK_DGRAM)
    except OSError:
        return False
    for family, kind, protocol, _, address in endpoints:
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.bind(address)
        except OSError:
            continue
        return True
    return False


def is_wildcard(host: str) -> bool:
    """Returns whether an address is a wildcard for all of the machine's addresses."""
    return host.strip("[]") in _WILDCARDS


def to_bind(host: str) -> str:
    """Returns the address or name to bind to, without brackets; an interface's name becomes its address.

    If an interface has an IPv4 and an IPv6 address, the IPv4 address is taken; name the address to choose.

    Raises:
        EnvironmentLackError: the interface has no address.
    """
    plain = host.strip("[]")
    if _is_address(plain):
        return plain
    interfaces = psutil.net_if_addrs()
    if plain not in interfaces:
        return plain
    by_family = {
        family: [entry.address for entry in interfaces[plain] if entry.family == family]
        for family in (socket.AF_INET, socket.AF_INET6)
    }
    # Link-local addresses need the interface with every use.
    usable = [*by_family[socket.AF_INET], *(a for a in by_family[socket.AF_INET6] if "%" not in a)]
    if not usable:
        raise EnvironmentLackError(
            f"the interface {plain} has no address to listen on; bring it up, or name another one of "
            f"{', '.join(sorted(interfaces))}"
        )
    return usable[0]


def to_advertise(host: str, advertise: str, *, towards: str = "") -> str:
    """Returns the address or name under which others reach a server that listens on `host`.

    Args:
        host: the address on which the server listens, as `to_bind` returns it.
        advertise: the user's choice. "" means `host`; if that is a wildcard, this machine's address on the
            route to `towards`, or its name.
        towards: host:port of the peer that learns the address, or "".
    """
    if advertise:
        return to_bind(advertise)
    if not is_wildcard(host):
        return host
    if towards:
        try:
            return on_route_to(*split(towards))
        except OSError:
            pass  # no route yet, or no such name: others may know this machine by its own
    return socket.gethostname()


def announced(host: str, port: int) -> str:
    """Returns the address that a server of this machine will announce, by its host and the environment.

    Raises:
        EnvironmentLackError: `host` is an interface without an address.
    """
    return join(to_advertise(to_bind(host), from_environment(_ADVERTISE, "")), port)


def on_route_to(host: str, port: int) -> str:
    """Returns this machine's address on the route to `host`; a datagram socket finds it and sends nothing.

    Raises:
        OSError: `host` is unknown or there is no route.
    """
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])


def choose_for_gloo(host: str, environ: MutableMapping[str, str] = os.environ) -> None:
    """Makes torch's gloo groups listen on the interface of `host`, unless the user chose one.

    By default, gloo takes the interface of the machine's name.
    """
    interface = _interface_of(to_bind(host))
    if interface is not None:
        environ.setdefault("GLOO_SOCKET_IFNAME", interface)


def choose_for_nccl(host: str, environ: MutableMapping[str, str] = os.environ) -> None:
    """Makes NCCL use the interface of `host` if that is not loopback; settings of the user stay.

    By default, NCCL takes the first interface that is not loopback.
    """
    address = to_bind(host)
    interface = _interface_of(address)
    if interface is not None and not is_loopback(address):
        # "=": exactly this name, not every one that begins with it.
        environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")
        environ.setdefault("NCCL_SOCKET_FAMILY", "AF_INET6" if ":" in address else "AF_INET")


def _interface_of(host: str) -> str | None:
    """Returns the interface of this machine that has the address; None if none has."""
    try:
        address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][4][0]
    except OSError:
        return None
    return next(
        (
            name
            for name, entries in psutil.net_if_addrs().items()
            if any(entry.address == address for entry in entries)
        ),
        None,
    )


def add_address_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds --host and --advertise, with their environment variables."""
    parser.add_argument(
        "--host",
        default=from_environment(_HOST, "127.0.0.1"),
        help="address to listen on, IPv4 or IPv6, or the name of an interface of this machine "
        f"(or {_HOST}; default: %(default)s)",
    )
    parser.add_argument(
        "--advertise",
        default=from_environment(_ADVERTISE, ""),
        metavar="ADDRESS",
        help=f"address or name under which others reach this process, if it is not --host (or {_ADVERTISE})",
    )


def add_data_argument(parser: argparse.ArgumentParser) -> None:
    """Adds --data-host, with its environment variable."""
    parser.add_argument(
        "--data-host",
        default=from_environment(DATA_HOST, ""),
        metavar="HOST",
        help="address or interface of this machine for weights and for traffic between learner ranks, "
        f"if it is not --host (or {DATA_HOST})",
    )


def from_environment(name: str, default: str) -> str:
    """Returns a variable's value; an empty one counts as unset, because compose files write it."""
    return os.environ.get(name) or default


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
