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

    A response in which no expression is found scores 0.0. The library limits its own time with SIGALRM, which
    only a process's main thread can use; Paceline's scoring workers run functions there.

    Args:
        response: the decoded response, its answer in `\\boxed{}`, in LaTeX or plain.
        ground_truth: the answer; one without LaTeX delimiters is read as if it stood in `\\boxed{}`.
        timeout_s: whole seconds for each of parsing and comparing.
        timeout_reward: the score of a response that takes longer (a tower of powers, say). None makes it an error
            of its own kind, so that an undecided answer is never taken for a wrong one.
        extra: the item's other fields, unused.

    Raises:
        ValueError: the ground truth holds no expression.
        TimeoutError: the time ran out and `timeout_reward` is None.
        RuntimeError: called outside the main thread, or math-verify is not installed.
    """
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError("math_verify limits its time by SIGALRM: call it in a process's main thread")
    wanted = _parse_ground_truth(ground_truth, timeout_s)
    given = _parse(response, timeout_s)
    verdict = None if given is None else _any_equal(wanted, given, timeout_s)
    if verdict is not None:
        return float(verdict)
    if timeout_reward is None:
        raise TimeoutError(f"math_verify did not decide within {timeout_s} s")
    return timeout_reward


@functools.cache
def load_library() -> ModuleType:
    """Imports math-verify (about two seconds, as it brings sympy).

    Raises:
        RuntimeError: it is not installed.
    """
    try:
        library = importlib.import_module("math_verify")
        importlib.import_module("math_verify.errors")
    except ModuleNotFoundError as error:
        raise RuntimeError(
            f"math_verify needs the package math-verify ({error}): pip install 'paceline[reward]'"
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
    """The readings of a text, best first; none when it holds no expression, None when the time ran out."""
    library = load_library()
    try:
        parsed: list[object] = library.parse(text, parsing_timeout=timeout_s, raise_on_error=True)
    except library.errors.TimeoutException:
        return None
    except Exception:  # noqa: BLE001  sympy and antlr raise anything at all for a text that they cannot read
        return []
    return parsed


def _any_equal(wanted: list[object], given: list[object], timeout_s: int) -> bool | None:
    """Whether one reading of each side is equal; None when none was found equal and a comparison ran out of time.

    The pairs are compared one by one because the library, given lists, either counts a pair that timed out as
    unequal or lets the first pair that fails hide the others.
    """
    library = load_library()
    verdict: bool | None = False
    for one, other in itertools.product(wanted, given):
        try:
            if library.verify(one, other, timeout_seconds=timeout_s, raise_on_error=True):
                return True
        except library.errors.TimeoutException:
            verdict = None
        except Exception:  # noqa: BLE001  what sympy raises for two expressions that it cannot compare
            continue
    return verdict
