"""Lets further members join a run that `paceline train --open` has started: token file and commands."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path

from paceline.config.run import RunConfig
from paceline.launch.planning import plan
from paceline.service.addresses import is_loopback
from paceline.service.identity.credentials import FILE_SUFFIX, TLS_DIR, TOKEN, Credentials
from paceline.service.process import write_atomically
from paceline.sizing.machine import Machine

_FILE = "token"


def keep_token(run_dir: Path, new: str) -> str:
    """Returns the token of an open run; keeps it for later starts in a file that only this user can read.

    Args:
        new: the token, if there is none yet.
    """
    path = run_dir / _FILE
    try:
        token = path.read_text(encoding="utf-8").strip()
    except OSError:
        token = ""
    token = token or new
    write_atomically(path, f"{token}\n", mode=0o600)
    return token


def how_to_join(config: RunConfig, run_dir: Path, controller_address: str) -> str:
    """Returns the commands that start a further rollout server and reward service, here or on another
    host."""
    secrets = {f"{TOKEN}{FILE_SUFFIX}": str(run_dir / _FILE)}
    tls = Credentials.from_env().tls
    if tls is not None:
        secrets[TLS_DIR] = str(tls.folder.resolve())
    specs = plan.newcomers(config, Machine.here(), controller_address=controller_address)
    lines = [f"  {_shell_line({**secrets, **spec.env})} {shlex.join(spec.command)}" for spec in specs]
    return "\n".join(["others may join, each under its own name:", *lines, _from_elsewhere(config)])


def _shell_line(variables: Mapping[str, str]) -> str:
    return " ".join(f"{name}={shlex.quote(value)}" for name, value in variables.items())


def _from_elsewhere(config: RunConfig) -> str:
    if is_loopback(config.service.host):
        return (
            "from this host only: for other hosts set service.host to an address that they reach, and "
            "broker.url to a Redis server that they reach"
        )
    redis = "" if config.broker.url else "; broker.url, too, must be set to a Redis server that they reach"
    return (
        "from another host: copy the token file there, issue TLS files for it, and give --host its own "
        f"address{redis}"
    )
