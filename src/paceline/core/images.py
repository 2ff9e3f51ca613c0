"""An image of a prompt: what messages say of it, and its patches, which travel beside them by hash."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

MODELS_WITH_IMAGES: Final = ("qwen2_5_vl",)
"""By `model_type` of config.json: a vision tower turns the prompt's images into states of tokens."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Image:
    """An image as messages carry it.

    `hash` is a sha256 over its grid and its patches' pixels, in hexadecimal. `grid` counts patches: in time,
    height and width.
    """

    hash: str
    grid: tuple[int, int, int]

    @property
    def num_patches(self) -> int:
        """Rows of its pixels."""
        time, height, width = self.grid
        return time * height * width


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LoadedImage:
    """An image with the pixels of its patches, (patches, width), as the model's image processor made them."""

    image: Image
    pixels: npt.NDArray[np.float32]
