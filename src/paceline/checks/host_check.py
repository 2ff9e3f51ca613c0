"""Asks every host of HOSTS.yaml, before anything starts, whether it is reachable and can run its services."""

from __future__ import annotations

import contextlib
import json
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import IO, Any

from paceline.core.errors import EnvironmentLackError
from paceline.core.ports import read_ports
from paceline.launch import remote
from paceline.launch.planning.hosts import Host, Hosts, shell_words
from paceline.service.addresses import is_loopback
from paceline.service.identity.credentials import CA_FILE, CERTIFICATE_FILE, KEY_FILE, TLS_DIR
from paceline.service.packages import version
from paceline.service.ports import kernel_fault

_LIMIT_S = 60.0
_CERTIFICATES = (
    "to the folder that `paceline certs issue DIR host-NAME` writes (`paceline hosts init` writes and copies "
    "all of them); or, on a network that you trust fully, set service.insecure=true"
)

# Runs on the host, by the interpreter of its services.
_QUESTION = """
import importlib.metadata as metadata, importlib.util as util, json, os, socket, sys
asked = json.loads(sys.argv[1])
missing = [name for name in asked["modules"] if util.find_spec(name) is None]
def meaning(name):
    try:
        return sorted({entry[4][0] for entry in socket.getaddrinfo(name, None)})
    except OSError:
        return []
try:
    version = metadata.version("paceline")
except metadata.PackageNotFoundError:
    version = None
folder = os.environ.get(asked["variable"], "")
unread = [name for name in asked["files"] if not os.access(os.path.join(folder, name), os.R_OK)]
meanings = {name: meaning(name) for name in asked["addresses"]}
try:
    kernel = list(map(int, open("/proc/sys/net/ipv4/ip_local_port_range").read().split()))
except (OSError, ValueError):
    kernel = []
said = {"missing": missing, "version": version, "folder": folder, "unread": unread, "meanings": meanings}
said["kernel"] = kernel
print(json.dumps(said))
"""


def check_hosts(
    hosts: Hosts, *, tls_dir: str | None = None, insecure: bool = False, ports: str | None = None
) -> None:
    """Asks all hosts at once, over the remote shell that will start their services.

    Args:
        insecure: whether services may talk in plain text, as `service.insecure` says.

    Raises:
        EnvironmentLackError: a host cannot be reached, cannot run its services, has no certificate, or its
            kernel assigns ports that a firewall blocks; one line per host.
    """
    here = None
    if not (insecure or is_loopback(hosts.address) or tls_dir):
        here = f"this machine has no certificate: set {TLS_DIR}, {_CERTIFICATES}"
    with ThreadPoolExecutor(len(hosts.hosts)) as pool:
        there = pool.map(lambda host: _fault(hosts, host, insecure, ports), hosts.hosts)
        faults = [fault for fault in (here, *there) if fault]
    if faults:
        raise EnvironmentLackError("\n".join(faults))


def _fault(hosts: Hosts, host: Host, insecure: bool, ports: str | None) -> str | None:
    modules = [f"paceline.{kind}" for kind in ("learner", "rollout", "reward") if getattr(host, kind)]
    data = {each.data_address for each in hosts.hosts if each.data_address}
    addresses = sorted({hosts.address, *(each.address for each in hosts.hosts), *data})
    files = [CA_FILE, CERTIFICATE_FILE, KEY_FILE]
    asked = {"modules": modules, "addresses": addresses, "variable": TLS_DIR, "files": files}
    try:
        answer = ask_python(hosts, host, _QUESTION, json.dumps(asked))
    except EnvironmentLackError as error:
        return str(error)
    if answer["missing"]:
        return f"{host.name}: {host.python} has no {', '.join(answer['missing'])}; install Paceline there"
    own = version("paceline")
    if own and answer["version"] and answer["version"] != own:
        return f"{host.name} has Paceline {answer['version']}, this machine {own}; install the same version"
    needs_tls = not (insecure or is_loopback(host.address))
    return (
        _misled(host, answer["meanings"])
        or (_unproven(host, answer) if needs_tls else None)
        or (_blocked(host, read_ports(ports), answer["kernel"]) if ports else None)
    )


def _blocked(host: Host, ports: range, kernel: Sequence[int]) -> str | None:
    """Returns what to change if weights and gradients would use ports that a firewall blocks."""
    if not (host.learner or host.rollout) or not kernel:
        return None
    fault = kernel_fault(ports, range(kernel[0], kernel[1] + 1))
    return f"{host.name}: {fault}" if fault else None


def ask_python(
    hosts: Hosts, host: Host, program: str, *words: str, env: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Runs a program with a host's interpreter; the program prints its answer as JSON in its last line.

    Args:
        hosts: the content of HOSTS.yaml, which names the remote shell.
        host: the host; its folder is the program's working directory.
        env: further variables, for values that must not appear in a process list.

    Raises:
        EnvironmentLackError: the host does not answer, or the program fails there.
    """
    order = remote.order([host.python, "-c", program, *words], {**host.env, **(env or {})})
    code, output, errors = _ask(shell_words(hosts, host), order)
    if code is None:
        raise EnvironmentLackError(
            f"{host.name} has not answered {hosts.shell[0]} for {_LIMIT_S:g} s; check name and network"
        )
    if code != 0:
        said = errors.strip().splitlines() or ["no message"]
        raise EnvironmentLackError(
            f"{host.name} cannot run its services: {said[-1]} (exit code {code}); check its name, "
            f"folder ({host.folder}) and python ({host.python}) in HOSTS.yaml"
        )
    answer: dict[str, Any] = json.loads(output.splitlines()[-1])
    return answer


def _misled(host: Host, meanings: dict[str, list[str]]) -> str | None:
    """Reports an address that the host cannot resolve, or that it resolves to itself."""
    for name, leads_to in meanings.items():
        if not leads_to:
            return f"{host.name} does not know the name {name}: give addresses in HOSTS.yaml as numbers"
        if not is_loopback(name) and is_loopback(leads_to[0]):
            return (
                f"on {host.name} the name {name} stands for {leads_to[0]}, which other hosts cannot reach: "
                "give addresses in HOSTS.yaml as numbers"
            )
    return None


def _unproven(host: Host, answer: dict[str, Any]) -> str | None:
    if not answer["folder"]:
        return f"{host.name} has no certificate: in HOSTS.yaml set its env, {TLS_DIR}, {_CERTIFICATES}"
    if answer["unread"]:
        names = ", ".join(answer["unread"])
        return f"{host.name} cannot read {names} in {TLS_DIR}={answer['folder']}, {_CERTIFICATES}"
    return None


def _ask(command: Sequence[str], order: bytes) -> tuple[int | None, str, str]:
    """Runs the remote shell; returns its exit code (None after the deadline), output and errors."""
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        try:
            shell = subprocess.Popen(command, bufsize=0, stdin=subprocess.PIPE, stdout=output, stderr=errors)
        except OSError as error:
            raise EnvironmentLackError(
                f"{command[0]} does not start ({error.strerror}): install it, or correct shell in HOSTS.yaml"
            ) from error
        # The remote process ends when its input closes, so the input stays open until there is an answer.
        with shell:
            assert shell.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                shell.stdin.write(order)
            try:
                code: int | None = shell.wait(_LIMIT_S)
            except subprocess.TimeoutExpired:
                shell.kill()
                code = None
        return code, _text(output), _text(errors)


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")
