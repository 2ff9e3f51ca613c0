"""The ports on which a process listens where no setting names one: any free one, or one of a range.

The range comes from the environment, as a member listens before it knows the run's configuration. NCCL and
gloo have no such setting: they listen where the kernel lets them, which the host or the container sets.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from paceline.core.ports import in_words, read_ports
from paceline.service.addresses import from_environment, is_loopback

log = logging.getLogger(__name__)

PORTS: Final = "PACELINE_PORTS"
"""The variable: service.ports"""

_KERNEL = Path("/proc/sys/net/ipv4/ip_local_port_range")
# Of its own: a seed set somewhere must not have two processes try the ports in the same order.
_RANDOM = random.SystemRandom()


def given_ports() -> range | None:
    """The range that a person chose; None for any port.

    Raises:
        ConfigError: the variable has another form.
    """
    words = from_environment(PORTS, "")
    return read_ports(words) if words else None


def ports_to_try(port: int) -> Sequence[int]:
    """The ports to try one after the other for a server that is to listen on `port`, 0 for a free one."""
    ports = None if port else given_ports()
    return [port] if ports is None else _RANDOM.sample(ports, len(ports))


def kernel_ports() -> range | None:
    """The ports that the kernel gives to who asks for none; None where it does not say."""
    try:
        first, last = _KERNEL.read_text().split()
        return range(int(first), int(last) + 1)
    except (OSError, ValueError):  # not Linux, or /proc is hidden
        return None


def kernel_fault(ports: range, kernel: range | None) -> str:
    """What to change where NCCL and gloo would listen outside of a range; "" if they do not."""
    if kernel is None or (kernel[0] in ports and kernel[-1] in ports):
        return ""
    return (
        f"NCCL and gloo take their ports from the kernel, which gives {in_words(kernel)}, not those of "
        f'service.ports: {in_words(ports)}; run `sysctl -w net.ipv4.ip_local_port_range="{ports[0]} '
        f'{ports[-1]}"` there, or give the container this sysctl'
    )


def warn_of_kernel(host: str) -> None:
    """Logs what to change where others reach ranks on `host`, and these would listen outside of the range."""
    ports = None if is_loopback(host) else given_ports()
    if ports is not None and (fault := kernel_fault(ports, kernel_ports())):
        log.warning("%s", fault)
