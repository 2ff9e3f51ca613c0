"""The files with a model's weights, and what their headers say: no number is read, no torch needed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from paceline.core.errors import ModelError

INDEX = "model.safetensors.index.json"

_STORED = ("F32", "BF16", "F16")
_QUANTISED = ("quantization_config", "compression_config")
_WAY_OUT = (
    "Its numbers are right only together with scales, which Paceline does not read. Make a bfloat16 copy and "
    "set the path to it; docs/models.md, Quantised checkpoints, has a program that makes one of block FP8"
)


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a folder: those that its index names, else all; none is an empty list."""
    index = folder / INDEX
    if index.is_file():
        names = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
        return [folder / name for name in sorted(set(names))]
    return sorted(folder.glob("*.safetensors"))


def require_plain_weights(folder: Path) -> None:
    """Refuses a quantised model; every service that loads one calls it first.

    Raises:
        ModelError: config.json names a quantisation, a tensor has another type than float32, bfloat16 or
            float16, or a file cannot be read.
    """
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{folder}/config.json does not load: {error}") from error
    for part in (config, *(value for value in config.values() if isinstance(value, dict))):
        for key in _QUANTISED:
            if part.get(key):
                method = part[key].get("quant_method") if isinstance(part[key], dict) else part[key]
                raise ModelError(f"{folder} is quantised: config.json has {key} ({method}). {_WAY_OUT}")
    for path in weight_files(folder):
        for name, dtype in _dtypes(path):
            if dtype not in _STORED:
                raise ModelError(
                    f"{path}: tensor {name!r} is stored as {dtype}; float32 (F32), bfloat16 (BF16) and "
                    f"float16 (F16) are read. {_WAY_OUT}"
                )


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
