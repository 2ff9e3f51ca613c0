"""The tests in a row's ground truth, and the check of a program's outputs against them.

The expected outputs are compared in this process: the program, which may try to cheat, never sees them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.core.errors import RewardError, RewardErrorKind

_FENCE = "```"
_LANGUAGE = re.compile(r"[\w+-]*")
_CALLER = "\nimport json as _json, sys as _sys\nprint(_json.dumps(eval(_sys.stdin.read())))\n"
_FORM = (
    'the ground truth must be a JSON object: {"inputs": ["1 2"], "outputs": ["3"]} for a program that reads '
    'and prints, or {"calls": ["add(1, 2)"], "results": [3]} for a function'
)


@dataclass(frozen=True, kw_only=True, slots=True)
class CodeTest:
    """One test: the program's input and expected output, with `is_json` as JSON in the output's last line."""

    stdin: str
    expected: object
    is_json: bool = False

    def passes(self, stdout: str) -> bool:
        """Returns whether the output of a program that ended without error passes."""
        if not self.is_json:
            return _lines(stdout) == _lines(str(self.expected))
        try:
            return bool(json.loads(stdout.strip().rpartition("\n")[2]) == self.expected)
        except (ValueError, RecursionError):
            return False


def code_of(response: str) -> str:
    """Returns the program in a response: its last fenced block, or all of it. Takes linear time."""
    code, at = response, 0
    while (end_of_line := response.find("\n", at)) >= 0:
        opening = response.rfind(_FENCE, at, end_of_line)
        at = end_of_line + 1
        if opening < 0 or not _LANGUAGE.fullmatch(
            response[opening + len(_FENCE) : end_of_line].strip(" \t\r")
        ):
            continue
        closing = response.find(_FENCE, at)
        if closing < 0:
            break
        code, at = response[at:closing], closing + len(_FENCE)
    return code


def program_of(code: str, tests: Sequence[CodeTest]) -> str:
    """Returns the program to run for these tests."""
    return code + _CALLER if any(test.is_json for test in tests) else code


def tests_of(ground_truth: str) -> list[CodeTest]:
    """Returns the tests of a ground truth.

    Raises:
        RewardError: WRONG_TYPE, if it holds none.
    """
    try:
        asked = json.loads(ground_truth)
        if "calls" in asked:
            pairs = zip(asked["calls"], asked["results"], strict=True)
            tests = [CodeTest(stdin=str(call), expected=result, is_json=True) for call, result in pairs]
        else:
            pairs = zip(asked["inputs"], asked["outputs"], strict=True)
            tests = [CodeTest(stdin=str(text), expected=str(output)) for text, output in pairs]
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise RewardError(f"{_FORM} ({error})", kind=RewardErrorKind.WRONG_TYPE) from None
    if not tests:
        raise RewardError(_FORM, kind=RewardErrorKind.WRONG_TYPE)
    return tests


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]
