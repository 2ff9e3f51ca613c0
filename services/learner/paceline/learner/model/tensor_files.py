"""Reads tensors of a folder's safetensors files row by row, by the names of the live model.

transformers fuses a Mixture of Experts when it loads a model: the experts' projections, one tensor per expert
in the files, become rows of one tensor. Here a row is assembled from its expert's tensors when it is read.
Quantised tensors are dequantised then.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from paceline.core.errors import ModelError
from paceline.learner.model.quantised import FP8_SCALES, MXFP4_PARTS, block_fp8, mxfp4
from paceline.models.facts import config_tree, family_of
from paceline.storage.weight_files import STORED, fp8_block, weight_files
from paceline.weights import corrections

ReadRows = Callable[[int, int], Tensor]
"""Reads rows [start, stop) in dimension 0 of one tensor."""

_FUSED = re.compile(r"(?P<block>.*)\.experts\.(?P<kind>gate_up_proj|down_proj)")
_PROJECTIONS = {
    "gate_up_proj": (("gate_proj", "up_proj"), ("w1", "w3")),
    "down_proj": (("down_proj",), ("w2",)),
}
"""Names of an expert's tensors in Qwen's and in Mixtral's files, in the order of their rows."""

_NESTED = (("model.language_model.", "model."), ("model.visual.", "visual."))
"""Prefixes of the parts of a model with a vision tower: in the model, and in its files."""


_OTHER_HEADS = re.compile(r"(score|value_head|v_head|classifier)\..*")
_KEYS_AND_VALUES = re.compile(r".*\.self_attn\.(?:k_proj|v_proj|k_norm|v_norm)\..*")
_LAYER = re.compile(r"model\.(?:language_model\.)?layers\.(\d+)\..*")


def _may_be_left_out(name: str, config: Any, *, has_head: bool) -> bool:
    """Returns whether a tensor of the files may be missing in the model; docs/models.md has the list.

    These are frequencies of rotary embeddings, which are computed; heads of another kind; a language model's
    head if it is tied or the network has none; multi-token-prediction layers (DeepSeek-V3, Qwen 3 Next); keys
    and values of layers that use those of earlier layers (Gemma 4).
    """
    text = config.get_text_config()
    if name.startswith("lm_head."):
        is_tied = config.tie_word_embeddings or text.tie_word_embeddings
        return not has_head or (bool(is_tied) and name == "lm_head.weight")
    if name.endswith(".rotary_emb.inv_freq") or _OTHER_HEADS.fullmatch(name):
        return True
    if name.startswith("mtp."):
        return family_of(text.model_type).has_states
    if (layer := _LAYER.fullmatch(name)) is None:
        return False
    number, num_layers = int(layer[1]), int(text.num_hidden_layers)
    further, shared = (
        int(getattr(text, key, 0) or 0) for key in ("num_nextn_predict_layers", "num_kv_shared_layers")
    )
    if _KEYS_AND_VALUES.fullmatch(name) and num_layers - shared <= number < num_layers:
        return True
    return num_layers <= number < num_layers + further


