"""Builds a judge's prompt for an item, and reads the grade in its answer. Pure."""

from __future__ import annotations

import json
import re
from pathlib import Path

from paceline.core.errors import ConfigError, RewardError, RewardErrorKind
from paceline.core.scoring import ScoreItem
from paceline.core.text import one_line

_PLACE = re.compile(r"\{(\w+)\}")
_SHOWN_CHARS = 200


class JudgePrompt:
    """A text with placeholders, {response} and others, that an item's fields fill.

    Args:
        text: the contents of the prompt file.

    Raises:
        ConfigError: the text does not show the response.
    """

    def __init__(self, text: str) -> None:
        if "{response}" not in text:
            raise ConfigError("the judge's prompt file has no {response}: the judge would not see the answer")
        self._text = text

    def about(self, item: ScoreItem) -> str:
        """Returns the text for an item. Text in braces that is no field stays unchanged.

        Filled-in text is not searched again, so a response with {ground_truth} does not get the ground truth.
        """
        fields = {
            **{key: _text(value) for key, value in item.extra.items()},
            "prompt": item.prompt,
            "response": item.response,
            "ground_truth": item.ground_truth,
            "data_source": item.data_source,
        }
        return _PLACE.sub(lambda place: fields.get(place[1], place[0]), self._text)


class GradePattern:
    """Finds the grade in a judge's answer.

    Args:
        pattern: a regular expression. The first group of its last match is the grade, a number or a word.

    Raises:
        ConfigError: the pattern is not a regular expression, or has no group.
    """

    def __init__(self, pattern: str, words: dict[str, float]) -> None:
        try:
            self._pattern = re.compile(pattern)
        except re.error as error:
            raise ConfigError(
                f"the judge's pattern {pattern!r} is not a regular expression: {error}"
            ) from error
        if not self._pattern.groups:
            raise ConfigError(f"the judge's pattern {pattern!r} has no group (...) around the grade")
        self._words = {word.lower(): value for word, value in words.items()}

    def of(self, answer: str) -> float:
        """Returns the grade in a judge's answer.

        Raises:
            RewardError: WRONG_TYPE, if the answer has none.
        """
        matches = list(self._pattern.finditer(answer))
        text = (matches[-1][1] or "").strip() if matches else ""
        if text.lower() in self._words:
            return self._words[text.lower()]
        try:
            return float(text)
        except ValueError:
            raise RewardError(
                one_line(f"the judge's answer has no grade: {answer[-_SHOWN_CHARS:]!r}"),
                kind=RewardErrorKind.WRONG_TYPE,
            ) from None


def read_prompt_file(path: str) -> str:
    """Reads a judge's prompt file.

    Raises:
        ConfigError: the file cannot be read.
    """
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"prompt_file={path} of a judge cannot be read ({error}); it must be on the host of the run's "
            "reward service, or of the reward model"
        ) from error


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
