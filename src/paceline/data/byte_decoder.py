"""Decodes responses from the bytes of each token, several times as fast as the tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from paceline.data.prompts import Decoder, TokenIds, Tokenizer


class ByteDecoder:
    """Decodes like a byte-level tokenizer: joins the tokens' bytes and reads them as UTF-8.

    Args:
        tokens: bytes of each token by its id; b"" for an id without a token.
        special: ids omitted with `skip_special_tokens`.
    """

    def __init__(self, tokens: Sequence[bytes], special: Sequence[int]) -> None:
        import pyarrow

        # The last entry stands for all ids beyond the vocabulary: a model may have more than its tokenizer.
        ordinary = [*tokens, b""]
        for number in special:
            ordinary[number] = b""
        self._last = len(tokens)
        self._tables = {
            skips: pyarrow.array(table, type=pyarrow.binary())
            for skips, table in ((False, [*tokens, b""]), (True, ordinary))
        }

    def decode(self, token_ids: TokenIds, *, skip_special_tokens: bool) -> str:
        """Returns the text of non-negative token ids; ids beyond the vocabulary have no text."""
        numbers = np.minimum(np.asarray(token_ids, dtype=np.int64), self._last)
        # Arrow lays the bytes of the taken entries out one after the other.
        taken: Any = self._tables[skip_special_tokens].take(numbers)
        _, bounds, text = taken.buffers()
        end = np.frombuffer(bounds, dtype=np.int32)[len(numbers)]
        return str(memoryview(text)[:end], "utf-8", "replace")


def fast_decoder(tokenizer: Tokenizer) -> Decoder:
    """Returns a table-based decoder if it agrees with the tokenizer, else the tokenizer.

    Both decode the whole vocabulary, forwards and backwards, before the tables are trusted.
    """
    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or type(backend.decoder).__name__ != "ByteLevel":
        return tokenizer
    bytes_of = _bytes_of_letters()
    tokens = [b""] * (1 + max(backend.get_vocab(with_added_tokens=True).values(), default=-1))
    for text, number in backend.get_vocab(with_added_tokens=True).items():
        try:
            tokens[number] = bytes(map(bytes_of.__getitem__, text))
        except KeyError:  # an added token outside the byte alphabet stands for its own text
            tokens[number] = text.encode()
    added = backend.get_added_tokens_decoder()
    decoder = ByteDecoder(tokens, [number for number, token in added.items() if token.special])
    for token_ids in (list(range(len(tokens))), list(reversed(range(len(tokens))))):
        for skip in (False, True):
            expected = tokenizer.decode(token_ids, skip_special_tokens=skip)
            if decoder.decode(token_ids, skip_special_tokens=skip) != expected:
                return tokenizer
    return decoder


def _bytes_of_letters() -> dict[str, int]:
    """Maps the letters of a byte-level vocabulary (GPT-2) to bytes.

    Printable bytes stand for themselves; the others have letters from 256 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [number for number in range(256) if number not in printable]
    letters = {chr(number): number for number in printable}
    return letters | {chr(256 + index): number for index, number in enumerate(others)}
