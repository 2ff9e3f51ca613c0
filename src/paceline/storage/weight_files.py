"""A model's weight files and their headers; reads no weights and needs no torch."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from paceline.core.errors import ModelError

INDEX = "model.safetensors.index.json"

STORED = ("F32", "BF16", "F16")
_QUANTISED = ("quantization_config", "compression_config")
_DEQUANTISED = ("F8_E4M3", "F8_E8M0", "U8")
"""Additional tensor types of block FP8 and MXFP4"""
_WAY_OUT = (
    "Its numbers need scales, which are not read here. Make a bfloat16 copy and set the path to it; "
    "docs/models.md, Quantised checkpoints, names a program that converts block FP8"
)


def weight_files(folder: Path) -> list[Path]:
    """Returns the safetensors files of a folder: those that its index names, else all."""
    index = folder / INDEX
    if index.is_file():
        names = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
        return [folder / name for name in sorted(set(names))]
    return sorted(folder.glob("*.safetensors"))


def require_plain_weights(folder: Path, *, dequantises: bool = False) -> None:
    """Refuses a quantised model; every service that loads one calls it first.

    Args:
        dequantises: accept block FP8 and MXFP4, which the caller dequantises.

    Raises:
        ModelError: config.json names a quantisation, a tensor has another type than float32, bfloat16 or
            float16, or a file cannot be read.
    """
    quantisation = _quantisation(folder)
    is_known = dequantises and is_dequantised(folder)
    if quantisation is not None and not is_known:
        key, value = quantisation
        method = value.get("quant_method") if isinstance(value, dict) else value
        raise ModelError(f"{folder} is quantised: config.json has {key} ({method}). {_WAY_OUT}")
    known = (*STORED, *_DEQUANTISED) if is_known else STORED
    for path in weight_files(folder):
        for name, dtype in _dtypes(path):
            if dtype not in known:
                raise ModelError(
                    f"{path}: tensor {name!r} is stored as {dtype}; float32 (F32), bfloat16 (BF16) and "
                    f"float16 (F16) are read. {_WAY_OUT}"
                )


def is_dequantised(folder: Path) -> bool:
    """Returns whether the model is in block FP8 or MXFP4, which the learner reads.

    Raises:
        ModelError: config.json does not load.
    """
    key, value = _quantisation(folder) or ("", None)
    is_mxfp4 = isinstance(value, dict) and value.get("quant_method") == "mxfp4"
    return key == _QUANTISED[0] and (is_mxfp4 or fp8_block(folder) is not None)


def fp8_block(folder: Path) -> tuple[int, int] | None:
    """Returns the rows and columns of a block of the folder's FP8 tensors; None without block FP8.

    Raises:
        ModelError: config.json does not load.
    """
    _, value = _quantisation(folder) or ("", None)
    if not isinstance(value, dict) or value.get("quant_method") != "fp8":
        return None
    block = value.get("weight_block_size")
    return (int(block[0]), int(block[1])) if block else None


def _quantisation(folder: Path) -> tuple[str, Any] | None:
    """Returns the key and value of config.json that declare the quantisation."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{folder}/config.json does not load: {error}") from error
    for part in (config, *(value for value in config.values() if isinstance(value, dict))):
        for key in _QUANTISED:
            if part.get(key):
                return key, part[key]
    return None


def _dtypes(path: Path) -> Iterator[tuple[str, str]]:
    try:
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            if size > path.stat().st_size:
                raise ValueError("the header is longer than the file")
            header: dict[str, Any] = json.loads(file.read(size))
            yield from ((name, entry["dtype"]) for name, entry in header.items() if name != "__metadata__")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{path} cannot be read as safetensors: {error}") from error
