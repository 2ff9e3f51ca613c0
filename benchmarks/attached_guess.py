"""Attaches the guessing game to a run: python benchmarks/attached_guess.py HOST:PORT ...

Stops when the run ends and prints the number of games opened but not released; `episode_faults.py` starts it.
"""

from __future__ import annotations

import importlib.util
import sys
from typing import Any

from recipes import ROOT

from paceline.sdk import attach_environment

NAME = "guess"


def main() -> None:
    """Plays until the run is over or a signal comes."""
    spec = importlib.util.spec_from_file_location("guess", ROOT / "examples" / "guess" / "environment.py")
    assert spec is not None
    assert spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    num_open = 0

    class Counted(module.Guess):  # type: ignore[misc]
        """A game that is counted while it is open."""

        def __init__(self) -> None:
            nonlocal num_open
            num_open += 1

        async def release(self) -> None:
            """Counts the game as released."""
            nonlocal num_open
            num_open -= 1

    try:
        attach_environment(Counted, address=sys.argv[1:], name=NAME, max_episodes=256)
    finally:
        print(f"open: {num_open}", flush=True)


if __name__ == "__main__":
    main()
