"""No room but an engine's own names it: all others ask for `engine_facts(config.rollout.name)`."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.engines.registry import ENGINES
from support import source

# What is an engine's own: where it runs, what it says of itself, and its line in the registry.
ROOMS = ("services/rollout/paceline/rollout/engines/{name}/", "src/paceline/engines/{name}.py")
REGISTRY = "src/paceline/engines/registry.py"
ALLOWED = {
    "src/paceline/config/rollout.py": "the default of rollout.name, and what users read about its keys",
    "src/paceline/config/reward.py": "the engines of a reward model: a key that users write",
    "services/reward/paceline/reward/models/__main__.py": "the table of the engines of reward models",
    "services/reward/paceline/reward/models/pooling.py": "a reward model in vLLM: its room there",
    **dict.fromkeys(
        (
            "services/reward/paceline/reward/teacher/answer.py",
            "services/reward/paceline/reward/teacher/client.py",
            "src/paceline/config/training/teacher.py",
        ),
        "a teacher is a server that the user starts, and its protocol is vLLM's",
    ),
    **{
        f"src/paceline/cli/convert/trl/{name}.py": "TRL's own names of its keys"
        for name in ("losses", "rest", "table")
    },
    "src/paceline/cli/commands/results/export.py": "says to users what can load a checkpoint",
}
FILES = {str(path.relative_to(source.ROOT)): path for path in source.modules().values()}


def _names(name: str, path: Path) -> bool:
    text = path.read_text(encoding="utf-8").lower()
    return name in text or ENGINES[name].package in text


def test_every_engine_has_its_rooms() -> None:
    for name in ENGINES:
        for room in ROOMS:
            assert (source.ROOT / room.format(name=name)).exists()


@pytest.mark.parametrize("name", ENGINES)
def test_no_other_room_names_an_engine(name: str) -> None:
    """Comments and docstrings included: what is said of one engine may not hold for the next."""
    own = tuple(room.format(name=name) for room in ROOMS)
    elsewhere = {
        file
        for file, path in FILES.items()
        if not file.startswith(own) and file != REGISTRY and _names(name, path)
    }
    assert sorted(elsewhere - ALLOWED.keys()) == []


def test_no_place_is_allowed_for_nothing() -> None:
    assert [file for file in ALLOWED if not any(_names(name, FILES[file]) for name in ENGINES)] == []
