"""Rows with the learner's log-probs, which are compared with an engine's before a run."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from paceline.core.samples.images import Image, LoadedImage


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoredRow:
    """Tokens, the prompt's images, and the learner's log-probs of the response's tokens."""

    prompt: list[int]
    response: list[int]
    log_probs: list[float]
    images: tuple[LoadedImage, ...] = ()


def read_rows(folder: Path) -> list[ScoredRow]:
    """Reads the files of the learner's self-test: `scored_rows.json` and, for images, `images.npz`."""
    rows = json.loads((folder / "scored_rows.json").read_text(encoding="utf-8"))
    path = folder / "images.npz"
    pixels = dict(np.load(path)) if path.exists() else {}

    def loaded(image: Any) -> LoadedImage:
        return LoadedImage(
            image=Image(hash=image["hash"], grid=tuple(image["grid"])), pixels=pixels[image["hash"]]
        )

    return [ScoredRow(**{**row, "images": tuple(map(loaded, row["images"]))}) for row in rows]
