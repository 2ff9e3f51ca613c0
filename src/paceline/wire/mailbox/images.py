"""Packs an image's pixels as a blob: float32 patches, little-endian, row by row, named by their hash.

The blob has no header: the grid in the messages gives the number of patches.
"""

from __future__ import annotations

import hashlib

import numpy as np

from paceline.core.errors import InvalidMessageError
from paceline.core.samples.images import Image, LoadedImage
from paceline.core.samples.trajectory import Float32Array


def image_of(pixels: Float32Array, grid: tuple[int, int, int]) -> Image:
    """Returns the image with these pixels (patches, width), named by their hash."""
    return Image(hash=_hash(pack_pixels(pixels), grid), grid=grid)


def pack_pixels(pixels: Float32Array) -> bytes:
    """Packs pixels (patches, width) as a blob."""
    return np.ascontiguousarray(pixels, dtype="<f4").tobytes()


def unpack_pixels(image: Image, data: bytes) -> LoadedImage:
    """Reads a blob; the pixels are a writable copy.

    Raises:
        InvalidMessageError: the blob belongs to another image.
    """
    rows = image.num_patches
    if not data or len(data) % (4 * rows):
        raise InvalidMessageError(
            f"the blob of image {image.hash[:12]} has {len(data)} bytes, which is not a multiple of the "
            f"{4 * rows} that a float32 in each of its {rows} patches takes",
            reason="unequal_lengths",
        )
    digest = _hash(data, image.grid)
    if digest != image.hash:
        raise InvalidMessageError(
            f"the blob of image {image.hash[:12]} holds other pixels: their hash begins with {digest[:12]}",
            reason="inconsistent",
        )
    return LoadedImage(
        image=image, pixels=np.frombuffer(data, dtype="<f4").astype(np.float32).reshape(rows, -1)
    )


def _hash(data: bytes, grid: tuple[int, int, int]) -> str:
    digest = hashlib.sha256(np.asarray(grid, dtype="<i4").tobytes())
    digest.update(data)
    return digest.hexdigest()
