"""Writes a model folder in the Hugging Face layout, which transformers and engines load.

Tensors are gathered one by one and written file by file, so that a model may be larger than memory.
"""

from __future__ import annotations

import itertools
import json
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from paceline.config.model import LoraConfig
from paceline.core.errors import ModelError
from paceline.learner.distributed.ranks import Ranks
from paceline.learner.model.architectures import model_class
from paceline.learner.model.loading import hugging_face_names, plain_config
from paceline.learner.model.lora import A, B
from paceline.models.facts import family_of
from paceline.weights import corrections

# Files that are copied from the starting model, in addition to the weights.
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

FILE_BYTES: Final = 2 << 30
"""Size in bytes at which a file of weights is written."""

ADAPTERS = "adapter"
"""The folder that holds only the adapters, beside the merged weights."""

_LAYER = re.compile(r".*?\.layers\.\d+\.")

Tensors = Iterable[tuple[str, Tensor]]


def by_layer(name: str) -> str:
    """Returns a key that all tensors of a decoder layer share; other tensors have their own."""
    match = _LAYER.match(name)
    return match.group() if match else name


def write_folder(
    out: Path,
    tensors: Tensors,
    *,
    source: Path,
    tokenizer_source: Path | None = None,
    dtype: torch.dtype = torch.float32,
    is_reward_model: bool = False,
    file_bytes: int = FILE_BYTES,
) -> None:
    """Writes safetensors, then config.json and the companions of `source`.

    Args:
        out: new or empty folder; created if it is missing.
        tensors: full tensors by the learner's names, grouped by layer; a tied head only once, under the
            embedding's name.
        source: folder of the starting model.
        tokenizer_source: folder of the tokenizer, if not `source`.
        dtype: data type of the weights written.
        is_reward_model: whether to write a sequence classifier with one label and the head `score`.
        file_bytes: size at which a file of weights ends.

    Raises:
        ModelError: `out` is not empty, or the tensors do not fit the model of config.json.
    """
    from transformers import AutoModelForSequenceClassification

    if out.exists() and any(out.iterdir()):
        raise ModelError(f"{out} is not empty; give a new folder")
    config = plain_config(source)
    config.dtype = dtype
    kind: Any = model_class(config)
    if is_reward_model:
        kind, config.num_labels = AutoModelForSequenceClassification, 1
    with torch.device("meta"):
        lm = kind.from_config(config, dtype=dtype)
    text = lm.config.get_text_config()
    for name, value in corrections.missing_keys(text.to_dict()).items():
        setattr(text, name, value)
    out.mkdir(parents=True, exist_ok=True)
    wrong = _write_weights(out, tensors, lm, dtype, file_bytes)
    if wrong:
        raise ModelError(f"{len(wrong)} tensors do not fit the model of {source}: {', '.join(wrong[:4])}")
    lm.config.dtype, lm.config.architectures = str(dtype).removeprefix("torch."), [type(lm).__name__]
    if lm.can_generate():
        lm.generation_config.save_pretrained(str(out))
    lm.config.save_pretrained(str(out))
    for folder in (source, tokenizer_source):
        for name in COMPANIONS:
            if folder is not None and (folder / name).is_file():
                shutil.copyfile(folder / name, out / name)


def _write_weights(out: Path, tensors: Tensors, lm: Any, dtype: torch.dtype, file_bytes: int) -> list[str]:
    """Writes the files of weights; returns missing and superfluous names."""
    from transformers.core_model_loading import revert_weight_conversion

    buffers = dict(lm.named_buffers())
    unrounded = {name for name in buffers if name.endswith(corrections.BUFFER)}
    factors = {name for name in buffers if name.endswith(corrections.FACTOR)}
    expected = dict(lm.named_parameters()).keys() | unrounded | factors
    files, names = _Files(out, file_bytes), set[str]()
    for _, layer in itertools.groupby(corrections.as_stored(tensors), key=lambda pair: by_layer(pair[0])):
        state = {
            name: tensor.to(torch.float32 if name in unrounded else dtype).contiguous()
            for name, tensor in layer
        }
        names |= state.keys()
        if names <= expected:
            stored = revert_weight_conversion(lm, state)
            if family_of(lm.config.model_type).transposes_experts:  # transformers would not transpose them
                stored = {name: _transposed(name, tensor) for name, tensor in stored.items()}
            files.add(stored)
    if names == expected:
        files.finish()
    return sorted(expected ^ names)


