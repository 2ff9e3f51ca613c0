"""The Redis user of a run: its keys and the commands that Paceline sends, nothing else."""

from __future__ import annotations

import hashlib

# What the broker sends itself, what its scripts call, and what a connection begins with. A client also names
# itself (CLIENT SETINFO) and goes on where it may not; servers before 7.2 do not know the command.
COMMANDS = (
    "auth", "hello", "ping", "select", "info",
    "set", "mget", "setrange", "getrange", "strlen", "exists", "unlink", "scan", "type", "eval", "evalsha",
    "xack", "xadd", "xclaim", "xgroup", "xinfo", "xlen", "xpending", "xread", "xreadgroup", "xtrim",
)  # fmt: skip


def acl_line(user: str, password: str, *, keys: str = "paceline:*") -> str:
    """Writes a line of Redis' ACL file, with the password's hash.

    Args:
        user: its name.
        password: in plain text.
        keys: pattern of the keys that it may use; `names.prefix(run_id)` with a star for one run alone.
    """
    return f"user {user} on #{_digest(password)} {rules(keys)}"


def renewer_line(user: str, password: str) -> str:
    """Writes the line of a user who may have the server read its certificate again, and nothing else."""
    return f"user {user} on #{_digest(password)} resetchannels -@all +config|set"


def _digest(password: str) -> str:
    return hashlib.sha256(password.encode()).hexdigest()


def rules(keys: str = "paceline:*") -> str:
    """Lists what the user may do."""
    return " ".join(["resetchannels", f"~{keys}", "-@all", *(f"+{command}" for command in COMMANDS)])
