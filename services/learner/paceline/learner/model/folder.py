"""Writes a model folder in the Hugging Face layout, which transformers and vLLM load."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from paceline.core.errors import ModelError
from paceline.learner.model.loading import hugging_face_names

# What a folder may hold beside weights; whatever of it the starting model has goes along.
COMPANIONS = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)


def write_folder(
    out: Path,
    tensors: Mapping[str, Tensor],
    *,
    source: Path,
    tokenizer_source: Path | None = None,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Writes config.json, safetensors and the companions of `source`.

    Args:
        out: new or empty folder; made where it is missing.
        tensors: whole tensors by Hugging Face name; a tied head once, under the embedding's name.
        source: the folder that the model started from.
        tokenizer_source: where the tokenizer lies, if not in `source`.
        dtype: of the weights written.

    Raises:
        ModelError: `out` is not empty, or tensors are missing for the model of config.json.
    """
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # type: ignore[no-untyped-call,unused-ignore]
    if out.exists() and any(out.iterdir()):
        raise ModelError(f"{out} is not empty; give a new folder")
    config = AutoConfig.from_pretrained(str(source), local_files_only=True)
    config.dtype = dtype
    with torch.device("meta"):
        lm: Any = AutoModelForCausalLM.from_config(config, dtype=dtype)
    expected = dict(lm.named_parameters())
    if expected.keys() != tensors.keys():
        wrong = sorted(expected.keys() ^ tensors.keys())
        raise ModelError(f"{len(wrong)} tensors do not fit the model of {source}: {', '.join(wrong[:4])}")
    out.mkdir(parents=True, exist_ok=True)
    state = {name: tensor.to(dtype).contiguous() for name, tensor in tensors.items()}
    lm.save_pretrained(str(out), state_dict=state)
    for folder in (source, tokenizer_source):
        for name in COMPANIONS:
            if folder is not None and (folder / name).is_file():
                shutil.copyfile(folder / name, out / name)


def gather_whole(network: nn.Module, *, keep: bool) -> dict[str, Tensor]:
    """All tensors of a sharded network, one after the other, on the CPU; every rank takes part.

    Args:
        network: sharded.
        keep: whether this rank wants them; others get {}.
    """
    whole = {}
    for name, parameter in hugging_face_names(network):
        tensor = parameter.detach()
        if isinstance(tensor, DTensor):
            tensor = tensor.full_tensor()
        if keep:
            whole[name] = tensor.cpu()
    return whole
