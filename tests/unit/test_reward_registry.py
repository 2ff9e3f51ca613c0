"""Finding reward functions by name, and what is said when that fails."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.core.errors import ConfigError
from paceline.reward.builtin import gsm8k
from paceline.reward.functions.registry import load, resolve

SUPPORT = "support.reward_functions"


def test_built_ins_by_name() -> None:
    function = resolve("gsm8k")
    assert function.call is gsm8k
    assert (function.named, function.required, function.takes_any) == ({"method"}, set(), True)


def test_module_function_instance_and_attribute() -> None:
    assert resolve(f"{SUPPORT}:length").call("abc", "") == 3
    assert resolve(f"{SUPPORT}:judge").call("", "") == 0.75
    assert resolve("operator:eq").call("a", "a") is True
    function = resolve(f"{SUPPORT}:tells_fields")
    assert function.named == {"prompt", "data_source", "level"}
    assert function.required == {"prompt", "data_source"}
    assert not function.takes_any


def test_file_function_sees_its_neighbours_and_its_dataclasses(tmp_path: Path) -> None:
    (tmp_path / "neighbour_of_my_reward.py").write_text("BONUS = 0.5\n")
    (tmp_path / "my_reward.py").write_text(
        "from __future__ import annotations\n"
        "from dataclasses import dataclass\n"
        "from neighbour_of_my_reward import BONUS\n"
        "@dataclass(slots=True)\n"
        "class Judge:\n"
        "    bonus: float\n"
        "def score(response, ground_truth, **extra):\n"
        "    return (response == ground_truth) + Judge(BONUS).bonus\n"
    )
    assert resolve(f"{tmp_path}/my_reward.py:score").call("a", "a") == 1.5


@pytest.mark.parametrize(
    ("reference", "sentence"),
    [
        (
            "gsm9k",
            "no built-in reward function 'gsm9k': write exact_match, gsm8k, math_verify, or module:function",
        ),
        ("length.py", "'length.py' names a file, but no function in it: write length.py:FUNCTION"),
        ("no_such_module:f", "no module 'no_such_module' on the Python path"),
        ("support.no_such:f", "no module 'support.no_such' on the Python path"),
        ("no/such.py:f", "no file no/such.py"),
        (":f", "no built-in"),
        (f"{SUPPORT}:", "no built-in"),
        (f"{SUPPORT}:lenght", "has no 'lenght'; its functions are .*length"),
        (f"{SUPPORT}:not_callable", "is int, not a function: write f"),
        (f"{SUPPORT}:Judge", "is a class: name a function or an instance"),
        (f"{SUPPORT}:is_async", "is async: write a plain def"),
        (
            f"{SUPPORT}:too_few",
            r"signature \(response: 'str'\) -> 'float': it must take the response and the ground",
        ),
    ],
)
def test_what_cannot_be_resolved(reference: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        resolve(reference)


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        ("import no_such_dependency", "importing .*broken.py raised ModuleNotFoundError: No module named"),
        ("raise RuntimeError('no\\nkey')", "raised RuntimeError: no key$"),
        ("import sys; sys.exit(2)", "raised SystemExit: 2"),
        ("def f(:", "raised SyntaxError"),
    ],
)
def test_a_file_that_does_not_import(tmp_path: Path, body: str, sentence: str) -> None:
    (tmp_path / "broken.py").write_text(body)
    with pytest.raises(ConfigError, match=sentence):
        resolve(f"{tmp_path}/broken.py:f")


def test_arguments_are_checked_against_the_signature() -> None:
    assert load("gsm8k", {"method": "flexible"}).call is gsm8k
    load(f"{SUPPORT}:obedient", {"anything": 1})
    with pytest.raises(ConfigError, match="'gsm8k' has no argument 'metod'; it has method"):
        load("gsm8k", {"metod": "flexible"})
    with pytest.raises(ConfigError, match="no argument 'x'; it has none"):
        load(f"{SUPPORT}:length", {"x": 1})
