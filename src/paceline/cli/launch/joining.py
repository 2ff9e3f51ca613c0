"""How further members join a run that `paceline train --open` has started: the token file, the commands."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

from paceline.config.run import RunConfig
from paceline.core.members import MemberKind
from paceline.service.connection import is_loopback
from paceline.service.credentials import FILE_SUFFIX, INSECURE, TLS_DIR, TOKEN, Credentials
from paceline.service.member import MAX_MESSAGE_MIB
from paceline.service.process import write_atomically

_FILE = "token"


def keep_token(run_dir: Path, new: str) -> str:
    """The token of an open run, in a file that only this user can read; a later start has the same one.

    Args:
        run_dir: of the run.
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
    """Commands that start one more rollout server and one more reward service, here or on another host."""
    environment = {
        f"{TOKEN}{FILE_SUFFIX}": str(run_dir / _FILE),
        MAX_MESSAGE_MIB: str(config.service.max_message_mib),
    }
    if config.service.insecure:
        environment[INSECURE] = "1"
    tls = Credentials.from_env().tls
    if tls is not None:
        environment[TLS_DIR] = str(tls.folder)
    variables = " ".join(f"{name}={shlex.quote(value)}" for name, value in environment.items())
    first = {MemberKind.ROLLOUT: config.rollout.replicas, MemberKind.REWARD: 1}
    lines = ["others may join, each under a name of its own:"]
    for kind, number in first.items():
        words = [sys.executable, "-m", f"paceline.{kind.value}", "--controller", controller_address]
        lines.append(f"  {variables} {shlex.join([*words, '--member-id', f'{kind.value}-{number}'])}")
    return "\n".join([*lines, _from_elsewhere(config)])


def _from_elsewhere(config: RunConfig) -> str:
    if is_loopback(config.service.host):
        return (
            "from this host only: for other hosts set service.host to an address that they reach, and "
            "broker.url to a Redis server that they reach"
        )
    redis = "" if config.broker.url else "; broker.url, too, must be set to a Redis server that they reach"
    return f"from another host: copy the token file and the TLS folder there, and add --host ADDRESS{redis}"