class ModelFiles:
    """The tensors of a folder.

    Raises:
        ModelError: the folder has none, or a file cannot be read.
    """

    def __init__(self, folder: Path) -> None:
        from safetensors import safe_open

        self._where: dict[str, Any] = {}
        self._read = set[str]()
        paths = weight_files(folder)
        if not paths:
            raise ModelError(
                f"model folder {folder} has no safetensors weights; convert them, or set "
                "model.load_format=random"
            )
        self._folder, self._block = folder, fp8_block(folder)
        self._transposes_experts = family_of(config_tree(folder).get("model_type")).transposes_experts
        for path in paths:
            try:
                file = safe_open(str(path), framework="pt")
            except Exception as error:
                raise ModelError(f"{path} cannot be read as safetensors: {error}") from error
            names: list[str] = file.keys()  # type: ignore[no-untyped-call]
            self._where.update(dict.fromkeys(names, file))

    def __contains__(self, name: str) -> bool:
        return name in self._where

    def rows(self, name: str, shape: torch.Size) -> ReadRows:
        """Returns a reader of the rows of a tensor, by its name in the live model.

        Raises:
            ModelError: the files have no such tensor, or one of another shape.
        """
        if name.endswith(corrections.PARTS):
            read = self.rows(name.removesuffix(corrections.PARTS) + corrections.BUFFER, shape[:1])
            return lambda start, stop: corrections.split(read(start, stop))
        stored = self._alias(name)
        fused = _FUSED.fullmatch(stored)
        if stored in self:
            if fused is not None and self._transposes_experts:
                return self._transposed(stored, shape)
            return self._plain(stored, shape)
        if fused is not None and len(shape) == 3:
            blocks, scales = (stored + part for part in MXFP4_PARTS)
            if blocks in self and scales in self:
                return mxfp4(stored, self._slice(blocks), self._slice(scales), shape)
            for projections in _PROJECTIONS[fused["kind"]]:
                if f"{fused['block']}.experts.0.{projections[0]}.weight" in self:
                    return self._experts(fused["block"], projections, shape)
        raise ModelError(
            f"{self._folder} has no tensor {name!r}, which the model of its config.json needs; it has "
            f"{', '.join(sorted(self._where)[:4])} and others"
        )

    def require_all_read(self, config: Any, *, has_head: bool) -> None:
        """Refuses a folder with tensors that the model lacks; call `rows` for all its tensors first.

        Raises:
            ModelError: names the superfluous tensors.
        """
        unread = sorted(
            name
            for name in self._where.keys() - self._read
            if not _may_be_left_out(name, config, has_head=has_head)
        )
        if unread:
            others = f" and {len(unread) - 6} others" if len(unread) > 6 else ""
            raise ModelError(
                f"{self._folder} has tensors that the model of its config.json lacks ({len(unread)}): "
                f"{', '.join(unread[:6])}{others}. It would be trained without them, as another model; take "
                "the config.json that belongs to these weights, or remove the tensors (docs/models.md)"
            )

    def _alias(self, name: str) -> str:
        """Returns the name in the files: Mixtral's name experts differently, Qwen VL's do not nest."""
        for live, stored in _NESTED:
            flat = stored + name.removeprefix(live)
            if name.startswith(live) and name not in self and flat in self:
                return flat
        alias = name.replace(".mlp.", ".block_sparse_moe.")
        prefix = alias.partition(".block_sparse_moe.")[0] + ".block_sparse_moe."
        is_used = name not in self and any(stored.startswith(prefix) for stored in self._where)
        return alias if is_used else name

    def _plain(self, name: str, shape: torch.Size) -> ReadRows:
        part = self._slice(name)
        stored = tuple(part.get_shape())
        if stored != tuple(shape):
            raise ModelError(
                f"{self._folder}: tensor {name!r} has shape {stored}, the model needs {tuple(shape)}"
            )
        if part.get_dtype() not in STORED:
            if self._block is None or name + FP8_SCALES not in self:
                raise ModelError(
                    f"{self._folder}: tensor {name!r} is stored as {part.get_dtype()} without the scales of "
                    f"block FP8 ({name}{FP8_SCALES}), without which its numbers mean nothing; download the "
                    "whole model again, or take one in bfloat16"
                )
            return block_fp8(name, part, self._slice(name + FP8_SCALES), self._block)
        return lambda start, stop: cast(Tensor, part[start:stop])

    def _transposed(self, name: str, shape: torch.Size) -> ReadRows:
        """Reads experts that are stored as (experts, inputs, outputs).

        transformers (5.19) reads them so, but writes them the other way round; square ones are taken for
        transposed, as engines take them.
        """
        if shape[1] != shape[2] and tuple(self._slice(name).get_shape()) == tuple(shape):
            return self._plain(name, shape)
        read = self._plain(name, torch.Size([shape[0], shape[2], shape[1]]))
        return lambda start, stop: read(start, stop).transpose(1, 2)

    def _slice(self, name: str) -> Any:
        self._read.add(name)
        return self._where[name].get_slice(name)

    def _experts(self, block: str, projections: tuple[str, ...], shape: torch.Size) -> ReadRows:
        """Returns a reader whose rows are experts, each with its stacked projections."""
        num_experts, height, width = shape
        part_shape = torch.Size((height // len(projections), width))
        readers = [
            [self.rows(f"{block}.experts.{expert}.{name}.weight", part_shape) for name in projections]
            for expert in range(num_experts)
        ]

        def read(start: int, stop: int) -> Tensor:
            rows = None
            for row, parts in enumerate(readers[start:stop]):
                for index, read in enumerate(parts):
                    part = read(0, part_shape[0])
                    if rows is None:
                        rows = part.new_empty(stop - start, height, width)
                    rows[row, index * part_shape[0] : (index + 1) * part_shape[0]] = part
            return torch.empty(0, height, width) if rows is None else rows

        return read
