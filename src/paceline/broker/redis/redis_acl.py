"""The Redis user of a run, who may use the run's keys and the commands that Paceline sends."""

from __future__ import annotations

import hashlib

# Commands that the broker sends, that its scripts call, and that open a connection. A client also sends
# CLIENT SETINFO and ignores a refusal; servers before 7.2 do not know the command.
COMMANDS = (
    "auth", "hello", "ping", "select", "info",
    "set", "mget", "setrange", "getrange", "strlen", "exists", "unlink", "scan", "type", "eval", "evalsha",
    "multi", "exec",
    "xack", "xadd", "xclaim", "xgroup", "xinfo", "xlen", "xpending", "xread", "xreadgroup", "xtrim",
)  # fmt: skip


def acl_line(user: str, password: str, *, keys: str = "paceline:*") -> str:
    """Writes a line of Redis' ACL file, with the password's hash.

    Args:
        keys: pattern of the keys that the user may use; `names.prefix(run_id)` with a star for only one run.
    """
    return f"user {user} on #{_digest(password)} {rules(keys)}"


def renewer_line(user: str, password: str) -> str:
    """Writes the line of a user who may only make the server reload its certificate."""
    return f"user {user} on #{_digest(password)} resetchannels -@all +config|set"


def _digest(password: str) -> str:
    return hashlib.sha256(password.encode()).hexdigest()


def rules(keys: str = "paceline:*") -> str:
    """Lists what the user is permitted."""
    return " ".join(["resetchannels", f"~{keys}", "-@all", *(f"+{command}" for command in COMMANDS)])
