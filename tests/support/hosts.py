"""Hosts on one machine: network namespaces on a switch, each with addresses and a folder of its own."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

_NETNS = Path("/etc/netns")
# A folder of this name in every host is the host's own, as another machine's would be.
OWN = Path("/mnt/paceline-host")


def need_namespaces() -> None:
    """Skips the test where namespaces cannot be made."""
    if os.geteuid() != 0:
        pytest.skip("network namespaces need root: run it with sudo")
    if shutil.which("ip") is None:
        pytest.skip("network namespaces need the program ip: apt-get install iproute2")
    probe = subprocess.run(["ip", "netns", "add", f"pl{os.getpid()}probe"], capture_output=True, check=False)
    if probe.returncode != 0:
        pytest.skip(f"this kernel or container makes no network namespaces: {probe.stderr.decode().strip()}")
    subprocess.run(["ip", "netns", "del", f"pl{os.getpid()}probe"], check=True)


@dataclass
class Host:
    """A namespace; `folder` is seen as OWN by what runs in it."""

    name: str
    namespace: str
    address: str
    address6: str
    folder: Path
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def start(self, name: str, command: Sequence[str], env: Mapping[str, str]) -> subprocess.Popen[bytes]:
        """Starts a process; its output goes to NAME.log beside the folders."""
        # `ip netns exec` has made a mount namespace, so that nobody else sees this mount.
        inside = ["sh", "-c", f'mount --bind "$0" {OWN} && exec "$@"', str(self.folder), *command]
        with (self.folder.parent / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                ["ip", "netns", "exec", self.namespace, *inside],
                env=os.environ | {"PACELINE_NODE_ID": self.name} | dict(env),
                stdout=log,
                stderr=log,
                start_new_session=True,
                cwd=self.folder,
            )
        self.processes[name] = process
        return process

    def run(self, *command: str) -> str:
        """Runs a command in the namespace; returns its output."""
        done = subprocess.run(
            ["ip", "netns", "exec", self.namespace, *command],
            check=True,
            capture_output=True,
            text=True,
            timeout=60,
        )
        return done.stdout

    def pids(self) -> list[int]:
        """Of all processes in the namespace."""
        return [int(pid) for pid in _ip("netns", "pids", self.namespace).split()]

    def stop(self) -> None:
        """Kills what still runs."""
        for process in self.processes.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(60)


class Network:
    """A switch and its hosts."""

    def __init__(self, hosts: dict[str, Host], switch: str) -> None:
        self.hosts, self._switch = hosts, switch

    def __getitem__(self, name: str) -> Host:
        return self.hosts[name]

    def cut(self, *names: str, seconds: float) -> None:
        """Takes hosts off the switch for a time."""
        for name in names:
            self._link(name, "down")
        try:
            time.sleep(seconds)
        finally:
            for name in names:
                self._link(name, "up")

    def _link(self, name: str, state: str) -> None:
        _ip("-n", self._switch, "link", "set", f"port-{name}", state)


@contextlib.contextmanager
def network(folder: Path, names: Sequence[str]) -> Iterator[Network]:
    """Hosts 10.77.0.1, 10.77.0.2 and so on, and fd77::1, ..., which see each other and nothing else."""
    need_namespaces()
    OWN.mkdir(parents=True, exist_ok=True)
    prefix = f"pl{os.getpid()}"
    switch = f"{prefix}switch"
    hosts: dict[str, Host] = {}
    try:
        _ip("netns", "add", switch)
        _ip("-n", switch, "link", "add", "switch", "type", "bridge")
        _ip("-n", switch, "link", "set", "switch", "up")
        for number, name in enumerate(names, start=1):
            host = Host(name, f"{prefix}{name}", f"10.77.0.{number}", f"fd77::{number}", folder / name)
            hosts[name] = host
            _add(host, switch)
        yield Network(hosts, switch)
    finally:
        for host in hosts.values():
            host.stop()
        for namespace in (switch, *(host.namespace for host in hosts.values())):
            subprocess.run(["ip", "netns", "del", namespace], capture_output=True, check=False)
            shutil.rmtree(_NETNS / namespace, ignore_errors=True)


def _add(host: Host, switch: str) -> None:
    host.folder.mkdir(parents=True)
    # torch asks for the names of peers' addresses: without a name server at hand each question takes seconds.
    (_NETNS / host.namespace).mkdir(parents=True)
    (_NETNS / host.namespace / "resolv.conf").write_text(
        "nameserver 127.0.0.1\noptions attempts:1 timeout:1\n"
    )
    _ip("netns", "add", host.namespace)
    _ip("-n", switch, "link", "add", f"port-{host.name}", "type", "veth", "peer", "name", "eth0")
    _ip("-n", switch, "link", "set", "eth0", "netns", host.namespace)
    _ip("-n", switch, "link", "set", f"port-{host.name}", "master", "switch", "up")
    for address in (f"{host.address}/24", f"{host.address6}/64"):
        options = ["nodad"] if ":" in address else []
        _ip("-n", host.namespace, "address", "add", address, "dev", "eth0", *options)
    for device in ("lo", "eth0"):
        _ip("-n", host.namespace, "link", "set", device, "up")


def _ip(*words: str) -> str:
    done = subprocess.run(["ip", *words], check=True, capture_output=True, text=True, timeout=60)
    return done.stdout
