"""Decoding without the model's own tokenizer class."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.core.errors import ModelError
from paceline.reward.decoder import load_decoder

TEXTS = [
    "so #### 18",
    "caf\u00e9 \U0001f600 'tis, isn't it ?",
    "a  b\n\n c",
    "<|end|>in<|end|>",
    " lead and trail ",
]


def save_tokenizer(folder: Path) -> Path:
    """A byte-level tokenizer as a Qwen2 model has one."""
    from tokenizers import Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: index for index, letter in enumerate(["<pad>", "<|end|>", *alphabet])}
    backend = Tokenizer(BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="<|end|>").save_pretrained(
        folder
    )
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "tokenizer_class": "Qwen2Tokenizer"}))
    return folder


def test_text_comes_back_without_special_tokens(tmp_path: Path) -> None:
    decoder = load_decoder(save_tokenizer(tmp_path))
    ids = [decoder(text, add_special_tokens=False)["input_ids"] for text in TEXTS]  # type: ignore[operator]
    decoded = [decoder.decode(one, skip_special_tokens=True) for one in ids]
    assert decoded == [text.replace("<|end|>", "") for text in TEXTS]
    assert decoder.decode([5, 1, 0], skip_special_tokens=True) == decoder.decode(
        [5], skip_special_tokens=False
    )


@pytest.mark.torch
def test_the_models_own_tokenizer_class_decodes_the_same(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    decoder, own = load_decoder(save_tokenizer(tmp_path)), AutoTokenizer.from_pretrained(str(tmp_path))
    assert type(own) is not type(decoder)
    for text in TEXTS:
        ids = own(text, add_special_tokens=False)["input_ids"]
        assert decoder.decode(ids, skip_special_tokens=True) == own.decode(ids, skip_special_tokens=True)


def test_the_service_imports_no_torch(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    code = (
        "import sys, paceline.reward.app; from paceline.reward.decoder import load_decoder;"
        f"load_decoder({str(tmp_path)!r}); print('torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=50
    )
    assert done.stdout.strip() == "False"


def test_a_folder_without_a_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="has no tokenizer"):
        load_decoder(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match="does not load"):
        load_decoder(tmp_path)
