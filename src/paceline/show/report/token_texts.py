"""Converts token ids to texts, one per token."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

_FILE = "tokenizer.json"
# Some tokens, such as parts of a letter, have a text only together with the tokens before them.
_CONTEXT = 6
_PARTIAL = "\ufffd"


class TokenTexts:
    """Decodes with the first tokenizer.json in `folders`; without one a token's text is its id."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self._folders = folders

    def of(self, ids: Sequence[int]) -> list[str]:
        """Returns a text per id; joined, they are the decoded text. A letter that spans several tokens
        belongs to the last of them."""
        if self._tokenizer is None:
            return [f"{token} " for token in ids]
        texts, shown = [], 0
        for end in range(1, len(ids) + 1):
            begin = max(0, shown - _CONTEXT)
            before = self._decode(ids[begin:shown])
            text = self._decode(ids[begin:end])
            complete = end == len(ids) or not text.endswith(_PARTIAL)
            texts.append(text[len(before) :] if complete else "")
            shown = end if complete else shown
        return texts

    def _decode(self, ids: Sequence[int]) -> str:
        assert self._tokenizer is not None
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))

    @cached_property
    def _tokenizer(self) -> Any:
        path = next((folder / _FILE for folder in self._folders if (folder / _FILE).is_file()), None)
        if path is None:
            return None
        try:
            from tokenizers import Tokenizer
        except ImportError:
            return None
        try:
            return Tokenizer.from_file(str(path))
        except Exception as error:  # noqa: BLE001  the library raises bare Exception for a damaged file
            import logging

            logging.getLogger(__name__).warning("%s cannot be read: %s", path, error)
            return None
