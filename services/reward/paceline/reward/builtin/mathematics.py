"""Reward for mathematical answers, by the `math-verify` library: equal as expressions, not as strings."""

from __future__ import annotations

import functools
import importlib
import itertools
import threading
from types import ModuleType

_MARKUP = ("$", "\\boxed", "\\(", "\\[", "\\begin")


def math_verify(
    response: str,
    ground_truth: str,
    *,
    timeout_s: int = 5,
    timeout_reward: float | None = None,
    **extra: object,
) -> float:
    """Scores 1.0 when the response's answer equals the ground truth mathematically, and 0.0 otherwise.

    A response without an expression scores 0.0. The library limits its own time with SIGALRM, which only a
    process's main thread can use; Paceline's reward processes call functions there.

    Args:
        response: the decoded response, its answer in `\\boxed{}`, in LaTeX or plain.
        ground_truth: the answer; without LaTeX delimiters it is read as if it were in `\\boxed{}`.
        timeout_s: whole seconds, separately for parsing and for comparing.
        timeout_reward: the score of a response that takes longer, such as a tower of powers. None: a timeout
            error, so that an undecided answer does not count as wrong.
        extra: the item's other fields, unused.

    Raises:
        ValueError: the ground truth holds no expression.
        TimeoutError: the time ran out and `timeout_reward` is None.
        RuntimeError: called outside the main thread, or math-verify is not installed.
    """
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError("math_verify limits its time by SIGALRM: call it in a process's main thread")
    expected = _parse_ground_truth(ground_truth, timeout_s)
    answers = _parse(response, timeout_s)
    is_right = None if answers is None else _any_equal(expected, answers, timeout_s)
    if is_right is not None:
        return float(is_right)
    if timeout_reward is None:
        raise TimeoutError(f"math_verify did not decide within {timeout_s} s")
    return timeout_reward


@functools.cache
def load_library() -> ModuleType:
    """Imports math-verify (about two seconds, as it brings sympy).

    Raises:
        RuntimeError: math-verify is not installed.
    """
    try:
        library = importlib.import_module("math_verify")
        importlib.import_module("math_verify.errors")
    except ModuleNotFoundError as error:
        raise RuntimeError(
            f"math_verify needs the package math-verify ({error}): pip install math-verify"
        ) from error
    return library


@functools.lru_cache(maxsize=1024)  # the samples of a prompt group share their ground truth
def _parse_ground_truth(text: str, timeout_s: int) -> list[object]:
    marked = text if any(mark in text for mark in _MARKUP) else f"\\boxed{{{text}}}"
    parsed = _parse(marked, timeout_s)
    if parsed is None:
        raise ValueError(f"math_verify could not read the ground truth {text!r} within {timeout_s} s")
    if not parsed or not text.strip():
        raise ValueError(f"math_verify found no expression in the ground truth {text!r}")
    return parsed


def _parse(text: str, timeout_s: int) -> list[object] | None:
    """Returns the possible expressions of a text, the best first; None when the time ran out."""
    library = load_library()
    try:
        parsed: list[object] = library.parse(text, parsing_timeout=timeout_s, raise_on_error=True)
    except library.errors.TimeoutException:
        return None
    except Exception:  # noqa: BLE001  sympy and antlr raise any type of exception for an unreadable text
        return []
    return parsed


def _any_equal(expected: list[object], answers: list[object], timeout_s: int) -> bool | None:
    """Returns whether any two expressions are equal; None when no two are and a comparison ran out of time.

    The pairs are compared one by one: for lists, the library either counts a pair that timed out as unequal
    or lets the first pair that fails hide the others.
    """
    library = load_library()
    result: bool | None = False
    for truth, answer in itertools.product(expected, answers):
        try:
            if library.verify(truth, answer, timeout_seconds=timeout_s, raise_on_error=True):
                return True
        except library.errors.TimeoutException:
            result = None
        except Exception:  # noqa: BLE001  what sympy raises for two expressions that it cannot compare
            continue
    return result