def _transposed(name: str, tensor: Tensor) -> Tensor:
    """Transposes the matrices of experts; returns other tensors unchanged."""
    return tensor.transpose(1, 2).contiguous() if ".experts." in name and tensor.ndim == 3 else tensor


class _Files:
    """Writes a folder's files of weights, each when it is large enough."""

    def __init__(self, out: Path, file_bytes: int) -> None:
        self._out, self._file_bytes = out, file_bytes
        self._tensors: dict[str, Tensor] = {}
        self._parts: list[tuple[Path, list[str]]] = []
        self._total = self._pending = 0

    def add(self, tensors: Mapping[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            self._tensors[name] = tensor
            self._pending += tensor.nbytes
            if self._pending >= self._file_bytes:
                self._write()

    def finish(self) -> None:
        """Writes the last file, and the index if there are several files."""
        self._write()
        if len(self._parts) == 1:
            self._parts[0][0].rename(self._out / "model.safetensors")
            return
        weight_map: dict[str, str] = {}
        for number, (path, names) in enumerate(self._parts, 1):
            file_name = f"model-{number:05}-of-{len(self._parts):05}.safetensors"
            path.rename(self._out / file_name)
            weight_map |= dict.fromkeys(names, file_name)
        index = {"metadata": {"total_size": self._total}, "weight_map": dict(sorted(weight_map.items()))}
        path = self._out / "model.safetensors.index.json"
        path.write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")

    def _write(self) -> None:
        from safetensors.torch import save_file

        if not self._tensors:
            return
        path = self._out / f"part-{len(self._parts):05}.safetensors"
        save_file(self._tensors, str(path), metadata={"format": "pt"})
        self._parts.append((path, list(self._tensors)))
        self._total += self._pending
        self._tensors, self._pending = {}, 0


def write_adapters(out: Path, tensors: Mapping[str, Tensor], *, lora: LoraConfig, base: str) -> None:
    """Writes adapters in the layout of the library PEFT, to load them with their base.

    Adapters of experts have no such layout here, and without them the others would be of no use: then nothing
    is written.

    Args:
        out: created if it is missing.
        tensors: full tensors of A and B, by the names of parameters.
        base: name of the adapters' base model for adapter_config.json.
    """
    from safetensors.torch import save_file

    if any(tensor.ndim == 3 for tensor in tensors.values()):
        return
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


def gathered_tensors(
    network: nn.Module, *, keep: bool, only: Callable[[str], bool] = lambda name: True
) -> Iterator[tuple[str, Tensor]]:
    """Yields the full tensors of a sharded network, one at a time; every rank must iterate over all.

    Args:
        network: sharded.
        keep: whether this rank needs the tensors, on the CPU.
        only: returns whether to gather the tensor of a name.
    """
    for name, parameter in hugging_face_names(network):
        if not only(name):
            continue
        tensor = parameter.detach()
        if isinstance(tensor, DTensor):
            tensor = tensor.full_tensor()
        yield name, tensor.cpu() if keep else tensor


def write_from_ranks(network: nn.Module, ranks: Ranks, write: Callable[[Tensors], None]) -> None:
    """Has rank 0 write a network's full tensors as they are gathered; every rank calls it."""
    tensors = gathered_tensors(network, keep=ranks.world.rank == 0)
    try:
        if ranks.world.rank == 0:
            write(tensors)
    finally:
        for _ in tensors:  # even if rank 0 cannot write: the others wait for it at every tensor
            pass
