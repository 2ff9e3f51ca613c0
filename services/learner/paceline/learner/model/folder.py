"""Writes a model folder in the Hugging Face layout, which transformers and vLLM load."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from paceline.config.model import LoraConfig
from paceline.core.errors import ModelError
from paceline.learner.model.architectures import model_class
from paceline.learner.model.loading import hugging_face_names
from paceline.learner.model.lora import A, B
from paceline.weights import corrections

# Files beside the weights that are copied from the starting model.
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
    "preprocessor_config.json",
    "video_preprocessor_config.json",
    "processor_config.json",
)


def write_folder(
    out: Path,
    tensors: Mapping[str, Tensor],
    *,
    source: Path,
    tokenizer_source: Path | None = None,
    dtype: torch.dtype = torch.float32,
    is_reward_model: bool = False,
) -> None:
    """Writes config.json, safetensors and the companions of `source`.

    Args:
        out: new or empty folder; created if it is missing.
        tensors: full tensors by the learner's names; a tied head once, under the embedding's name.
        source: folder of the starting model.
        tokenizer_source: folder of the tokenizer, if it is not in `source`.
        dtype: of the weights written.
        is_reward_model: a model for sequence classification with one label, whose head is `score`.

    Raises:
        ModelError: `out` is not empty, or the tensors do not fit the model of config.json.
    """
    from transformers import AutoConfig, AutoModelForSequenceClassification
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # type: ignore[no-untyped-call,unused-ignore]
    if out.exists() and any(out.iterdir()):
        raise ModelError(f"{out} is not empty; give a new folder")
    config = AutoConfig.from_pretrained(str(source), local_files_only=True)
    config.dtype = dtype
    kind: Any = model_class(config)
    if is_reward_model:
        kind, config.num_labels = AutoModelForSequenceClassification, 1
    with torch.device("meta"):
        lm = kind.from_config(config, dtype=dtype)
    for name, value in corrections.missing_keys(config.to_dict()).items():
        setattr(lm.config, name, value)
    stored = dict(corrections.as_stored(tensors.items()))
    unrounded = {name for name, _ in lm.named_buffers() if name.endswith(corrections.BUFFER)}
    expected = dict(lm.named_parameters()).keys() | unrounded
    if expected != stored.keys():
        wrong = sorted(expected ^ stored.keys())
        raise ModelError(f"{len(wrong)} tensors do not fit the model of {source}: {', '.join(wrong[:4])}")
    out.mkdir(parents=True, exist_ok=True)
    state = {
        name: tensor.to(torch.float32 if name in unrounded else dtype).contiguous()
        for name, tensor in stored.items()
    }
    lm.save_pretrained(str(out), state_dict=state)
    for folder in (source, tokenizer_source):
        for name in COMPANIONS:
            if folder is not None and (folder / name).is_file():
                shutil.copyfile(folder / name, out / name)


def write_adapters(out: Path, tensors: Mapping[str, Tensor], *, lora: LoraConfig, base: str) -> None:
    """Writes adapters in the layout of the library PEFT, which transformers and vLLM load beside their base.

    Args:
        out: created if it is missing.
        tensors: full tensors of A and B, by the names of parameters.
        lora: of the run.
        base: the model that the adapters belong to, as adapter_config.json names it.
    """
    from safetensors.torch import save_file

    targets = {name.removesuffix(A).rpartition(".")[2] for name in tensors if name.endswith(A)}
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "target_modules": sorted(targets),
    }
    out.mkdir(parents=True, exist_ok=True)
    (out / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    state = {_peft_name(name): tensor.contiguous() for name, tensor in tensors.items()}
    save_file(state, str(out / "adapter_model.safetensors"), metadata={"format": "pt"})


def _peft_name(name: str) -> str:
    return f"base_model.model.{name}.weight".replace(A, ".lora_A").replace(B, ".lora_B")


def gather_tensors(network: nn.Module, *, keep: bool) -> dict[str, Tensor]:
    """Gathers the full tensors of a sharded network on the CPU, one at a time; every rank calls it.

    Args:
        network: sharded.
        keep: whether this rank keeps them; other ranks get {}.
    """
    tensors = {}
    for name, parameter in hugging_face_names(network):
        tensor = parameter.detach()
        if isinstance(tensor, DTensor):
            tensor = tensor.full_tensor()
        if keep:
            tensors[name] = tensor.cpu()
    return tensors
