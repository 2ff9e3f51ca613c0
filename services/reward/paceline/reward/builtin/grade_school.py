"""Reward for GSM8K: compares the last number of a solution by value."""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Literal

# The pattern matches everything attached to a number, so that "1,2001", "1.2.3" or "1/2" is refused as a
# whole, instead of yielding a part that is right by chance. Without nested repetition it takes linear time.
_SIGN = r"[-+\u2212]?"
_RUN = r"\.?[0-9](?:[0-9]|[.,/](?=[0-9])|[eE][-+]?(?=[0-9]))*"
_NUMBER = re.compile(rf"(?P<sign>{_SIGN})\$?\s?(?P<inner>{_SIGN})(?P<run>{_RUN})")
_LAST_NUMBER = re.compile(
    rf"(?P<sign>(?<![\w)\]])[-+\u2212])?\$?(?P<inner>(?<=\$)[-+\u2212])?(?P<run>{_RUN})"
)
_WELL_FORMED = re.compile(r"(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+")
_MARK = "####"
_MAX_DIGITS = 100


def gsm8k(
    response: str, ground_truth: str, *, method: Literal["strict", "flexible"] = "strict", **extra: object
) -> float:
    """Scores 1.0 when the response's final number equals the ground truth's, and 0.0 otherwise.

    Numbers are compared by value: thousands commas, a dollar sign, a plus sign, trailing zeros and a full
    stop after the number do not matter. A malformed number ("1,23", "1/2", "1.2.3") equals nothing.

    Args:
        response: the decoded response.
        ground_truth: the number, or a complete GSM8K answer that ends in `#### <number>`.
        method: "strict" takes the number right after the last `####` of the response;
            "flexible" takes the last number of the response, wherever it stands.
        extra: the item's other fields, unused.

    Raises:
        ValueError: `method` is neither of the two, or `ground_truth` holds no number: a fault of the data is
            an error and not a score of 0.
    """
    truth = _ground_truth_number(ground_truth)
    if method == "strict":
        return float(_marked_number(response) == truth)
    if method == "flexible":
        return float(_last_number(response) == truth)
    raise ValueError(f'gsm8k knows method="strict" and method="flexible", not method={method!r}')


def extract_answer(answer: str) -> str:
    """Returns the number of a GSM8K answer, or a bare number, as plain digits: "#### 1,200" gives "1200".

    Raises:
        ValueError: there is no number where GSM8K puts it.
    """
    return f"{_ground_truth_number(answer):f}"


def _ground_truth_number(text: str) -> Decimal:
    if _MARK in text:
        number = _marked_number(text)
    else:
        bare = text.strip().removesuffix(".")
        match = _NUMBER.fullmatch(bare)
        number = _value(match) if match else None
    if number is None:
        shown = text if len(text) <= 60 else f"...{text[-60:]}"
        raise ValueError(
            "gsm8k needs a number, or a GSM8K answer that ends in '#### <number>', as ground truth; got "
            f"{shown!r}"
        )
    return number


def _marked_number(text: str) -> Decimal | None:
    _, mark, tail = text.rpartition(_MARK)
    if not mark:
        return None
    match = _NUMBER.match(tail.lstrip(" \t"))
    return _value(match) if match else None


def _last_number(text: str) -> Decimal | None:
    last: re.Match[str] | None = None
    for last in _LAST_NUMBER.finditer(text):  # noqa: B007  only the last match counts
        pass
    return _value(last) if last else None


def _value(match: re.Match[str]) -> Decimal | None:
    sign, inner, run = match["sign"] or "", match["inner"] or "", match["run"]
    if len(run) > _MAX_DIGITS or (sign and inner) or not _WELL_FORMED.fullmatch(run):
        return None
    magnitude = Decimal(run.replace(",", ""))
    return -magnitude if (sign or inner) in ("-", "\u2212") else magnitude
