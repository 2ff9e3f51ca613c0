"""A byte-level tokenizer as a Qwen2 model has one, and texts that are hard to get back."""

from __future__ import annotations

import json
from pathlib import Path

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
