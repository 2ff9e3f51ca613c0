"""Asks every host of HOSTS.yaml, before anything starts, whether it can run its services."""

from __future__ import annotations

import contextlib
import json
import subprocess
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import IO

from paceline.core.errors import EnvironmentLackError
from paceline.launch import remote
from paceline.launch.planning.hosts import Host, Hosts, shell_words
from paceline.service.packages import version

_LIMIT_S = 60.0

# Runs on the host, by the interpreter of its services.
_QUESTION = """
import importlib.metadata as metadata, importlib.util as util, json, sys
missing = [name for name in sys.argv[1:] if util.find_spec(name) is None]
try:
    version = metadata.version("paceline")
except metadata.PackageNotFoundError:
    version = None
print(json.dumps({"missing": missing, "version": version}))
"""


def check_hosts(hosts: Hosts) -> None:
    """Asks all hosts at once, over the remote shell that will start their services.

    Raises:
        EnvironmentLackError: a host cannot be reached or cannot run its services; one line per host.
    """
    with ThreadPoolExecutor(len(hosts.hosts)) as pool:
        faults = [fault for fault in pool.map(lambda host: _fault(hosts, host), hosts.hosts) if fault]
    if faults:
        raise EnvironmentLackError("\n".join(faults))


def _fault(hosts: Hosts, host: Host) -> str | None:
    modules = [f"paceline.{kind}" for kind in ("learner", "rollout", "reward") if getattr(host, kind)]
    order = remote.order([host.python, "-c", _QUESTION, *modules], host.env)
    code, output, errors = _ask(shell_words(hosts, host), order)
    if code is None:
        return f"{host.name} has not answered {hosts.shell[0]} for {_LIMIT_S:g} s; check name and network"
    if code != 0:
        said = errors.strip().splitlines() or ["no message"]
        return (
            f"{host.name} cannot run its services: {said[-1]} (exit code {code}); check its name, "
            f"folder ({host.folder}) and python ({host.python}) in HOSTS.yaml"
        )
    answer = json.loads(output.splitlines()[-1])
    if answer["missing"]:
        return f"{host.name}: {host.python} has no {', '.join(answer['missing'])}; install Paceline there"
    own = version("paceline")
    if own and answer["version"] and answer["version"] != own:
        return f"{host.name} has Paceline {answer['version']}, this machine {own}; install the same version"
    return None


def _ask(command: Sequence[str], order: bytes) -> tuple[int | None, str, str]:
    """Exit code, None where there is none in time, output and errors of the remote shell."""
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        try:
            shell = subprocess.Popen(command, bufsize=0, stdin=subprocess.PIPE, stdout=output, stderr=errors)
        except OSError as error:
            raise EnvironmentLackError(
                f"{command[0]} does not start ({error.strerror}): install it, or correct shell in HOSTS.yaml"
            ) from error
        # The remote process ends with its input: it stays open until there is an answer.
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
