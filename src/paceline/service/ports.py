"""Chooses the port of a server that has none configured: any free port, or one of a range.

The range comes from the environment, because a member listens before it knows the run's configuration. NCCL
and gloo have no such setting: they use the kernel's ephemeral range, which the host or the container sets.
"""

from __future__ import annotations

import logging
import random
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from paceline.core.ports import in_words, read_ports
from paceline.service.addresses import from_environment, is_loopback

log = logging.getLogger(__name__)

PORTS: Final = "PACELINE_PORTS"
"""The environment variable that holds service.ports"""

_KERNEL = Path("/proc/sys/net/ipv4/ip_local_port_range")
# Unseeded, so that two processes do not try the ports in the same order.
_RANDOM = random.SystemRandom()


def given_ports() -> range | None:
    """Returns the configured range; None for any port.

    Raises:
        ConfigError: the variable does not hold a range.
    """
    words = from_environment(PORTS, "")
    return read_ports(words) if words else None


def ports_to_try(port: int) -> Sequence[int]:
    """Returns the ports to try in order for a server on `port`; 0 asks for a free one."""
    ports = None if port else given_ports()
    return [port] if ports is None else _RANDOM.sample(ports, len(ports))


def unused_port() -> int:
    """Returns a port of the kernel's range that is free on loopback at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def kernel_ports() -> range | None:
    """Returns the kernel's ephemeral port range; None if unknown."""
    try:
        first, last = _KERNEL.read_text().split()
        return range(int(first), int(last) + 1)
    except (OSError, ValueError):  # not Linux, or /proc is hidden
        return None


def kernel_fault(ports: range, kernel: range | None) -> str:
    """Says what to change if NCCL and gloo would listen outside of a range; "" if they would not."""
    if kernel is None or (kernel[0] in ports and kernel[-1] in ports):
        return ""
    return (
        f"NCCL and gloo take their ports from the kernel, which gives {in_words(kernel)}, not those of "
        f'service.ports: {in_words(ports)}; run `sysctl -w net.ipv4.ip_local_port_range="{ports[0]} '
        f'{ports[-1]}"` there, or give the container this sysctl'
    )


def warn_of_kernel(host: str) -> None:
    """Logs what to change if ranks on `host` are reachable from others but would listen outside the range."""
    ports = None if is_loopback(host) else given_ports()
    if ports is not None and (fault := kernel_fault(ports, kernel_ports())):
        log.warning("%s", fault)
