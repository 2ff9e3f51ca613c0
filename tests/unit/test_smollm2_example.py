"""The SmolLM2 example: which sums are held out, and what its reward pays."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "examples/smollm2"


def _module(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"smollm2_{name}", FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("response", "score", "right", "bare"),
    [
        ("12", 1.0, 1.0, 1.0),
        (" 12\n", 1.0, 1.0, 1.0),
        ("7 + 5 = 12.", 0.5, 1.0, 0.0),
        ("12 is not 13", 0.0, 0.0, 0.0),
        ("13", 0.2, 0.0, 1.0),
        ("112", 0.2, 0.0, 1.0),
        ("twelve", 0.0, 0.0, 0.0),
        ("", 0.0, 0.0, 0.0),
    ],
)
def test_the_reward_pays_the_bare_right_number_most(
    response: str, score: float, right: float, bare: float
) -> None:
    assert _module("sums").bare_number(response, "12") == {"score": score, "right": right, "bare": bare}


def test_held_out_sums_are_not_trained_on() -> None:
    train, held_out = _module("prepare").sums(0)
    questions = [row["prompt"][0]["content"] for row in (*train, *held_out)]
    assert len(questions) == len(set(questions)) == 144
    assert len(held_out) == 24
    assert (train, held_out) == _module("prepare").sums(0)
    for row in train:
        first, _, second = row["prompt"][0]["content"].removeprefix("What is ").partition("?")[0].split()
        assert int(first) + int(second) == int(row["ground_truth"])
