"""Names the command that makes an input of the demo, for messages about a missing one."""

from __future__ import annotations

from pathlib import Path

_EXAMPLE = Path("examples/arithmetic")
_PREPARE = f"python {_EXAMPLE}/prepare.py"
_COMMANDS = {"data": _PREPARE, "model": _PREPARE, "start": f"paceline sft {_EXAMPLE}/sft.yaml"}


def how_to_make(path: Path) -> str:
    """Returns the command that makes an input of the demo; "" for any other path."""
    commands = [command for name, command in _COMMANDS.items() if path.is_relative_to(_EXAMPLE / name)]
    return f"`{commands[0]}` makes it" if commands else ""
