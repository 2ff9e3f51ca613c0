"""From the token ids of a response to its text."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from paceline.core.errors import ModelError
from paceline.data.prompts import load_tokenizer


class Decoder(Protocol):
    """The part of a tokenizer that is used."""

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Text of token ids."""
        ...


def load_decoder(folder: str | Path) -> Decoder:
    """The tokenizer of a model folder, for decoding only.

    Where the folder has a tokenizer.json, which says all that decoding needs, it is read without the model's own tokenizer
    class: looking that class up makes transformers import torch, ten seconds of a core that this service has no use for.

    Raises:
        ModelError: the folder is missing or holds no tokenizer.
    """
    if not (Path(folder) / "tokenizer.json").is_file():
        return load_tokenizer(folder)
    from transformers import PreTrainedTokenizerFast

    try:
        decoder: Decoder = PreTrainedTokenizerFast.from_pretrained(str(folder), local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"the tokenizer in {folder} does not load: {error}") from error
    return decoder
