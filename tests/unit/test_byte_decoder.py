"""Texts by a table of bytes are the tokenizer's own, and other tokenizers decode for themselves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.data.byte_decoder import ByteDecoder, fast_decoder
from paceline.data.prompts import load_tokenizer
from support.byte_tokenizer import save_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Byte-level, with a token that is added and not special, and one of letters that no byte has."""
    tokenizer: Any = load_tokenizer(save_tokenizer(tmp_path_factory.mktemp("tokenizer")))
    tokenizer.add_tokens(["<tool>", "\u4f60\u597d \u0120"])
    return tokenizer


@pytest.fixture(scope="module")
def decoder(tokenizer: Any) -> ByteDecoder:
    """By tables."""
    decoder = fast_decoder(tokenizer)
    assert isinstance(decoder, ByteDecoder)
    return decoder


@given(data=st.data(), skip=st.booleans())
def test_any_tokens_have_the_tokenizers_text(
    tokenizer: Any, decoder: ByteDecoder, data: st.DataObject, skip: bool
) -> None:
    """Bytes in any order: most sequences are no UTF-8. Some ids are beyond the vocabulary."""
    token_ids = data.draw(st.lists(st.integers(0, len(tokenizer) + 1), max_size=40))
    expected = tokenizer.decode(token_ids, skip_special_tokens=skip)
    assert decoder.decode(token_ids, skip_special_tokens=skip) == expected


@given(text=st.text(max_size=30))
def test_a_text_comes_back(tokenizer: Any, decoder: ByteDecoder, text: str) -> None:
    token_ids = tokenizer.encode("<|end|>" + text + "<tool>", add_special_tokens=False)
    for skip in (False, True):
        expected = tokenizer.decode(token_ids, skip_special_tokens=skip)
        assert decoder.decode(token_ids, skip_special_tokens=skip) == expected


def test_a_tokenizer_that_decodes_otherwise_is_left_to_itself(tmp_path: Path) -> None:
    from tokenizers import decoders

    other: Any = load_tokenizer(save_tokenizer(tmp_path))
    other.backend_tokenizer.decoder = decoders.Metaspace()
    assert fast_decoder(other) is other

    changed: Any = load_tokenizer(save_tokenizer(tmp_path))
    decode = changed.decode
    changed.decode = lambda token_ids, **options: decode(token_ids, **options).replace("a", "b")
    assert fast_decoder(changed) is changed
