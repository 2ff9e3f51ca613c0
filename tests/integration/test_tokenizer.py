"""The reward service's decoder against the model's own tokenizer class, which needs torch."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.data.prompts import load_tokenizer
from support.byte_tokenizer import TEXTS, save_tokenizer


@pytest.mark.torch
def test_the_models_own_tokenizer_class_decodes_the_same(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    decoder, own = load_tokenizer(save_tokenizer(tmp_path)), AutoTokenizer.from_pretrained(str(tmp_path))
    assert type(own) is not type(decoder)
    for text in TEXTS:
        ids = own(text, add_special_tokens=False)["input_ids"]
        assert decoder.decode(ids, skip_special_tokens=True) == own.decode(ids, skip_special_tokens=True)
