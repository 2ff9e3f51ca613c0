"""The images of prompts: where their tokens stand, what positions these have, and a micro-batch's pixels.

trajectory's images, pixels -> `find_images` -> rows -> `prompt_positions`, `PlacedImages` -> micro-batch

A position has three numbers: time, height and width. They are equal in text. An image's tokens have the
positions of their place in its grid; the text after it continues one above the largest of them (M-RoPE,
arXiv:2409.12191).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from paceline.core.samples.images import ImageSpec, LoadedImage, placeholder_ranges
from paceline.core.samples.trajectory import Int32Array
from paceline.learner.batch.blocks import Int64Array, on_device
from paceline.learner.batch.types import PackedImages, PromptImage

_AXES = 3


def find_images(
    prompt: Int32Array, images: Sequence[LoadedImage], spec: ImageSpec
) -> tuple[PromptImage, ...]:
    """Returns the images with the places of their tokens in the prompt.

    Raises:
        DataError: as in `placeholder_ranges`.
    """
    ranges = placeholder_ranges(prompt, images, spec)
    return tuple(
        PromptImage(
            hash=loaded.image.hash,
            start=start,
            grid=loaded.image.grid,
            merge_size=spec.merge_size,
            pixels=loaded.pixels,
        )
        for loaded, (start, _) in zip(images, ranges, strict=True)
    )


def prompt_positions(num_tokens: int, images: Sequence[PromptImage]) -> Int64Array:
    """Returns positions (3, num_tokens) of a prompt; images are in the order of their tokens."""
    parts, place, position = [], 0, 0
    for image in images:
        num_before = image.start - place
        parts.append(_text(position, num_before))
        position += num_before
        t, h, w = image.token_grid
        parts.append(np.indices((t, h, w)).reshape(_AXES, -1) + position)
        position += max(t, h, w)
        place = image.start + image.num_tokens
    parts.append(_text(position, num_tokens - place))
    return np.concatenate(parts, axis=1)


def in_three(positions: Int64Array) -> Int64Array:
    """Turns positions in text, (n,), into (3, n); returns others unchanged."""
    return positions if positions.ndim == 2 else np.broadcast_to(positions, (_AXES, len(positions)))


def _text(first: int, length: int) -> Int64Array:
    return in_three(np.arange(first, first + length))


@dataclass(kw_only=True, slots=True)
class PlacedImages:
    """The images of a micro-batch, each with the place of its first token among the T."""

    images: list[PromptImage] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.images)

    def place(self, images: Sequence[PromptImage], prompt_start: int) -> None:
        """Adds the images of a prompt that begins at this place."""
        self.images += images
        self.starts += [prompt_start + image.start for image in images]

    def pack(self, device: torch.device) -> PackedImages | None:
        """Returns tensors on the device, which hold equal images once; None without images."""
        if not self.images:
            return None
        distinct = {image.hash: image for image in self.images}
        lengths = [image.num_tokens for image in distinct.values()]
        first_states = dict(zip(distinct, np.cumsum(lengths) - lengths, strict=True))
        placed = list(zip(self.starts, self.images, strict=True))
        places = [np.arange(start, start + image.num_tokens) for start, image in placed]
        states = [first_states[image.hash] + np.arange(image.num_tokens) for image in self.images]
        pixels = np.concatenate([image.pixels for image in distinct.values()])
        return PackedImages(
            pixels=on_device(pixels, device),
            grids=torch.tensor([image.grid for image in distinct.values()], device=device),
            places=on_device(np.concatenate(places), device),
            states=on_device(np.concatenate(states), device),
        )
