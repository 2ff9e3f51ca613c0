"""Decoding without the model's own tokenizer class."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from paceline.core.errors import ModelError
from paceline.data.prompts import load_tokenizer
from support.byte_tokenizer import TEXTS, save_tokenizer


def test_text_comes_back_without_special_tokens(tmp_path: Path) -> None:
    decoder = load_tokenizer(save_tokenizer(tmp_path))
    ids = [decoder(text, add_special_tokens=False)["input_ids"] for text in TEXTS]
    decoded = [decoder.decode(one, skip_special_tokens=True) for one in ids]
    assert decoded == [text.replace("<|end|>", "") for text in TEXTS]
    assert decoder.decode([5, 1, 0], skip_special_tokens=True) == decoder.decode(
        [5], skip_special_tokens=False
    )


def test_the_service_imports_no_torch(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    code = (
        "import sys, paceline.reward.app; from paceline.data.prompts import load_tokenizer;"
        f"load_tokenizer({str(tmp_path)!r}); print('torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300
    )
    assert done.stdout.strip() == "False"


def test_a_folder_without_a_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="has no tokenizer"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match="does not load"):
        load_tokenizer(tmp_path)
