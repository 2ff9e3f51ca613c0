"""The guessing game's warm-up: one player heeds what it was told, the other does not."""

from __future__ import annotations

import importlib.util
import sys
from typing import Any

import numpy as np
import pytest

from support.source import ROOT


@pytest.fixture(scope="module")
def prepare() -> Any:
    spec = importlib.util.spec_from_file_location("guess_prepare", ROOT / "examples/guess/prepare.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def heeded(messages: list[dict[str, str]], answer: str) -> list[bool]:
    """Of each guess, whether it can still be right after what was said before it."""
    still_right, low, high = [], -1, 10
    guesses = [*(message["content"] for message in messages[1::2]), answer]
    for guess, said in zip(guesses, [*(message["content"] for message in messages[2::2]), ""], strict=True):
        still_right.append(low < int(guess) < high)
        low = max(low, int(guess)) if said == "low" else low
        high = min(high, int(guess)) if said == "high" else high
    return still_right


@pytest.mark.parametrize(("share", "least", "most"), [(1.0, 1.0, 1.0), (0.5, 0.7, 0.9), (0.0, 0.4, 0.7)])
def test_a_share_of_the_guesses_heeds_what_was_said(
    prepare: Any, share: float, least: float, most: float
) -> None:
    games = prepare.to_sft(np.random.default_rng(0), 2000, share).to_pylist()
    later = [fits for game in games for fits in heeded(game["prompt"], game["answer"])[1:]]
    assert least <= np.mean(later) <= most
    assert {len(game["prompt"]) for game in games} == {1, 3, 5, 7}
